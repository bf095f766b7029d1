"""GLM-4.5 and 4.6, and what they share with GLM-5.

    [gMASK]<sop><|system|>
    You are ...<|user|>
    Weather?<|assistant|>
    <think>A tool knows.</think>
    Let me see.
    <tool_call>weather
    <arg_key>city</arg_key>
    <arg_value>Oslo</arg_value>
    </tool_call><|observation|>
    <tool_response>
    9 C
    </tool_response><|assistant|>

Nothing ends a turn but the token that opens the next one: the model stops by sampling <|user|> or <|observation|>, and a
bridge goes on behind it, if the next message is of that role. Tools stand in a system turn of their own, before any other.
Reasoning stays only after the last user message; other turns hold an empty block. Reasoning and content are stripped, so
are no other texts. The generation prompt is bare (the model samples "\\n<think>" itself). Thinking off closes an empty block
there and puts /nothink behind every user text that does not end with it.
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
    Segment,
    ToolCall,
    Writer,
    function_of,
    text_of,
    to_json,
)
from renderers.turns import (
    TOOL_CALL,
    argument_schemas,
    arguments_of,
    convert_argument,
    is_broken,
    join_content,
    read_reasoning,
    split_calls,
    split_inline,
    text_or_json,
    unknown_tool,
)

TOOLS_BEFORE = """<|system|>
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""

TOOLS_AFTER = """</tools>

For each function call, output the function name and arguments within the following XML format:
"""

CALL_FORMAT = """<tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
<arg_value>{arg-value-1}</arg_value>
<arg_key>{arg-key-2}</arg_key>
<arg_value>{arg-value-2}</arg_value>
...
</tool_call>"""

ARGUMENT = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
OPENERS = {"system": "<|system|>", "user": "<|user|>", "tool": "<|observation|>"}


