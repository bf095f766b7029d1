"""gpt-oss: harmony, a format of many small messages, each with an author, a channel and a body.

    <|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
    Knowledge cutoff: 2024-06
    Current date: 2026-01-15

    Reasoning: medium

    # Valid channels: analysis, commentary, final. Channel must be included for every message.
    Calls to these tools must go to the commentary channel: 'functions'.<|end|><|start|>developer<|message|># Instructions

    You are ...

    # Tools

    ## functions

    namespace functions {

    // The weather of a city.
    type weather = (_: {
    city: string,
    }) => any;

    } // namespace functions<|end|><|start|>user<|message|>Weather?<|end|><|start|>assistant<|channel|>analysis<|message|>A tool
    knows.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>
    <|start|>functions.weather to=assistant<|channel|>commentary<|message|>9 C<|end|><|start|>assistant<|channel|>final<|message|>
    Nine degrees.<|return|>

(The last two line breaks are not in the text: nothing stands between two messages.)

One assistant turn is hence several messages: reasoning in `analysis`, calls and what is said before them in `commentary`, the
answer in `final`. <|end|> closes a message, and only <|return|> and <|call|> stop the model. In history an answer ends with
<|end|>, and all reasoning before an answer that is followed by something is gone; reasoning that led to calls stays until
then. A system message becomes the developer's; the system block belongs to the format, and the date in it is an option
with a fixed default, so that a run tomorrow has the prompts of today.

The chat template that is shipped with the models is not harmony in all details. Where they differ this file writes harmony:
tool schemas in harmony's TypeScript (an object within another states its description twice), a tool's result as it is and not as
a JSON string, no blank lines after instructions without tools, and past calls in the form in which the model samples them. What is
said before a call is commentary, as the model writes it (the template makes it analysis).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
    ToolCall,
    Writer,
    as_list,
    function_of,
    text_of,
)
from renderers.harmony_types import typescript
from renderers.turns import join_content, read_arguments, text_or_json

CHANNELS = "\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message."
FUNCTIONS_CHANNEL = "\nCalls to these tools must go to the commentary channel: 'functions'."

ENDS = ("<|end|>", "<|call|>", "<|return|>")


@dataclass
class Part:
    """One harmony message of a sampled turn. `header` is what stands before its body (author, channel and recipient),
    `body` None where it was cut off before, `end` the token that closed it or ""."""

    header: str = ""
    channel: str = ""
    body: str | None = None
    end: str = ""

    @property
    def recipient(self) -> str:
        """Whom it is addressed to, which may stand behind the author or behind the channel; "" for the user."""
        return next((word[3:] for word in (self.header + " " + self.channel).split() if word.startswith("to=")), "")

    @property
    def is_call(self) -> bool:
        return bool(self.recipient) or self.end == "<|call|>" or "<|constrain|>" in self.channel

    @property
    def is_reasoning(self) -> bool:
        return self.channel.split()[:1] == ["analysis"] and not self.is_call


class GptOss(Renderer):
    """gpt-oss 20b and 120b. `reasoning_effort` and `date` (year-month-day) stand in the system block."""

    name = "gpt-oss"
    options: ClassVar = Renderer.options | {"reasoning_effort": "medium", "date": "2026-01-15"}
    choices: ClassVar = Renderer.choices | {"reasoning_effort": ("low", "medium", "high")}
    model_types = ("gpt_oss",)
    control_tokens = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
    stop_tokens = ("<|return|>", "<|call|>")
    turn_start, generation_header, turn_end = "<|start|>", "assistant", "<|end|>"
    deviations: ClassVar = {
        "system": "the template writes a blank line after instructions, harmony does not",
        "late system": "the template drops a system message that is not the first",
        "tools": "harmony's form of tool schemas",
        "calls": "past calls as the model samples them, results as harmony writes them",
    }

    def __init__(self, tokenizer: Any, **options: Any) -> None:
        super().__init__(tokenizer, **options)
        try:
            date.fromisoformat(self.date)
        except (TypeError, ValueError):
            raise ValueError(f"--renderer-args date={self.date}: for gpt-oss it is year-month-day") from None

    @classmethod
    def fits_template(cls, template: str) -> bool:
        return "<|channel|>analysis<|message|>" in template

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict] | None = None, add_generation_prompt: bool = False
    ) -> Rendered:
        writer = self.writer()
        writer.write(
            *(-1, "system", "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI."),
            f"\nKnowledge cutoff: 2024-06\nCurrent date: {self.date}\n\nReasoning: {self.reasoning_effort}",
            *(CHANNELS, FUNCTIONS_CHANNEL if tools else "", "<|end|>"),
        )
        has_system = bool(messages) and messages[0]["role"] in ("system", "developer")
        text = text_of(messages[0]) if has_system else ""
        if text or tools:
            write = partial(writer.write, *((0, messages[0]["role"]) if has_system else (-1, "system")))
            write("<|start|>developer<|message|>", *(["# Instructions\n\n", Body(text)] if text else []))
            if tools:
                write("\n\n" if text else "", "# Tools\n\n## functions\n\nnamespace functions {\n\n")
                for tool in tools:
                    write(Plain(typescript(function_of(tool))))
                write("} // namespace functions")
            write("<|end|>")
        self.write_turns(writer, messages, first=1 if has_system else 0, finished=not add_generation_prompt)
        if add_generation_prompt:
            self.write_generation_prompt(writer)
        return writer.finish()

    def write_turns(self, writer: Writer, messages: Sequence[Message], first: int = 0, finished: bool = False) -> None:
        """`finished`: an answer that stands last is written as the model samples it, with its reasoning and <|return|>."""
        named = with_authors(messages)
        answers = [at for at, one in enumerate(messages) if one["role"] == "assistant" and not one.get("tool_calls")]
        last_answer = answers[-1] if answers else -1
        for index in range(first, len(messages)):
            message, role, text = named[index], messages[index]["role"], text_of(messages[index])
            write = partial(writer.write, index, role)
            if role == "user":
                write("<|start|>user<|message|>", Body(text), "<|end|>")
            elif role in ("system", "developer"):
                write("<|start|>developer<|message|># Instructions\n\n", Body(text), "<|end|>")
            elif role == "tool":
                write("<|start|>functions.", Plain(message["name"]))
                write(" to=assistant<|channel|>commentary<|message|>", Body(text), "<|end|>")
            elif role == "assistant":
                reasoning, calls = message.get("reasoning_content"), message.get("tool_calls") or []
                sampled = not calls and finished and index == len(messages) - 1
                if (reasoning and calls and index > last_answer) or (reasoning is not None and sampled):
                    write("<|start|>assistant<|channel|>analysis<|message|>", Body(reasoning), "<|end|>")
                if not calls:
                    write("<|start|>assistant<|channel|>final<|message|>", Body(text))
                    write("<|return|>" if sampled else "<|end|>")
                elif text:
                    write("<|start|>assistant<|channel|>commentary<|message|>", Body(text), "<|end|>")
                for call in calls:
                    write("<|start|>assistant<|channel|>commentary ")
                    if name := function_of(call).get("name"):
                        write("to=functions.", Body(name), " ")
                    arguments = text_or_json(function_of(call).get("arguments", {}))
                    write("<|constrain|>json<|message|>", Body(arguments), "<|call|>")
            else:
                raise ValueError(f"gpt-oss has no role {role!r}: it has system, developer, user, assistant and tool")

    def parse_response(
        self,
        completion_ids: Iterable[int],
        prompt_ids: Iterable[int] | None = None,
        tools: Sequence[dict] | None = None,
    ) -> ParsedResponse:
        """Reads the channels: analysis is reasoning; messages to someone are calls, and broken where <|call|> does not
        close them; all else is content."""
        tail = self.open_turn(as_list(prompt_ids)) if prompt_ids is not None else None
        parts, _ = self.read(tail or [], as_list(completion_ids))
        reasoning, texts, calls = [], [""], []
        for part in parts:
            if part.is_reasoning:
                reasoning.append(part.body or "")
            elif part.is_call:
                calls.append(read_call(part, tools, f"call_{len(calls)}"))
                texts.append("")
            else:  # without a channel it is no harmony, and nothing that was said is lost
                said = part.header if part.body is None and not part.channel else part.body or ""
                texts[-1] += ("\n" if texts[-1] and said else "") + said
        return ParsedResponse(
            join_content(texts, bool(calls)),
            "\n".join(reasoning).strip("\n") or None,
            calls,
            not (parts[-1].is_reasoning and parts[-1].end != "<|end|>"),
        )

    def read(self, tail: Sequence[int], completion: Sequence[int]) -> tuple[list[Part], bool]:
        """(the messages of a turn whose <|start|>assistant stands in the prompt, whether a next turn may follow them).

        <|call|> stops the model; where the assistant went on after it all the same, so does this.
        """
        markers = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", *ENDS)
        parts, clean = [Part()], True
        segments = self.segments([*tail, *completion], markers)
        for at, (marker, text) in enumerate(segments):
            part = parts[-1]
            if marker == "<|start|>" and (part.end or at == 1):
                goes_on = text == "assistant" or text.startswith("assistant ")
                clean = clean and goes_on and part.end in ("<|end|>", "<|call|>")
                if part.end == "<|return|>" or (part.end == "<|call|>" and not goes_on):
                    break
                parts.append(Part(header=text.removeprefix("assistant")))
            elif part.end:
                clean = False
            elif marker in ENDS:
                part.end = marker
                clean = clean and part.body is not None and (not text or (text == "\n" and at == len(segments) - 1))
            elif part.body is not None:  # a control token within a body: not a text that harmony can hold
                part.body += marker + text
                clean = False
            elif marker == "<|message|>":
                part.body = text
            elif marker == "<|channel|>" or part.channel:
                part.channel += text if marker == "<|channel|>" else marker + text
            else:
                part.header += marker + text
        return parts[parts[0] == Part() and len(parts) > 1 :], clean

    def open_turn(self, prompt: Sequence[int]) -> list[int] | None:
        tail = super().open_turn(prompt)
        return None if tail is None or self.token_id("<|end|>") in tail else tail

    def bridge(
        self,
        prev_prompt_ids: Iterable[int],
        prev_completion_ids: Iterable[int],
        new_messages: Sequence[Message],
        tools: Sequence[dict] | None = None,
    ) -> Rendered | None:
        prompt, completion = as_list(prev_prompt_ids), as_list(prev_completion_ids)
        reply = self.parse_response(completion, prompt).message()  # a result's author is named by the call in it
        return super().bridge(prompt, completion, with_authors([reply, *new_messages])[1:], tools)

    def close_turn(
        self, writer: Writer, prompt: Sequence[int], completion: Sequence[int], new_messages: Sequence[Message]
    ) -> bool:
        tail = self.open_turn(prompt)
        if tail is None:
            return False
        parts, clean = self.read(tail, completion)
        last = parts[-1]
        if not clean or last.body is None:
            return False
        if last.is_reasoning and last.end != "<|end|>" and (last.end or self.thinking_retention == "template"):
            return False
        if not last.end:
            writer.write(-1, "assistant", "<|call|>" if last.is_call else "<|end|>")
        return True

    def strips_history(self, prompt: Sequence[int], completion: Sequence[int], new_messages: Sequence[Message]) -> bool:
        # An answer takes all reasoning before it along, and once something follows it ends with <|end|>.
        parts, _ = self.read(self.open_turn(prompt) or [], completion)
        if parts[-1].is_call:
            return False
        headers = self.segments([*prompt, *completion], ("<|channel|>", "<|message|>"))
        thought = any(marker == "<|channel|>" and text.startswith("analysis") for marker, text in headers)
        return thought or self.token_id("<|return|>") in completion


def with_authors(messages: Sequence[Message]) -> list[Message]:
    """The messages, the tools' results among them with the name of the function that was called: by `tool_call_id`, else by
    their own `name`, else in the order of the calls."""
    named, calls, answered = [], [], 0
    for message in messages:
        if message["role"] == "assistant":
            calls, answered = message.get("tool_calls") or [], 0
        elif message["role"] == "tool":
            called = [call for call in calls if call.get("id") and call.get("id") == message.get("tool_call_id")]
            name = function_of(called[-1]).get("name") if called else message.get("name")
            if not name and answered < len(calls):
                name = function_of(calls[answered]).get("name")
            message, answered = message | {"name": name or "unknown"}, answered + 1
        named.append(message)
    return named


def read_call(part: Part, tools: Sequence[dict] | None, call_id: str) -> ToolCall:
    """A message to a function as a call; marked broken, never raising, where it is none that could be made."""
    raw, name = part.body or "", part.recipient.removeprefix("functions.")
    return read_arguments(ToolCall(name, raw, call_id, raw), part.end == "<|call|>", tools)
