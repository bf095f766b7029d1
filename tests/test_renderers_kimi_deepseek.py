"""Kimi K2, Kimi K2.5 and DeepSeek V3, beyond the cases: any conversation, any ids, TypeScript, and which template is whose."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from renderers import make_renderer
from renderers.deepseek_v3 import DeepSeekV3
from renderers.kimi_k2 import KimiK2
from renderers.kimi_k2_5 import KimiK25
from tests.renderer_data import (
    WEATHER,
    assistant,
    byte_tokenizer,
    call,
    quick,
    sample,
    user,
)

FAMILIES = {"kimi-k2": KimiK2, "kimi-k2.5": KimiK25, "deepseek-v3": DeepSeekV3}
TOKENIZERS = {name: byte_tokenizer(more=family.control_tokens) for name, family in FAMILIES.items()}
RENDERERS = {name: make_renderer(name, tokenizer) for name, tokenizer in TOKENIZERS.items()}
K2, K25, V3 = RENDERERS.values()
families = pytest.mark.parametrize("name", FAMILIES)

MARKS = ["<think>", "</think>", *K2.control_tokens, *V3.control_tokens]
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=9) | st.sampled_from(["", "\n", " a \n", *MARKS])
arguments = st.dictionaries(texts, texts | st.integers() | st.none() | st.lists(texts, max_size=2), max_size=2)
calls = st.lists(st.builds(call, st.sampled_from(["weather", "look"]), arguments), max_size=2)
plain = st.text("ab \n", max_size=5)
replies = st.builds(
    lambda text, thought, calls: assistant(text, reasoning_content=thought, tool_calls=calls), plain, plain, calls
)
others = st.builds(
    lambda role, text: {"role": role, "content": text, "tool_call_id": "functions.weather:0"},
    st.sampled_from(["user", "tool"]),
    texts,
)


def decoded(name, ids):
    return TOKENIZERS[name].decode(ids)


@families
@quick
@given(st.data())
def test_bridge_is_what_the_renderer_writes_after_a_turn(name, data):
    renderer, new = RENDERERS[name], data.draw(st.lists(others, min_size=1, max_size=4))
    before = data.draw(
        st.sampled_from(
            [[user("q")], [user("q"), assistant("", tool_calls=[call("look", {})]), {"role": "tool", "content": "9"}]]
        )
    )
    reply = data.draw(replies)
    prompt = renderer.render_ids(before, [WEATHER], True)
    turn = renderer.render_ids([*before, reply], [WEATHER])
    if turn[: len(prompt)] != prompt:  # an answer closes Kimi K2.5's reasoning before it
        return
    whole = renderer.render([*before, reply, *new], [WEATHER], True)
    for completion in (turn[len(prompt) :], turn[len(prompt) : -1]):
        assert renderer.bridge_to_next_turn(prompt, completion, new, [WEATHER]) == whole.token_ids
        bridge, start = renderer.bridge(prompt, completion, new, [WEATHER]), len(prompt) + len(completion)
        assert bridge.roles == whole.roles[start:]
        assert bridge.is_content == whole.is_content[start:]


ENDINGS = {  # what was sampled, and what the bridge writes before the next turn
    "kimi-k2": {
        "A": "<|im_end|>",
        "A<|im_end|>": "",
        "A<|im_end|>\n": None,
        "A<|im_user|>user<|im_middle|>B<|im_end|>": None,
        "A<|im_end|><|im_system|>": None,
    },
    "kimi-k2.5": {
        "R</think>A": "<|im_end|>",
        "R</think>A<|im_end|>": "",
        "R": "</think><|im_end|>",
        "R<|im_end|>": None,
        "R</think>A<|im_end|>\n": None,
    },
    "deepseek-v3": {
        "A": "<｜end▁of▁sentence｜>",
        "A<｜end▁of▁sentence｜>": "",
        "A<｜User｜>B<｜end▁of▁sentence｜>": None,
        "A<｜tool▁outputs▁begin｜>": None,
        "A<｜end▁of▁sentence｜><｜User｜>": None,
    },
}  # fmt: skip


@families
def test_a_turn_is_closed_once(name):
    renderer = RENDERERS[name]
    prompt = renderer.render_ids([user("q")], None, True)
    start = renderer.render_ids([{"role": "system", "content": ""}])
    new = decoded(
        name, renderer.render_ids([{"role": "system", "content": ""}, user("And?")], None, True)[len(start) :]
    )
    for completion, written in ENDINGS[name].items():
        bridge = renderer.bridge(prompt, sample(TOKENIZERS[name], completion), [user("And?")])
        assert (bridge and decoded(name, bridge.token_ids)) == (None if written is None else written + new)


def test_kimi_k2_5_keeps_reasoning_between_calls_and_strips_it_after_an_answer():
    template = make_renderer("kimi-k2.5", TOKENIZERS["kimi-k2.5"], thinking_retention="template")
    result = {"role": "tool", "content": "9 C", "tool_call_id": "functions.weather:0"}
    called = assistant("", reasoning_content="R", tool_calls=[call("weather", {})])
    prompt = K25.render_ids([user("q")], None, True)
    completion = K25.render_ids([user("q"), called])[len(prompt) :]
    following = template.bridge_to_next_turn(prompt, completion, [result, user("Hurry")])
    assert following == K25.render_ids([user("q"), called, result, user("Hurry")], None, True)
    answers = {text: sample(TOKENIZERS["kimi-k2.5"], f"{text}A<|im_end|>") for text in ("R</think>", "</think>")}
    assert template.bridge(prompt, answers["R</think>"], [user("And?")]) is None
    assert template.bridge(prompt, answers["</think>"], [user("And?")]) is not None
    assert template.bridge(following, answers["</think>"], [user("And?")]) is None  # the earlier R goes
    assert K25.bridge(following, answers["R</think>"], [user("And?")]) is not None


def test_kimi_ids_name_the_tool():
    def read(text):
        calls = K2.parse_response(sample(TOKENIZERS["kimi-k2"], text), tools=[WEATHER]).tool_calls
        return [(one.name, one.id, one.error and one.error.split(":")[0]) for one in calls]

    begin, between = "<|tool_calls_section_begin|><|tool_call_begin|>", "<|tool_call_argument_begin|>"
    end = "<|tool_call_end|><|tool_calls_section_end|>"
    assert read(f"{begin}functions.weather:3{between}{{}}{end}") == [("weather", "functions.weather:3", None)]
    assert read(f"{begin}functions.a.b:0{between}{{}}{end}")[0][2].startswith("unknown tool 'a.b'")
    assert read(f"{begin}:0{between}{{}}{end}") == [("", ":0", "a call has a name")]
    assert read(f"{begin}functions.weather:0{end}") == [("weather", "functions.weather:0", "not valid JSON")]
    assert read(f"{begin}functions.weather:0{between}{{}}") == [
        ("weather", "functions.weather:0", "the call is not closed")
    ]
    assert K2.parse_response(sample(TOKENIZERS["kimi-k2"], "A<|tool_calls_section_begin|>")).content == (
        "A<|tool_calls_section_begin|>"
    )
    unnamed = assistant("", tool_calls=[{"function": {"name": "weather", "arguments": {}}}] * 2)
    assert "functions.weather:1" in decoded("kimi-k2", K2.render_ids([user("q"), unnamed]))


@families
def test_a_broken_call_is_written_as_it_was(name):
    renderer = RENDERERS[name]
    written = renderer.render_ids([user("q"), assistant("Hm.", tool_calls=[call("weather", '{"city": ')])])
    prompt = renderer.render_ids([user("q")], None, True)
    message = renderer.parse_response(written[len(prompt) :], prompt).message()
    assert message["tool_calls"][0]["error"].startswith("not valid JSON")
    assert renderer.render_ids([user("q"), message]) == written


def test_deepseek_writes_every_round_of_calls_and_closes_outputs():
    two = assistant("", tool_calls=[call("look", {}), call("look", "{}")])
    results = [{"role": "tool", "content": "8"}, {"role": "tool", "content": "9"}]
    one = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{}\n```<｜tool▁call▁end｜>"
    turn = f"<｜tool▁calls▁begin｜>{one}\n{one}<｜tool▁calls▁end｜><｜end▁of▁sentence｜><｜tool▁outputs▁begin｜>"
    turn += "<｜tool▁output▁begin｜>8<｜tool▁output▁end｜>\n<｜tool▁output▁begin｜>9<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    messages = [{"role": "system", "content": "S"}, user("q"), two, *results, two, *results]
    whole = decoded("deepseek-v3", V3.render_ids(messages, None, True))
    assert whole == f"<｜begin▁of▁sentence｜>S<｜User｜>q<｜Assistant｜>{turn}{turn}"
    asked = decoded(
        "deepseek-v3", V3.render_ids([*messages, user("?"), {"role": "system", "content": "T"}], None, True)
    )
    assert asked == whole.replace("S<", "S\n\nT<", 1) + "<｜User｜>?<｜Assistant｜>"


def test_deepseek_cannot_bridge_a_system_message_and_needs_a_tokenizer_that_keeps_spaces():
    prompt = V3.render_ids([user("q")], None, True)
    assert V3.bridge(prompt, [], [{"role": "system", "content": "S"}, user("q")]) is None
    core = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(V3.control_tokens))
    with pytest.raises(ValueError, match="drops spaces"):
        make_renderer("deepseek-v3", PreTrainedTokenizerFast(tokenizer_object=core))


def test_typescript():
    node = {"type": "object", "description": "A node", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    properties = {
        "z": {"type": "string", "minLength": 1, "pattern": "^a", "description": "Two\n\nlines"},
        "any": {},
        "choice": {"enum": ["a", 1, None], "type": "string", "default": "a"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "object", "properties": {"b": {"type": "boolean"}}}]},
        "rows": {"type": "array", "minItems": 1, "items": {"type": "array", "items": {"type": "number", "maximum": 5}}},
        "free": {"type": "object", "additionalProperties": {"type": "string"}},
        "shut": {"type": "object", "properties": {}, "additionalProperties": False, "default": {"b": 1, "a": True}},
        "maybe": {"type": ["array", "null"], "default": False},
        "list": {"type": "array"},
        "root": {"$ref": "#/$defs/Node", "description": "The first"},
    }
    schema = {"type": "object", "required": ["z", "list"], "properties": properties, "$defs": {"Node": node}}
    tools = [
        {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": schema}},
        {"type": "function", "function": {"name": "ping"}},
    ]
    assert (
        K25.declare(tools)
        == """# Tools

