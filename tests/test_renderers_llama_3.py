"""Llama 3: its turns, its bare JSON calls, and that no other model of type llama is taken for it."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from renderers import make_renderer, resolve_name
from renderers.base import ParsedResponse
from renderers.check import CHECKS
from tests.renderer_data import (
    LLAMA3,
    WEATHER,
    assistant,
    byte_tokenizer,
    call,
    check_bridge,
    in_plain_text,
    others,
    quick,
    replies,
    sample,
    user,
)

TOKENS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
LATER_TOKENS = [*TOKENS, "<|eom_id|>", "<|python_tag|>"]
TURN = "{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' + text + '<|eot_id|>' }}"
# The format of 3.1 as this project understands it.
LLAMA31 = (
    "{% macro turn(role, text) %}" + TURN + "{% endmacro %}{% set ns = namespace(first=0, system='', offer='') %}"
    "{% if messages and messages[0].role == 'system' %}"
    "{% set ns.first = 1 %}{% set ns.system = messages[0].content | trim %}{% endif %}"
    "{{ bos_token + turn('system', ('Environment: ipython\n' if tools else '') + 'Cutting Knowledge Date: December 2023\n'"
    " + 'Today Date: ' + (date_string or '26 Jul 2024') + '\n\n' + ns.system) }}"
    "{% if tools %}{% set ns.offer %}"
    "Given the following functions, please respond with a JSON for a function call with its proper arguments that best "
    'answers the given prompt.\n\nRespond in the format {"name": function name, "parameters": dictionary of argument name '
    "and its value}.Do not use variables.\n\n"
    "{% for t in tools %}{{ t | tojson(indent=4) + '\n\n' }}{% endfor %}{% endset %}{% endif %}"
    "{% for m in messages[ns.first:] %}"
    "{% if m.tool_calls %}{% set called = m.tool_calls[0].function %}"
    "{{ raise_exception('one call') if m.tool_calls | length > 1 }}"
    """{{ turn('assistant', '{"name": "' + called.name + '", "parameters": ' + called.arguments | tojson + '}') }}"""
    "{% elif m.role == 'tool' %}{{ turn('ipython', m.content | tojson) }}"
    "{% else %}{{ turn(m.role, (ns.offer if loop.first else '') + m.content | trim) }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def llama(template, tokens):
    tokenizer = byte_tokenizer(template, more=tokens)
    tokenizer.bos_token, tokenizer.eos_token = "<|begin_of_text|>", "<|eot_id|>"
    return tokenizer


EARLY, LATER = llama(LLAMA3, TOKENS), llama(LLAMA31, LATER_TOKENS)
RENDERERS = {name: make_renderer("llama-3", one) for name, one in {"3": EARLY, "3.1": LATER}.items()}
each = pytest.mark.parametrize("version", RENDERERS)


def test_auto_takes_it_only_where_the_template_proves_to_be_llama_3s():
    for tokenizer in (EARLY, LATER):
        assert resolve_name("auto", tokenizer, "llama")[0] == "llama-3"
        assert resolve_name("auto", tokenizer, "mistral")[0] == "default"
    assert resolve_name("auto", byte_tokenizer(LLAMA3), "llama")[0] == "default"  # without the tokens, as SmolLM2


@pytest.mark.parametrize(
    "template",
    [
        None,
        LLAMA3.replace(" | trim", ""),
        LLAMA3.replace("{% for", "{{ raise_exception('no') }}{% for"),
        LLAMA3.replace("m['content'] | trim", "(m['content'].split('</think>') | last | trim)"),
        LLAMA3.replace("{% for", "{% if tools %}{{ tools | tojson }}{% endif %}{% for"),
        LLAMA31.replace("indent=4", "indent=2"),
        LLAMA31.replace("'ipython'", "'tool'"),
        LLAMA31.replace("ns.system) }}", "(ns.system or 'You are Bob.')) }}"),
        LLAMA31.replace("messages[ns.first:]", "messages[-2:]"),
    ],
)
def test_auto_leaves_an_edited_template_to_default(template):
    assert template not in (LLAMA3, LLAMA31)
    assert resolve_name("auto", llama(template, LATER_TOKENS), "llama")[0] == "default"


@each
@quick
@given(st.lists(others | replies, min_size=1, max_size=5), st.booleans(), st.booleans())
def test_it_equals_its_template(version, messages, generate, with_tools):
    renderer, tools = RENDERERS[version], [WEATHER] if with_tools else None
    messages = in_plain_text(messages)
    for message in messages:
        if message.get("tool_calls"):
            message["content"] = ""
    expected = None
    try:
        expected = renderer.tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=generate, return_dict=False
        )
        ids = renderer.render_ids(messages, tools, generate)
    except Exception as error:
        assert expected is None or (isinstance(error, ValueError) and "tools" in str(error))
        assume(False)
    assert ids == expected


@each
def test_every_check_passes(version):
    checks = [check(RENDERERS[version]) for check in CHECKS]
    assert not [failure for check in checks for failure in check.failures]
    assert all(check.passed for check in checks)


@each
def test_a_bridge_is_what_is_written_after_a_turn(version):
    renderer = RENDERERS[version]
    check_bridge(renderer, renderer.tokenizer, [user(" And\n?"), {"role": "system", "content": "x"}], "<|eot_id|>")


GOOD = '{"name": "weather", "parameters": {"city": "Oslo"}}'


@pytest.mark.parametrize(
    ("text", "error"),
    {
        GOOD: None,
        f"<|python_tag|>{GOOD}<|eom_id|>": None,
        f"\n{GOOD}<|eot_id|>": None,
        '{"type": "function", "name": "weather", "parameters": {"city": "Oslo"}}': None,
        GOOD[:-1]: "not valid JSON",
        f"{GOOD}; {GOOD}": "not valid JSON",
        '{"name": "guess", "parameters": {}}': "unknown tool 'guess'",
        '{"name": "weather", "parameters": "[1]"}': "not a JSON object",
        '{"name": "weather", "arguments": {}}': "not a JSON object",
        '{"name": ["weather"], "parameters": {}}': "with a name",
        '{"type": "function", "function": {"name": "weather"}}': "with a name",
        '{"name": ' + "[" * 100_000: "not valid JSON",
        "<|python_tag|>": "not valid JSON",
        "<|python_tag|>[1]": "with a name",
        "\n<|python_tag|>print('<|python_tag|>')<|eom_id|>": "not valid JSON",
    }.items(),
    ids=range(15),
)
def test_a_call_is_well_formed_or_marked_broken_and_written_as_it_was(text, error):
    renderer = RENDERERS["3.1"]
    prompt = renderer.render_ids([user("q")], [WEATHER], add_generation_prompt=True)
    completion = sample(LATER, text)
    parsed = renderer.parse_response(completion, prompt, [WEATHER])
    (only,) = parsed.tool_calls
    assert parsed.content == "" and (only.error is None if error is None else error in only.error)
    assert only.arguments == {"city": "Oslo"} if error is None else only.raw.endswith(only.arguments)
    turn, _ = renderer.cut_at_stop(completion)
    again = renderer.render_ids([user("q"), parsed.message()], [WEATHER])[len(prompt) : -1]
    assert LATER.decode(again) == (GOOD if error is None else LATER.decode(turn).lstrip())
    if error is not None and LATER.convert_tokens_to_ids("<|python_tag|>") in turn:
        assert LATER.convert_tokens_to_ids("<|python_tag|>") in again


def test_what_does_not_begin_as_a_call_is_an_answer():
    renderer = RENDERERS["3.1"]
    for text in ("", "Hi", f"See: {GOOD}", '{"city": "Oslo"}', f"See: <|python_tag|>{GOOD}"):
        for tools in (None, [WEATHER]):
            assert renderer.parse_response(sample(LATER, text), tools=tools) == ParsedResponse(text)
    assert renderer.parse_response(sample(LATER, '{"name": "Bob"}')) == ParsedResponse('{"name": "Bob"}')
    spelled = [id_ for id_, _ in renderer._encode(f"<|python_tag|>{GOOD}")]  # as ordinary characters it marks nothing
    assert renderer.parse_response(spelled, tools=[WEATHER]) == ParsedResponse(f"<|python_tag|>{GOOD}")
    assert RENDERERS["3"].parse_response(sample(EARLY, GOOD)).content == GOOD


ENDINGS = {  # what was sampled, and what the bridge writes before the next turn
    "A": "<|eot_id|>",
    "A<|eot_id|>": "",
    "A<|eom_id|>": "",
    "A<|end_of_text|>": "",
    GOOD: "<|eot_id|>",
    "<think>A": "<|eot_id|>",
    "A<|eot_id|>\n": None,
    "A<|eot_id|><|eot_id|>": None,
    "A<|start_header_id|>user": None,
    "A<|eot_id|><|start_header_id|>user": None,
}


@pytest.mark.parametrize(("completion", "written"), ENDINGS.items())
def test_a_turn_is_closed_once(completion, written):
    renderer = RENDERERS["3.1"]
    prompt = renderer.render_ids([user("q")], [WEATHER], add_generation_prompt=True)
    bridge = renderer.bridge(prompt, sample(LATER, completion), [{"role": "tool", "content": '9 "C"\n'}], [WEATHER])
    turn = "<|start_header_id|>{}<|end_header_id|>\n\n"
    following = turn.format("ipython") + '"9 \\"C\\"\\n"<|eot_id|>' + turn.format("assistant")
    assert (bridge and LATER.decode(bridge.token_ids)) == (None if written is None else written + following)


def test_every_token_is_attributed():
    messages = [user(" Weather? "), assistant("", tool_calls=[call("weather", {"city": "Oslo"})])]
    messages += [{"role": "tool", "content": "9 C"}]
    rendered = RENDERERS["3.1"].render(messages, [WEATHER], add_generation_prompt=True)
    bodies, scaffold = dict.fromkeys(range(-1, 3), ""), dict.fromkeys(range(-1, 3), "")
    for id_, index, role, content in zip(*vars(rendered).values(), strict=True):
        assert role in (("system", "assistant") if index == -1 else (messages[index]["role"],))
        (bodies if content else scaffold)[index] += LATER.decode([id_])
    assert bodies == {-1: "", 0: "Weather?", 1: 'weather{"city": "Oslo"}', 2: '"9 C"'}
    assert "Today Date" in scaffold[-1] and '"city"' in scaffold[0] and "ipython" in scaffold[2]
    with_system = RENDERERS["3.1"].render([{"role": "system", "content": "S"}, *messages], [WEATHER])
    assert set(with_system.message_index[1:]) == {
        0,
        1,
        2,
        3,
    }  # all but <|begin_of_text|>: the dates are in the message's turn


def test_arguments_that_are_a_json_string_are_written_as_they_are():
    as_dict, as_text = (
        RENDERERS["3.1"].render_ids([user("q"), assistant("", tool_calls=[call("weather", arguments)])])
        for arguments in ({"city": "Oslo"}, '{"city": "Oslo"}')
    )
    assert as_dict == as_text


def test_what_a_version_lacks_is_refused():
    for messages, tools in (
        ([user("q")], [WEATHER]),
        ([user("q"), assistant("", tool_calls=[call("weather", {})])], None),
        ([{"role": "tool", "content": "9"}], None),
    ):
        with pytest.raises(ValueError, match="Llama 3 has no tools"):
            RENDERERS["3"].render(messages, tools)
    with pytest.raises(ValueError, match="date"):
        make_renderer("llama-3", EARLY, date="2026-01-15")
    two = [call("weather", {})] * 2
    for message in (assistant("", tool_calls=two), assistant("Well", tool_calls=two[:1])):
        with pytest.raises(ValueError, match="one call"):
            RENDERERS["3.1"].render([user("q"), message])
    with pytest.raises(ValueError, match="first user message"):
        RENDERERS["3.1"].render([assistant("Hi"), user("q")], [WEATHER])
    with pytest.raises(ValueError, match="critic"):
        RENDERERS["3.1"].render([{"role": "critic", "content": "x"}])


def test_the_date_is_pinned_and_each_version_has_its_stop_tokens():
    for date in ("today", 3):
        with pytest.raises(ValueError, match="date"):
            make_renderer("llama-3", LATER, date=date)
    text = LATER.decode(make_renderer("llama-3", LATER, date="2026-01-05").render_ids([user("q")]))
    assert "\nToday Date: 05 Jan 2026\n\n<|eot_id|>" in text
    stops = [LATER.convert_tokens_to_ids(token) for token in ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")]
    assert RENDERERS["3.1"].stop_token_ids == stops
    assert len(RENDERERS["3"].stop_token_ids) == 2
