"""What must hold in every family: properties over random texts, calls and ids. With the families' own tokenizers where
NANOPOST_RENDERER_DATA has them, else with one token a byte."""

import importlib
import json
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from bench.bridge import TURNS, bridged, counting, rendered
from renderers import RENDERERS, make_renderer
from renderers.check import ASK, REPLIES, TOOLS, result, said, sampled, system, turns, user
from tests.renderer_data import CHATML, byte_tokenizer, has_tokenizer, real_tokenizer

HAND_CODED = [name for name in RENDERERS if name != "default"]
INSTRUCT = "qwen3-Instruct-2507.jinja"  # a template that `default` bridges
SIGNS = {"llama-3": ["<|eom_id|>", "<|python_tag|>"]}  # tokens by which a version of a family is told, that with tools

quick = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
# No "<", "[" or "`": what the text of a call may hold is each format's own affair (XML has no escape for its tags).
letters = st.characters(exclude_categories=["C"], exclude_characters="<[`")
texts = st.text(letters, max_size=16) | st.sampled_from(["", "\n", " a \n", '"q" \\ \n\n日本', "👩‍👩‍👧 é"])
words = texts.map(str.strip)
weather = st.tuples(st.just("weather"), st.fixed_dictionaries({"city": words}, optional={"unit": st.just("C")}))
search = st.tuples(
    st.just("search"),
    st.fixed_dictionaries(
        {"query": words, "filters": st.fixed_dictionaries({"tags": st.lists(words, max_size=2)})},
        optional={"limit": st.integers(-5, 10**6)},
    ),
)
replies = st.builds(
    lambda text, thought, calls: said(text, thought, *calls),
    texts,
    words.filter(bool),
    st.just([]) | st.lists(weather | search, min_size=1, max_size=2),
)


@cache
def family(name, **options):
    if not has_tokenizer("qwen3" if name == "default" else name):
        module, _, kind = RENDERERS[name].partition(":")
        more = [*getattr(importlib.import_module(module), kind).control_tokens, *SIGNS.get(name, ())]
        return make_renderer(name, byte_tokenizer(CHATML if name == "default" else None, more=more), **options)
    if name == "default":
        return make_renderer(name, real_tokenizer("tokenizers/qwen3", INSTRUCT), **options)
    return make_renderer(name, real_tokenizer(f"tokenizers/{name}"), **options)


def each(names=tuple(RENDERERS)):
    return pytest.mark.parametrize("name", names)


def held(name, reply):
    """The reply, or as much of it as the format holds: Llama 3 has one call in a turn, and no text beside it."""
    called = reply.get("tool_calls", [])
    return reply | {"content": "", "tool_calls": called[:1]} if name == "llama-3" and called else reply


def prompt_of(renderer):
    return renderer.render_ids([ASK], TOOLS, add_generation_prompt=True)


def keeps_reasoning(renderer, prompt, reply):
    """Whether the family writes this message's reasoning at all."""
    without = {key: value for key, value in reply.items() if key != "reasoning_content"}
    return sampled(renderer, prompt, [ASK], without) != sampled(renderer, prompt, [ASK], reply)


@each()
@quick
@given(data=st.data())
def test_no_exception_from_any_ids(name, data):
    renderer = family(name)
    control = [*renderer.tokenizer.get_added_vocab().values()]
    stops = st.sampled_from(renderer.stop_token_ids)
    formats = st.sampled_from([renderer.token_id(token) for token in renderer.control_tokens] or control)
    size = len(renderer.tokenizer)
    one = st.integers(0, size - 1) | st.sampled_from(control) | formats | stops | st.sampled_from([-1, size, 2**40])
    ids = data.draw(st.lists(one, max_size=40))
    for prompt in (prompt_of(renderer), data.draw(st.lists(one, max_size=10))):
        for tools in (TOOLS, None):
            parsed = renderer.parse_response(ids, prompt, tools)
            assert json.dumps(parsed.message())
            assert all((call.error is None) == isinstance(call.arguments, dict) for call in parsed.tool_calls)
            assert renderer.render_ids([ASK, parsed.message()]), "what was read can be written, broken calls too"
        for new in ([user("And?")], [result("9 C")]):
            following = renderer.bridge_to_next_turn(prompt, ids, new, TOOLS)
            assert following is None or following[: len(prompt) + len(ids)] == prompt + ids
    assert renderer.parse_response(ids) is not None


