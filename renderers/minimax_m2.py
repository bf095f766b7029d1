"""MiniMax-M2 and M2.5.

    ]~!b[]~b]system
    You are ...[e~[
    ]~b]user
    Weather?[e~[
    ]~b]ai
    <think>
    A tool knows.
    </think>

    Let me see.
    <minimax:tool_call>
    <invoke name="weather">
    <parameter name="city">Oslo</parameter>
    </invoke>
    </minimax:tool_call>[e~[
    ]~b]tool
    <response>9 C</response>[e~[
    ]~b]ai
    <think>

A system turn is always there, with the model's identity where no system message comes first, and with the tools; later system
messages are dropped. Reasoning stays only after the last user message. It is written as it is, and so is the content; only
reasoning that stands inline in the content is freed of newlines. All calls of a turn share one block. The generation prompt
opens the reasoning, and there is no switch for that. The newline after [e~[ is the template's: the model never samples it.
<invoke> and <parameter> are no tokens, only text.
"""

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
    ToolCall,
    Writer,
    function_of,
    text_of,
    to_json,
)
from renderers.turns import (
    argument_schemas,
    arguments_of,
    convert_argument,
    is_broken,
    join_content,
    read_reasoning,
    split_calls,
    split_inline,
    text_or_json,
    thinks_nothing,
    unknown_tool,
)

IDENTITY = "You are a helpful assistant. Your name is MiniMax-M2.5 and is built by MiniMax."

TOOLS_BEFORE = """

# Tools
You may call one or more tools to assist with the user query.
Here are the tools available in JSONSchema format:

<tools>
"""

TOOLS_AFTER = """</tools>

When making tool calls, use XML format to invoke tools and pass parameters:

<minimax:tool_call>
<invoke name="tool-name-1">
<parameter name="param-key-1">param-value-1</parameter>
<parameter name="param-key-2">param-value-2</parameter>
...
</invoke>
</minimax:tool_call>"""

CALLS = ("<minimax:tool_call>", "</minimax:tool_call>")
INVOKE = re.compile(r'<invoke name="([^"]*)">(.*)</invoke>\s*', re.DOTALL)
# A value may hold </parameter> itself: it ends where another parameter follows, or nothing.
PARAMETER = re.compile(
    r'<parameter name="([^"]*)">((?:(?!<parameter name=").)*?)</parameter>(?=\s*(?:<parameter name="|\Z))', re.DOTALL
)


