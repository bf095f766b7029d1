"""Nemotron 3 Nano and Super (not Ultra, whose template joins reasoning and text otherwise: `default` renders that).

    <|im_start|>system
    You are ...

    # Tools ...<|im_end|>
    <|im_start|>user
    Weather?<|im_end|>
    <|im_start|>assistant
    <think>
    A tool knows.
    </think>
    I will look.
    <tool_call>
    <function=weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>
    </tool_call>
    <|im_end|>
    <|im_start|>user
    <tool_response>
    9 C
    </tool_response>
    <|im_end|>
    <|im_start|>assistant
    <think></think>It is 9 C.<|im_end|>

The system turn is always there, though it may be empty, and later system messages are turns of their own. Tools are
described in XML. A turn without reasoning has a bare <think></think>; so has, unless `clear_thinking=False`, every turn
before the last user message, and the newline that followed its reasoning stays where no call follows. Reasoning is
written as it is; text loses what white space it ends with. The generation prompt opens thinking, or closes it at once. A
conversation that begins with a tool result gets the header that the template forgets there.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import ClassVar

from renderers.base import (
    Body,
    Message,
    ParsedResponse,
    Plain,
    Rendered,
    Renderer,
    Writer,
    function_of,
    text_of,
    to_json,
)
from renderers.turns import TOOL_CALL, read_calls, read_reasoning, thinks_nothing
from renderers.xml_calls import read_xml_call, write_xml_call, xml_tools, xml_value


class Nemotron3(Renderer):
    """Nemotron 3. `thinking=False` closes the thinking block in the generation prompt; `clear_thinking=False` writes the
    reasoning of past turns, as a conversation holds it whose turns were bridged."""

    name = "nemotron-3"
    options: ClassVar = Renderer.options | {"thinking": None, "clear_thinking": True}
    choices: ClassVar = Renderer.choices | {"clear_thinking": (True, False)}
    model_types = ("nemotron_h",)
    control_tokens = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
    told_by_template = True  # from Ultra
    stop_tokens = ("<|im_end|>",)
    turn_start, generation_header, turn_end, after_turn = "<|im_start|>", "assistant\n", "<|im_end|>", "\n"
    thinking_tags = ("<think>", "</think>")

    @classmethod
    def fits_template(cls, template: str) -> bool:
        return r'~ "\n</think>\n" ~' in template and "truncate_history_thinking" in template

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict] | None = None, add_generation_prompt: bool = False
    ) -> Rendered:
        writer = self.writer()
        has_system = bool(messages) and messages[0]["role"] == "system"
        system = partial(writer.write, 0 if has_system else -1, "system")
        text = text_of(messages[0]) if has_system else ""
        system("<|im_start|>system\n", Body(text))
        if tools:
            system("\n\n" if text else "", *xml_tools(map(describe, tools)))
        system("<|im_end|>\n")
        self.write_turns(writer, messages, first=int(has_system))
        if add_generation_prompt:
            self.write_generation_prompt(writer)
        return writer.finish()

    def write_turns(self, writer: Writer, messages: Sequence[Message], first: int = 0) -> None:
        last_user = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=-1)
        for index in range(first, len(messages)):
            message, role = messages[index], messages[index]["role"]
            write = partial(writer.write, index, role)
            if role == "assistant":
                write("<|im_start|>assistant\n", *reply(message, self.clear_thinking and index < last_user))
                for call in message.get("tool_calls") or []:
                    write("\n", *write_xml_call(call))
                write("\n<|im_end|>\n" if message.get("tool_calls") else "<|im_end|>\n")
            elif role == "tool":  # consecutive results share one turn
                if index == 0 or messages[index - 1]["role"] != "tool":
                    write("<|im_start|>user\n")
                write("<tool_response>\n", Body(text_of(message)), "\n</tool_response>\n")
                if index + 1 == len(messages) or messages[index + 1]["role"] != "tool":
                    write("<|im_end|>\n")
            else:
                write("<|im_start|>", Plain(role), "\n", Body(text_of(message)), "<|im_end|>\n")

    def write_generation_prompt(self, writer: Writer) -> None:
        super().write_generation_prompt(writer)
        writer.write(-1, "assistant", "<think></think>" if self.thinking is False else "<think>\n")

    def parse_response(
        self,
        completion_ids: Iterable[int],
        prompt_ids: Iterable[int] | None = None,
        tools: Sequence[dict] | None = None,
    ) -> ParsedResponse:
        reasoning, complete, segments = read_reasoning(self, completion_ids, prompt_ids, TOOL_CALL)
        content, calls = read_calls(segments, tools, read_xml_call)
        return ParsedResponse(content, reasoning, calls, complete)

    def strips_history(self, prompt: Sequence[int], completion: Sequence[int], new_messages: Sequence[Message]) -> bool:
        # Once a user message follows, the template writes every block bare, and no white space before text with calls.
        if self.clear_thinking and any(message["role"] == "user" for message in new_messages):
            segments = self.segments([*prompt, *completion], (*self.thinking_tags, "<tool_call>", "<|im_end|>"))
            return any(
                (marker == "<think>" and (text != "" or following != "</think>"))
                or (marker == "</think>" and following == "<tool_call>" and text.strip() and text[0].isspace())
                for (marker, text), (following, _) in pairwise(segments)
            )
        # In any case it writes a block of blanks alone bare.
        turn = [*(self.open_turn(prompt) or []), *completion]
        bare = turn[:2] == [self.token_id(tag) for tag in self.thinking_tags]
        return not bare and thinks_nothing(self, prompt, completion)


def reply(message: Message, cleared: bool) -> list[str]:
    """Parts of the thinking block and the text of an assistant message; `cleared`: without what it thought.

    Reasoning may also stand in the text, where there is no `reasoning_content`; then what lies between is the text's.
    """
    reasoning, text, calls = message.get("reasoning_content"), text_of(message), message.get("tool_calls")
    thought, gap = ["<think></think>"], ""
    if not isinstance(reasoning, str) and "</think>" in text:
        inside, _, text = text.rpartition("</think>")
        before, opening, inside = inside.lstrip().partition("<think>")
        cleared = cleared and bool(opening or calls)
        if not cleared:
            thought = [Body(before), opening, Body(inside), "</think>"]
    elif isinstance(reasoning, str) and reasoning.strip():
        gap = "\n" if text.strip() else ""
        if not cleared:
            thought = ["<think>\n", Body(reasoning), "\n</think>"]
    if cleared and calls:
        gap, text = "", text.lstrip()
    return [*thought, gap, Body(text.rstrip())]


def describe(tool: dict) -> str:
    """A tool as Nemotron's system turn offers it: its schema as XML, one parameter after the other."""
    function = function_of(tool)
    parameters = function.get("parameters")
    parameters = parameters if isinstance(parameters, dict) else {}
    lines = ["<function>", f"<name>{function['name']}</name>"]
    if "description" in function:
        lines.append(f"<description>{str(function['description']).strip()}</description>")
    lines.append("<parameters>")
    for name, schema in (parameters.get("properties") or {}).items():
        lines += ["<parameter>", f"<name>{name}</name>"]
        if "type" in schema:
            lines.append(f"<type>{schema['type']}</type>")
        if "description" in schema:
            lines.append(f"<description>{str(schema['description']).strip()}</description>")
        if "enum" in schema:
            lines.append(f"<enum>{to_json(schema['enum'])}</enum>")
        lines += [*other_keys(schema, "name", "type", "description", "enum"), "</parameter>"]
    lines += other_keys(parameters, "type", "properties", "required")
    if "required" in parameters:
        lines.append(f"<required>{to_json(parameters['required'])}</required>")
    lines += ["</parameters>", *other_keys(function, "type", "name", "description", "parameters"), "</function>"]
    return "\n".join(lines)


def other_keys(schema: dict, *written: str) -> list[str]:
    """What else a schema says, a tag for each key."""
    return [f"<{key}>{xml_value(value)}</{key}>" for key, value in schema.items() if key not in written]