@each(HAND_CODED)
@quick
@given(reply=replies)
def test_parse_of_render_is_the_message(name, reply):
    renderer, reply = family(name), held(name, reply)
    spelled = json.dumps(reply, ensure_ascii=False)
    assume(
        renderer.decode(id_ for id_, _ in renderer._encode(spelled)) == spelled
    )  # small vocabularies lack some bytes
    prompt = prompt_of(renderer)
    completion = sampled(renderer, prompt, [ASK], reply)
    assume(completion is not None)
    parsed = renderer.parse_response(completion, prompt, TOOLS)
    assert parsed.content.strip() == reply["content"].strip()
    thought = reply["reasoning_content"] if keeps_reasoning(renderer, prompt, reply) else None
    assert (parsed.reasoning_content and parsed.reasoning_content.strip()) == thought
    assert parsed.reasoning_complete
    assert [(call.name, call.arguments, call.error) for call in parsed.tool_calls] == [
        (call["function"]["name"], call["function"]["arguments"], None) for call in reply.get("tool_calls", [])
    ]


@each(HAND_CODED)
def test_a_family_writes_answers_and_calls_as_they_are_sampled(name):
    """Else the properties here would hold of nothing."""
    written = {what for what, *_ in turns(family(name))}
    assert written & {"an answer", "an answer after reasoning"}
    assert written & {"a call", "a call after words and reasoning"}


@each()
@quick
@given(what=st.sampled_from([*REPLIES]), data=st.data(), finished=st.booleans())
def test_a_bridge_is_the_prefix_and_what_a_rendering_puts_after_it(name, what, data, finished):
    renderer = family(name)
    reply, prompt = held(name, REPLIES[what]), prompt_of(renderer)
    completion = sampled(renderer, prompt, [ASK], reply)
    assume(completion is not None)
    if not finished and completion[-1] in renderer.stop_token_ids:
        completion = completion[:-1]
    called = [data.draw(texts.map(result))] if "tool_calls" in reply else []
    new = called + [user(text) for text in data.draw(st.lists(texts, min_size=not called, max_size=2))]
    following = renderer.bridge_to_next_turn(prompt, completion, new, TOOLS)
    assert following[: len(prompt) + len(completion)] == prompt + completion
    whole = renderer.render_ids([ASK, reply, *new], TOOLS, add_generation_prompt=True)
    rest = following[len(prompt) + len(completion) :]
    assert rest and rest == whole[-len(rest) :]
    if whole[: len(prompt) + len(completion)] == prompt + completion:  # the history is not stripped
        assert following == whole
    bridge = renderer.bridge(prompt, completion, new, TOOLS)
    assert bridge.token_ids == rest and max(bridge.message_index) == len(new) - 1


@each(HAND_CODED)
@quick
@given(what=st.sampled_from([*REPLIES]), text=texts, finished=st.booleans())
def test_template_retention_bridges_to_what_a_rendering_gives_or_not_at_all(name, what, text, finished):
    renderer = family(name, thinking_retention="template")
    reply, prompt = held(name, REPLIES[what]), prompt_of(renderer)
    completion = sampled(renderer, prompt, [ASK], reply)
    assume(completion is not None)
    if not finished and completion[-1] in renderer.stop_token_ids:
        completion = completion[:-1]
    for new in [[user(text)]] + [[result(text)]] * ("tool_calls" in reply):
        following = renderer.bridge_to_next_turn(prompt, completion, new, TOOLS)
        if following is not None:
            assert following == renderer.render_ids([ASK, reply, *new], TOOLS, add_generation_prompt=True)


@each(HAND_CODED)
def test_twenty_turns_are_one_branch_and_cost_a_fifth_of_rendering_anew(name):
    renderer = family(name)
    with counting(renderer) as bridging:
        prompts = bridged(renderer)
    with counting(renderer) as rendering:
        rendered(renderer)
    assert len(prompts) == TURNS
    assert all(after[: len(before)] == before for before, after in pairwise(prompts))
    assert 5 * sum(bridging) <= sum(rendering)