class MiniMaxM2(Renderer):
    """MiniMax-M2 and M2.5. `model_identity` replaces the identity that the checkpoint's template names by default."""

    name = "minimax-m2"
    options: ClassVar = Renderer.options | {"model_identity": None}
    model_types = ("minimax_m2",)
    control_tokens = ("]~!b[", "]~b]", "[e~[", "<think>", "</think>", *CALLS)
    stop_tokens = ("[e~[",)
    turn_start, generation_header, turn_end, after_turn = "]~b]", "ai\n", "[e~[", "\n"
    thinking_tags = ("<think>", "</think>")

    @classmethod
    def fits_template(cls, template: str) -> bool:
        return all(
            mark in template for mark in ("model_identity", "<minimax:tool_call>", "']~b]ai' ~ '\\n' ~ '<think>'")
        )

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict] | None = None, add_generation_prompt: bool = False
    ) -> Rendered:
        writer = self.writer()
        has_system = bool(messages) and messages[0]["role"] == "system"
        message = messages[0] if has_system else {}
        write = partial(writer.write, 0 if has_system else -1, "system")
        write("]~!b[]~b]system\n", Body(text_of(message)) if message.get("content") else Plain(self.identity()))
        for key, label in {"current_date": "\nCurrent date: ", "current_location": "\nCurrent location: "}.items():
            if message.get(key):
                write(label, Body(message[key]))
        if tools:
            write(TOOLS_BEFORE)
            for tool in tools:
                write("<tool>", Plain(to_json(function_of(tool))), "</tool>\n")
            write(TOOLS_AFTER)
        write("[e~[\n")
        self.write_turns(writer, messages, first=1 if has_system else 0)
        if add_generation_prompt:
            self.write_generation_prompt(writer)
        return writer.finish()

    def identity(self) -> str:
        """The identity that was asked for; else that of the checkpoint's own template, as it changes by version."""
        if self.model_identity is not None:
            return self.model_identity
        named = re.search(r'model_identity = "([^"]*)"', str(getattr(self.tokenizer, "chat_template", "")))
        return named[1] if named else IDENTITY

    def write_turns(self, writer: Writer, messages: Sequence[Message], first: int = 0) -> None:
        last_user = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=-1)
        last = len(messages) - 1
        for index in range(first, len(messages)):
            message, role, text = messages[index], messages[index]["role"], text_of(messages[index])
            write = partial(writer.write, index, role)
            if role == "user":
                write("]~b]user\n", Body(text), "[e~[\n")
            elif role == "assistant":
                reasoning, text = split_inline(message, text, strip=str.strip)
                write("]~b]ai\n")
                if reasoning and index > last_user:
                    write("<think>\n", Body(reasoning), "\n</think>\n\n")
                write(Body(text))
                if calls := message.get("tool_calls"):
                    write("\n<minimax:tool_call>\n")
                    for call in calls:
                        write(*write_call(call))
                    write("</minimax:tool_call>")
                write("[e~[\n")
            elif role == "tool":  # consecutive results share one turn
                if index == 0 or messages[index - 1]["role"] != "tool":
                    write("]~b]tool")
                if isinstance(message.get("content"), list):  # each part is a result of its own
                    for part in message["content"]:
                        write("\n<response>", Body(text_of({"role": role, "content": [part]})), "\n</response>")
                else:
                    write("\n<response>", Body(text), "</response>")
                if index == last or messages[index + 1]["role"] != "tool":
                    write("[e~[\n")
            elif role != "system":
                raise ValueError(f"minimax-m2 has no role {role!r}: it has system, user, assistant and tool")

    def write_generation_prompt(self, writer: Writer) -> None:
        super().write_generation_prompt(writer)
        writer.write(-1, "assistant", "<think>\n")

    def parse_response(
        self,
        completion_ids: Iterable[int],
        prompt_ids: Iterable[int] | None = None,
        tools: Sequence[dict] | None = None,
    ) -> ParsedResponse:
        reasoning, complete, segments = read_reasoning(self, completion_ids, prompt_ids, CALLS)
        texts, blocks = split_calls(segments, CALLS)
        raws = [raw for body, _ in blocks for raw in split_block(body[0][1])]
        calls = [read_call(raw, tools, f"call_{number}") for number, raw in enumerate(raws)]
        return ParsedResponse(join_content(texts, bool(blocks)), reasoning, calls, complete)

    def strips_history(self, prompt: Sequence[int], completion: Sequence[int], new_messages: Sequence[Message]) -> bool:
        # A user message strips all thinking blocks before it, anything else one that is empty.
        opening = self.token_id("<think>")
        if any(message["role"] == "user" for message in new_messages):
            return opening in prompt or opening in completion
        return thinks_nothing(self, prompt, completion)


def write_call(call: dict) -> list[str]:
    """Parts of one call within the block; a broken one as the model wrote it."""
    if is_broken(call):
        return [Body(call["raw"])]
    parts = ['<invoke name="', Body(function_of(call)["name"]), '">\n']
    for key, value in arguments_of(call).items():
        parts += ['<parameter name="', Body(key), '">', Body(text_or_json(value)), "</parameter>\n"]
    return [*parts, "</invoke>\n"]


def split_block(block: str) -> list[str]:
    """The calls in the text of a block, one <invoke> each; whatever stands before them, or instead, is a (broken) one too."""
    before, *calls = re.split(r'(?=<invoke name=")', block)
    return [before, *calls] if before.strip() or not calls else calls


def read_call(raw: str, tools: Sequence[dict] | None, call_id: str) -> ToolCall:
    """One call from its text, marked broken where it is not an <invoke> around some <parameter>s."""
    call = ToolCall("", raw, call_id, raw)
    invoke = INVOKE.fullmatch(raw)
    if invoke is None:
        call.error = "a call is <invoke name=...> to </invoke>"
        return call
    call.name, body = invoke[1], invoke[2]
    if not call.name:
        call.error = "the call has no name"
    elif PARAMETER.sub("", body).strip():
        call.error = "the arguments are not <parameter name=...> to </parameter>"
    else:
        call.error = unknown_tool(call.name, tools)
    if call.error is None:
        schemas = argument_schemas(call.name, tools)
        call.arguments = {key: convert_argument(value, schemas.get(key)) for key, value in PARAMETER.findall(body)}
    return call
