"""DeepSeek V3 (R1, V3.1 and others of its architecture have templates of their own: `default` renders those).

    <｜begin▁of▁sentence｜>You are ...<｜User｜>Weather?<｜Assistant｜>Let me see.<｜tool▁calls▁begin｜>
    <｜tool▁call▁begin｜>function<｜tool▁sep｜>weather
    ```json
    {"city": "Oslo"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜><｜tool▁outputs▁begin｜>
    <｜tool▁output▁begin｜>9 C<｜tool▁output▁end｜><｜tool▁outputs▁end｜>It is 9 C.<｜end▁of▁sentence｜>

The line breaks are those around the JSON, and one between two calls or two outputs; the others are for this page. All system
messages stand at the front as bare text, so a bridge refuses a new one. Tools are not declared: a system message has to.
After tool outputs the model goes on at once, without <｜Assistant｜>: there is no generation prompt. Reasoning is not written;
`<think>` in an answer is text.

The chat template is broken for calls, and this renderer is not: it drops them where the content is a string, fails on arguments
that are a dict, does not end a turn of one call, and opens only the first section of a conversation. Here every turn of calls
is written and ended as above. The template also leaves outputs open when a user's message comes next; here they are closed.
"""

from collections.abc import Iterable, Sequence
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
)
from renderers.turns import is_broken, split_sectioned_calls, text_or_json

CALLS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
OUTPUTS = ("<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>")


class DeepSeekV3(Renderer):
    """DeepSeek-V3."""

    name = "deepseek-v3"
    model_types = ("deepseek_v3",)
    control_tokens = (
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        *CALLS,
        *OUTPUTS,
    )
    told_by_template = True  # from R1, V3.1 and others
    deviations: ClassVar = {"calls": "the template loses calls beside a text, and does not end a turn of one call"}
    stop_tokens = ("<｜end▁of▁sentence｜>",)
    turn_start, turn_end = "<｜Assistant｜>", "<｜end▁of▁sentence｜>"

    def __init__(self, tokenizer: Any, **options: Any) -> None:
        super().__init__(tokenizer, **options)
        if self.decode([id_ for id_, _ in self._encode("a b")]) != "a b":
            raise ValueError(
                "renderer deepseek-v3: this tokenizer drops spaces, as LlamaTokenizerFast does with DeepSeek's vocabulary; "
                "load it with PreTrainedTokenizerFast.from_pretrained"
            )

    @classmethod
    def fits_template(cls, template: str) -> bool:
        return (
            "{{'<｜User｜>' + message['content']}}" in template
            and "{{bos_token}}{{ns.system_prompt}}" in template
            and "ns.is_first_sp" in template
            and "think" not in template
        )

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict] | None = None, add_generation_prompt: bool = False
    ) -> Rendered:
        writer = self.writer()
        writer.write(-1, "system", "<｜begin▁of▁sentence｜>")
        systems = [index for index, message in enumerate(messages) if message["role"] == "system"]
        for index in systems:
            writer.write(index, "system", "\n\n" if index != systems[0] else "", Body(text_of(messages[index])))
        self.write_turns(writer, messages)
        if add_generation_prompt:
            self.write_generation_prompt(writer)
        return writer.finish()

    def write_turns(self, writer: Writer, messages: Sequence[Message], first: int = 0) -> None:
        turns = [index for index in range(first, len(messages)) if messages[index]["role"] != "system"]
        after_output = False
        for index, following in zip(turns, [*turns[1:], None], strict=False):
            message, role = messages[index], messages[index]["role"]
            write = partial(writer.write, index, role)
            if role == "user":
                write("<｜User｜>", Body(text_of(message)))
            elif role == "assistant":
                write("" if after_output else "<｜Assistant｜>", Body(text_of(message)))
                calls = message.get("tool_calls") or []
                for number, call in enumerate(calls):
                    write("\n" if number else "<｜tool▁calls▁begin｜>", *write_call(call))
                write("<｜tool▁calls▁end｜>" if calls else "", "<｜end▁of▁sentence｜>")
            elif role == "tool":
                write("\n" if after_output else "<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>")
                write(Body(text_of(message)), "<｜tool▁output▁end｜>")
                if following is None or messages[following]["role"] != "tool":
                    write("<｜tool▁outputs▁end｜>")
            else:
                raise ValueError(f"deepseek-v3 has no role {role!r}: it has system, user, assistant and tool")
            after_output = role == "tool"

    def write_generation_prompt(self, writer: Writer) -> None:
        written = writer.finish().token_ids
        if not written or written[-1] != self.token_id("<｜tool▁outputs▁end｜>"):
            writer.write(-1, "assistant", "<｜Assistant｜>")

    def open_turn(self, prompt: Sequence[int]) -> list[int] | None:
        openers = (self.token_id("<｜Assistant｜>"), self.token_id("<｜tool▁outputs▁end｜>"))
        at = next((at for at in range(len(prompt) - 1, -1, -1) if prompt[at] in openers), None)
        if at is None:
            return None
        tail = list(prompt[at + 1 :])
        return None if self.next_turn_begins_in(tail) or set(tail).intersection(self.stop_token_ids) else tail

    def close_turn(
        self, writer: Writer, prompt: Sequence[int], completion: Sequence[int], new_messages: Sequence[Message]
    ) -> bool:
        if self.next_turn_begins_in(completion) or any(message["role"] == "system" for message in new_messages):
            return False
        return super().close_turn(writer, prompt, completion, new_messages)

    def next_turn_begins_in(self, ids: Sequence[int]) -> bool:
        return not {self.token_id(token) for token in ("<｜User｜>", *OUTPUTS)}.isdisjoint(ids)

    def parse_response(
        self,
        completion_ids: Iterable[int],
        prompt_ids: Iterable[int] | None = None,
        tools: Sequence[dict] | None = None,
    ) -> ParsedResponse:
        turn, _ = self.cut_at_stop(as_list(completion_ids))
        content, calls = split_sectioned_calls(self.segments(turn, CALLS), CALLS, read_call, tools)
        return ParsedResponse(content, None, calls)


def write_call(call: dict) -> list[str]:
    """Parts of one call; a broken one as the model wrote it."""
    if is_broken(call):
        head, marker, body = call["raw"].partition("<｜tool▁sep｜>")
        return ["<｜tool▁call▁begin｜>", Body(head), marker, Body(body), "<｜tool▁call▁end｜>"]
    function = function_of(call)
    return [
        "<｜tool▁call▁begin｜>",
        Plain(call.get("type") or "function"),
        "<｜tool▁sep｜>",
        Body(function["name"]),
        "\n```json\n",
        Body(text_or_json(function.get("arguments", {}))),
        "\n```<｜tool▁call▁end｜>",
    ]


def read_call(head: str, body: str) -> tuple[str, str, str]:
    """(name, no id, arguments) of a call whose body is a name and a block of JSON."""
    name, _, block = body.partition("\n")
    return name.strip(), "", block.strip().removeprefix("```json").removesuffix("```")
