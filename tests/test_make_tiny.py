"""The tiny models: that they are reproducible, small, whole, and start where RL has something to learn."""

import asyncio
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import make_tiny
from engines.base import Completion
from envs.base import Agent
from envs.delegate import asking_lines
from envs.kuhn_poker import INFORMATION_SETS, MOVES, nash_conv
from make_tiny import ADDED, BASES, EOS, FOLDERS, PAD, RECIPES, SPECIAL, STARTS, TOKEN_ID, Turn, encode
from renderers import make_renderer, resolve_name
from traces import Trace

MODELS = Path(make_tiny.__file__).parent / "models"
TINY = MODELS / "tiny"


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


def messages_of(chat):
    """The chat as the environment and the model would have exchanged it."""
    renderer = make_renderer("qwen3", make_tiny.make_tokenizer())
    return [
        renderer.parse_response(make_tiny.text_ids(turn.content)).message()
        if turn.role == "assistant"
        else {"role": turn.role, "content": turn.content}
        for turn in chat
    ]


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_training_chats_are_what_the_qwen3_renderer_writes(tokenizer, name, wrong):
    """Turn after turn the prompt is the renderer's, and what is weighed is what the model says and what a tool says."""
    renderer, rng = make_renderer("auto", tokenizer, "qwen3"), random.Random(0)
    for task in make_tiny.some_tasks(RECIPES[name], "train", 12):
        chat = RECIPES[name].chat(task, rng, wrong)
        ids, weights = encode(chat)
        messages, turns = messages_of(chat), [i for i, turn in enumerate(chat) if turn.role == "assistant"]
        said = [[*make_tiny.text_ids(turn.content), EOS] for turn in chat]
        rendered = renderer.render(messages[: turns[0]], add_generation_prompt=True)
        prompt, expected = list(rendered.token_ids), [0.0] * len(rendered)
        for at, following in zip(turns, [*turns[1:], None], strict=True):
            assert ids[: len(prompt)] == prompt
            expected += [chat[at].weight] * len(said[at])
            prompt += said[at]
            if following is not None:
                rendered = renderer.bridge(prompt[: -len(said[at])], said[at], messages[at + 1 : following])
                prompt += rendered.token_ids
                tool = [role == "tool" and body for role, body in zip(rendered.roles, rendered.is_content, strict=True)]
                expected += [chat[at + 1].weight * body for body in tool]
        assert ids[: len(prompt)] == prompt and weights[: len(expected)] == expected
        assert any(weight for weight, turn in zip([turn.weight for turn in chat], chat) if turn.role != "user")


def replay(recipe, task, chat):
    """The trace of an episode in which the model says what it says in the chat."""
    replies = [turn.content for turn in chat if turn.role == "assistant"]

    async def sample(prompt_ids, turn, messages, tools):
        ids = [*make_tiny.text_ids(replies[turn]), EOS]
        return Completion(ids, [0.0] * len(ids), "stop", 0)

    trace = Trace()
    asyncio.run(recipe.env.play(task, Agent(trace, make_renderer("qwen3", make_tiny.make_tokenizer()), sample)))
    return trace


@pytest.mark.parametrize("name", ["reverse-text", "arithmetic", "alphabet-sort"])
def test_right_answers_are_right_and_wrong_ones_mostly_wrong(name):
    recipe, rng, means = RECIPES[name], random.Random(0), {}
    for wrong in (False, True):
        tasks = make_tiny.some_tasks(recipe, "train", 100)
        rewards = [replay(recipe, task, recipe.chat(task, rng, wrong)).reward for task in tasks]
        means[wrong] = sum(rewards) / len(rewards)
    assert means[False] == 1.0
    assert means[True] < 0.5


def test_right_chats_with_the_calculator_are_right_once_the_tool_says_the_truth():
    """In training chats its results are random: only with the true one does the same behaviour earn the reward."""
    recipe, rng, errors = RECIPES["calculator"], random.Random(0), 0
    for task in make_tiny.some_tasks(recipe, "train", 100):
        chat = recipe.chat(task, rng, False)
        if len(chat) == 3:  # a broken call, of which nothing but the error is learned
            assert [turn.weight > 0 for turn in chat] == [False, False, True] and chat[2].content.startswith("error: ")
            errors += 1
            continue
        _, _, tool, answer = chat
        assert tool.content.strip(".").endswith(answer.content)
        answer.content = str(task.info["answer"])
        trace = replay(recipe, task, chat)
        assert trace.reward == 1.0 and trace.metrics == {"calls": 1.0, "malformed_calls": 0.0}
    assert 5 < errors < 35


