"""gpt-oss: what the cases of the family cannot show, with a tokenizer of one token per byte."""

import pytest

from renderers import harmony_types, make_renderer, resolve_name
from renderers.harmony_types import typescript
from tests.renderer_data import assistant, byte_tokenizer, call, sample, user

HARMONY = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
TOKENIZER = byte_tokenizer(more=HARMONY)
RENDERER = make_renderer("gpt-oss", TOKENIZER)
PROMPT = RENDERER.render_ids([user("Hi")], add_generation_prompt=True)

THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": 1}<|call|>'
ANSWER = "<|channel|>final<|message|>Yes.<|return|>"
NEXT = "<|start|>user<|message|>And?<|end|><|start|>assistant"


def text(messages, tools=None, generate=False):
    return TOKENIZER.decode(RENDERER.render_ids(messages, tools, generate))


def test_schemas_are_written_as_harmony_writes_them():
    place = {"type": "object", "description": "A place", "nullable": True}
    place |= {"properties": {"country": {"type": "string", "default": "no"}}, "required": ["country"]}
    properties = {
        "city": {"type": "string", "description": "City name"},
        "where": place,
        "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
    }
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    weather = {"name": "weather", "description": "The weather of a city.", "parameters": parameters}
    example = harmony_types.__doc__.partition("\n\n")[2].partition("\n\nWhat")[0]
    assert typescript(weather) == example.replace("\n    ", "\n").removeprefix("    ") + "\n\n"
    days = {"oneOf": [{"type": "integer", "description": "n"}, {"type": ["string", "null"]}], "title": "Days"}
    parameters = {
        "type": "object",
        "properties": {"days": days, "tags": {"type": "array", "items": {"type": "string"}}},
    }
    assert typescript({"name": "x", "parameters": parameters}) == (
        "type x = (_: {\n// Days\n//\ndays?:\n | number // n\n | string | null\n,\ntags?: string[],\n}) => any;\n\n"
    )
    assert typescript({"name": "x"}) == "type x = () => any;\n\n"


def test_reasoning_stays_until_an_answer_follows():
    calls = assistant("Let me see.", reasoning_content="Hm.", tool_calls=[call("look", {"at": 1})])
    result = {"role": "tool", "tool_call_id": "call_0", "content": "9"}
    said = "<|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
    thought = "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
    author = "<|start|>functions.look to=assistant<|channel|>commentary<|message|>9<|end|>"
    assert text([calls, result], None, True).endswith(thought + said + CALL + author + "<|start|>assistant")
    whole = text([calls, result, assistant("Yes.", reasoning_content="So.")])
    assert "Hm." not in whole and whole.endswith("analysis<|message|>So.<|end|><|start|>assistant" + ANSWER)
    assert "So." not in text([assistant("Yes.", reasoning_content="So."), user("And?")])


@pytest.mark.parametrize(
    ("completion", "written"),
    {
        THOUGHT + ANSWER: NEXT,
        THOUGHT + ANSWER + "\n": NEXT,
        ANSWER.replace("<|return|>", ""): "<|end|>" + NEXT,
        ANSWER.replace("<|return|>", "<|end|>"): NEXT,
        THOUGHT + CALL: NEXT,
        THOUGHT + CALL.replace("<|call|>", ""): "<|call|>" + NEXT,
        "<|channel|>analysis<|message|>Hm": "<|end|>" + NEXT,
        "<|channel|>analysis<|message|>Hm<|end|>": NEXT,
        "<|channel|>analysis<|message|>Hm<|return|>": None,
        THOUGHT: None,
        "": None,
        "Yes.<|return|>": None,
        ANSWER + "More": None,
        ANSWER + "\n\n": None,
        ANSWER + ANSWER: None,
        "<|start|>assistant" + ANSWER: None,
        "<|channel|>final<|message|>Yes.<|end|><|start|>user<|message|>Why?<|end|>": None,
        "<|channel|>final<|message|>Yes.<|channel|>final<|message|>Yes.<|return|>": None,
    }.items(),
)
def test_a_turn_is_closed_once(completion, written):
    bridge = RENDERER.bridge(PROMPT, sample(TOKENIZER, completion), [user("And?")])
    assert (bridge and TOKENIZER.decode(bridge.token_ids)) == written


