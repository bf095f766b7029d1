"""Any chat template, through the tokenizer's own `apply_chat_template`. Takes what no hand-coded family fits.

*Text is text*, as far as a template allows: before it is rendered, message text is replaced by placeholders, so that the
control tokens in the result are the template's own and everything put back in is ordinary characters. A template that
looks into the text (trims it, splits it at </think>, tests how it begins) may then write something else; that is noticed,
and less is hidden, until the result is the template's own text to the letter: first whole texts and all control-token
strings; then control-token strings (in assistant text the special ones alone, as templates read <think> there); then special
tokens alone; then nothing. Only in the last two does text of a user or a tool reach the model as a control token.

*Attribution.* A message's scaffold ends where the template's text for the messages up to it ends. Where that is no prefix
of the whole (templates that rewrite earlier turns, results that share a turn), scaffold goes to the message whose text comes
next. Blanks around a text count as scaffold; a text that could not be hidden does too.

*A bridge is proved or refused.* Probe conversations are rendered with and without the new messages. What the template
writes after an assistant's text must begin with a control token (the stop), be the same after every history and every answer
(with and without inline reasoning), and leave all before it untouched, over two turns. A template that strips past reasoning
fails here. One that merely trims an answer passes: the prompt then holds the answer as it was sampled.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from renderers.base import (
    Body,
    Message,
    ParsedResponse,
    Plain,
    Rendered,
    Renderer,
    _cut,
    _pattern,
    as_list,
    function_of,
    text_of,
)
from renderers.turns import TOOL_CALL, arguments_of, is_broken, read_calls, read_json_call, split_reasoning

QUESTION, ANSWER = "Is the sky blue?", "Yes, on most days."
USER = {"role": "user", "content": QUESTION}
HISTORIES = (
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, {"role": "assistant", "content": "No."}, USER],
)
ANSWERS = (ANSWER, f"<think>\nLight scatters.\n</think>\n\n{ANSWER}")
CALL = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": {"where": "up"}}}


@dataclass
class Hidden:
    """A conversation whose texts are placeholders, and the template's text for it."""

    messages: list[Message]
    tools: list[dict] | None
    chunks: list[tuple[int, str, bool]]  # message index, what the placeholder stands for, whether it is a body
    placeholder: re.Pattern
    text: str = ""

    def restore(self, text: str) -> str:
        return self.placeholder.sub(lambda match: self.chunks[int(match[1])][1], text)


