"""The usual ways of writing reasoning and tool calls, and of reading them back out of a sampled turn.

What is read here was cut at the format's markers before (`Renderer.segments`), so a marker is one that the model sampled,
never one that a text spells. A call that is cut off, malformed or of an unknown tool is marked broken; nothing raises.
"""

import json
from collections.abc import Callable, Sequence

from renderers.base import Body, Segment, ToolCall, function_of, to_json


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


JSON_CALL = ("<tool_call>", "</tool_call>")


def write_json_call(call: dict) -> list[str]:
    """Parts of one call in the form `<tool_call>{json}</tool_call>`; a broken one as the model wrote it."""
    if call.get("error") is not None and "raw" in call:
        return ["<tool_call>", Body(call["raw"]), "</tool_call>"]
    function = function_of(call)
    arguments = function.get("arguments", {})
    return [
        '<tool_call>\n{"name": "',
        Body(function["name"]),
        '", "arguments": ',
        Body(arguments if isinstance(arguments, str) else to_json(arguments)),
        "}\n</tool_call>",
    ]


def split_json_calls(segments: list[Segment], tools: Sequence[dict] | None) -> tuple[str, list[ToolCall]]:
    """(content, calls) of segments cut at JSON_CALL. Text around the calls stays content, newlines before them do not."""
    opening, closing = JSON_CALL
    texts, calls = [""], []
    for at, (marker, text) in enumerate(segments):
        if marker == opening:
            closed = at + 1 < len(segments) and segments[at + 1][0] == closing
            calls.append(read_json_call(text, closed, tools, f"call_{len(calls)}"))
        elif marker == closing and segments[at - 1][0] == opening:
            texts.append(text)
        else:
            texts[-1] += marker + text
    return join_content(texts, bool(calls)), calls


def join_content(texts: list[str], has_calls: bool) -> str:
    """The content of a turn from its text before, between and after the calls."""
    if not has_calls:
        return "".join(texts).lstrip("\n")
    rest = [text.strip("\n") for text in texts[1:] if text.strip()]
    return "\n".join([text for text in [texts[0].strip("\n")] if text] + rest)


def read_json_call(raw: str, closed: bool, tools: Sequence[dict] | None, call_id: str) -> ToolCall:
    """One call written as JSON with `name` and `arguments`; marked broken, never raising, where it is anything else."""
    call = ToolCall("", raw, call_id, raw)
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError) as error:
        call.error = f"not valid JSON: {error}" if closed else "the call is not closed"
        return call
    if not isinstance(parsed, dict) or not isinstance(parsed.get("name"), str) or not parsed["name"]:
        call.error = "a call is a JSON object with a name"
        return call
    call.name = parsed["name"]
    if not closed:
        call.error = "the call is not closed"
    elif not isinstance(parsed.get("arguments"), dict):
        call.error = "the arguments are not a JSON object"
    else:
        call.error = unknown_tool(call.name, tools)
        call.arguments = parsed["arguments"] if call.error is None else raw
    return call


def unknown_tool(name: str, tools: Sequence[dict] | None) -> str | None:
    """Why a call of `name` is broken: it is none of the tools that were offered. None where it is, or none are known."""
    names = [function_of(tool).get("name", "") for tool in tools or []]
    return f"unknown tool {name!r}; there are: {', '.join(names)}" if names and name not in names else None


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
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError) as error:
        call.error = f"not valid JSON: {error}" if closed else "the call is not closed"
        return call
    if not call.name:
        call.error = "a call has a name"
    elif not closed:
        call.error = "the call is not closed"
    elif not isinstance(arguments, dict):
        call.error = "the arguments are not a JSON object"
    else:
        call.error = unknown_tool(call.name, tools)
        call.arguments = arguments if call.error is None else call.arguments
    return call
