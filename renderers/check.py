"""Is this model's renderer right? python -m renderers.check MODEL_OR_PATH [--renderer auto] [--renderer-args thinking=false]

Holds the renderer that a run would take against the chat template that the model came with, on conversations of every kind:

    equals the chat template     the same ids, token by token
    keeps the prefix             a bridged prompt begins with prompt and completion, and ends as a full rendering does
    one branch                   twenty turns, bridged, are one token stream
    parses what it renders       content, reasoning and calls come back as they were
    text is text                 control tokens that a text spells do not become control tokens
    stop tokens                  there are some, and the vocabulary has them

Exit code 0: all of it holds; 1: a difference, with both token rows around it; 2: there is nothing to compare (no tokenizer; no
template, and no hand-coded family that does without). What the renderer does otherwise on purpose (`Renderer.deviations`)
is counted apart and named.
"""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from renderers import make_renderer, resolve_name
from renderers.base import Message, Renderer

AROUND = 4  # tokens shown before and after a difference


@dataclass
class Conversation:
    """A conversation to render, and what it has that a family may write otherwise than its template on purpose."""

    name: str
    messages: list[Message]
    features: tuple[str, ...] = ()
    generate: bool = True

    @property
    def tools(self) -> list[dict] | None:
        return TOOLS if "tools" in self.features else None


