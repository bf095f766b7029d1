"""Kimi K2 (Instruct, without reasoning; K2 Thinking has a template of its own: `default` renders that).

    <|im_system|>tool_declare<|im_middle|>[{"function":{"description":...,"name":"weather",...},"type":"function"}]<|im_end|>
    <|im_system|>system<|im_middle|>You are ...<|im_end|>
    <|im_user|>user<|im_middle|>Weather?<|im_end|>
    <|im_assistant|>assistant<|im_middle|>Let me see.<|tool_calls_section_begin|>
        <|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>
    <|tool_calls_section_end|><|im_end|>
    <|im_system|>weather<|im_middle|>## Return of functions.weather:0
    9 C<|im_end|>

All of that is one line but for the newline inside the tool's result: nothing stands between turns. The one exception is the
default system prompt, which goes before a conversation that begins otherwise and is followed by a newline.

A turn is headed by its message's `name`, or by its role where it has none, so a tool's result by the tool. A call has no
field for its name: the id that the model samples, `functions.NAME:COUNT`, holds it, and stays verbatim in the messages. The
tool list is compact JSON with all keys sorted. `reasoning_content` is not written. Thinking tags in an assistant's content are
the model's own, so they are tokens if the tokenizer has such; all else in any text is ordinary characters.
"""

import json
import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import ClassVar

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
)
from renderers.turns import is_broken, split_sectioned_calls, text_or_json

OPENERS = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}  # all others: <|im_system|>
TAG = re.compile("(<think>|</think>)")
DEFAULT_SYSTEM = "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>\n"
CALLS = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)


class KimiK2(Renderer):
    """Kimi-K2-Instruct. What Kimi K2.5 writes otherwise is in methods of its own: the tool list, the default system prompt
    and the reasoning."""

    name = "kimi-k2"
    model_types = ("kimi_k2", "deepseek_v3")
    control_tokens = ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>", *CALLS)
    told_by_template = True  # from K2 Thinking, K2.5 and older releases
    stop_tokens = ("<|im_end|>",)
    turn_start, generation_header, turn_end = "<|im_assistant|>", "assistant<|im_middle|>", "<|im_end|>"
    default_system: ClassVar[str] = DEFAULT_SYSTEM

    @classmethod
    def fits_template(cls, template: str) -> bool:
        return (
            f"{DEFAULT_SYSTEM}  {{% endif %}}" in template
            and "message.get('name') or" in template
            and "separators=(',', ':')" in template
            and "think" not in template
        )

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict] | None = None, add_generation_prompt: bool = False
    ) -> Rendered:
        writer = self.writer()
        if tools:
            declared = Plain(self.declare(tools))
            writer.write(-1, "system", "<|im_system|>tool_declare<|im_middle|>", declared, "<|im_end|>")
        if messages and messages[0]["role"] != "system":
            writer.write(-1, "system", self.default_system)
        self.write_turns(writer, messages)
        if add_generation_prompt:
            self.write_generation_prompt(writer)
        return writer.finish()

    def declare(self, tools: Sequence[dict]) -> str:
        return json.dumps(tools, ensure_ascii=False, separators=(",", ":"), sort_keys=True)

    def thoughts(self, messages: Sequence[Message]) -> list[tuple[str, ...]]:
        """For each message, the parts that its reasoning is written as."""
        return [()] * len(messages)

    def write_turns(self, writer: Writer, messages: Sequence[Message], first: int = 0) -> None:
        thoughts = self.thoughts(messages)
        count = 0  # calls so far in the conversation, as the ids count them
        for index in range(first, len(messages)):
            message, role, text = messages[index], messages[index]["role"], text_of(messages[index])
            write = partial(writer.write, index, role)
            write(OPENERS.get(role, "<|im_system|>"), Plain(message.get("name") or role), "<|im_middle|>")
            if role == "tool":
                write("## Return of ", Plain(message.get("tool_call_id") or ""), "\n")
            if role == "assistant":
                write(*thoughts[index], *(part if TAG.fullmatch(part) else Body(part) for part in TAG.split(text)))
                calls = message.get("tool_calls") or []
                write("<|tool_calls_section_begin|>" if calls else "")
                for call in calls:
                    write(*write_call(call, count))
                    count += 1
                write("<|tool_calls_section_end|>" if calls else "")
            else:
                write(Body(text))
            write("<|im_end|>")

    def close_turn(
        self, writer: Writer, prompt: Sequence[int], completion: Sequence[int], new_messages: Sequence[Message]
    ) -> bool:
        # Any opener in the sampled turn says that the model wrote on into the next one.
        if {self.token_id("<|im_user|>"), self.token_id("<|im_system|>")}.intersection(completion):
            return False
        return super().close_turn(writer, prompt, completion, new_messages)

    def parse_response(
        self,
        completion_ids: Iterable[int],
        prompt_ids: Iterable[int] | None = None,
        tools: Sequence[dict] | None = None,
    ) -> ParsedResponse:
        turn, _ = self.cut_at_stop(as_list(completion_ids))
        content, calls = split_sectioned_calls(self.segments(turn, CALLS), CALLS, read_call, tools)
        return ParsedResponse(content, None, calls)


def write_call(call: dict, count: int) -> list[str]:
    """Parts of one call, with the id that it came with; a broken one as the model wrote it."""
    if is_broken(call):
        call_id, marker, arguments = call["raw"].partition("<|tool_call_argument_begin|>")
    else:
        function, marker = function_of(call), "<|tool_call_argument_begin|>"
        call_id, arguments = call.get("id") or f"functions.{function['name']}:{count}", function.get("arguments", {})
    return ["<|tool_call_begin|>", Body(call_id), marker, Body(text_or_json(arguments)), "<|tool_call_end|>"]


def read_call(head: str, body: str) -> tuple[str, str, str]:
    """(name, id, arguments) of a call whose head is its id."""
    call_id = head.strip()
    return re.sub(r":\d+$", "", call_id.removeprefix("functions.")), call_id, body
