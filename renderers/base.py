"""What every renderer shares: the interface, exact encoding, and the reading and closing of sampled turns.

A renderer writes a conversation as *parts*. A plain `str` is text that the format itself writes: control-token strings in
it become control tokens. `Body` (a message's own text) and `Plain` (text that a message or tool brought along: a schema,
a name) are always ordinary characters, so `<|im_end|>` inside them ends nothing. The text between two control tokens is
one *run*, whoever wrote its parts, and is encoded in one pass, as the template's tokenizer would.

A token belongs to the part that holds its first character. One that straddles ("\\n" of a header merged with the "\\n\\n"
that a body begins with) is hence scaffold where the header began it, and content where the body did.
"""

import copy
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

Message = dict[str, Any]
Segment = tuple[str, str]  # a marker of the format ("" for none), and the text that follows it


@dataclass
class Rendered:
    """Token ids with their attribution, four lists of one length T.

    `message_index` counts in the messages that were passed; -1 is scaffold that belongs to none of them (the generation
    prompt, a tool list without a system message, the end of a turn that a bridge closes). `roles` holds the message's role
    per token; where there is no message, that of the turn (the generation prompt: "assistant"). `is_content` tells message
    bodies (text, reasoning, arguments of calls) from template scaffold.
    """

    token_ids: list[int] = field(default_factory=list)
    message_index: list[int] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    is_content: list[bool] = field(default_factory=list)

    def add(self, token_id: int, index: int, role: str, content: bool) -> None:
        self.token_ids.append(token_id)
        self.message_index.append(index)
        self.roles.append(role)
        self.is_content.append(content)

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass
class ToolCall:
    """A call as the model wrote it: well-formed (`error` is None, `arguments` a dict), or marked broken (`error` says why,
    `arguments` is the raw string). `raw` is the text between the call's tags, verbatim."""

    name: str
    arguments: dict[str, Any] | str
    id: str
    raw: str
    error: str | None = None


@dataclass
class ParsedResponse:
    """A sampled turn, read. `reasoning_content` is None where there is none; `reasoning_complete` is False where the turn
    ended inside its reasoning. `tool_calls` keeps the order of the text, broken calls included."""

    content: str
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    reasoning_complete: bool = True

    def message(self) -> Message:
        """The OpenAI-style assistant message. A broken call stands among the others with two more keys, `error` and `raw`,
        so that an environment can answer it, and a renderer can write it again as it was."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                | ({} if call.error is None else {"error": call.error, "raw": call.raw})
                for call in self.tool_calls
            ]
        return message


class Body(str):
    """A message's own text: ordinary characters, and content."""


class Plain(str):
    """Text that is not the format's and no message's body either (a tool's schema): ordinary characters, scaffold."""


class Writer:
    """Collects the parts of a conversation and encodes them run by run; made by `Renderer.writer()`."""

    def __init__(self, renderer: "Renderer") -> None:
        self._renderer = renderer
        self._rendered = Rendered()
        self._run: list[tuple[str, int, str, bool]] = []  # text, message index, role, is_content
        self.skip = ""  # how the format's next part begins, where that was sampled already: it is left out

    def write(self, index: int, role: str, *parts: str) -> None:
        """Appends parts that belong to message `index` (-1: to none) of `role`."""
        for part in parts:
            if isinstance(part, Body | Plain):
                self._run.append((part, index, role, isinstance(part, Body)))
                continue
            part, self.skip = part.removeprefix(self.skip), ""
            for _, text, token_id in _cut(self._renderer._control, part):
                if token_id is None:
                    self._run.append((text, index, role, False))
                else:
                    self._end_run()
                    self._rendered.add(token_id, index, role, False)

    def finish(self) -> Rendered:
        self._end_run()
        return self._rendered

    def _end_run(self) -> None:
        parts = [part for part in self._run if part[0]]
        starts, text = [], ""
        for part in parts:
            starts.append(len(text))
            text += part[0]
        for token_id, start in self._renderer._encode(text):
            self._rendered.add(token_id, *parts[bisect_right(starts, start) - 1][1:])
        self._run = []