@dataclass
class Check:
    """What one check found: `failures` holds for each a sentence, and the two token rows where there are two."""

    name: str
    passed: int = 0
    failures: list[tuple[str, list[int] | None, list[int] | None]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    other: str = "expected"  # whose the second row is

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def count(self, good: bool, what: str, ours: list[int] | None = None, theirs: list[int] | None = None) -> None:
        if good:
            self.passed += 1
        else:
            self.failures.append((what, ours, theirs))


def user(text: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    """A system message."""
    return {"role": "system", "content": text}


def said(text: str, thought: str | None = None, *calls: tuple[str, dict]) -> Message:
    """An assistant's message, with reasoning and calls of (name, arguments)."""
    message: Message = {"role": "assistant", "content": text}
    if thought is not None:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {"id": f"functions.{name}:{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for at, (name, arguments) in enumerate(calls)
        ]
    return message


def result(text: str, name: str = "weather", at: int = 0) -> Message:
    """What the call at that place in a reply gave."""
    return {"role": "tool", "tool_call_id": f"functions.{name}:{at}", "name": name, "content": text}


def tool(name: str, description: str, properties: dict, required: Sequence[str]) -> dict:
    """A tool in OpenAI's form."""
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TEXT = {"type": "string", "description": "Some text"}
TOOLS = [
    tool("weather", "The weather of a city.", {"city": TEXT, "unit": {"type": "string", "enum": ["C", "F"]}}, ["city"]),
    tool(
        "search",
        'Finds "documents" — 文書 <b>&</b>',
        {
            "query": TEXT,
            "limit": {"type": "integer", "default": 10},
            "filters": {"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "string"}}}},
        },
        ["query", "filters"],
    ),
]
OSLO = ("weather", {"city": "Oslo"})
ASKED, ASK = said("", None, OSLO), user("Weather in Oslo?")
SEARCHED = said("", None, ("search", {"query": 'naïve "q"\n日本', "limit": 3, "filters": {"tags": ["a", "b"]}}))

CONVERSATIONS = [
    Conversation("a question", [user("What is 2+2?")]),
    Conversation("a system message", [system("Be brief."), user("Hi")], ("system",)),
    Conversation("an answer", [user("Hi"), said("Hello!")], (), False),
    Conversation("several turns", [user("Hi"), said("Hello!"), user("And?"), said("No."), user("Why?")]),
    Conversation("two questions at once", [user("First"), user("Second")]),
    Conversation("nothing said", [user("")]),
    Conversation("blanks around texts", [user(" \n a \n\n"), said("\n\n b \n"), user("\n")]),
    Conversation("letters", [user("日本 é é 👩‍👩‍👧 ﬁ"), said("はい 👍🏽"), user("한국어?")]),
    Conversation(
        "a later system message", [user("Hi"), said("Hello!"), system("Be brief."), user("Bye")], ("late system",)
    ),
    Conversation("reasoning", [user("Hi"), said("Hello!", "A greeting.\nI greet.")], ("reasoning",), False),
    Conversation("past reasoning", [user("Hi"), said("Hello!", "A greeting."), user("Bye")], ("reasoning",)),
    Conversation("tools", [user("Find it")], ("tools",)),
    Conversation("tools and a system message", [system("Be brief."), user("Find it")], ("tools", "system")),
    Conversation("a call", [ASK, ASKED], ("tools", "calls"), False),
    Conversation(
        "a call after words",
        [ASK, said("Let me see.", None, OSLO)],
        ("tools", "calls", "words with a call"),
        False,
    ),
    Conversation("a result", [ASK, ASKED, result("9 C")], ("tools", "calls")),
    Conversation("nested arguments", [user("Find"), SEARCHED, result("[]\n", "search")], ("tools", "calls")),
    Conversation(
        "two calls",
        [user("Oslo, Rome?"), said("", None, OSLO, ("weather", {"city": "Rome"})), result("9 C"), result("20 C", at=1)],
        ("tools", "calls"),
    ),
    Conversation(
        "two steps with reasoning",
        [ASK, said("", "A tool.", OSLO), result("9 C"), said("", "Another.", OSLO), result("8 C")],
        ("tools", "calls", "reasoning"),
    ),
    Conversation("a call done", [ASK, ASKED, result("9 C"), said("Nine.")], ("tools", "calls"), False),
    Conversation(
        "a call done, and on",
        [ASK, said("", "A tool.", OSLO), result("9 C"), said("Nine.", "So."), user("Thanks")],
        ("tools", "calls", "reasoning"),
    ),
]

REPLIES = {
    "an answer": said("Nine degrees."),
    "an answer after reasoning": said("Nine degrees.", "I know it."),
    "a call": ASKED,
    "a call after words and reasoning": said("Let me see.", "A tool knows.", OSLO),
}


def check_template(renderer: Renderer) -> Check:
    """The same ids as the template's, wherever the template takes the conversation."""
    check = Check("equals the chat template", other="template")
    refused, otherwise = 0, dict.fromkeys(renderer.deviations, 0)
    ordered = json.loads(json.dumps(TOOLS, sort_keys=True))
    if not getattr(renderer.tokenizer, "chat_template", None):
        check.note("not compared: the tokenizer has no chat template (--template FILE gives one)")
        return check
    for one in CONVERSATIONS:
        if by_design := [feature for feature in one.features if feature in renderer.deviations]:
            otherwise[by_design[0]] += 1
            continue
        try:
            theirs = template_ids(renderer, one, one.tools)
        except Exception:  # templates fail in as many ways as there are templates
            refused += 1
            continue
        try:
            ours = renderer.render_ids(one.messages, one.tools, one.generate)
        except ValueError as error:
            check.count(False, f"{one.name}: the renderer refuses what the template takes: {error}")
            continue
        if ours != theirs and one.tools and ours == template_ids(renderer, one, ordered):
            check.note("tools with their keys sorted, which is left to the caller of the template")
            theirs = ours
        check.count(ours == theirs, one.name, ours, theirs)
    for feature, count in otherwise.items():
        if count:
            check.note(f"{count} otherwise by design: {renderer.deviations[feature]}")
    if refused:
        check.note(f"{refused} that the template refuses")
    return check


def template_ids(renderer: Renderer, one: Conversation, tools: list[dict] | None) -> list[int]:
    """The template's ids with its own switches set as the renderer's options are. Reasoning is passed under both names that
    templates know."""
    switches = {option: getattr(renderer, option) for option in renderer.options if option != "thinking_retention"}
    if "thinking" in switches:
        switches["enable_thinking"] = switches["thinking"]
    if "date" in switches:
        day = date.fromisoformat(switches.pop("date"))
        switches |= {"strftime_now": day.strftime, "date_string": f"{day:%d %b %Y}"}
    messages = [
        message | ({"thinking": message["reasoning_content"]} if "reasoning_content" in message else {})
        for message in one.messages
    ]
    return renderer.tokenizer.apply_chat_template(
        messages,
        tools=tools,
        add_generation_prompt=one.generate,
        return_dict=False,
        **{switch: value for switch, value in switches.items() if value is not None},
    )


def sampled(
    renderer: Renderer, prompt: list[int], history: list[Message], reply: Message, tools: list[dict] | None = TOOLS
) -> list[int] | None:
    """`reply` as the model would have sampled it after the prompt: with its stop token, if the format writes one. None where
    the format writes a finished turn otherwise than a generation prompt begins it."""
    whole = renderer.render_ids([*history, reply], tools)
    if whole[: len(prompt)] != prompt:
        return None
    turn, stops = whole[len(prompt) :], set(renderer.stop_token_ids)
    last = max((at for at, id_ in enumerate(turn) if id_ in stops), default=len(turn) - 1)
    return turn[: last + 1]


def offered(renderer: Renderer) -> list[dict] | None:
    """The tools; None where the format has no place for any."""
    try:
        renderer.render_ids([ASK], TOOLS)
    except ValueError:
        return None
    return TOOLS


def turns(renderer: Renderer) -> Iterator[tuple[str, Message, list[int], list[int]]]:
    """(name, reply, prompt, completion) of every reply that the format can hold."""
    tools = offered(renderer)
    for name, reply in REPLIES.items():
        try:
            prompt = renderer.render_ids([ASK], tools, add_generation_prompt=True)
            completion = sampled(renderer, prompt, [ASK], reply, tools)
        except ValueError:
            continue
        if completion is not None:
            yield name, reply, prompt, completion


def check_bridge(renderer: Renderer) -> Check:
    """Whether the next prompt begins with prompt and completion verbatim, and goes on as a whole rendering does."""
    check, refused, tools = Check("keeps the prefix"), 0, offered(renderer)
    may_refuse = renderer.name == "default" or renderer.thinking_retention == "template"
    for name, reply, prompt, completion in turns(renderer):
        stops = set(renderer.stop_token_ids)
        unfinished = completion[:-1] if completion[-1] in stops else completion
        news = {"a question": [user("And?")]} | ({"a result": [result("9 C")]} if "tool_calls" in reply else {})
        for after, new in news.items():
            for ending, ids in {"": completion, ", stop token missing": unfinished}.items():
                following = renderer.bridge_to_next_turn(prompt, ids, new, tools)
                what = f"{name}{ending}, then {after}"
                if following is None:
                    refused += may_refuse
                    if not may_refuse:
                        check.count(False, f"{what}: refused")
                    continue
                kept = following[: len(prompt) + len(ids)] == prompt + ids
                check.count(kept, f"{what}: not the prefix", following, prompt + ids)
                rest = following[len(prompt) + len(ids) :]
                whole = renderer.render_ids([ASK, reply, *new], tools, add_generation_prompt=True)
                check.count(rest == whole[-len(rest) :], f"{what}: not as rendered", rest, whole[-len(rest) :])
    if refused:
        check.note(f"{refused} bridges refused: such turns are rendered anew, and begin a new sequence")
    if not check.passed and not check.failures:
        check.note("no turn that could be bridged")
    return check


def check_branch(renderer: Renderer) -> Check:
    """Whether twenty turns stay one token stream."""
    check, tools = Check("one branch"), offered(renderer)
    for name, _, prompt, completion in turns(renderer):
        branch = prompt
        for turn in range(20):
            following = renderer.bridge_to_next_turn(branch, completion, [user(f"Turn {turn}?")], tools)
            if following is None:
                break
            kept = following[: len(branch) + len(completion)] == branch + completion
            check.count(kept, f"{name}: turn {turn}", following, branch + completion)
            branch = following
        else:
            return check
    check.note("none over twenty turns")
    return check


def check_parsing(renderer: Renderer) -> Check:
    """Whether content, reasoning and calls of a rendered turn are read back."""
    check, tools = Check("parses what it renders"), offered(renderer)
    for name, reply, prompt, completion in turns(renderer):
        message = {key: value for key, value in reply.items() if key != "reasoning_content"}
        thought = reply.get("reasoning_content")
        if thought and sampled(renderer, prompt, [ASK], message, tools) == completion:
            check.note("reasoning is not rendered")
            thought = None
        parsed = renderer.parse_response(completion, prompt, tools)
        calls = [(call.name, call.arguments) for call in parsed.tool_calls]
        functions = [call["function"] for call in reply.get("tool_calls", [])]
        # `default` cannot know every template's form of calls.
        if functions and renderer.name == "default" and all(call.error for call in parsed.tool_calls):
            check.note("calls are not read")
            continue
        found = (parsed.content, parsed.reasoning_content, calls)
        expected = (reply["content"], thought, [(one["name"], one["arguments"]) for one in functions])
        check.count(found == expected, f"{name}: {found} instead of {expected}")
    return check


def check_injection(renderer: Renderer) -> Check:
    """Every control token spelled in a text, once for each place of a text: no more of them in the prompt than without. An
    answer may hold its reasoning inline, so thinking tags are left out there."""
    check = Check("text is text")
    control = {token: id_ for token, id_ in renderer.tokenizer.get_added_vocab().items() if token.strip()}
    places = {
        "a user's text": lambda text: ([user(text)], None),
        "a system message": lambda text: ([system(text), user("Hi")], None),
        "an answer": lambda text: ([user("Hi"), said(text), user("Bye")], None),
        "a tool's result": lambda text: ([ASK, ASKED, result(text)], TOOLS),
        "an argument": lambda text: ([ASK, said("", None, ("weather", {"city": text})), result("9 C")], TOOLS),
        "a tool's description": lambda text: ([ASK], [tool("look", text, {"at": {"description": text}}, ())]),
    }
    if renderer.name == "default":
        del places["an answer"]
        check.note("answers left to the template, which may look for <think> and the like in them")
    for place, written in places.items():
        try:
            inline = ("<think>", "</think>") if place == "an answer" else ()
            spelled = " ".join(token for token in control if token not in inline)
            ours, expected = (renderer.render_ids(*written(text)) for text in (f"x {spelled} x", "x"))
        except ValueError:
            check.note(f"no text of {place}")
            continue
        more = [token for token, id_ in control.items() if ours.count(id_) > expected.count(id_)]
        check.count(not more, f"{place} becomes {' '.join(more[:5])}")
    return check


def check_stops(renderer: Renderer) -> Check:
    """Whether there are stop tokens, in the vocabulary."""
    check = Check("stop tokens")
    stops, size = renderer.stop_token_ids, len(renderer.tokenizer)
    check.count(bool(stops) and all(0 <= id_ < size for id_ in stops), f"{stops} of a vocabulary of {size}")
    check.note(" ".join(renderer.decode([id_]) for id_ in stops))
    return check


CHECKS = (check_template, check_bridge, check_branch, check_parsing, check_injection, check_stops)


def show(console: Console, renderer: Renderer, checks: list[Check]) -> None:
    """Print the table, and of each failure both token rows around the first difference."""
    table = Table("check", "passed", "failed", "")
    for check in checks:
        style = "red" if check.failures else "green" if check.passed else "yellow"
        cells = (check.name, str(check.passed), str(len(check.failures)), "; ".join(check.notes))
        table.add_row(*map(Text, cells), style=style)
    console.print(table)
    for check in checks:
        for what, ours, theirs in check.failures:
            console.print(Text(f"{check.name}: {what}"))
            if ours is not None and theirs is not None:
                console.print(rows_around(renderer, ours, theirs, check.other))


def rows_around(renderer: Renderer, ours: list[int], theirs: list[int], other: str) -> Table:
    """Both token rows around their first difference, as ids and as text."""
    same = next((at for at, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), min(len(ours), len(theirs)))
    begin, end = max(0, same - AROUND), same + 1 + AROUND
    table = Table("token", *(f"{at}{' <-' if at == same else ''}" for at in range(begin, end)), box=None)
    for label, ids in (("renderer", ours), (other, theirs)):
        shown = [*ids[begin:end], *[None] * (end - begin)][: end - begin]
        table.add_row(label, *("" if id_ is None else str(id_) for id_ in shown))
        table.add_row("", *(Text("" if id_ is None else repr(renderer.decode([id_]))[1:-1]) for id_ in shown))
    return table


@dataclass
class Options:
    """Holds a model's renderer against its chat template."""

    model: Annotated[str, tyro.conf.Positional]
    """a folder or hub id with a tokenizer"""
    renderer: str = "auto"
    """auto, a family, or an import path (module:Class or path/to/file.py:Class)"""
    renderer_args: tuple[str, ...] = ()
    """options of the renderer, such as thinking=false"""
    template: Path | None = None
    """compare with this chat template instead of the model's own"""


def read_args(args: Sequence[str]) -> dict[str, Any]:
    """{"thinking": False} of ["thinking=false"]. Raises ValueError for anything without a name."""
    words = {"true": True, "false": False, "none": None}
    for arg in args:
        if not arg.partition("=")[0] or "=" not in arg:
            raise ValueError(f"--renderer-args {arg}: write NAME=VALUE, such as thinking=false")
    pairs = [arg.split("=", 1) for arg in args]
    return {name: words.get(value.lower(), value) for name, value in pairs}


def load(options: Options) -> tuple[Renderer, str]:
    """(the renderer, why this one). Raises ValueError in one line where there is nothing to check."""
    import transformers
    from transformers import AutoTokenizer, PreTrainedConfig

    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    except Exception as error:  # transformers raises whatever its readers of files do
        reason = str(error).strip().partition("\n")[0].rstrip(": ")
        raise ValueError(f"{options.model}: no tokenizer there ({reason})") from error
    transformers.logging.set_verbosity_error()
    if options.template:
        tokenizer.chat_template = options.template.read_text(encoding="utf-8")
    model_type = None
    with contextlib.suppress(
        OSError, ValueError
    ):  # without a config it is the tokenizer alone, and auto takes `default`
        model_type = PreTrainedConfig.get_config_dict(options.model)[0].get("model_type")
    name, reason = resolve_name(options.renderer, tokenizer, model_type)
    return make_renderer(name, tokenizer, model_type, **read_args(options.renderer_args)), reason


def main(args: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, 1 for a difference, 2 where there is nothing to check."""
    options = tyro.cli(Options, args=args, prog="python -m renderers.check")
    try:
        renderer, reason = load(options)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    console.print(Text(f"renderer {renderer.name}: {reason}"))
    checks = [check(renderer) for check in CHECKS]
    show(console, renderer, checks)
    return 1 if any(check.failures for check in checks) else 0


if __name__ == "__main__":
    sys.exit(main())