class GLM45(Renderer):
    """GLM-4.5 and 4.6. `thinking=False` writes /nothink and puts an empty thinking block into the generation prompt."""

    name = "glm-4.5"
    options: ClassVar = Renderer.options | {"thinking": None}
    model_types = ("glm4_moe",)
    control_tokens = (
        *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        *("<think>", "</think>", *TOOL_CALL, *ARGUMENT, "<tool_response>", "</tool_response>"),
    )
    stop_tokens = ("<|endoftext|>", "<|user|>", "<|observation|>")
    turn_start = "<|assistant|>"
    thinking_tags = ("<think>", "</think>")
    newline: ClassVar[str] = "\n"  # between the pieces of the format

    @classmethod
    def fits_template(cls, template: str) -> bool:
        return all(mark in template for mark in ("/nothink", "<arg_key>", "'\\n<think></think>'"))

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict] | None = None, add_generation_prompt: bool = False
    ) -> Rendered:
        writer = self.writer()
        writer.write(-1, "system", "[gMASK]<sop>")
        if tools:
            writer.write(-1, "system", TOOLS_BEFORE)
            for tool in tools:
                writer.write(-1, "system", Plain(to_json(tool)), "\n")
            writer.write(-1, "system", TOOLS_AFTER, CALL_FORMAT.replace("\n", self.newline))
        self.write_turns(writer, messages)
        if add_generation_prompt:
            self.write_generation_prompt(writer)
        return writer.finish()

    def write_turns(self, writer: Writer, messages: Sequence[Message], first: int = 0) -> None:
        newline = self.newline
        last_user = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=-1)
        for index in range(first, len(messages)):
            message, role, text = messages[index], messages[index]["role"], text_of(messages[index])
            write = partial(writer.write, index, role)
            if role == "system":
                write(f"<|system|>{newline}", Body(text))
            elif role == "user":
                write(f"<|user|>{newline}", Body(text), self.user_suffix(text))
            elif role == "assistant":
                reasoning, text = split_inline(message, text)
                write("<|assistant|>", *self.thinking_block(reasoning, past=index < last_user))
                if text.strip():
                    write(newline, Body(text.strip()))
                for call in message.get("tool_calls") or []:
                    write(newline, *self.write_call(call))
            elif role == "tool":  # consecutive results share one turn
                opener = "<|observation|>" if index == 0 or messages[index - 1]["role"] != "tool" else ""
                write(f"{opener}{newline}<tool_response>{newline}", Body(text), f"{newline}</tool_response>")
            else:
                raise ValueError(f"{self.name} has no role {role!r}: it has system, user, assistant and tool")

    def user_suffix(self, text: str) -> str:
        return "/nothink" if self.thinking is False and not text.endswith("/nothink") else ""

    def thinking_block(self, reasoning: str, past: bool) -> list[str]:
        return ["\n<think>", Body("" if past else reasoning.strip()), "</think>"]

    def write_generation_prompt(self, writer: Writer) -> None:
        writer.write(-1, "assistant", "<|assistant|>" + ("\n<think></think>" if self.thinking is False else ""))

    def write_call(self, call: dict) -> list[str]:
        """Parts of one call; a broken one as the model wrote it."""
        if is_broken(call):
            return ["<tool_call>", Body(call["raw"]), "</tool_call>"]
        newline = self.newline
        parts = ["<tool_call>", Body(function_of(call)["name"]), newline]
        for key, value in arguments_of(call).items():
            parts += ["<arg_key>", Body(key), f"</arg_key>{newline}"]
            parts += ["<arg_value>", Body(text_or_json(value)), f"</arg_value>{newline}"]
        return [*parts, "</tool_call>"]

    def parse_response(
        self,
        completion_ids: Iterable[int],
        prompt_ids: Iterable[int] | None = None,
        tools: Sequence[dict] | None = None,
    ) -> ParsedResponse:
        reasoning, complete, segments = read_reasoning(self, completion_ids, prompt_ids, (*TOOL_CALL, *ARGUMENT))
        texts, bodies = split_calls(segments, TOOL_CALL, inner=ARGUMENT)
        calls = [read_call(body, closed, tools, f"call_{number}") for number, (body, closed) in enumerate(bodies)]
        return ParsedResponse(join_content(texts, bool(calls)), reasoning, calls, complete)

    def reply_end(self, reply: Message) -> str:
        return "<|observation|>" if reply.get("tool_calls") else "<|user|>"

    def close_turn(
        self, writer: Writer, prompt: Sequence[int], completion: Sequence[int], new_messages: Sequence[Message]
    ) -> bool:
        if self.token_id("<|system|>") in completion:
            return False
        turn, after = self.cut_at_stop(completion)
        if after is None:
            return super().close_turn(writer, prompt, completion, new_messages)
        stop, opener = completion[len(turn)], OPENERS.get(new_messages[0]["role"])
        opens = stop != self.token_id("<|endoftext|>")  # what was sampled is the beginning of the next turn
        if self.decode(after) not in ("", "\n") or (opens and (opener is None or stop != self.token_id(opener))):
            return False
        closed = super().close_turn(writer, prompt, completion[: len(turn) + 1], new_messages)
        if opens:  # a newline that was sampled behind it is the template's, or in GLM-5 stays as the text's first
            writer.skip = opener + (self.newline if after else "")
        return closed

    def strips_history(self, prompt: Sequence[int], completion: Sequence[int], new_messages: Sequence[Message]) -> bool:
        # A user message empties all thinking blocks before it: nothing may stand between their tags.
        opening, closing = map(self.token_id, self.thinking_tags)
        ids = [*prompt, *completion]
        return any(message["role"] == "user" for message in new_messages) and any(
            (id_ == opening) != (following == closing) for id_, following in pairwise(ids)
        )


def read_call(body: list[Segment], closed: bool, tools: Sequence[dict] | None, call_id: str) -> ToolCall:
    """One call from its segments, cut at ARGUMENT: a name, then pairs of a key and a value; anything else is broken."""
    raw = "".join(marker + text for marker, text in body)
    call = ToolCall(body[0][1].strip(), raw, call_id, raw)
    keys, values = ([text for marker, text in body if marker == tag] for tag in ARGUMENT[::2])
    between = [text for marker, text in body if marker in ARGUMENT[1::2]]
    if not closed:
        call.error = "the call is not closed"
    elif len(call.name.split()) != 1:
        call.error = f"a call begins with the name of a tool, not {call.name!r}"
    elif [marker for marker, _ in body[1:]] != [*ARGUMENT] * len(keys) or any(map(str.strip, between)):
        call.error = "the arguments are not pairs of <arg_key> and <arg_value>"
    else:
        call.error = unknown_tool(call.name, tools)
    if call.error is None:
        schemas = argument_schemas(call.name, tools)
        pairs = zip(map(str.strip, keys), values, strict=True)
        call.arguments = {key: convert_argument(value, schemas.get(key)) for key, value in pairs}
    return call
