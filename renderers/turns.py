"""The usual ways of writing reasoning and tool calls, and of reading them back out of a sampled turn.

What is read here was cut at the format's markers before (`Renderer.segments`), so a marker is one that the model sampled,
never one that a text spells. A call that is cut off, malformed or of an unknown tool is marked broken; nothing raises.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from renderers.base import Body, Message, Renderer, Segment, ToolCall, as_list, from_json, function_of, to_json


def split_inline(message: Message, text: str, strip: Callable[[str, str], str] = str.lstrip) -> tuple[str, str]:
    """(reasoning, content) of an assistant message, whose reasoning may also stand in its content. `strip` takes the
    newlines off a content that follows such reasoning."""
    if isinstance(message.get("reasoning_content"), str):
        return message["reasoning_content"], text
    if "</think>" not in text:
        return "", text
    reasoning = text.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
    return reasoning, strip(text.split("</think>")[-1], "\n")


def split_reasoning(
    segments: list[Segment], tags: tuple[str, str], opened: bool = False
) -> tuple[str | None, bool, list[Segment]]:
    """(reasoning or None, complete, the segments without it). `opened`: the prompt opened the reasoning.

    A closing tag without an opening one ends reasoning that began with the turn. Nothing is lost: text before an opening
    tag stays, and after the first closing tag all is content.
    """
    opening, closing = tags
    markers = [marker for marker, _ in segments]
    first_open = markers.index(opening) if opening in markers else len(markers)
    first_close = markers.index(closing) if closing in markers else len(markers)
    if first_open < first_close and not (opened and segments[0][1].strip()):
        start = first_open
    elif opened or first_close < len(markers):
        start = 0
    else:
        return None, True, segments
    stop = next((at for at in range(start + 1, len(markers)) if markers[at] == closing), len(markers))
    reasoning = segments[start][1] + "".join(marker + text for marker, text in segments[start + 1 : stop])
    after = [("", segments[stop][1]), *segments[stop + 1 :]] if stop < len(markers) else []
    return reasoning.strip("\n") or None, stop < len(markers), segments[:start] + after


def read_reasoning(
    renderer: Renderer, completion_ids: Iterable[int], prompt_ids: Iterable[int] | None, markers: Sequence[str]
) -> tuple[str | None, bool, list[Segment]]:
    """`split_reasoning` of a sampled turn, the rest of it cut at `markers`."""
    turn, _ = renderer.cut_at_stop(as_list(completion_ids))
    tail = renderer.open_turn(as_list(prompt_ids)) if prompt_ids is not None else None
    segments = renderer.segments(turn, (*renderer.thinking_tags, *markers))
    return split_reasoning(segments, renderer.thinking_tags, renderer.in_thinking(tail or []))


def thinks_nothing(renderer: Renderer, prompt: Sequence[int], completion: Sequence[int]) -> bool:
    """Whether the sampled turn has a thinking block with nothing in it: templates write none once the turn is history."""
    turn = [*(renderer.open_turn(prompt) or []), *completion]
    opened = renderer.token_id(renderer.thinking_tags[0]) in turn
    return opened and renderer.parse_response(turn).reasoning_content is None


TOOL_CALL = ("<tool_call>", "</tool_call>")


def split_calls(
    segments: list[Segment], tags: tuple[str, str], inner: Sequence[str] = ()
) -> tuple[list[str], list[tuple[list[Segment], bool]]]:
    """(texts before, between and after the calls, per call: its segments and whether it was closed).

    A call is cut at the `inner` markers only; whatever else stands in it is text.
    """
    opening, closing = tags
    texts, calls, inside = [""], [], False
    for marker, text in segments:
        if marker == opening:
            calls.append(([("", text)], False))
            inside = True
        elif marker == closing and inside:
            calls[-1] = (calls[-1][0], True)
            texts.append(text)
            inside = False
        elif inside and marker in inner:
            calls[-1][0].append((marker, text))
        elif inside:
            before, start = calls[-1][0].pop()
            calls[-1][0].append((before, start + marker + text))
        else:
            texts[-1] += marker + text
    return texts, calls


def read_calls(
    segments: list[Segment],
    tools: Sequence[dict] | None,
    read: Callable[[str, bool, Sequence[dict] | None, str], ToolCall],
) -> tuple[str, list[ToolCall]]:
    """(content, calls) of segments cut at TOOL_CALL. `read` takes the text of a call, whether it was closed, the tools and
    the call's id."""
    texts, bodies = split_calls(segments, TOOL_CALL)
    calls = [read(body[0][1], closed, tools, f"call_{number}") for number, (body, closed) in enumerate(bodies)]
    return join_content(texts, bool(calls)), calls


