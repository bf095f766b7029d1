"""reasoning-gym: every family can be played, its own answers are right, and no answer breaks a run."""

import json
import math
import warnings

import pytest

pytest.importorskip("reasoning_gym", reason="needs the extra envs")

from reasoning_gym.factory import DATASETS

import envs.reasoning_gym
from command_line import parse
from envs.grading import WORKER_POOL
from envs.reasoning_gym import ReasoningGym, dataset, entries, score
from tests.speaker import play

# The package gives no answer of its own for these, only a scorer; a composite has no tasks before it is told of what it is made.
WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
NEEDS_CONFIG = {"composite"}
GARBAGE = ["", "garbage", "[1, 2]", "((((", "\x00", "1/0", "None", "{}", "٣", "exit()", "[" * 500, "\ud800"]


@pytest.fixture(scope="module", autouse=True)
def workers():
    yield
    WORKER_POOL.close()
    dataset.cache_clear()
    entries.cache_clear()


def test_every_family_scores_its_own_answer_1_and_no_answer_raises():
    names = DATASETS.keys() - NEEDS_CONFIG
    assert len(names) >= 100 and names >= WITHOUT_ANSWER
    wrong = {}
    for name in sorted(names):
        entry = dataset(name, "{}", 0, 1)[0]
        assert isinstance(entry["question"], str)
        own = score(name, "{}", entry["answer"], entry)
        if own != (None if entry["answer"] is None else 1.0) and name not in WITHOUT_ANSWER:
            wrong[name] = own
        assert (entry["answer"] is None) == (name in WITHOUT_ANSWER), name
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [score(name, "{}", answer, entry) for answer in GARBAGE]
        assert all(value is None or math.isfinite(value) for value in found), name
    assert not wrong


def test_splits_are_distinct_disjoint_and_the_same_again():
    env = ReasoningGym(task="basic_arithmetic", size=200, eval_size=50)
    train, held_out = env.tasks("train"), env.tasks("eval")
    assert len(train) > 190 and len(held_out) > 45
    questions = [task.prompt[-1]["content"] for task in train + held_out]
    assert len(set(questions)) == len({task.key for task in train + held_out}) == len(questions)
    entries.cache_clear()
    assert [task.key for task in env.tasks("train")] == [task.key for task in train]
    other = ReasoningGym(task="basic_arithmetic", size=200, eval_size=50, seed=1)
    assert [task.key for task in other.tasks("train")] != [task.key for task in train]


def test_of_few_questions_each_split_gets_some():
    env = ReasoningGym(
        task="basic_arithmetic",
        size=400,
        eval_size=400,
        config={
            "min_digits": 1,
            "max_digits": 1,
            "min_terms": 2,
            "max_terms": 2,
            "operators": ["+"],
            "allow_parentheses": False,
            "allow_negation": False,
        },
    )
    env.check()
    train, held_out = ({task.key for task in env.tasks(split)} for split in ("train", "eval"))
    assert len(train) > 20 and len(held_out) > 20 and not train & held_out


def test_options_of_a_family():
    flags = "--env reasoning-gym --env.task chain_sum --env.config min_terms=2 max_terms=2 min_digits=3 max_digits=3 --env.size 20"
    config, _ = parse(flags.split())
    json.dumps(config.to_dict())
    env = config.sources[0].env
    assert env.config["max_terms"] == 2 and all(abs(int(task.info["answer"])) < 2000 for task in env.tasks("train"))


