"""Llama 3, 3.1, 3.2 and 3.3 Instruct, text only (other models of this architecture are not Llama 3: `default` renders those).

    <|begin_of_text|><|start_header_id|>system<|end_header_id|>

    Environment: ipython
    Cutting Knowledge Date: December 2023
    Today Date: 26 Jul 2024

    You are ...<|eot_id|><|start_header_id|>user<|end_header_id|>

    Given the following functions, ...

    Weather?<|eot_id|><|start_header_id|>assistant<|end_header_id|>

    {"name": "weather", "parameters": {"city": "Oslo"}}<|eot_id|><|start_header_id|>ipython<|end_header_id|>

    "9 C"<|eot_id|>

Texts are stripped, and nothing stands between turns. From 3.1 on a system turn is always there and holds two dates; the first
user message holds the tools, a call is a turn of bare JSON, and a result is JSON too, in a turn of `ipython`. Llama 3 has
none of this: which one it is, the tokenizer's template says. Today's date is an option with a fixed default, so that a run
tomorrow has the prompts of today.

A turn calls one tool and says nothing beside it, so anything else is refused. No marker tells a call from an answer: a turn
that begins as a call does is read as one, and so is whatever follows <|python_tag|>, which the models sample there though
no template writes it for such tools. Python code behind it, the form of the built-in tools, is hence a broken call.
`reasoning_content` is not written. Arguments that are a JSON string are written as they are; the template would quote them.
"""

import json
import re
from collections.abc import Iterable, Sequence
from datetime import date
from functools import partial
from typing import Any, ClassVar

from renderers.base import (
    Body,
    Message,
    ParsedResponse,
    Plain,
    Rendered,
    Renderer,
    Writer,
    as_list,
    function_of,
    text_of,
    to_json,
)
from renderers.turns import is_broken, read_json_call, text_or_json

TOOLS_BEFORE = (
    "Given the following functions, please respond with a JSON for a function call with its proper arguments that best "
    'answers the given prompt.\n\nRespond in the format {"name": function name, "parameters": dictionary of argument name '
    "and its value}.Do not use variables.\n\n"
)
KNOWLEDGE = "Cutting Knowledge Date: December 2023\n"
NO_TOOLS = "Llama 3 has no tools in its format, only 3.1 and later do"
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")  # in no locale's language
PYTHON_TAG = "<|python_tag|>"
CALL = re.compile(r'\s*\{\s*"(name"\s*:|type"\s*:\s*"function")')

# What a template has to write as this file does for `auto` to take it for Llama 3's.
PROBES = (
    [{"role": "user", "content": " Is the sky blue?\n"}],
    [
        {"role": "system", "content": "Be brief. "},
        {"role": "user", "content": "Is the sky blue?"},
        {"role": "assistant", "content": "\nOn <think>most</think> days."},
        {"role": "user", "content": "And now?"},
    ],
)
PROBE_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
PROBE_CALL = [
    *PROBES[0],
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {}}}]},
    {"role": "tool", "content": 'grey, "so far"'},
]  # fmt: skip