def join_content(texts: list[str], has_calls: bool) -> str:
    """The content of a turn from its text before, between and after the calls."""
    if not has_calls:
        return "".join(texts).lstrip("\n")
    rest = [text.strip("\n") for text in texts[1:] if text.strip()]
    return "\n".join([text for text in [texts[0].strip("\n")] if text] + rest)


def is_broken(call: dict) -> bool:
    """Whether a call of a message is one that the model wrote broken: then `raw` is all there is to write."""
    return call.get("error") is not None and "raw" in call


def write_json_call(call: dict) -> list[str]:
    """Parts of one call in the form `<tool_call>{json}</tool_call>`; a broken one as the model wrote it."""
    if is_broken(call):
        return ["<tool_call>", Body(call["raw"]), "</tool_call>"]
    function = function_of(call)
    return [
        '<tool_call>\n{"name": "',
        Body(function["name"]),
        '", "arguments": ',
        Body(text_or_json(function.get("arguments", {}))),
        "}\n</tool_call>",
    ]


def read_json_call(
    raw: str, closed: bool, tools: Sequence[dict] | None, call_id: str, key: str = "arguments"
) -> ToolCall:
    """One call written as JSON with a name and, under `key`, the arguments; marked broken, never raising, where it is
    anything else."""
    call = ToolCall("", raw, call_id, raw)
    parsed = load_json(call, closed)
    fields = parsed if isinstance(parsed, dict) else {}
    call.name = fields["name"] if isinstance(fields.get("name"), str) else ""
    if not call.name:
        call.error = call.error or "a call is a JSON object with a name"
    return settle(call, fields.get(key), closed, tools)


def split_sectioned_calls(
    segments: list[Segment],
    markers: tuple[str, str, str, str, str],
    read: Callable[[str, str], tuple[str, str, str]],
    tools: Sequence[dict] | None,
) -> tuple[str, list[ToolCall]]:
    """(content, calls) of a turn whose calls stand in a section of their own: SECTION CALL head SEPARATOR body END ... CLOSE,
    where `markers` are these five. `read` gives (name, id, JSON arguments) of a head and a body. A section without any call
    stays in the content, spelled out."""
    section, begin, separator, end, close = markers
    texts, calls, at = [""], [], 0
    while at < len(segments):
        marker, text = segments[at]
        at += 1
        if marker == begin:
            head, body, raw = text, "", text
            if at < len(segments) and segments[at][0] == separator:
                body = segments[at][1]
                raw = head + separator + body
                at += 1
            closed = at < len(segments) and segments[at][0] == end
            name, call_id, arguments = read(head, body)
            call = ToolCall(name, arguments, call_id or f"call_{len(calls)}", raw)
            calls.append(read_arguments(call, closed, tools))
            if closed:
                texts.append(segments[at][1])
                at += 1
        elif marker in (section, close):
            texts.append(text)
        else:
            texts[-1] += marker + text
    if not calls:
        texts = [marker + text for marker, text in segments]
    return join_content(texts, bool(calls)), calls


def read_arguments(call: ToolCall, closed: bool, tools: Sequence[dict] | None) -> ToolCall:
    """The call, whose arguments are JSON text as yet, with them read; marked broken, never raising, where they are no object."""
    return settle(call, load_json(call, closed), closed, tools)


def load_json(call: ToolCall, closed: bool) -> object:
    """The value of a call's arguments, which are JSON text as yet; where they are not, the call is marked broken."""
    try:
        return from_json(call.arguments)
    except ValueError as error:
        call.error = f"not valid JSON: {error}" if closed else "the call is not closed"
        return None


