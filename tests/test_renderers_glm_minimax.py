"""GLM and MiniMax: what the cases leave out. The stop token that opens the next turn, tagged calls, and the choice between siblings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from renderers import make_renderer
from renderers.turns import text_or_json
from tests.renderer_data import (
    DATA,
    WEATHER,
    arguments,
    assistant,
    byte_tokenizer,
    call,
    needs_data,
    quick,
    sample,
    user,
)

GLM_TOKENS = [
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
]
MINIMAX_TOKENS = ["]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>"]
TINY = byte_tokenizer(more=[*GLM_TOKENS, *MINIMAX_TOKENS])
RENDERERS = {name: make_renderer(name, TINY) for name in ("glm-4.5", "glm-5", "minimax-m2")}


@pytest.mark.parametrize(
    ("ending", "role", "written"),
    [
        ("", "user", "<|user|>\nhey"),
        ("<|user|>", "user", "\nhey"),
        ("<|user|>\n", "user", "hey"),
        ("<|endoftext|>", "user", "<|user|>\nhey"),
        ("", "system", "<|system|>\nhey"),
        ("<|observation|>", "tool", "\n<tool_response>\nhey\n</tool_response>"),
        ("<|observation|>\n", "tool", "<tool_response>\nhey\n</tool_response>"),
        ("<think>on", "user", "</think><|user|>\nhey"),
        ("<|observation|>", "user", None),
        ("<|user|>", "tool", None),
        ("<|user|>", "system", None),
        ("<|system|>", "system", None),
        ("<|user|>more", "user", None),
        ("<|user|><|user|>", "user", None),
        ("<think>on<|user|>", "user", None),
        ("<|assistant|>", "user", None),
    ],
)
def test_a_sampled_opener_is_not_written_again(ending, role, written):
    for name, newline in {"glm-4.5": "\n", "glm-5": ""}.items():
        renderer = make_renderer(name, TINY, thinking=False)
        prompt = renderer.render_ids([user("Hi")], add_generation_prompt=True)
        bridge = renderer.bridge(prompt, sample(TINY, "Yes" + ending), [{"role": role, "content": "hey"}])
        if written is None:
            assert bridge is None
            continue
        suffix = "/nothink" if name == "glm-4.5" and role == "user" else ""
        generation = TINY.decode(prompt).partition("<|assistant|>")[2]
        assert TINY.decode(bridge.token_ids) == written.replace("\n", newline) + suffix + "<|assistant|>" + generation


BROKEN = {
    "glm-4.5": {
        "<tool_call>weather\n<arg_key>city": "not closed",
        "<tool_call>weather\n<arg_key>city</arg_key>\nOslo\n</tool_call>": "not pairs",
        "<tool_call><arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>": "name of a tool",
        "<tool_call></tool_call>": "name of a tool",
        "<tool_call>guess</tool_call>": "unknown tool 'guess'",
        "<tool_call>weather<tool_call>weather": "not closed",
        "<tool_call>weather<arg_value>Oslo</arg_value><arg_key>city</arg_key></tool_call>": "not pairs",
    },
    "minimax-m2": {
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Os': "to </invoke>",
        '<minimax:tool_call><invoke name="">\n</invoke></minimax:tool_call>': "no name",
        '<minimax:tool_call><invoke name="guess"></invoke></minimax:tool_call>': "unknown tool 'guess'",
        '<minimax:tool_call><invoke name="weather"><parameter name="city">Os</invoke></minimax:tool_call>': "arguments",
        "<minimax:tool_call>weather</minimax:tool_call>": "to </invoke>",
        "<minimax:tool_call></minimax:tool_call>": "to </invoke>",
    },
}


@pytest.mark.parametrize(("family", "text"), [(family, text) for family, texts in BROKEN.items() for text in texts])
def test_broken_calls_are_marked_and_written_as_they_were(family, text):
    renderer = RENDERERS[family]
    parsed = renderer.parse_response(sample(TINY, "Hm." + text), tools=[WEATHER])
    assert parsed.content == "Hm."
    for broken in parsed.tool_calls:
        assert BROKEN[family][text] in broken.error and broken.arguments == broken.raw
    assert parsed.tool_calls
    again = TINY.decode(renderer.render_ids([user("Hi"), parsed.message()]))
    assert all(broken.raw in again for broken in parsed.tool_calls)


def test_a_good_call_survives_beside_a_broken_one():
    good = '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n</invoke>\n'
    parsed = RENDERERS["minimax-m2"].parse_response(sample(TINY, good + '<invoke name="weather">\n<para'))
    assert [(c.name, c.arguments) for c in parsed.tool_calls if c.error is None] == [("weather", {"city": "Oslo"})]
    assert [c.raw for c in parsed.tool_calls if c.error] == ['<invoke name="weather">\n<para']


def test_arguments_may_be_a_json_string_but_nothing_else():
    for renderer in RENDERERS.values():
        as_dict, as_string = (
            renderer.render_ids([user("q"), assistant("", tool_calls=[call("weather", value)])])
            for value in ({"city": "Oslo"}, '{"city": "Oslo"}')
        )
        assert as_dict == as_string
        for wrong in ("{city", "[1]", [1]):
            with pytest.raises(ValueError, match="arguments of a call of weather"):
                renderer.render_ids([user("q"), assistant("", tool_calls=[call("weather", wrong)])])


@needs_data
def test_the_identity_is_that_of_the_checkpoints_template():
    tokenizer = byte_tokenizer((DATA / "templates/minimax-m2-MiniMax-M2.jinja").read_text(), more=MINIMAX_TOKENS)
    ids = make_renderer("auto", tokenizer, "minimax_m2").render_ids([user("Hi")])
    assert "]~b]system\nYou are MiniMax-M2, a helpful" in tokenizer.decode(ids)
    named = make_renderer("minimax-m2", tokenizer, model_identity="You are Bob.").render_ids([user("Hi")])
    assert tokenizer.decode(named).startswith("]~!b[]~b]system\nYou are Bob.[e~[\n")


@quick
@given(st.sampled_from(sorted(RENDERERS)), st.lists(arguments, max_size=2))
def test_calls_are_read_as_they_were_written(family, several):
    renderer = RENDERERS[family]
    several = [{key.strip().replace('"', ""): value for key, value in one.items()} for one in several]
    ids = renderer.render_ids([user("q"), assistant("x", tool_calls=[call("look", one) for one in several])])
    parsed = renderer.parse_response(ids[len(renderer.render_ids([user("q")])) :])
    assert [(c.name, c.arguments, c.error) for c in parsed.tool_calls] == [
        ("look", {key: text_or_json(value) for key, value in one.items()}, None) for one in several
    ]
