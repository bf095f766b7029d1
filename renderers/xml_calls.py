"""Tool calls in XML, as Qwen3.5 and Nemotron 3 write them: a function's name and its parameters in tags of their own.

    <tool_call>
    <function=weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>
    </tool_call>

A value stands there without quotes, so only the tool's schema says whether `3` is a number.
"""

import re
from collections.abc import Iterable, Sequence

from renderers.base import Body, Plain, ToolCall, function_of, to_json
from renderers.turns import argument_schemas, arguments_of, convert_argument, is_broken, settle

TOOLS_BEFORE = """# Tools

You have access to the following functions:

<tools>"""

TOOLS_AFTER = """
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

FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)
# A value ends at a closing tag that another parameter or the end of the call follows: it may hold the tag's characters.
PARAMETER = re.compile(
    r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))",
    re.DOTALL,
)


def xml_tools(descriptions: Iterable[str]) -> list[str]:
    """Parts of the block that offers tools to be called in XML; how one is described is the family's."""
    return [TOOLS_BEFORE, *(part for text in descriptions for part in ("\n", Plain(text))), TOOLS_AFTER]


def write_xml_call(call: dict) -> list[str]:
    """Parts of one call in the form `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...`; a broken one as the
    model wrote it. Raises ValueError for arguments that are no object."""
    if is_broken(call):
        return ["<tool_call>", Body(call["raw"]), "</tool_call>"]
    function = function_of(call)
    parts = ["<tool_call>\n<function=", Body(function["name"]), ">\n"]
    for key, value in arguments_of(call).items():
        parts += ["<parameter=", Body(key), ">\n", Body(xml_value(value)), "\n</parameter>\n"]
    return [*parts, "</function>\n</tool_call>"]


def xml_value(value: object) -> str:
    """A value as the templates write it in XML: JSON for what has parts, else Python's text (`True`, `None`)."""
    return to_json(value) if isinstance(value, dict | list | tuple) else str(value)


def read_xml_call(raw: str, closed: bool, tools: Sequence[dict] | None, call_id: str) -> ToolCall:
    """One call written as XML; marked broken, never raising, where it is anything else."""
    call = ToolCall("", raw, call_id, raw)
    function = FUNCTION.fullmatch(raw)
    if not closed or function is None:
        call.error = "not a call in the form <function=NAME>...</function>" if closed else "the call is not closed"
        return call
    call.name, body = function[1], function[2].rstrip()
    schema = argument_schemas(call.name, tools)
    arguments, at = {}, 0
    while at < len(body):
        parameter = PARAMETER.match(body, at)
        if parameter is None:
            call.error = "the arguments are not in the form <parameter=KEY>VALUE</parameter>"
            return call
        key, text = parameter.groups()
        arguments[key] = convert_argument(text, schema.get(key))
        at = parameter.end()
    return settle(call, arguments, closed, tools)
