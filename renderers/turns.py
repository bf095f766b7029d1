"""The usual ways of writing reasoning and tool calls, and of reading them back out of a sampled turn.

What is read here was cut at the format's markers before (`Renderer.segments`), so a marker is one that the model sampled,
never one that a text spells. A call that is cut off, malformed or of an unknown tool is marked broken; nothing raises.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from renderers.base import Body, Message, Plain, Segment, ToolCall, function_of, to_json


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


def is_broken(call: dict) -> bool:
    """Whether a call of a message is one that the model wrote broken: then `raw` is all there is to write."""
    return call.get("error") is not None and "raw" in call


def write_json_call(call: dict) -> list[str]:
    """Parts of one call in the form `<tool_call>{json}</tool_call>`; a broken one as the model wrote it."""
    if is_broken(call):
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
    """(content, calls) of segments cut at JSON_CALL."""
    return split_calls(segments, tools, read_json_call)


def split_calls(
    segments: list[Segment],
    tools: Sequence[dict] | None,
    read: Callable[[str, bool, Sequence[dict] | None, str], ToolCall],
) -> tuple[str, list[ToolCall]]:
    """(content, calls) of segments cut at the tags of calls. Text around the calls stays content, newlines before them do not.

    `read` takes the text of a call, whether it was closed, the tools and the call's id.
    """
    opening, closing = JSON_CALL
    texts, calls = [""], []
    for at, (marker, text) in enumerate(segments):
        if marker == opening:
            closed = at + 1 < len(segments) and segments[at + 1][0] == closing
            calls.append(read(text, closed, tools, f"call_{len(calls)}"))
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


XML_TOOLS_BEFORE = """# Tools

You have access to the following functions:

<tools>"""

XML_TOOLS_AFTER = """
</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within \
<tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after
- If there is no function call available, answer the question like normal with your current knowledge and do not tell \
the user about function calls
</IMPORTANT>"""

XML_CALL = JSON_CALL
XML_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)
# A value ends at a closing tag that another parameter or the end of the call follows: it may hold the tag's characters.
XML_PARAMETER = re.compile(
    r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))",
    re.DOTALL,
)


def xml_tools(descriptions: Iterable[str]) -> list[str]:
    """Parts of the block that offers tools to be called in XML; how one is described is the family's."""
    return [XML_TOOLS_BEFORE, *(part for text in descriptions for part in ("\n", Plain(text))), XML_TOOLS_AFTER]


def write_xml_call(call: dict) -> list[str]:
    """Parts of one call in the form `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...`; a broken one as the
    model wrote it. Raises ValueError for arguments that are no object."""
    if is_broken(call):
        return ["<tool_call>", Body(call["raw"]), "</tool_call>"]
    function = function_of(call)
    parts = ["<tool_call>\n<function=", Body(function["name"]), ">\n"]
    for key, value in arguments_of(function).items():
        parts += ["<parameter=", Body(key), ">\n", Body(xml_value(value)), "\n</parameter>\n"]
    return [*parts, "</function>\n</tool_call>"]


def arguments_of(function: dict) -> dict:
    """The arguments of a call, which OpenAI's form holds as a JSON string. Raises ValueError where they are no object."""
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments of the call of {function['name']} are no object: {arguments!r}")
    return arguments


def xml_value(value: object) -> str:
    """A value as the templates write it in XML: JSON for what has parts, else Python's text (`True`, `None`)."""
    return to_json(value) if isinstance(value, dict | list | tuple) else str(value)


def split_xml_calls(segments: list[Segment], tools: Sequence[dict] | None) -> tuple[str, list[ToolCall]]:
    """(content, calls) of segments cut at XML_CALL."""
    return split_calls(segments, tools, read_xml_call)


def read_xml_call(raw: str, closed: bool, tools: Sequence[dict] | None, call_id: str) -> ToolCall:
    """One call written as XML; marked broken, never raising, where it is anything else."""
    call = ToolCall("", raw, call_id, raw)
    function = XML_FUNCTION.fullmatch(raw)
    if not closed or function is None:
        call.error = "not a call in the form <function=NAME>...</function>" if closed else "the call is not closed"
        return call
    call.name, body = function[1], function[2].rstrip()
    schema = parameters_of(call.name, tools)
    arguments, at = {}, 0
    while at < len(body):
        parameter = XML_PARAMETER.match(body, at)
        if parameter is None:
            call.error = "the arguments are not in the form <parameter=KEY>VALUE</parameter>"
            return call
        key, text = parameter.groups()
        arguments[key] = typed_value(text, schema.get(key))
        at = parameter.end()
    call.error = unknown_tool(call.name, tools)
    call.arguments = arguments if call.error is None else raw
    return call


def parameters_of(name: str, tools: Sequence[dict] | None) -> dict:
    """The schemas of a tool's parameters by name; empty where they are not known."""
    for function in map(function_of, tools or []):
        if function.get("name") == name:
            return (function.get("parameters") or {}).get("properties") or {}
    return {}


PYTHON_WORDS = {"True": True, "False": False, "None": None}
JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
JSON_TYPES |= {list: "array", dict: "object"}


def typed_value(text: str, schema: object) -> object:
    """An argument that is written without quotes, read by its schema.

    It becomes a number, a boolean, an object ... only where the schema asks for that and the text is one; all other text
    (that of a string, above all) stays as it was written, and without a schema everything does.
    """
    types = declared_types(schema)
    try:
        value = PYTHON_WORDS[text] if text in PYTHON_WORDS else json.loads(text)
    except (ValueError, RecursionError):
        return text
    if "string" in types and value is not None:
        return text
    kind = JSON_TYPES[type(value)]
    return value if kind in types or (kind in ("integer", "number") and types & {"integer", "number"}) else text


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