@each()
@quick
@given(data=st.data())
def test_text_is_text(name, data):
    renderer = family(name)
    control = {token: id_ for token, id_ in renderer.tokenizer.get_added_vocab().items() if token.strip()}
    few = st.lists(st.sampled_from([*control]), min_size=1, max_size=4)
    joined = st.sampled_from(["", " ", "\n", "a"])
    text = data.draw(joined).join(data.draw(st.just([*control]) | few))
    cut = data.draw(st.integers(0, min(len(text), 20)))
    parts = [{"type": "text", "text": text[:cut]}, {"type": "text", "text": text[cut:]}]
    for content, plain in ((f"x{text}x", "xx"), (text, ""), (parts, "")):
        ours, expected = (renderer.render_ids([user(one)], add_generation_prompt=True) for one in (content, plain))
        assert not [token for token, id_ in control.items() if ours.count(id_) > expected.count(id_)]
    rendering = renderer.render([user(f"x{text}x")])
    body = [i for i, content in zip(rendering.token_ids, rendering.is_content, strict=True) if content]
    assert renderer.decode(body).strip() == f"x{text}x".strip()


@each()
def test_stop_tokens_exist(name):
    renderer = family(name)
    assert renderer.stop_token_ids and len(set(renderer.stop_token_ids)) == len(renderer.stop_token_ids)
    vocabulary = renderer.tokenizer.get_added_vocab()
    assert {vocabulary[token] for token in renderer.stop_tokens} <= set(renderer.stop_token_ids)
    assert set(renderer.stop_token_ids) <= set(vocabulary.values())


@each()
def test_options_that_a_family_lacks_are_refused(name):
    ours = family(name).options
    everywhere = set().union(*(family(other).options for other in RENDERERS))
    for option in {*everywhere, "temperature"} - set(ours):
        with pytest.raises(ValueError, match=option):
            family(name, **{option: "low"})
    for option in set(ours) & set(family(name).choices):
        with pytest.raises(ValueError, match=option):
            family(name, **{option: "no such value"})
        for value in family(name).choices[option]:
            if name != "default" or option == "thinking_retention":  # the others go by the template
                assert family(name, **{option: value}).stop_token_ids == family(name).stop_token_ids


@each()
def test_what_a_format_cannot_hold_is_an_error_in_words(name):
    renderer = family(name)
    with pytest.raises(ValueError, match="input_audio"):
        renderer.render_ids([user([{"type": "input_audio"}])])
    for messages in ([{"role": "critic", "content": "x"}], [user("a"), system("b"), user("c")], [result("9 C")]):
        try:
            columns = vars(renderer.render(messages)).values()
        except ValueError as error:
            assert str(error)
        else:
            assert len({len(column) for column in columns}) == 1


@each(HAND_CODED)
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("reasoned", [False, True])
def test_a_reply_in_text_becomes_a_turn_with_one_stop_token(name, called, reasoned):
    """What a served model said, as the policy's family writes it: it reads back, and ends as the family's turns do."""
    renderer = family(name)
    reply = {"role": "assistant", "content": "Let me see."}
    reply |= {"reasoning_content": "Hm."} if reasoned else {}
    call = {"name": "weather", "arguments": {"city": "Oslo"}}
    reply |= {"tool_calls": [{"id": "functions.weather:0", "type": "function", "function": call}]} if called else {}
    reply = held(name, reply)
    tools = TOOLS if called else None
    prompt = renderer.render_ids([ASK], tools, add_generation_prompt=True)
    try:
        renderer.render_reply([ASK], reply, tools)
    except ValueError as error:  # the prompt opened reasoning that the reply does not have
        assert not reasoned and "the reply has none" in str(error)
        assert ("--renderer-args thinking=false" in str(error)) == ("thinking" in renderer.options)
        if "thinking" not in renderer.options:  # MiniMax-M2, which always thinks
            return
        renderer = family(name, thinking=False)
        prompt = renderer.render_ids([ASK], tools, add_generation_prompt=True)
    ids = renderer.render_reply([ASK], reply, tools)
    parsed = renderer.parse_response(ids, prompt, tools)
    # Four formats have no reasoning, and Kimi K2.5 does not write that of an answer.
    unwritten = name in ("qwen3-vl", "deepseek-v3", "kimi-k2", "llama-3") or (name == "kimi-k2.5" and not called)
    assert parsed.content.strip() == reply["content"]
    assert parsed.reasoning_content == (None if unwritten else reply.get("reasoning_content"))
    assert [(c.name, c.arguments, c.error) for c in parsed.tool_calls] == [("weather", {"city": "Oslo"}, None)] * called
    stops = set(renderer.stop_token_ids)
    assert ids[-1] in stops and not stops.intersection(ids[:-1])
    assert not stops.intersection(renderer.render_reply([ASK], reply, tools, ended=False))
    if name.startswith("glm"):
        assert ids[-1] == renderer.token_id("<|observation|>" if called else "<|user|>")
