"""Calls that are written without quotes: arguments are read by the schema; in XML, what is no call is marked broken."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renderers.turns import convert_argument
from renderers.xml_calls import read_xml_call, write_xml_call

PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "exact": {"type": "boolean"},
    "where": {"type": "object"},
    "names": {"anyOf": [{"type": "array"}, {"type": "null"}]},
}
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"properties": PROPERTIES}}}


def read(raw, tools=(SEARCH,)):
    return read_xml_call(raw, True, tools, "call_0")


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": texts | st.sampled_from(["\n", "3", "null", "</parameter>", "</function>\n", "<tool_call>"]),
        "count": st.integers(),
        "exact": st.booleans(),
        "where": st.dictionaries(texts, texts | st.none(), max_size=2),
        "names": st.none() | st.lists(texts, max_size=2),
    },
)


@settings(deadline=None)
@given(arguments)
def test_a_call_that_was_written_is_read_back(arguments):
    parts = write_xml_call({"function": {"name": "search", "arguments": arguments}})
    call = read("".join(parts).removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert (call.name, call.arguments, call.error) == ("search", arguments, None)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", None, "3"),
        ("3", True, "3"),
        ("3", {}, 3),
        ("3", {"type": "string"}, "3"),
        ("3", {"type": "integer"}, 3),
        ("3", {"type": ["string", "number"]}, 3),
        ("3.5", {"type": ["string", "integer"]}, "3.5"),
        ("three", {"type": "integer"}, "three"),
        ("true", {"type": "boolean"}, True),
        ("True", {"type": "boolean"}, True),
        ("true", {"type": "integer"}, "true"),
        ("null", {"type": "string"}, "null"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("None", {"type": ["string", "null"]}, None),
        ('{"a": 1}', {"$ref": "#/$defs/Where"}, {"a": 1}),
        ('"a"', {"type": ["string", "null"]}, '"a"'),
        ("a", {"enum": ["a", "b"]}, "a"),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("2", {"enum": [1, 2]}, 2),
        ("[1", {"type": "array"}, "[1"),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ("1" * 5000, {"type": "integer"}, "1" * 5000),
    ],
)
def test_a_value_is_read_by_its_schema_or_stays_text(text, schema, value):
    read = convert_argument(text, schema)
    assert read == value and type(read) is type(value)


def test_without_newlines_it_is_a_call_too():
    assert read("<function=search><parameter=count>3</parameter></function>").arguments == {"count": 3}


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "search",
        "<function=>\n</function>",
        "<function=search>\n<parameter=count>\n3\n",
        "<function=search\n<parameter=count>\n3\n</parameter>\n</function>",
        "<function=search>\n<parameter=count>\n3\n</function>",
        '<function=search>\n{"count": 3}\n</function>',
        "Well: <function=search>\n</function>",
        "<function=find>\n</function>",
    ],
)
def test_what_is_no_call_is_marked_broken_and_written_again_as_it_was(raw):
    call = read(raw)
    assert call.error and call.arguments == raw
    entry = {"function": {"name": call.name, "arguments": call.arguments}, "error": call.error, "raw": call.raw}
    assert "".join(write_xml_call(entry)) == f"<tool_call>{raw}</tool_call>"


def test_an_unclosed_call_is_broken_and_arguments_without_keys_are_refused():
    assert read_xml_call("<function=search>\n</function>", False, [SEARCH], "call_0").error
    assert write_xml_call({"name": "search", "arguments": '{"count": 3}'}) == write_xml_call(
        {"name": "search", "arguments": {"count": 3}}
    )
    with pytest.raises(ValueError, match="search"):
        write_xml_call({"name": "search", "arguments": "three"})