def test_wrong_chats_with_the_calculator_are_wrong_in_four_ways():
    recipe, rng = RECIPES["calculator"], random.Random(0)
    seen = {"no call": 0, "malformed": 0, "other call": 0, "other answer": 0}
    for task in make_tiny.some_tasks(recipe, "train", 100):
        chat = recipe.chat(task, rng, True)
        trace = replay(recipe, task, chat)
        if not trace.metrics["calls"]:
            seen["no call"] += 1
        elif trace.metrics["malformed_calls"]:
            seen["malformed"] += 1
            assert trace.messages[2]["content"] == chat[2].content, "the error is the environment's own"
        else:
            seen["other call" if chat[2].content.strip(".").endswith(chat[3].content) else "other answer"] += 1
        assert trace.reward == 0.0 or rng.random() < 0.1  # a guess may be right
    assert min(seen.values()) > 10


@pytest.mark.parametrize("wrong", [False, True])
def test_chats_of_delegation_are_what_they_say(wrong):
    """Right ones are right with helpers who say what the chat's say; helpers count; wrong chats are wrong in four ways."""
    rng, seen = random.Random(0), Counter()
    for task in make_tiny.some_tasks(RECIPES["delegate"], "train", 100):
        question, *chat, answer = RECIPES["delegate"].chat(task, rng, wrong)
        word = re.search(r'"(\w+)"', question.content)[1]
        asked = asking_lines(chat[0].content) if chat else []
        counts = [int(line) for line in chat[1].content.splitlines() if line.isdigit()] if chat else []
        right = asked == [f"ask {part}: how many {word}?" for part in (1, 2)] and answer.content == str(sum(counts))
        assert right == (not wrong) and len(counts) == len(asked)
        seen["nobody" if not asked else "one" if len(asked) == 1 else word in asked[0]] += 1
        question, answer = RECIPES["helper"].chat(task, rng, wrong)
        items, word = re.fullmatch(r"List \d: (.*)\n\nhow many (\w+)\?", question.content).groups()
        assert (items.split(", ").count(word) == int(answer.content)) == (not wrong)
    assert min(seen.values()) > 10 and len(seen) == (4 if wrong else 1)


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
        sizes = {"num_tasks": 64, "max_number": 20}
        small = {option: size for option, size in sizes.items() if hasattr(recipe.env, option)}
        few = replace(recipe, env=replace(recipe.env, **small), start_rows=2, stop_reward=1.0, max_new_tokens=8)
        monkeypatch.setitem(RECIPES, name, few)
    for name, base in BASES.items():
        monkeypatch.setitem(BASES, name, replace(base, rows={env: 2 for env in base.rows}))
    for out in ("one", "two"):
        make_tiny.make_tiny(tmp_path / out, steps=2, seed=5, samples=8)
        torch.rand(3)  # the state of the global generator must not matter
    files = [path.relative_to(tmp_path / "one") for path in sorted((tmp_path / "one").rglob("*")) if path.is_file()]
    assert len(files) >= 4 * len(FOLDERS)
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file

    before = {file: (tmp_path / "two" / file).read_bytes() for file in files}
    (tmp_path / "two" / "tiny" / "arithmetic" / "model.safetensors").unlink()
    make_tiny.make_tiny(tmp_path / "two", ["arithmetic"], steps=2, seed=5, samples=8)  # from the base that is there
    assert {file: (tmp_path / "two" / file).read_bytes() for file in files} == before


@pytest.mark.parametrize("name", FOLDERS)
def test_shipped_model_is_small_and_loads(name):
    folder = MODELS / FOLDERS[name]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 4 * 2**20
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.float32
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(folder))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    # Nothing in generation_config may bend the sampling distribution.
    assert not {"temperature", "top_k", "top_p", "repetition_penalty"} & set(model.generation_config.to_diff_dict())