## functions
namespace functions {
// A node
interface Node {
  next?: Node
}
// Looks.
type look = (_: {
  list: Array<any>,
  // Two

  // lines
  // minLength: 1, pattern: ^a
  z: string,
  any?: any,
  // Default: "a"
  choice?: "a" | 1 | None,
  either?: number | {
    b?: boolean
  },
  free?: {
    [k: string]: string
  },
  // Default: False
  maybe?: Array<any> | null,
  // The first
  root?: Node,
  // minItems: 1
  rows?: Array<Array<
    // maximum: 5
    number
  >>,
  // Default: {"a": true, "b": 1}
  shut?: {
    [k: string]: never
  }
}) => any;
type ping = (_: {}) => any;
}
"""
    )
    recursive = {"properties": {"b": {"$ref": "#"}, "a": {"type": "string"}}}
    declared = K25.declare([{"function": {"name": "walk", "parameters": recursive}}])
    assert "interface parameters {\n  a?: string,\n  b?: parameters\n}\ntype walk = (_: parameters) => any;" in declared
    untyped = [{"type": "function", "function": {"name": "x", "parameters": {"properties": {"a": {"title": "A"}}}}}]
    assert K25.declare(untyped) == K2.declare(untyped)
    assert K2.declare(untyped).startswith('[{"function":{"name":"x","parameters":{"properties"')
