"""The tiny models: that they are reproducible, small, whole, and start where RL has something to learn."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import make_tiny
from make_tiny import ADDED, EOS, PAD, RECIPES, SPECIAL, TOKEN_ID, Turn, encode, sampled_reward, some_tasks
from renderers import make_renderer

TINY = Path(make_tiny.__file__).parent / "models" / "tiny"
NAMES = ["base", *RECIPES]


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that share a busy machine wait for each other; a model this small needs one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY / "base")


def test_every_byte_has_its_value_as_id(tokenizer):
    text = "".join(chr(code) for code in range(0x180)) + "語 🙂\r\n  \t"
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    # UTF-8 never uses all 256 values; the vocabulary has them all the same, so that any bytes can be sampled.
    assert sorted(tokenizer.get_vocab().values()) == list(range(256 + len(TOKEN_ID)))


def test_control_tokens_are_atomic_and_flagged_as_in_qwen3(tokenizer):
    for token in SPECIAL + ADDED:
        assert tokenizer.encode(f"a{token}b") == [ord("a"), TOKEN_ID[token], ord("b")]
        assert tokenizer.decode([TOKEN_ID[token]]) == token
        assert tokenizer.added_tokens_decoder[TOKEN_ID[token]].special == (token in SPECIAL)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (EOS, PAD)


@pytest.mark.parametrize("name", RECIPES)
def test_training_chats_are_what_the_qwen3_renderer_writes(tokenizer, name):
    task = next(iter(RECIPES[name].env.tasks("train")))
    chat = RECIPES[name].chat(task, random.Random(0), False)
    ids, weights = encode(chat)
    prompt = make_renderer("auto", tokenizer, "qwen3").render(task.prompt, add_generation_prompt=True).token_ids
    assert ids[: len(prompt)] == list(prompt)
    assert [token for token, weight in zip(ids, weights, strict=True) if weight] == ids[len(prompt) : -1]
    assert ids[len(prompt) : -1] == [*chat[-1].content.encode(), EOS]


def test_right_answers_are_right_and_wrong_ones_mostly_wrong():
    for recipe in RECIPES.values():
        rng = random.Random(0)
        means = {}
        for wrong in (False, True):
            rewards = []
            for task in random.Random(0).sample(list(recipe.env.tasks("train")), 100):
                agent = make_tiny.Recorded(recipe.chat(task, rng, wrong)[-1].content)
                asyncio.run(recipe.env.play(task, agent))
                rewards.append(agent.trace.reward)
            means[wrong] = sum(rewards) / len(rewards)
        assert means[False] == 1.0
        assert means[True] < 0.5


def test_loss_counts_weighted_tokens_alone():
    model = make_tiny.make_model(0)
    chats = [[Turn("user", "ab"), Turn("assistant", "ba", 1.0)], [Turn("user", "abcd"), Turn("assistant", "dcba", 0.5)]]
    total, mass = 0.0, 0.0
    for chat in chats:  # one by one, hence without padding
        ids, weights = encode(chat)
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        for t in range(1, len(ids)):
            total -= weights[t] * logprobs[t - 1, ids[t]].item()
            mass += weights[t]
    assert make_tiny.chat_loss(model, chats).item() == pytest.approx(total / mass, rel=1e-5)


def test_same_seed_same_files(tmp_path, monkeypatch):
    for name, recipe in RECIPES.items():
        env = replace(recipe.env, num_tasks=64) if name == "reverse-text" else recipe.env
        monkeypatch.setitem(RECIPES, name, replace(recipe, env=env, base_rows=4, start_rows=4))
    for out in ("one", "two"):
        make_tiny.make_tiny(tmp_path / out, steps=2, seed=5, samples=16)
        torch.rand(3)  # the state of the global generator must not matter
    files = [path.relative_to(tmp_path / "one") for path in sorted((tmp_path / "one").rglob("*")) if path.is_file()]
    assert len(files) >= 4 * len(NAMES)
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


@pytest.mark.parametrize("name", NAMES)
def test_shipped_model_is_small_and_loads(name):
    assert sum(path.stat().st_size for path in (TINY / name).iterdir()) <= 4 * 2**20
    model = AutoModelForCausalLM.from_pretrained(TINY / name)
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.float32
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(TINY / name))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    # Nothing in generation_config may bend the sampling distribution.
    assert not {"temperature", "top_k", "top_p", "repetition_penalty"} & set(model.generation_config.to_diff_dict())


@pytest.mark.parametrize("name", RECIPES)
def test_start_leaves_room_to_learn(name):
    model = AutoModelForCausalLM.from_pretrained(TINY / name)
    low, high = {"reverse-text": (0.4, 0.62), "arithmetic": (0.1, 0.35)}[name]
    assert low < sampled_reward(model, RECIPES[name], some_tasks(RECIPES[name], "eval", 128, seed=1)) < high


@pytest.mark.parametrize("name", RECIPES)
def test_base_knows_its_environments(name):
    model = AutoModelForCausalLM.from_pretrained(TINY / "base")
    assert sampled_reward(model, RECIPES[name], some_tasks(RECIPES[name], "eval", 64)) > 0.85