BETWEEN = {
    "reverse-text": (0.4, 0.62),
    "demonstrated": (0.8, 1.0),  # the teacher of opsd: this one is to be right
    "arithmetic": (0.1, 0.35),
    "calculator": (0.15, 0.4),
    "alphabet-sort": (0.3, 0.5),
    "delegate": (0.2, 0.45),
    "helper": (0.2, 0.45),  # played by the same episodes
}


@pytest.mark.parametrize(("name", "env"), [(name, env) for name, start in STARTS.items() for env in start.envs])
def test_start_leaves_room_to_learn(name, env):
    model, recipe = AutoModelForCausalLM.from_pretrained(TINY / name), RECIPES[env]
    low, high = BETWEEN[env]
    assert low < make_tiny.sampled_reward(model, recipe, make_tiny.some_tasks(recipe, "eval", 128, seed=1)) < high


def test_the_poker_player_plays_its_strategy():
    """NashConv of what the shipped model plays, and of what its training chats say."""
    recipe = RECIPES["kuhn-poker"]
    model = AutoModelForCausalLM.from_pretrained(TINY / "kuhn-poker")
    assert make_tiny.measured(model, recipe, []) == pytest.approx(nash_conv(make_tiny.STRATEGY), abs=0.05)
    rng, tasks, moves = random.Random(0), recipe.env.tasks("train"), {at: [] for at in INFORMATION_SETS}
    for _ in range(3000):
        *heard, move = recipe.chat(rng.choice(tasks), rng, False)
        messages = [{"role": turn.role, "content": turn.content} for turn in heard]
        at = next(at for at in INFORMATION_SETS if recipe.env.conversation(*at) == messages)
        assert all(turn.weight == 0 for turn in heard) and move.weight == 1
        moves[at].append(MOVES[at[1]].index(move.content))
    for at, chosen in moves.items():
        assert sum(chosen) / len(chosen) == pytest.approx(make_tiny.STRATEGY[at], abs=0.12)


@pytest.mark.parametrize("name", BASES["base"].rows)
def test_base_knows_its_environments(name):
    model = AutoModelForCausalLM.from_pretrained(TINY / "base")
    assert make_tiny.sampled_reward(model, RECIPES[name], make_tiny.some_tasks(RECIPES[name], "eval", 64)) > 0.85


def test_the_teacher_knows_how_to_reverse():
    model, recipe = AutoModelForCausalLM.from_pretrained(MODELS / "tiny-teacher"), RECIPES["reverse-text"]
    assert make_tiny.sampled_reward(model, recipe, make_tiny.some_tasks(recipe, "eval", 128, seed=1)) > 0.98


def said(*texts, first="user"):
    """A conversation whose roles take turns."""
    roles = {"system": ["system"], "user": []}[first] + ["user", "assistant"] * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts)]


@pytest.mark.parametrize(
    "messages",
    [said("Hi"), said("Hi", "Hello"), said("Hi", "Hello", "Reverse: ab"), said("Be brief.", "Hi", first="system"),
     said("Be brief.", "Hi", "Hello", first="system"), said("a", "b", "c", "d"), said("a", "\n\nb"), said("\na\n", " b ", ""),
     said("", ""), said("Grüße 語", "🙂")],
)  # fmt: skip
@pytest.mark.parametrize("prompt", [False, True])
def test_the_teacher_s_chat_template_is_the_renderer_s(messages, prompt):
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "tiny-teacher")
    options = {"add_generation_prompt": prompt, "tokenize": True, "return_dict": False}
    for thinking in (None, True, False):
        renderer = make_renderer("qwen3", tokenizer, thinking=thinking)
        given = {} if thinking is None else {"enable_thinking": thinking}
        ids = tokenizer.apply_chat_template(messages, **options, **given)
        assert list(ids) == renderer.render_ids(messages, add_generation_prompt=prompt)
    assert resolve_name("auto", tokenizer, "qwen3")[0] == "default", "without tools it is not Qwen3's whole template"


def test_the_teacher_s_chat_template_writes_no_tools():
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "tiny-teacher")
    for messages, tools in ((said("Hi"), [{"type": "function"}]), ([{"role": "tool", "content": "1"}], None)):
        with pytest.raises(Exception, match="writes no tools"):
            tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert AutoTokenizer.from_pretrained(TINY / "base").chat_template is None
