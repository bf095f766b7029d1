"""Countdown: solvable tasks, and expressions that try to be more than one."""

import json
import time
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import parse
from envs.countdown import Countdown, tagged, value_of
from tests.speaker import play
from traces import Task

GIVEN = [3, 7, 25, 50]


def earns(reply, target=118, **options):
    trace = play(
        Countdown(**options), Task("t", [{"role": "user", "content": "?"}], {"numbers": GIVEN, "target": target}), reply
    )
    return trace.reward, trace.metrics["formatted"], trace.metrics["legal"]


@pytest.mark.parametrize(
    "options",
    [{}, {"numbers": 3}, {"numbers": 6, "max_target": 999, "max_number": 100}, {"min_numbers": 2, "numbers": 2}],
)
def test_tasks_are_solvable_distinct_and_in_one_split(options):
    env = Countdown(**options, num_tasks=500)
    env.check()
    train, held_out = env.tasks("train"), env.tasks("eval")
    assert (
        len({task.key for task in train + held_out}) == len(train) + len(held_out) == 500 and 30 < len(held_out) < 100
    )
    assert env.tasks("train") == train
    for task in train + held_out:
        numbers, target, solution = (task.info[name] for name in ("numbers", "target", "answer"))
        assert value_of(solution, numbers) == target and 1 <= target <= env.max_target
        assert env.min_numbers <= len(numbers) <= env.numbers and all(1 <= n <= env.max_number for n in numbers)
        assert (
            target not in numbers
            and f"Reach {target} from the numbers {', '.join(map(str, numbers))}." in task.prompt[0]["content"]
        )
    assert len({task.key.split("=")[0] for task in train}) > 50, "numbers vary"
    assert play(env, train[0], f"Well. {train[0].info['demonstration']}").reward == 1.0


def test_splits_agree_between_sizes():
    small, large = Countdown(numbers=3), Countdown(numbers=4, num_tasks=3000)
    assert not {t.key for t in small.tasks("train")} & {t.key for t in large.tasks("eval")}


@pytest.mark.parametrize(
    ("expression", "value"),
    [("50 * 3 - 25 - 7", 118), ("3", 3), ("(50)", 50), ("50-(-25)", 75), ("-3 + 7", 4), ("50/25/7*3", Fraction(6, 7)),
     ("7/(3/25)", Fraction(175, 3)), ("(25-3)*(50-7)", 946), ("\n 50\n-25 ", 25), ("007 + 3", 10), ("3-50", -47)],
)  # fmt: skip
def test_legal(expression, value):
    assert value_of(expression, GIVEN) == value


@pytest.mark.parametrize(
    "expression",
    ["", " ", "118", "50+50", "3+3", "7*7", "1+117", "50**3", "3**7**25**50", "50//25", "50%7", "50^3", "7!", "50 3", "503", "5 0",
     "3 7 25 50", "0000000037", "3.0+7", "3.", ".3", "3e7", "0x3", "3_7", "3j", "٣+7", "³", "3×7", "3−7", "50÷25", "3=3", "50*3-25-7=118",
     "x+3", "abs(3)", "max(3,7)", "__import__('os')", "3 if 7 else 25", "3;7", "3,7", "[3]", "3 and 7", "3<7", "()", "(3", "3)", ")3(",
     "3(7)", "(3)(7)", "3+", "*3", "3*/7", "7/(3-3)", "50/(25-25)", "3/0", "(" * 60 + "3" + ")" * 60, "(" * 5000 + "3" + ")" * 5000,
     "-" * 5000 + "3", "9" * 5000, "3+" * 5000 + "3", "3\x00", "3\ufeff", "\ud800", "3\t+7\u20287", "3\\n+7", "nan", "inf", "1e999"],
)  # fmt: skip
def test_not_legal(expression):
    start = time.perf_counter()
    assert value_of(expression, GIVEN) is None
    assert time.perf_counter() - start < 0.1


@pytest.mark.parametrize(
    ("expression", "numbers", "value"), [("3+3", [3, 3, 7], 6), ("3+3+3", [3, 3, 7], None), ("33", [3, 3], None), ("33", [33, 3], 33)]
)  # fmt: skip
def test_a_number_counts_as_often_as_it_is_given(expression, numbers, value):
    assert value_of(expression, numbers) == value


@pytest.mark.parametrize(
    ("reply", "earned"),
    [(tagged("50*3-25-7"), (1, 1, 1)), (f"<think>{tagged('3')}</think> {tagged('50*3-25-7')}", (1, 1, 1)),
     (f"{tagged('50*3-25-7')} or {tagged('50')}", (0, 1, 1)), ("<answer><answer>50*3-25-7</answer>", (1, 1, 1)),
     (tagged("50+50+18"), (0, 1, 0)), (tagged("118"), (0, 1, 0)), (tagged("50*3-25-7=118"), (0, 1, 0)), (tagged(""), (0, 1, 0)),
     ("50*3-25-7", (0, 0, 0)), ("<answer>50*3-25-7", (0, 0, 0)), ("50*3-25-7</answer>", (0, 0, 0)), ("", (0, 0, 0)),
     ("</answer>50*3-25-7<answer>", (0, 0, 0)), ("\x00\ufffd", (0, 0, 0))],
)  # fmt: skip
def test_rewards(reply, earned):
    assert earns(reply) == earned


def test_the_reward_of_the_format():
    assert earns(tagged("50"), format_reward=0.1)[0] == 0.1
    assert earns(tagged("50+50"), format_reward=0.1)[0] == earns("50", format_reward=0.1)[0] == 0
    assert earns(tagged("50*3-25-7"), format_reward=0.1)[0] == 1


def test_a_fraction_near_the_target_misses_it():
    assert earns(tagged("7/3"), target=2)[0] == 0 and earns(tagged("50/25"), target=2)[0] == 1


@given(st.text(alphabet="0123456789+-*/()% .\n", max_size=40) | st.text(max_size=40))
@settings(max_examples=300, deadline=None)
def test_nothing_raises_and_nothing_is_used_that_is_not_given(text):
    value = value_of(text, GIVEN)
    if value is not None:
        digits = "".join(c if c.isdigit() else " " for c in text).split()
        assert len(digits) == len(set(map(int, digits))) and set(map(int, digits)) <= set(GIVEN)


@pytest.mark.parametrize(
    ("flag", "value", "rule"),
    [("numbers", "9", "between --env.min-numbers 3 and 8"), ("numbers", "2", "between --env.min-numbers 3"), ("min-numbers", "1", "at least 2"),
     ("max-number", "0", "at least 1"), ("max-number", "10000", "at most 9999"), ("max-target", "0", "at least 1"), ("num-tasks", "0", "at least 1"),
     ("format-reward", "1", r"in [0, 1)"), ("format-reward", "-1", r"in [0, 1)"), ("format-reward", "nan", r"in [0, 1)")],
)  # fmt: skip
def test_one_line_names_the_option(flag, value, rule, capsys):
    with pytest.raises(SystemExit):
        parse(["--env", "countdown", f"--env.{flag}={value}"])
    error = capsys.readouterr().err
    assert f"--env.{flag} {value}: must" in error and rule in error and error.count("\n") == 1


def test_options_reach_the_environment():
    config, _ = parse("--env countdown --env.numbers 5 --env.format-reward 0.1".split())
    assert config.sources[0].env == Countdown(numbers=5, format_reward=0.1)
    json.dumps(config.to_dict())
    sizes = {len(task.info["numbers"]) for task in config.sources[0].env.tasks("train")}
    assert all(b == a + 1 for a, b in pairwise(sorted(sizes))) and sizes == {3, 4, 5}
