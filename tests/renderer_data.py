"""What the tests of the renderers share: tokenizers (the families' own, and one token a byte), messages, random texts."""

import copy
import os
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

DATA = Path(os.environ["NANOPOST_RENDERER_DATA"]) if os.environ.get("NANOPOST_RENDERER_DATA") else None
needs_data = pytest.mark.skipif(
    DATA is None, reason="NANOPOST_RENDERER_DATA is unset: no templates, tokenizers and cases"
)

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CHATML = (
    "{% for m in messages %}"
    "{% if loop.first and m['role'] != 'system' %}{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def byte_tokenizer(template=None, merges=(), more=()):
    """Qwen3's control tokens, one token per byte, and the merges that are asked for."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: id_ for id_, piece in enumerate([*letters, *(a + b for a, b in merges)])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(token, special=True, normalized=False) for token in [*CONTROL, *more]])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", bos_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


@cache
def real_tokenizer(name, template=None):
    """The tokenizer in the folder DATA/name, with the template of that file."""
    if template:
        tokenizer = copy.copy(real_tokenizer(name))
        tokenizer.chat_template = (DATA / "templates" / template).read_text(encoding="utf-8")
        return tokenizer
    return AutoTokenizer.from_pretrained(DATA / name)


def has_tokenizer(name):
    """Whether the data hold the tokenizer of this family."""
    return DATA is not None and (DATA / "tokenizers" / name).is_dir()


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(name, arguments):
    return {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}


def sample(tokenizer, text):
    """Ids as a model would have sampled them: control tokens in the text are control tokens."""
    return tokenizer.encode(text, add_special_tokens=False)


def in_plain_text(value):
    """Without control tokens (<|im_end|>, ]~b], /nothink), so that what is compared is the format, not how they are handled."""
    if isinstance(value, str):
        return value.translate(dict.fromkeys(map(ord, "<[/"), "("))
    if isinstance(value, dict):
        return {in_plain_text(key): in_plain_text(item) for key, item in value.items()}
    return [in_plain_text(item) for item in value] if isinstance(value, list) else value


def check_bridge(renderer, tokenizer, new, stop):
    """The bridge is prompt and completion, then what a rendered conversation holds after the assistant's text."""
    prompt = renderer.render_ids([user("q")], add_generation_prompt=True)
    answer = sample(tokenizer, "x")
    whole = renderer.render_ids([user("q"), assistant("x"), *new], add_generation_prompt=True)
    assert whole[: len(prompt) + 1] == prompt + answer
    end = tokenizer.convert_tokens_to_ids(stop)
    assert whole[len(prompt) + 1] == end
    for completion in (answer, [*answer, end]):
        following = renderer.bridge_to_next_turn(prompt, completion, new)
        assert following == whole
        rendered = renderer.bridge(prompt, completion, new)
        reference = renderer.render([user("q"), assistant("x"), *new], add_generation_prompt=True)
        start = len(prompt) + len(completion)
        assert rendered.is_content == reference.is_content[start:]
        assert rendered.roles == reference.roles[start:]
        assert rendered.message_index == [max(i - 2, -1) for i in reference.message_index[start:]]


TINY = byte_tokenizer()
quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(["", "\n", " a \n", *ADDED])
arguments = st.dictionaries(texts, texts | st.integers() | st.none() | st.lists(texts, max_size=2), max_size=2)
calls = st.lists(st.builds(call, st.sampled_from(["weather", "look"]), arguments), max_size=2)
replies = st.builds(
    lambda text, thought, calls: assistant(text, reasoning_content=thought, tool_calls=calls), texts, texts, calls
)
others = st.builds(
    lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "tool", "system"]), texts
)