class Renderer:
    """Messages to token ids, sampled ids back to a message, and one turn to the next without encoding it again.

    A family sets the class attributes, writes `render`, `write_turns`, `write_generation_prompt` and `parse_response`, and
    gets `bridge` from here where its turns end with a token of their own. Raises ValueError for a tokenizer that lacks the
    family's control tokens and for an option that the family lacks.
    """

    # Every option has one name in all families; a family lists those that it has, with their defaults.
    # thinking: None (the template's default), True or False. thinking_retention: "all" bridges over a new user turn though
    # the template would strip past reasoning there; "template" does not.
    options: ClassVar[dict[str, Any]] = {"thinking_retention": "all"}
    choices: ClassVar[dict[str, tuple]] = {"thinking_retention": ("all", "template"), "thinking": (None, True, False)}

    name: ClassVar[str] = ""
    model_types: ClassVar[tuple[str, ...]] = ()  # transformers' names, for `auto`
    control_tokens: ClassVar[tuple[str, ...]] = ()  # what the tokenizer must have
    told_by_template: ClassVar[bool] = False  # its model types and control tokens are other models' too
    stop_tokens: ClassVar[tuple[str, ...]] = ()
    turn_start: ClassVar[str] = ""  # opens every turn
    generation_header: ClassVar[str] = ""  # what follows turn_start in the generation prompt
    turn_end: ClassVar[str] = ""  # written where no stop token was sampled
    after_turn: ClassVar[str] = ""  # text that the template writes after turn_end
    thinking_tags: ClassVar[tuple[str, str] | None] = None
    # Where the family leaves its checkpoint's template on purpose, and why: `renderers.check` compares no conversation with
    # such a feature (system, late system, tools, calls, words with a call, reasoning) with the template.
    deviations: ClassVar[dict[str, str]] = {}

    def __init__(self, tokenizer: Any, **options: Any) -> None:
        self.tokenizer = tokenizer
        for option, value in options.items():
            if option not in self.options:
                raise ValueError(
                    f"--renderer-args {option}={value}: {self.name} has no such option; it has {', '.join(self.options)}"
                )
            allowed = self.choices.get(option)
            if allowed is not None and not any(value == one and type(value) is type(one) for one in allowed):
                raise ValueError(f"--renderer-args {option}={value}: for {self.name} it is one of {allowed}")
        for option, default in self.options.items():
            setattr(self, option, options.get(option, default))

        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is None:
            raise ValueError(
                f"renderer {self.name or 'of this class'} needs a fast tokenizer (one with a backend_tokenizer)"
            )
        added = self._backend.get_added_tokens_decoder()
        # Added tokens of blanks alone (some vocabularies hold runs of spaces there) control nothing: they stay text.
        blank = {id_: token for id_, token in added.items() if not token.content.strip(" \t\r\n▁")}
        self._control = _pattern({id_: token for id_, token in added.items() if id_ not in blank})
        self._blank = _pattern(blank)
        self._control_ids = {token.content: id_ for id_, token in added.items() if id_ not in blank}
        self._control_id_set = frozenset(self._control_ids.values())
        self._ordinary = _without_added_tokens(self._backend)
        for token in self.control_tokens:
            self.token_id(token)

    # What a family writes.

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict] | None = None, add_generation_prompt: bool = False
    ) -> Rendered:
        """The conversation as the family's template writes it. Raises ValueError for what the format cannot hold."""
        raise NotImplementedError

    def write_turns(self, writer: Writer, messages: Sequence[Message], first: int = 0) -> None:
        """Writes the turns of `messages[first:]`."""
        raise NotImplementedError

    def write_generation_prompt(self, writer: Writer) -> None:
        writer.write(-1, "assistant", self.turn_start + self.generation_header)

    def parse_response(
        self,
        completion_ids: Iterable[int],
        prompt_ids: Iterable[int] | None = None,
        tools: Sequence[dict] | None = None,
    ) -> ParsedResponse:
        """Reads a sampled turn; never raises on any ids. Reasoning that the prompt opened is known from `prompt_ids` alone;
        with `tools`, a call of an unknown one is marked broken."""
        raise NotImplementedError

    def strips_history(self, prompt: Sequence[int], completion: Sequence[int], new_messages: Sequence[Message]) -> bool:
        """True where the template, given `new_messages`, would no longer write what prompt and completion hold."""
        return False

    # What everyone has.

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids that end an assistant turn."""
        return [self.token_id(token) for token in self.stop_tokens]

    def render_ids(
        self, messages: Sequence[Message], tools: Sequence[dict] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        return self.render(messages, tools, add_generation_prompt).token_ids

    def bridge(
        self,
        prev_prompt_ids: Iterable[int],
        prev_completion_ids: Iterable[int],
        new_messages: Sequence[Message],
        tools: Sequence[dict] | None = None,
    ) -> Rendered | None:
        """What follows prompt + completion in the next prompt: a closing token if none was sampled, the new messages, the
        generation prompt. `message_index` counts in `new_messages`. None where the next prompt is not surely that."""
        prompt, completion = as_list(prev_prompt_ids), as_list(prev_completion_ids)
        if not new_messages or any(message["role"] == "assistant" for message in new_messages):
            return None
        if self.thinking_retention == "template" and self.strips_history(prompt, completion, new_messages):
            return None
        writer = self.writer()
        if not self.close_turn(writer, prompt, completion, new_messages):
            return None
        self.write_turns(writer, new_messages)
        self.write_generation_prompt(writer)
        return writer.finish()

    def bridge_to_next_turn(
        self,
        prev_prompt_ids: Iterable[int],
        prev_completion_ids: Iterable[int],
        new_messages: Sequence[Message],
        tools: Sequence[dict] | None = None,
    ) -> list[int] | None:
        """The next prompt: previous prompt and completion verbatim, then `bridge`. None where that gives None."""
        prompt, completion = as_list(prev_prompt_ids), as_list(prev_completion_ids)
        rendered = self.bridge(prompt, completion, new_messages, tools)
        return None if rendered is None else prompt + completion + rendered.token_ids

    def render_reply(
        self, messages: Sequence[Message], reply: Message, tools: Sequence[dict] | None = None, ended: bool = True
    ) -> list[int]:
        """The turn of a model that answered `messages` in text: what follows the generation prompt, its stop token included
        if it `ended`. Raises ValueError where the format writes what came before differently once the reply is there."""
        prompt = self.render_ids(messages, tools, add_generation_prompt=True)
        whole = self.render_ids([*messages, reply], tools)
        if whole[: len(prompt)] != prompt:
            opens = self.in_thinking(self.open_turn(prompt) or []) and not reply.get("reasoning_content")
            reason = ": its generation prompt opens reasoning, and the reply has none" if opens else ""
            remedy = " (--renderer-args thinking=false)" if opens and "thinking" in self.options else ""
            raise ValueError(f"{self.name} does not write this reply after its generation prompt{reason}{remedy}")
        turn, after = self.cut_at_stop(whole[len(prompt) :])
        if not ended:
            return turn
        return [*turn, self.token_id(self.reply_end(reply)) if after is None else whole[len(prompt) + len(turn)]]

    def reply_end(self, reply: Message) -> str:
        """The stop token that a model samples after a reply, where the format writes none behind it."""
        return self.turn_end or self.stop_tokens[0]

    def close_turn(
        self, writer: Writer, prompt: Sequence[int], completion: Sequence[int], new_messages: Sequence[Message]
    ) -> bool:
        """Writes what is missing of the end of the sampled turn; False where the turn is not one to go on from.

        A stop token that was sampled closes the turn, whichever it is, and gets no second one. Reasoning left open without
        a stop token gets its closing tag under thinking_retention "all"; a stop token inside reasoning is refused.
        """
        tail = self.open_turn(prompt)
        if tail is None or (self.turn_start and self.token_id(self.turn_start) in completion):
            return False
        turn, after = self.cut_at_stop(completion)
        thinking = self.in_thinking(tail + turn)
        if after is None:
            if thinking and self.thinking_retention == "template":
                return False
            close = self.thinking_tags[1] if thinking else ""
            writer.write(-1, "assistant", close + self.turn_end + self.after_turn)
            return True
        text = self.decode(after)  # a newline sampled after the stop token stands for the one that the template writes
        if thinking or not self.after_turn.startswith(text):
            return False
        writer.write(-1, "assistant", self.after_turn[len(text) :])
        return True

    def writer(self) -> Writer:
        return Writer(self)

    def token_id(self, token: str) -> int:
        """The id of a control token. Raises ValueError where the tokenizer has none."""
        try:
            return self._control_ids[token]
        except KeyError:
            raise ValueError(
                f"renderer {self.name} needs the control token {token}, which this tokenizer lacks: choose another --renderer"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """Text of any ids, control tokens spelled out; ids outside the vocabulary are passed over."""
        return self._backend.decode([id_ for id_ in ids if 0 <= id_ < 2**32], skip_special_tokens=False)

    def cut_at_stop(self, completion: Sequence[int]) -> tuple[list[int], list[int] | None]:
        """The tokens before the first stop token, and those after it (None where no stop token was sampled)."""
        stops = frozenset(self.stop_token_ids)
        at = next((at for at, id_ in enumerate(completion) if id_ in stops), None)
        return (list(completion), None) if at is None else (list(completion[:at]), list(completion[at + 1 :]))

    def open_turn(self, prompt: Sequence[int]) -> list[int] | None:
        """What follows the generation header in the prompt's last turn; None where that is no open assistant turn."""
        start = self.token_id(self.turn_start)
        at = next((at for at in range(len(prompt) - 1, -1, -1) if prompt[at] == start), None)
        writer = self.writer()
        writer.write(-1, "assistant", self.generation_header)
        header = writer.finish().token_ids
        if at is None or list(prompt[at + 1 : at + 1 + len(header)]) != header:
            return None
        tail = list(prompt[at + 1 + len(header) :])
        return None if set(tail).intersection(self.stop_token_ids) else tail

    def in_thinking(self, turn: Sequence[int]) -> bool:
        """True where the tokens of a turn end inside its reasoning."""
        if self.thinking_tags is None:
            return False
        opening, closing = map(self.token_id, self.thinking_tags)
        return next((id_ == opening for id_ in reversed(turn) if id_ in (opening, closing)), False)

    def segments(self, ids: Iterable[int], markers: Sequence[str]) -> list[Segment]:
        """Cuts ids at the format's markers: [("", text), (marker, text that follows it), ...].

        A marker that is a token counts only as that token: the same characters sampled as ordinary tokens stay text. One
        that the tokenizer has no token for is found in the text.
        """
        by_id = {self._control_ids[marker]: marker for marker in markers if marker in self._control_ids}
        spelled = [re.escape(marker) for marker in markers if marker not in self._control_ids]
        found: list[tuple[str, list[int]]] = [("", [])]
        for id_ in ids:
            if id_ in by_id:
                found.append((by_id[id_], []))
            else:
                found[-1][1].append(id_)
        segments = []
        for marker, run in found:
            text = self.decode(run)
            pieces = re.split(f"({'|'.join(spelled)})", text) if spelled else [text]
            segments.append((marker, pieces[0]))
            segments += zip(pieces[1::2], pieces[2::2], strict=True)
        return segments

    @classmethod
    def fits(cls, tokenizer: Any, model_type: str | None) -> bool:
        """Whether `auto` may take this family: by model type, control tokens and, where there is one, chat template."""
        if model_type not in cls.model_types:
            return False
        vocabulary = tokenizer.get_added_vocab()
        template = getattr(tokenizer, "chat_template", None)
        if not all(token in vocabulary for token in cls.control_tokens):
            return False
        return isinstance(template, str) and cls.fits_template(template) if template else not cls.told_by_template

    @classmethod
    def fits_template(cls, template: str) -> bool:
        """Whether the checkpoint's own chat template is the one that this family writes."""
        return True

    def _encode(self, text: str) -> list[tuple[int, int]]:
        """(id, offset of its first character) of ordinary text: no control token comes out of it, whatever it spells."""
        pairs = []
        for start, chunk, blank_id in _cut(self._blank, text):
            if blank_id is not None:
                pairs.append((blank_id, start))
                continue
            encoding = self._ordinary.encode(chunk, add_special_tokens=False)
            for id_, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
                if (
                    id_ in self._control_id_set and end - begin > 1
                ):  # the plain vocabulary can spell it too: break it up
                    for at in range(begin, end):
                        pairs += [
                            (i, start + at) for i in self._ordinary.encode(chunk[at], add_special_tokens=False).ids
                        ]
                else:
                    pairs.append((id_, start + begin))
        return pairs


