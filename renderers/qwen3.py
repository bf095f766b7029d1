"""Qwen3, the models with a thinking switch (not Instruct-2507, whose template knows no thinking: `default` renders those).

    <|im_start|>system
    You are ...<|im_end|>
    <|im_start|>user
    Weather?<|im_end|>
    <|im_start|>assistant
    <think>
    A tool knows.
    </think>

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call><|im_end|>
    <|im_start|>user
    <tool_response>
    9 C
    </tool_response><|im_end|>

Reasoning stays in the text only after the last user query (tool results are no query, nor is a user text that is wrapped in
<tool_response>). The newline after <|im_end|> is the template's: the model never samples it.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import ClassVar

from renderers.base import Body, Message, ParsedResponse, Plain, Rendered, Renderer, Writer, text_of, to_json
from renderers.turns import (
    TOOL_CALL,
    read_calls,
    read_json_call,
    read_reasoning,
    split_inline,
    thinks_nothing,
    tool_response,
    write_json_call,
)

TOOLS_BEFORE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""

TOOLS_AFTER = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


class Qwen3(Renderer):
    """Qwen3's hybrid models. `thinking=False` puts an empty thinking block into the generation prompt."""

    name = "qwen3"
    options: ClassVar = Renderer.options | {"thinking": None}
    model_types = ("qwen3", "qwen3_moe")
    control_tokens = (
        *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"),
        *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    )
    stop_tokens = ("<|im_end|>", "<|endoftext|>")
    turn_start, generation_header, turn_end, after_turn = "<|im_start|>", "assistant\n", "<|im_end|>", "\n"
    thinking_tags = ("<think>", "</think>")

    @classmethod
    def fits_template(cls, template: str) -> bool:
        marks = ("enable_thinking", r"'<think>\n\n</think>\n\n'", r"""'<tool_call>\n{"name": "'""")
        return all(mark in template for mark in marks)

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict] | None = None, add_generation_prompt: bool = False
    ) -> Rendered:
        writer = self.writer()
        first = write_tools(writer, messages, tools)
        self.write_turns(writer, messages, first)
        if add_generation_prompt:
            self.write_generation_prompt(writer)
        return writer.finish()

    def write_turns(self, writer: Writer, messages: Sequence[Message], first: int = 0) -> None:
        queries = [index for index, message in enumerate(messages) if is_query(message)]
        last_query, last = queries[-1] if queries else len(messages) - 1, len(messages) - 1
        for index in range(first, len(messages)):
            message, role, text = messages[index], messages[index]["role"], text_of(messages[index])
            write = partial(writer.write, index, role)
            if role in ("system", "user"):
                write(f"<|im_start|>{role}\n", Body(text), "<|im_end|>\n")
            elif role == "assistant":
                reasoning, text = split_inline(message, text)
                write("<|im_start|>assistant\n")
                if index > last_query and (index == last or reasoning):
                    write("<think>\n", Body(reasoning.strip("\n")), "\n</think>\n\n", Body(text.lstrip("\n")))
                else:
                    write(Body(text))
                for number, call in enumerate(message.get("tool_calls") or []):
                    write("\n" if text or number else "", *write_json_call(call))
                write("<|im_end|>\n")
            elif role == "tool":
                write(*tool_response(messages, index, Body(text)))
            else:
                raise ValueError(f"qwen3 has no role {role!r}: it has system, user, assistant and tool")

    def write_generation_prompt(self, writer: Writer) -> None:
        super().write_generation_prompt(writer)
        if self.thinking is False:
            writer.write(-1, "assistant", "<think>\n\n</think>\n\n")

    def parse_response(
        self,
        completion_ids: Iterable[int],
        prompt_ids: Iterable[int] | None = None,
        tools: Sequence[dict] | None = None,
    ) -> ParsedResponse:
        reasoning, complete, segments = read_reasoning(self, completion_ids, prompt_ids, TOOL_CALL)
        content, calls = read_calls(segments, tools, read_json_call)
        return ParsedResponse(content, reasoning, calls, complete)

    def strips_history(self, prompt: Sequence[int], completion: Sequence[int], new_messages: Sequence[Message]) -> bool:
        # A new query strips all thinking blocks before it; a tool result strips one that is empty, as the turn is no longer the last.
        if any(map(is_query, new_messages)):
            return self.token_id("<think>") in prompt or self.token_id("<think>") in completion
        return thinks_nothing(self, prompt, completion)


def write_tools(writer: Writer, messages: Sequence[Message], tools: Sequence[dict] | None) -> int:
    """Writes the system turn that offers tools, if there are any; returns how many messages it holds (0 or 1)."""
    if not tools:
        return 0
    has_system = bool(messages) and messages[0]["role"] == "system"
    write = partial(writer.write, 0 if has_system else -1, "system")
    write("<|im_start|>system\n")
    if has_system:
        write(Body(text_of(messages[0])), "\n\n")
    write(TOOLS_BEFORE)
    for tool in tools:
        write("\n", Plain(to_json(tool)))
    write(TOOLS_AFTER, "<|im_end|>\n")
    return int(has_system)


def is_query(message: Message) -> bool:
    """Whether a message is a user's query, on raw text: a tool result that a user turn carries is none."""
    text = text_of(message)
    return message["role"] == "user" and not (text.startswith("<tool_response>") and text.endswith("</tool_response>"))