class Llama3(Renderer):
    """Llama 3 to 3.3 Instruct. `date` (year-month-day) is today's in the system turn, from 3.1 on."""

    name = "llama-3"
    options: ClassVar = Renderer.options | {"date": "2024-07-26"}
    model_types = ("llama",)
    told_by_template = True  # from every other model of the architecture
    control_tokens = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    stop_tokens = ("<|eot_id|>", "<|end_of_text|>")
    turn_start, generation_header = "<|start_header_id|>", "assistant<|end_header_id|>\n\n"
    turn_end = "<|eot_id|>"
    deviations: ClassVar = {"words with a call": "the template drops what is said beside a call"}

    def __init__(self, tokenizer: Any, **options: Any) -> None:
        super().__init__(tokenizer, **options)
        template = getattr(tokenizer, "chat_template", None)
        self.dated = KNOWLEDGE.strip() in template if template else "<|eom_id|>" in self._control_ids
        if not self.dated:
            self.deviations = {"tools": NO_TOOLS}
        if "date" in options and not self.dated:
            raise ValueError(
                f"--renderer-args date={self.date}: Llama 3 has no date in its prompt, only 3.1 and later do"
            )
        try:
            day = date.fromisoformat(self.date)
        except (TypeError, ValueError):
            raise ValueError(f"--renderer-args date={self.date}: for llama-3 it is year-month-day") from None
        self.today = f"{day.day:02} {MONTHS[day.month - 1]} {day.year}"

    @classmethod
    def fits_template(cls, template: str) -> bool:
        return KNOWLEDGE.strip() in template or "tool" not in template

    @classmethod
    def fits(cls, tokenizer: Any, model_type: str | None) -> bool:
        # Fine-tunes keep model type and tokens, and edit the template where they like: it must prove to be this one.
        if not super().fits(tokenizer, model_type):
            return False
        try:
            renderer = cls(tokenizer)
            options = {"date_string": renderer.today, "add_generation_prompt": True, "tokenize": False}
            return all(
                renderer.decode(renderer.render_ids(messages, tools, add_generation_prompt=True))
                == tokenizer.apply_chat_template(messages, tools=tools, **options)
                for messages, tools in [(one, None) for one in PROBES] + [(PROBE_CALL, [PROBE_TOOL])] * renderer.dated
            )
        except Exception:  # templates fail in as many ways as there are templates
            return False

    @property
    def stop_token_ids(self) -> list[int]:
        """From 3.1 on <|eom_id|> too, with which a call of a built-in tool ends."""
        more = [self.token_id("<|eom_id|>")] if "<|eom_id|>" in self._control_ids else []
        return [*super().stop_token_ids, *more]

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict] | None = None, add_generation_prompt: bool = False
    ) -> Rendered:
        writer = self.writer()
        has_system = bool(messages) and messages[0]["role"] == "system"
        first = int(has_system and self.dated)
        writer.write(-1, "system", "<|begin_of_text|>")
        if self.dated:
            write = partial(writer.write, 0 if has_system else -1, "system")
            write("<|start_header_id|>system<|end_header_id|>\n\n", "Environment: ipython\n" if tools else "")
            write(f"{KNOWLEDGE}Today Date: {self.today}\n\n")
            write(Body(text_of(messages[0]).strip() if has_system else ""), "<|eot_id|>")
        if tools:
            if not self.dated:
                raise ValueError(NO_TOOLS)
            if len(messages) <= first or messages[first]["role"] != "user":
                raise ValueError("llama-3 offers tools in the first user message, before any other turn: there is none")
            write = partial(writer.write, first, "user")
            write("<|start_header_id|>user<|end_header_id|>\n\n", TOOLS_BEFORE)
            for tool in tools:
                write(Plain(json.dumps(tool, ensure_ascii=False, indent=4)), "\n\n")
            write(Body(text_of(messages[first]).strip()), "<|eot_id|>")
            first += 1
        self.write_turns(writer, messages, first)
        if add_generation_prompt:
            self.write_generation_prompt(writer)
        return writer.finish()

    def write_turns(self, writer: Writer, messages: Sequence[Message], first: int = 0) -> None:
        for index, message in enumerate(messages[first:], first):
            role, text, calls = message["role"], text_of(message).strip(), message.get("tool_calls") or []
            if role not in ("system", "user", "assistant", "tool"):
                raise ValueError(f"llama-3 has no role {role!r}: it has system, user, assistant and tool")
            if not self.dated and (calls or role == "tool"):
                raise ValueError(NO_TOOLS)
            if len(calls) > 1 or (calls and text):
                raise ValueError("llama-3 has one call in a turn, and no text beside it")
            parts = write_call(calls[0]) if calls else [Body(to_json(text_of(message)) if role == "tool" else text)]
            header = "ipython" if role == "tool" else role
            writer.write(index, role, f"<|start_header_id|>{header}<|end_header_id|>\n\n", *parts, "<|eot_id|>")

    def parse_response(
        self,
        completion_ids: Iterable[int],
        prompt_ids: Iterable[int] | None = None,
        tools: Sequence[dict] | None = None,
    ) -> ParsedResponse:
        turn, _ = self.cut_at_stop(as_list(completion_ids))
        (_, before), *tagged = self.segments(turn, [PYTHON_TAG])
        text = before + "".join(marker + following for marker, following in tagged)
        if not self.dated:
            return ParsedResponse(text.lstrip("\n"))
        if tagged and not before.strip():
            raw, body = text.lstrip(), text.lstrip().removeprefix(PYTHON_TAG)
        elif CALL.match(text) and (tools or '"parameters"' in text):  # without tools an answer may be such JSON as well
            raw = body = text
        else:
            return ParsedResponse(text.lstrip("\n"))
        call = read_json_call(body, True, tools, "call_0", "parameters")
        call.raw = raw
        return ParsedResponse("", tool_calls=[call])


def write_call(call: dict) -> list[str]:
    """Parts of one call; a broken one as the model wrote it."""
    if is_broken(call):
        tag = PYTHON_TAG if call["raw"].startswith(PYTHON_TAG) else ""
        return [tag, Body(call["raw"].removeprefix(tag))]
    function = function_of(call)
    arguments = text_or_json(function.get("arguments", {}))
    return ['{"name": "', Body(function["name"]), '", "parameters": ', Body(arguments), "}"]