def as_list(ids: Iterable[int]) -> list[int]:
    """Plain ints of a list, an array or a tensor."""
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)


def text_of(message: Message) -> str:
    """The text of a message: a string, or the joined text parts of a list. Raises ValueError for other parts."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if not isinstance(part, str) and part.get("type") != "text":
            raise ValueError(
                f"a {message['role']} message holds a part of type {part.get('type')!r}: only text is rendered"
            )
        texts.append(part if isinstance(part, str) else part["text"])
    return "".join(texts)


def to_json(value: Any) -> str:
    """JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


DEEPEST = 100  # levels; some 500 of them would end the run where it is written down or sent to another rank


def from_json(text: str) -> Any:
    """The value of JSON text that a model wrote. Raises ValueError where it is none, or is nested deeper than anyone means it."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    level, depth = [value], 0
    while level:
        if depth > DEEPEST:
            raise ValueError(f"nested more than {DEEPEST} deep")
        inner = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list))
        level, depth = [each for values in inner for each in values], depth + 1
    return value


def function_of(entry: dict) -> dict:
    """The inner dict of a tool or a tool call in OpenAI's form; flat ones are taken as they are."""
    return entry.get("function") or entry


def _pattern(added: dict[int, Any]) -> tuple[re.Pattern, dict[str, int]]:
    """A pattern that finds added tokens as the tokenizer does, the longest first, and their ids."""
    alternatives = [
        (r"\s*" if token.lstrip else "") + f"({re.escape(token.content)})" + (r"\s*" if token.rstrip else "")
        for token in sorted(added.values(), key=lambda token: -len(token.content))
    ]
    return re.compile("|".join(alternatives) or r"(?!)"), {token.content: id_ for id_, token in added.items()}


def _cut(pattern: tuple[re.Pattern, dict[str, int]], text: str) -> Iterator[tuple[int, str, int | None]]:
    """(start, text, id of the added token or None) of the pieces of a text, empty ones left out."""
    expression, ids = pattern
    at = 0
    for match in expression.finditer(text):
        if match.start() > at:
            yield at, text[at : match.start()], None
        yield match.start(), match.group(), ids[match.group(match.lastindex)]
        at = match.end()
    if at < len(text):
        yield at, text[at:], None


def _without_added_tokens(backend: Any) -> Any:
    """A tokenizer over the same vocabulary that knows no added tokens. The model is shared, so this is cheap."""
    ordinary = type(backend)(backend.model)
    if backend.normalizer is not None:
        ordinary.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        # A run is never the beginning of the text, so a vocabulary that marks that beginning has nothing to mark. The
        # round trip makes a copy: setting the attribute would change the caller's tokenizer.
        state = backend.pre_tokenizer.__getstate__().replace(b'"prepend_scheme":"first"', b'"prepend_scheme":"never"')
        pre_tokenizer = copy.copy(backend.pre_tokenizer)
        pre_tokenizer.__setstate__(state)
        ordinary.pre_tokenizer = pre_tokenizer
    return ordinary
