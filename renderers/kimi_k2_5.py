"""Kimi K2.5: Kimi K2's turns with reasoning, and tools that are declared in TypeScript.

    <|im_system|>tool_declare<|im_middle|># Tools

    ## functions
    namespace functions {
    // The weather.
    type weather = (_: {
      // A city
      city: string,
      unit?: "c" | "f"
    }) => any;
    }
    <|im_end|><|im_user|>user<|im_middle|>Weather?<|im_end|>
    <|im_assistant|>assistant<|im_middle|><think>A tool knows.</think><|tool_calls_section_begin|>...<|im_end|>
    <|im_system|>weather<|im_middle|>## Return of functions.weather:0
    9 C<|im_end|><|im_assistant|>assistant<|im_middle|><think>

Again nothing stands between the turns, and there is no default system prompt (an early release had Kimi K2's: `default`
renders that). Every past assistant turn has a thinking block, but it is empty up to the last one that called no tool: reasoning
is kept between calls and dropped once an answer was given, whoever speaks next. So an answer's own reasoning is never
written; a thinking block in its content is, as in Kimi K2.

In a declaration required fields come first, then optional ones, each sorted by name. A schema that has no TypeScript form here
(no type, oneOf, a reference to nowhere) makes the whole list Kimi K2's JSON.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

from renderers.base import Body, Message, ParsedResponse, Renderer, Writer, function_of
from renderers.kimi_k2 import CALLS, KimiK2, read_call
from renderers.turns import read_reasoning, split_sectioned_calls


class KimiK25(KimiK2):
    """Kimi-K2.5, text only. `thinking=False` puts an empty thinking block into the generation prompt and drops all past reasoning."""

    name = "kimi-k2.5"
    options: ClassVar = Renderer.options | {"thinking": None}
    deviations: ClassVar = {
        "tools": "the template is handed the declarations in TypeScript by the tokenizer's own code"
    }
    model_types = ("kimi_k25", "kimi_k2", "deepseek_v3")
    control_tokens = (*KimiK2.control_tokens, "<think>", "</think>")
    thinking_tags = ("<think>", "</think>")
    default_system = ""

    @classmethod
    def fits_template(cls, template: str) -> bool:
        return (
            "tools_ts_str" in template
            and "messages[:ns.last_non_tool_call_assistant_msg+1]" in template
            and "<think>{{rc}}</think>" in template
            and "You are Kimi" not in template
        )

    def declare(self, tools: Sequence[dict]) -> str:
        try:
            functions = "\n".join(declare_function(function_of(tool)) for tool in tools)
        except (ValueError, TypeError, AttributeError, KeyError):
            return super().declare(tools)
        return f"# Tools\n\n## functions\nnamespace functions {{\n{functions}\n}}\n"

    def thoughts(self, messages: Sequence[Message]) -> list[tuple[str, ...]]:
        answers = (at for at, m in enumerate(messages) if m["role"] == "assistant" and not m.get("tool_calls"))
        last_answer = max(answers, default=-1)
        thoughts = []
        for index, message in enumerate(messages):
            kept = index > last_answer and self.thinking is not False
            reasoning = Body(message.get("reasoning_content") or "" if kept else "")
            thoughts.append(("<think>", reasoning, "</think>") if message["role"] == "assistant" else ())
        return thoughts

    def write_generation_prompt(self, writer: Writer) -> None:
        super().write_generation_prompt(writer)
        writer.write(-1, "assistant", "<think></think>" if self.thinking is False else "<think>")

    def parse_response(
        self,
        completion_ids: Iterable[int],
        prompt_ids: Iterable[int] | None = None,
        tools: Sequence[dict] | None = None,
    ) -> ParsedResponse:
        reasoning, complete, segments = read_reasoning(self, completion_ids, prompt_ids, CALLS)
        content, calls = split_sectioned_calls(segments, CALLS, read_call, tools)
        return ParsedResponse(content, reasoning, calls, complete)

    def strips_history(self, prompt: Sequence[int], completion: Sequence[int], new_messages: Sequence[Message]) -> bool:
        if self.thinking is not False and self.parse_response(completion, prompt).tool_calls:
            return False
        opening, closing = map(self.token_id, self.thinking_tags)
        ids = [*prompt, *completion]
        return any(id_ == opening and following != closing for id_, following in pairwise(ids))


def declare_function(function: dict) -> str:
    """One function in TypeScript, after the interfaces that its schema defines. Raises where the schema has no such form."""
    schema, types = function.get("parameters") or {}, TypeScript()
    argument = types.object_type(schema)
    lines = []
    if types.refers_to_root:
        argument = "parameters"
        fields = [types.field_of(schema, name, "  ") for name in sorted(schema.get("properties") or {})]
        lines.append("interface parameters {\n" + ",\n".join(fields) + "\n}")
    for name, definition in sorted(types.definitions.items()):
        lines += [comment_of(definition.get("description")), f"interface {name} {types.type_of(definition)}"]
    lines += [comment_of(function.get("description")), f"type {function['name']} = (_: {argument}) => any;"]
    return "\n".join(line for line in lines if line)


@dataclass
class TypeScript:
    """JSON schemas as types; notes the definitions that it meets. `indent` is that of the line a type begins on."""

    definitions: dict[str, Any] = field(default_factory=dict)
    refers_to_root: bool = False

    # "type" and what it is called; those in a list of types are called so without any detail.
    NAMES: ClassVar = {"integer": "number", "object": "{}", "array": "Array<any>"}
    LIMITS: ClassVar = {
        "string": ("maxLength", "minLength", "pattern"),
        "number": ("maximum", "minimum"),
        "integer": ("maximum", "minimum"),
        "array": ("maxItems", "minItems"),
    }

    def type_of(self, schema: Any, indent: str = "") -> str:
        if isinstance(schema, bool) or schema == {}:
            return "any"
        if "$ref" in schema:
            return self.referred(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self.type_of(option, indent) for option in schema["anyOf"])
        if "enum" in schema:
            return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])
        kind = schema["type"]
        if isinstance(kind, list):
            return " | ".join(self.NAMES.get(one, one) for one in kind)
        if kind == "object":
            return self.object_type(schema, indent)
        if kind == "array":
            items = schema.get("items") or True
            comment = self.comment(items, indent + "  ")
            if comment:
                return f"Array<\n{comment}{indent}  {self.type_of(items, indent + '  ')}\n{indent}>"
            return f"Array<{self.type_of(items, indent)}>"
        return self.NAMES.get(kind, kind)

    def object_type(self, schema: dict, indent: str = "") -> str:
        self.definitions.update(schema.get("$defs") or {})
        required, inner = schema.get("required") or [], indent + "  "
        names = sorted(schema.get("properties") or {}, key=lambda name: (name not in required, name))
        fields = [self.field_of(schema, name, inner) for name in names]
        others = schema.get("additionalProperties")
        if others is not None:
            fields.append(f"{inner}[k: string]: {'never' if others is False else self.type_of(others, inner)}")
        return "{\n" + ",\n".join(fields) + f"\n{indent}}}" if fields else "{}"

    def field_of(self, parent: dict, name: str, indent: str) -> str:
        schema = parent["properties"][name]
        optional = "" if name in (parent.get("required") or []) else "?"
        text = self.comment(schema, indent)
        default = None if isinstance(schema, bool) else schema.get("default")
        if default is not None:
            number = isinstance(default, int | float)  # and truth values, all as Python writes them
            written = repr(default) if number else json.dumps(default, ensure_ascii=False, sort_keys=True)
            text += f"{indent}// Default: {written}\n"
        return f"{text}{indent}{name}{optional}: {self.type_of(schema, indent)}"

    def comment(self, schema: Any, indent: str) -> str:
        """The lines above a field: its description, and its limits where it is a plain value or an array."""
        if isinstance(schema, bool):
            return ""
        kind = None if {"$ref", "anyOf", "enum"} & schema.keys() else schema.get("type")
        limits = self.LIMITS.get(kind, ()) if isinstance(kind, str) else ()
        limits = ", ".join(f"{limit}: {schema[limit]}" for limit in limits if limit in schema)
        lines = [comment_of(schema.get("description"), indent), f"{indent}// {limits}" if limits else ""]
        return "".join(f"{line}\n" for line in lines if line)

    def referred(self, reference: str) -> str:
        if reference == "#":
            self.refers_to_root = True
            return "parameters"
        name = reference.removeprefix("#/$defs/")
        if name not in self.definitions:
            raise ValueError(f"the schema defines no {reference}")
        return name


def comment_of(description: str | None, indent: str = "") -> str:
    """A description as lines of // comments."""
    return "\n".join(f"{indent}// {line}" if line else "" for line in (description or "").split("\n"))
