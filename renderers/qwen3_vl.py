"""Qwen3-VL Instruct, read and written as text (not the Thinking models, whose template knows reasoning).

    <|im_start|>system
    You are ...<|im_end|>
    <|im_start|>user
    What is this? <|vision_start|><|image_pad|><|vision_end|><|im_end|>
    <|im_start|>assistant
    I will look it up.
    <tool_call>
    {"name": "search", "arguments": {"query": "red bird"}}
    </tool_call><|im_end|>
    <|im_start|>user
    <tool_response>
    A cardinal.
    </tool_response><|im_end|>

There is no thinking: `reasoning_content` is not written. A system message counts only in first place; the template drops
later ones, and so do `render` and the bridge. An image or video in a user message or tool result becomes the template's
placeholder. The placeholder is all of it: whoever shows the model pixels replaces it.
"""

from collections.abc import Iterable, Sequence
from functools import partial

from renderers.base import Body, Message, ParsedResponse, Rendered, Renderer, Writer, as_list, text_of
from renderers.qwen3 import write_tools
from renderers.turns import TOOL_CALL, read_calls, read_json_call, tool_response, write_json_call

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


class Qwen3VL(Renderer):
    """Qwen3-VL's Instruct models: ChatML with JSON tool calls and without reasoning."""

    name = "qwen3-vl"
    model_types = ("qwen3_vl", "qwen3_vl_moe", "qwen3_vl_text", "qwen3_vl_moe_text")
    control_tokens = (
        *("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
        *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    )
    told_by_template = True  # from the Thinking models
    stop_tokens = ("<|im_end|>", "<|endoftext|>")
    turn_start, generation_header, turn_end, after_turn = "<|im_start|>", "assistant\n", "<|im_end|>", "\n"

    @classmethod
    def fits_template(cls, template: str) -> bool:
        return IMAGE in template and r"<tool_call>\n{\"name\":" in template and "think" not in template

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict] | None = None, add_generation_prompt: bool = False
    ) -> Rendered:
        writer = self.writer()
        first = write_tools(writer, messages, tools)
        if not tools and messages and messages[0]["role"] == "system":
            writer.write(0, "system", "<|im_start|>system\n", Body(text_of(messages[0])), "<|im_end|>\n")
        self.write_turns(writer, messages, first)
        if add_generation_prompt:
            self.write_generation_prompt(writer)
        return writer.finish()

    def write_turns(self, writer: Writer, messages: Sequence[Message], first: int = 0) -> None:
        for index in range(first, len(messages)):
            message, role = messages[index], messages[index]["role"]
            write = partial(writer.write, index, role)
            if role == "user":
                write("<|im_start|>user\n", *parts_of(message), "<|im_end|>\n")
            elif role == "assistant":
                write("<|im_start|>assistant\n", Body(text_of(message)))
                for number, call in enumerate(message.get("tool_calls") or []):
                    write("\n" if message.get("content") or number else "", *write_json_call(call))
                write("<|im_end|>\n")
            elif role == "tool":
                write(*tool_response(messages, index, *parts_of(message)))
            elif role != "system":
                raise ValueError(f"qwen3-vl has no role {role!r}: it has system, user, assistant and tool")

    def parse_response(
        self,
        completion_ids: Iterable[int],
        prompt_ids: Iterable[int] | None = None,
        tools: Sequence[dict] | None = None,
    ) -> ParsedResponse:
        turn, _ = self.cut_at_stop(as_list(completion_ids))
        content, calls = read_calls(self.segments(turn, TOOL_CALL), tools, read_json_call)
        return ParsedResponse(content, tool_calls=calls)


def parts_of(message: Message) -> list[str]:
    """The text of a message, and the template's placeholder wherever an image or a video stands between. Raises
    ValueError for a part that is neither."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return [Body(content or "")]
    parts = [Body("")]
    for part in content:
        kinds = set() if isinstance(part, str) else {part.get("type"), *part}
        if kinds & {"image", "image_url"}:
            parts += [IMAGE, Body("")]
        elif "video" in kinds:
            parts += [VIDEO, Body("")]
        else:
            parts[-1] = Body(parts[-1] + text_of(message | {"content": [part]}))
    return parts