def settle(call: ToolCall, arguments: object, closed: bool, tools: Sequence[dict] | None) -> ToolCall:
    """The call with the arguments that were read, unless something is wrong with it: then it says so and keeps its text."""
    if call.error is not None:
        return call
    if not call.name:
        call.error = "a call has a name"
    elif not closed:
        call.error = "the call is not closed"
    elif not isinstance(arguments, dict):
        call.error = "the arguments are not a JSON object"
    elif not is_text(to_json(arguments)):
        call.error = "the arguments hold half a surrogate pair, which is no character"
    else:
        call.error = unknown_tool(call.name, tools)
    if call.error is None:
        call.arguments = arguments
    return call


def is_text(text: str) -> bool:
    """Whether a tokenizer takes it back: JSON can spell half a surrogate pair, which no tokenizer can."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def unknown_tool(name: str, tools: Sequence[dict] | None) -> str | None:
    """Why a call of `name` is broken: it is none of the tools that were offered. None where it is, or none are known."""
    names = [function_of(tool).get("name", "") for tool in tools or []]
    return f"unknown tool {name!r}; there are: {', '.join(names)}" if names and name not in names else None


def arguments_of(call: dict) -> dict[str, Any]:
    """The arguments of a call in a message, which may be a dict or, as OpenAI's clients write it, a JSON string. Raises
    ValueError for anything else: formats that write one argument after the other can only hold an object."""
    function = function_of(call)
    arguments = function.get("arguments") or {}
    whose = f"the arguments of a call of {function.get('name')}"
    if isinstance(arguments, str):
        try:
            arguments = from_json(arguments)
        except ValueError as error:
            raise ValueError(f"{whose} are not valid JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"{whose} are not a JSON object: {arguments!r}")
    return arguments


def text_or_json(value: Any) -> str:
    """An argument of a tagged call, or all those of a call in JSON: a string as it is, everything else as JSON."""
    return value if isinstance(value, str) else to_json(value)


def argument_schemas(name: str, tools: Sequence[dict] | None) -> dict[str, Any]:
    """The JSON schemas of a tool's arguments by their names; none where the tool, or its schema, is not known."""
    for tool in tools or []:
        function = function_of(tool)
        if function.get("name") == name:
            return (function.get("parameters") or {}).get("properties") or {}
    return {}


PYTHON_WORDS = {"True": True, "False": False, "None": None}
JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
JSON_TYPES |= {list: "array", dict: "object"}


def convert_argument(text: str, schema: object) -> object:
    """An argument that is written without quotes, read by its schema.

    It becomes a number, a boolean, an object ... only where the schema allows that and the text is one; all other text
    (that of a string, above all) stays as it was written, and without a schema everything does.
    """
    if not isinstance(schema, dict):
        return text
    types = declared_types(schema)
    try:
        value = PYTHON_WORDS[text] if text in PYTHON_WORDS else from_json(text)
    except ValueError:
        return text
    kind = JSON_TYPES[type(value)]
    if kind == "string" and "string" in types:
        return text
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return value if fits else text


def declared_types(schema: object) -> set[str]:
    """The JSON types that a schema allows, as far as it names them; a reference is taken for one to an object."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type") or []
    types = {named} if isinstance(named, str) else set(named)
    types |= {"object"} if "$ref" in schema else set()
    types |= {JSON_TYPES.get(type(value), "") for value in schema.get("enum") or []}
    return types.union(*(declared_types(one) for key in ("anyOf", "oneOf", "allOf") for one in schema.get(key) or []))


def tool_response(messages: Sequence[Message], index: int, *text: str) -> list[str]:
    """Parts of a tool result in ChatML, where consecutive results share one user turn."""
    opening = [] if index > 0 and messages[index - 1]["role"] == "tool" else ["<|im_start|>user"]
    closing = [] if index + 1 < len(messages) and messages[index + 1]["role"] == "tool" else ["<|im_end|>\n"]
    return [*opening, "\n<tool_response>\n", *text, "\n</tool_response>", *closing]