class Default(Renderer):
    """A chat template as a renderer. `thinking` is passed to templates that have a switch for it, and refused elsewhere.
    Raises ValueError for a tokenizer without a chat template."""

    name = "default"
    options: ClassVar = Renderer.options | {"thinking": None}
    thinking_tags = ("<think>", "</think>")

    def __init__(self, tokenizer: Any, **options: Any) -> None:
        super().__init__(tokenizer, **options)
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            raise ValueError(
                "renderer default needs a chat template, and this tokenizer has none: name another --renderer"
            )
        self._template = template if isinstance(template, str) else json.dumps(template)
        self._switch: dict[str, bool] = {}
        if self.thinking is not None:
            switches = ("enable_thinking", "thinking")
            switch = next((s for s in switches if re.search(rf"(?<![\w.'\"]){s}\b", self._template)), None)
            if switch is None:
                raise ValueError(f"--renderer-args thinking={self.thinking}: this chat template has no switch for it")
            self._switch = {switch: self.thinking}
        added = self._backend.get_added_tokens_decoder()
        self._special = _pattern(
            {id_: token for id_, token in added.items() if token.special and token.content.strip()}
        )

    @cached_property
    def stop_token_ids(self) -> list[int]:
        """The tokenizer's end of sequence, and the token that the template writes after an assistant's text."""
        eos = getattr(self.tokenizer, "eos_token_id", None)
        stops = [] if eos is None else [eos]
        try:
            written = self._text([USER, {"role": "assistant", "content": ANSWER}], None).rpartition(ANSWER)[2]
        except ValueError:
            return stops
        first = next(_cut(self._control, written.lstrip()), (0, "", None))[2]
        return stops if first is None or first in stops else [*stops, first]

    @cached_property
    def _generation_prompt(self) -> list[int]:
        """Ids of what the template adds for generation; empty where it cannot be told apart."""
        try:
            plain, prompted = self._text([USER], None), self._text([USER], None, generation=True)
        except ValueError:
            return []
        writer = self.writer()
        writer.write(-1, "assistant", prompted[len(plain) :] if prompted.startswith(plain) else "")
        return writer.finish().token_ids

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict] | None = None, add_generation_prompt: bool = False
    ) -> Rendered:
        hidden = self._hide([_for_template(message) for message in messages], tools, add_generation_prompt)
        writer = self.writer()
        for owner, part in self._attribute(hidden):
            role = messages[owner]["role"] if 0 <= owner < len(messages) else "system" if owner < 0 else "assistant"
            writer.write(owner if owner < len(messages) else -1, role, part)
        return writer.finish()

    def bridge(
        self,
        prev_prompt_ids: Iterable[int],
        prev_completion_ids: Iterable[int],
        new_messages: Sequence[Message],
        tools: Sequence[dict] | None = None,
    ) -> Rendered | None:
        prompt, (turn, after) = as_list(prev_prompt_ids), self.cut_at_stop(as_list(prev_completion_ids))
        opening = self._generation_prompt
        if not new_messages or any(message["role"] == "assistant" for message in new_messages):
            return None
        if not opening or prompt[-len(opening) :] != opening or self._control_id_set.intersection(opening, turn):
            return None
        probe = [USER, {"role": "assistant", "content": ANSWER}]
        try:
            if not self._keeps_answers:
                return None
            hidden = self._hide([*probe, *map(_for_template, new_messages)], tools, True, first=len(probe))
            suffix = self._proved_suffix(hidden.messages[len(probe) :], hidden.tools)
        except ValueError:
            return None
        _, stop, stop_id = next(_cut(self._control, suffix or ""), (0, "", None))
        if suffix is None or stop_id is None or stop_id not in self.stop_token_ids:
            return None
        begin = len(hidden.text) - len(suffix)
        if after is not None:
            sampled = self.decode(after)  # blanks sampled after the stop stand for those that the template writes
            begin += len(stop) + len(sampled)
            follows = next(_cut(self._control, hidden.text[begin:]), (0, "", None))[2]
            if sampled.strip() or not suffix.startswith(stop + sampled) or (sampled and follows is None):
                return None
        writer = self.writer()
        for owner, part in self._attribute(hidden, begin):
            index = owner - len(probe)
            own = 0 <= index < len(new_messages)
            writer.write(index if own else -1, new_messages[index]["role"] if own else "assistant", part)
        return writer.finish()

    def parse_response(
        self,
        completion_ids: Iterable[int],
        prompt_ids: Iterable[int] | None = None,
        tools: Sequence[dict] | None = None,
    ) -> ParsedResponse:
        """Reads reasoning and JSON calls only where the template knows them (</think>, <tool_call>); all else is content."""
        turn, _ = self.cut_at_stop(as_list(completion_ids))
        thinks = self.thinking_tags[1] in self._template
        calls_json = TOOL_CALL[0] in self._template and "<function=" not in self._template
        segments = self.segments(turn, (self.thinking_tags if thinks else ()) + (TOOL_CALL if calls_json else ()))
        reasoning, complete = None, True
        if thinks:
            opening = self._generation_prompt
            prompted = prompt_ids is not None and opening and as_list(prompt_ids)[-len(opening) :] == opening
            opened = prompted and self.segments(opening, self.thinking_tags)[-1][0] == self.thinking_tags[0]
            reasoning, complete, segments = split_reasoning(segments, self.thinking_tags, bool(opened))
        content, calls = read_calls(segments, tools, read_json_call)
        return ParsedResponse(content, reasoning, calls, complete)

    def _text(self, messages: Sequence[Message], tools: Sequence[dict] | None, generation: bool = False) -> str:
        """The template's text. Raises ValueError where it refuses the conversation."""
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=generation,
                tokenize=False,
                **self._switch,
            )
        except Exception as error:  # templates fail in as many ways as there are templates
            raise ValueError(f"the chat template refuses this conversation: {type(error).__name__}: {error}") from error

    def _hide(self, messages: list[Message], tools: Sequence[dict] | None, generation: bool, first: int = 0) -> Hidden:
        """Hides as much of the text (of messages[first:] and the tools) as leaves the template's result as it is."""
        raw = self._text(messages, tools, generation)
        used = set(json.dumps([messages, list(tools or [])], ensure_ascii=False, default=str))
        left, right = [mark for mark in map(chr, range(0xE000, 0xF8FF)) if mark not in used][:2]
        for texts, assistant, others in (
            (True, self._control, self._control),
            (False, self._special, self._control),
            (False, self._special, self._special),
        ):
            hidden = Hidden(messages[:first], None, [], re.compile(f"{left}(\\d+){right}"))

            def hide(text: str, index: int, body: bool, chunks: list = hidden.chunks) -> str:
                chunks.append((index, text, body))
                return f"{left}{len(chunks) - 1}{right}"

            def walk(value: Any, index: int, pattern: tuple, hide: Any = hide) -> Any:
                if isinstance(value, str):
                    return "".join(hide(t, index, False) if i is not None else t for _, t, i in _cut(pattern, value))
                if isinstance(value, dict):
                    return {walk(key, index, pattern): walk(item, index, pattern) for key, item in value.items()}
                return [walk(item, index, pattern) for item in value] if isinstance(value, list | tuple) else value

            for index, message in enumerate(messages[first:], first):
                pattern = assistant if message["role"] == "assistant" else others
                covered = {"role": message["role"]}
                for key, value in message.items():
                    is_text = key in ("content", "reasoning_content")
                    if core := value.strip() if texts and is_text and value else "":
                        before, _, behind = value.partition(core)
                        covered[key] = before + hide(core, index, True) + behind
                    elif key != "role":
                        covered[key] = walk(value, index, pattern if is_text else others)
                hidden.messages.append(covered)
            hidden.tools = walk(list(tools), -1, others) if tools else None
            try:
                hidden.text = self._text(hidden.messages, hidden.tools, generation)
            except ValueError:
                continue
            if hidden.restore(hidden.text) == raw:
                return hidden
        return Hidden(messages, list(tools) if tools else None, [], re.compile("(?!)"), raw)

    def _attribute(self, hidden: Hidden, begin: int = 0) -> Iterator[tuple[int, str]]:
        """(message index, part) of the pieces of the hidden text from `begin` on. An index past the last message is the
        generation prompt, -1 what stands before the first."""
        text, messages, count = hidden.text, hidden.messages, len(hidden.messages)
        cuts = []  # (end of the message in the text, message)
        for index in range(count):
            try:
                prefix = self._text(messages[: index + 1], hidden.tools)
            except ValueError:
                continue
            if text.startswith(prefix):
                cuts.append((len(prefix), index))
        if not cuts or cuts[-1][1] != count - 1:
            cuts.append((len(text), count - 1))
        cuts = [(self._preamble(messages[0], text[: cuts[0][0]]), -1), *cuts, (len(text), count)]
        pieces = []  # start, part, its message (None: to be found)
        at = begin
        for match in [*hidden.placeholder.finditer(text, begin), None]:
            end = len(text) if match is None else match.start()
            for stop in [*sorted({cut for cut, _ in cuts if at < cut < end}), end]:
                pieces.append((at, text[at:stop], None))
                at = stop
            if match is not None:
                index, chunk, body = hidden.chunks[int(match[1])]
                pieces.append((match.start(), Body(chunk) if body else Plain(chunk), index if body else None))
                at = match.end()
        upcoming: list[int | None] = [None] * (len(pieces) + 1)  # the message of the next body
        for position in range(len(pieces) - 1, -1, -1):
            own = pieces[position][2]
            upcoming[position] = upcoming[position + 1] if own is None else own
        for position, (start, part, own) in enumerate(pieces):
            if own is None:
                own = next(index for end, index in cuts if start < end or end == len(text))
                following = upcoming[position]
                if following is not None and 0 <= own < count:
                    own = min(own, following)
            yield own, part

    def _preamble(self, message: Message, text: str) -> int:
        """Where the first message's own turn begins in its text: behind a default system prompt, say. 0 where unknown."""
        probe = [USER, {"role": "assistant", "content": ANSWER}]
        try:
            before, after = self._text(probe, None), self._text([*probe, message], None)
        except ValueError:
            return 0
        turn = after[len(before) :]
        return len(text) - len(turn) if after.startswith(before) and turn and text.endswith(turn) else 0

    @cached_property
    def _keeps_answers(self) -> bool:
        """Whether the template leaves any answer in history as it was. Where it takes one apart, it does so at a string that
        it names: answers that hold each of these, and each control token in the template, are tried."""
        named = re.findall(
            r"""(?:split|partition|replace|with)\(\s*(['"])(.+?)\1|(['"])([^'"\n]+)\3\s+(?:not\s+)?in\b""",
            self._template,
        )
        marks = {(called or tested).replace("\\n", "\n") for _, called, _, tested in named}
        marks |= {text for _, text, token_id in _cut(self._control, self._template) if token_id is not None}
        answers = [*ANSWERS, *(f"Yes.{mark}No." for mark in sorted(marks))]
        return self._proved_suffix([USER], None, answers) is not None

    def _proved_suffix(
        self, new: list[Message], tools: list[dict] | None, answers: Sequence[str] = ANSWERS
    ) -> str | None:
        """What the template writes between an assistant's text and the next one's, `new` between them; None where it is not
        the same after every probe, or where the template changes what stood before. Raises ValueError where none renders."""
        suffixes = set()
        for history in HISTORIES:
            try:
                before = self._text(history, tools, generation=True)
            except ValueError:  # a template without system messages, say: no conversation has one then
                continue
            for answer in answers:
                said = {"role": "assistant", "content": answer}
                once = self._text([*history, said, *new], tools, generation=True)
                suffix = once[len(before) + len(answer) :]
                twice = self._text([*history, said, *new, said, *new], tools, generation=True)
                if once != before + answer + suffix or twice != once + answer + suffix:
                    return None
                suffixes.add(suffix)
            if new[0]["role"] == "tool":
                called = [*history, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
                try:
                    call, full = self._text(called, tools), self._text([*called, *new], tools, generation=True)
                except ValueError:
                    return None
                if not full.startswith(call) or not call.startswith(before) or not suffix.endswith(full[len(call) :]):
                    return None
        return suffixes.pop() if len(suffixes) == 1 else None


def _for_template(message: Message) -> Message:
    """A message as templates expect it: text for content, arguments as objects, a broken call as the text that it was."""
    message, calls, text = dict(message), [], text_of(message)
    for call in message.pop("tool_calls", None) or []:
        if is_broken(call):
            text += f"\n{TOOL_CALL[0]}{call['raw']}{TOOL_CALL[1]}"
            continue
        function = dict(function_of(call))
        if isinstance(function.get("arguments"), str):
            with contextlib.suppress(ValueError):
                function["arguments"] = arguments_of(call)
        calls.append({"id": call.get("id", "call_0"), "type": "function", "function": function})
    return message | {"content": text} | ({"tool_calls": calls} if calls else {})