def test_what_the_template_would_take_away():
    strict = make_renderer("gpt-oss", TOKENIZER, thinking_retention="template")
    tool = {"role": "tool", "content": "9"}
    for completion, new, kept in (
        (THOUGHT + CALL, tool, True),
        (THOUGHT + ANSWER, user("And?"), False),
        (ANSWER, user("And?"), False),  # <|return|> becomes <|end|>
        (ANSWER.replace("<|return|>", ""), user("And?"), True),
        ("<|channel|>analysis<|message|>Hm", user("And?"), False),
    ):
        assert (strict.bridge(PROMPT, sample(TOKENIZER, completion), [new]) is not None) == kept


def test_results_name_the_function_that_was_called():
    completion = CALL + "<|start|>assistant" + CALL.replace("look", "feel")
    by_id = [{"role": "tool", "tool_call_id": f"call_{at}", "content": ""} for at in (1, 0)]
    for new, names in (
        (by_id, "feel look"),
        ([{"role": "tool", "content": ""}] * 3, "look feel unknown"),
        ([{"role": "tool", "name": "ask", "content": ""}], "ask"),
    ):
        written = TOKENIZER.decode(RENDERER.bridge(PROMPT, sample(TOKENIZER, completion), new).token_ids)
        assert [piece.split()[0] for piece in written.split("<|start|>functions.")[1:]] == names.split()


def test_every_channel_is_read():
    def read(completion, prompt=None):
        parsed = RENDERER.parse_response(sample(TOKENIZER, completion), prompt)
        return parsed.reasoning_content, parsed.content, [(c.name, c.error) for c in parsed.tool_calls]

    preamble = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
    assert read(THOUGHT + preamble + CALL) == ("Hm.", "Let me see.", [("look", None)])
    assert read("<|start|>assistant" + ANSWER + "more") == (None, "Yes.", [])
    assert read("No harmony.") == (None, "No harmony.", [])
    opened = [*PROMPT, *sample(TOKENIZER, "<|channel|>analysis<|message|>")]
    assert read("Hm.<|end|><|start|>assistant" + ANSWER, opened) == ("Hm.", "Yes.", [])
    assert read(CALL.replace("<|call|>", ""))[2] == [("look", "the call is not closed")]
    assert read(CALL.replace('{"at": 1}', "[]"))[2] == [("look", "the arguments are not a JSON object")]
    assert read(CALL.replace("to=functions.look ", ""))[2] == [("", "a call has a name")]
    cut = RENDERER.parse_response(sample(TOKENIZER, "<|channel|>analysis<|message|>Hm"))
    assert (cut.reasoning_content, cut.reasoning_complete) == ("Hm", False)


def test_options_and_auto():
    ids = make_renderer("gpt-oss", TOKENIZER, reasoning_effort="low", date="2025-06-28").render_ids([user("Hi")])
    assert "Current date: 2025-06-28\n\nReasoning: low\n\n" in TOKENIZER.decode(ids)
    for option, value in (("date", "today"), ("date", 3), ("reasoning_effort", "none"), ("thinking", False)):
        with pytest.raises(ValueError, match=option):
            make_renderer("gpt-oss", TOKENIZER, **{option: value})
    assert resolve_name("auto", TOKENIZER, "gpt_oss")[0] == "gpt-oss"
    assert resolve_name("auto", byte_tokenizer(), "gpt_oss")[0] == "default"
    with pytest.raises(ValueError, match="critic"):
        RENDERER.render_ids([{"role": "critic", "content": ""}])
