"""Qwen3.5: Qwen3's turns, with tool calls in XML and every text stripped.

    <|im_start|>system
    # Tools ...

    You are ...<|im_end|>
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
    </tool_call><|im_end|>
    <|im_start|>user
    <tool_response>
    9 C
    </tool_response><|im_end|>
    <|im_start|>assistant
    <think>

The tools stand before the system text, which must come first. Every turn after the last user query has a thinking block,
be it empty; earlier ones have none. Thinking begins in the generation prompt, so only the prompt tells that a completion
starts inside it. Checkpoints of up to 2B have the same template but think only when asked to: what `thinking=None` means
is read off the tokenizer's template. A conversation that begins with a tool result gets the header that the template
forgets there.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

from renderers.base import Body, Message, ParsedResponse, Rendered, Renderer, Writer, text_of, to_json
from renderers.qwen3_vl import parts_of
from renderers.turns import TOOL_CALL, read_calls, read_reasoning, split_inline, tool_response
from renderers.xml_calls import read_xml_call, write_xml_call, xml_tools


class Qwen35(Renderer):
    """Qwen3.5. `thinking=False` closes the thinking block in the generation prompt."""

    name = "qwen3.5"
    options: ClassVar = Renderer.options | {"thinking": None}
    model_types = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")
    control_tokens = (
        *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"),
        *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    )
    told_by_template = True  # from a later generation's models
    stop_tokens = ("<|im_end|>", "<|endoftext|>")
    turn_start, generation_header, turn_end, after_turn = "<|im_start|>", "assistant\n", "<|im_end|>", "\n"
    thinking_tags = ("<think>", "</think>")

    def __init__(self, tokenizer: Any, **options: Any) -> None:
        super().__init__(tokenizer, **options)
        if self.thinking is None:
            self.thinking = "enable_thinking is true" not in (getattr(tokenizer, "chat_template", None) or "")

    @classmethod
    def fits_template(cls, template: str) -> bool:
        # preserve_thinking is a later generation's switch.
        return r"'\n\n<tool_call>\n<function='" in template and "preserve_thinking" not in template

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict] | None = None, add_generation_prompt: bool = False
    ) -> Rendered:
        if not any(map(is_query, messages)):
            raise ValueError("qwen3.5 needs a user message that is not a tool result")
        writer = self.writer()
        has_system = messages[0]["role"] == "system"
        system = partial(writer.write, 0 if has_system else -1, "system")
        text = text_of(messages[0]).strip() if has_system else ""
        if tools:
            system("<|im_start|>system\n", *xml_tools(map(to_json, tools)), "\n\n" if text else "")
        elif has_system:
            system("<|im_start|>system\n")
        if tools or has_system:
            system(Body(text), "<|im_end|>\n")
        self.write_turns(writer, messages, first=int(has_system))
        if add_generation_prompt:
            self.write_generation_prompt(writer)
        return writer.finish()

    def write_turns(self, writer: Writer, messages: Sequence[Message], first: int = 0) -> None:
        last_query = max((index for index, message in enumerate(messages) if is_query(message)), default=-1)
        for index in range(first, len(messages)):
            message, role = messages[index], messages[index]["role"]
            write = partial(writer.write, index, role)
            if role == "user":
                write("<|im_start|>user\n", *stripped_parts(message), "<|im_end|>\n")
            elif role == "assistant":
                reasoning, text = split_inline(message, text_of(message).strip())
                write("<|im_start|>assistant\n")
                if index > last_query:
                    write("<think>\n", Body(reasoning.strip()), "\n</think>\n\n")
                write(Body(text))
                for number, call in enumerate(message.get("tool_calls") or []):
                    write("\n" if number else "\n\n" if text else "", *write_xml_call(call))
                write("<|im_end|>\n")
            elif role == "tool":
                write(*tool_response(messages, index, *stripped_parts(message)))
            elif role == "system":
                raise ValueError("qwen3.5 has a system message in first place only")
            else:
                raise ValueError(f"qwen3.5 has no role {role!r}: it has system, user, assistant and tool")

    def write_generation_prompt(self, writer: Writer) -> None:
        super().write_generation_prompt(writer)
        writer.write(-1, "assistant", "<think>\n" if self.thinking else "<think>\n\n</think>\n\n")

    def close_turn(
        self, writer: Writer, prompt: Sequence[int], completion: Sequence[int], new_messages: Sequence[Message]
    ) -> bool:
        if any(message["role"] == "system" for message in new_messages):  # the template raises
            return False
        return super().close_turn(writer, prompt, completion, new_messages)

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
        # A new query takes the thinking blocks of all turns before it away, also the empty one of thinking=False.
        thought = self.token_id("<think>") in prompt or self.token_id("<think>") in completion
        return thought and any(map(is_query, new_messages))


def stripped_parts(message: Message) -> list[str]:
    """The parts of a message, without white space at either end of the whole."""
    parts = parts_of(message)
    parts[0] = Body(parts[0].lstrip())
    parts[-1] = Body(parts[-1].rstrip())
    return parts


def is_query(message: Message) -> bool:
    """Whether a message is a user's query, on raw text: a tool result that a user turn carries is none."""
    text = "".join(stripped_parts(message)) if message["role"] == "user" else ""
    return message["role"] == "user" and not (text.startswith("<tool_response>") and text.endswith("</tool_response>"))