def test_rewards_and_formats():
    env = ReasoningGym(task="chain_sum", size=5, answer="tags")
    task = env.tasks("train")[0]
    right = task.info["answer"]
    assert task.prompt[0]["role"] == "system" and "<answer>" in task.prompt[0]["content"]
    for reply, reward, formatted in (
        (f"<answer>{right}</answer>", 1, 1), (f"<answer>0</answer> <answer>\n{right}\n</answer> end", 1, 1), (f"<answer>{right}0</answer>", None, 1),
        (right, 0, 0), (f"<answer>{right}", 0, 0), ("", 0, 0), ("<answer></answer>", 0, 1),
    ):  # fmt: skip
        trace = play(env, task, reply)
        assert trace.metrics == {"formatted": formatted, "unreadable": 0}
        assert trace.reward == reward if reward is not None else trace.reward < 1
    env = ReasoningGym(task="chain_sum", size=5)  # the default asks for what a small model can do
    task = env.tasks("train")[0]
    assert len(task.prompt) == 1 and task.prompt[0]["content"].endswith("on the last line.")
    assert play(env, task, f"so\n{right}\n").reward == 1 and play(env, task, f"{right}\nso").reward < 1
    assert play(env, task, " \n ").metrics["formatted"] == 0


def test_an_answer_that_is_code_runs_in_a_worker_or_not_at_all():
    env = ReasoningGym(task="spiral_matrix", answer="tags", size=2, eval_size=2)
    task = env.tasks("train")[0]
    trace = play(env, task, "<answer>[exit()]</answer>")
    assert trace.reward == 0 and trace.metrics["unreadable"] in (0, 1)
    assert play(env, task, f"<answer>{task.info['answer']}</answer>").reward == 1, "exit() harms no later answer"
    with pytest.raises(RuntimeError, match="exit code 7"):
        play(env, task, "<answer>[__import__('os')._exit(7)]</answer>")
    env = ReasoningGym(task="spiral_matrix", answer="tags", size=2, eval_size=2, grading_timeout=0.5)
    with pytest.raises(TimeoutError):
        play(env, task, "<answer>[__import__('time').sleep(60)]</answer>")
    assert play(env, task, f"<answer>{task.info['answer']}</answer>").reward == 1


def test_a_scorer_that_fails_is_counted():
    env = ReasoningGym(task="prime_factorization", answer="tags", size=2, eval_size=2)
    trace = play(env, env.tasks("train")[0], "<answer>garbage</answer>")
    assert trace.reward == 0 and trace.metrics == {"formatted": 1, "unreadable": 1}


@pytest.mark.parametrize(
    ("flags", "words"),
    [("", ("--env.task is missing", "gsm_symbolic")), ("--env.task gsm_symbolc", ("--env.task gsm_symbolc", "did you mean gsm_symbolic")),
     ("--env.task zzzzzz", ("--env.task zzzzzz", "e.g. gsm_symbolic")), ("--env.task composite", ("--env.config", "composite says")),
     ("--env.task chain_sum --env.config min_digit=2", ("--env.config min_digit=2", "min_digits")),
     ("--env.task chain_sum --env.config min_digits=9", ("--env.config min_digits=9: chain_sum says",)),
     ("--env.task chain_sum --env.config min_digits=two", ("--env.config min_digits=two: chain_sum says",)),
     ("--env.task chain_sum --env.config size=2", ("--env.config size=2: set --env.size",)),
     ("--env.task chain_sum --env.size 0", ("--env.size 0",)), ("--env.task chain_sum --env.seed 2000000000", ("--env.seed 2000000000",)),
     ("--env.task chain_sum --env.answer tags --env.system-prompt none", ("--env.system-prompt none", "default")),
     ("--env.task chain_sum --env.system-prompt direct", ("--env.system-prompt direct", "--env.answer tags")),
     ("--env.task chain_sum --env.grading-timeout -1", ("--env.grading-timeout -1",))],
)  # fmt: skip
def test_one_line_names_the_option(flags, words, capsys):
    with pytest.raises(SystemExit):
        parse(["--env", "reasoning-gym", *flags.split()])
    error = capsys.readouterr().err
    assert all(word in error for word in words) and error.count("\n") == 1, error


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(envs.reasoning_gym, "installed", lambda package: False)
    with pytest.raises(ValueError, match=r"reasoning-gym needs .* '.\[envs\]'"):
        ReasoningGym(task="chain_sum").check()
