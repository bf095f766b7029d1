"""Samplers and gates: what golden cases do not pin, that is chance, state, metrics and refusals (test_golden_credit.py
has the rest)."""

import json
from collections import Counter
from itertools import count

import numpy as np
import pytest

from curriculum import (
    GATES,
    SAMPLERS,
    AdvRangeConfig,
    AdvRangeGate,
    Curriculum,
    DifficultyPoolConfig,
    DifficultyPoolSampler,
    Pool,
    StandardConfig,
    StandardSampler,
    make_curriculum,
)
from traces import Episode, Task, Trace, assign_advantages

TASKS = [Task(key, []) for key in "abcd"]


def group(key, *rewards, advantage=None, error=None):
    episodes = []
    for reward in rewards:
        trace = Trace(reward=reward, error=error)
        trace.add_turn([1], [2, 3], [-1.0, -1.0])
        if advantage is not None:
            assign_advantages(trace, advantage)
        episodes.append(Episode("e", "env", Task(key, []), [trace]))
    return episodes


def draws(sampler, n):
    return [sampler.sample().key for _ in range(n)]


def test_a_stream_of_tasks_is_drawn_in_order_and_ends_with_a_word():
    sampler = StandardSampler(Task(str(i), []) for i in range(3))
    assert draws(sampler, 3) == ["0", "1", "2"]
    with pytest.raises(ValueError, match="ran out of tasks"):
        sampler.sample()


def test_a_stream_of_tasks_resumes():
    first, second = (StandardSampler(Task(str(i), []) for i in count()) for _ in range(2))
    draws(first, 5)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert draws(second, 2) == draws(first, 2) == ["5", "6"]


def test_tasks_are_drawn_by_weight():
    sampler = DifficultyPoolSampler(TASKS, DifficultyPoolConfig({"low": (0.5, 0.0), "high": (1.0, 3.0)}), seed=1)
    sampler.observe(group("a", 0.0))
    sampler.observe(group("b", 1.0))
    drawn = Counter(draws(sampler, 5000))
    assert drawn["a"] == 0
    for key, probability in sampler.probabilities().items():
        assert drawn[key] / 5000 == pytest.approx(probability, abs=0.03)


@pytest.mark.parametrize("point", [0.0, np.nextafter(1.0, 0.0)])
def test_the_ends_of_the_unit_interval_draw_no_task_of_weight_zero(point):
    sampler = DifficultyPoolSampler(TASKS, DifficultyPoolConfig({"low": (0.5, 0.0), "high": (1.0, 0.3)}))
    for key, reward in zip("abcd", (0.0, 1.0, 1.0, 0.0), strict=True):
        sampler.observe(group(key, reward))
    sampler._rng = type("Rng", (), {"random": lambda self: point})()
    assert sampler.sample().key == ("c" if point else "b")


def test_pools_of_weight_zero_are_left_once_every_task_was_seen():
    sampler = DifficultyPoolSampler(TASKS[:2], DifficultyPoolConfig({"all": (1.0, 0.0)}))
    sampler.observe(group("a", 0.5))
    assert draws(sampler, 5) == ["b"] * 5
    sampler.observe(group("b", 0.5))
    with pytest.raises(ValueError, match="all 2 tasks lie in pools of weight 0"):
        sampler.sample()


def test_the_same_seed_draws_the_same_tasks_and_a_resumed_sampler_goes_on():
    one, same, other, resumed = (DifficultyPoolSampler(TASKS, seed=seed) for seed in (3, 3, 4, 5))
    for sampler in (one, same, other):
        sampler.observe(group("a", 0.0))
    assert draws(one, 50) == draws(same, 50) != draws(other, 50)
    resumed.observe(group("d", 1.0))  # forgotten by what is loaded
    resumed.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert draws(resumed, 50) == draws(one, 50)
    assert resumed.weights() == one.weights() and resumed.metrics() == one.metrics()


def test_scores_of_tasks_that_are_gone_are_left_out():
    before, after = DifficultyPoolSampler(TASKS), DifficultyPoolSampler(TASKS[1:])
    before.observe(group("a", 0.0))
    before.observe(group("b", 0.0))
    after.load_state_dict(before.state_dict())
    after.observe(group("a", 1.0))
    assert after.scores == {"b": 0.0}


def test_pool_metrics():
    sampler = DifficultyPoolSampler(TASKS)
    for key, reward in (("a", 0.1), ("b", 0.5), ("c", 7.0)):
        sampler.observe(group(key, reward))
    sampler.observe(group("d", 1.0, error="boom"))
    assert sampler.metrics() == {"unseen": 1.0, "pool/hard": 1.0, "pool/normal": 1.0, "pool/easy": 1.0}


@pytest.mark.parametrize(
    ("pools", "match"),
    [
        ({}, "at least one pool"),
        ({"hard": (float("nan"), 1.0)}, "hard: threshold nan"),
        ({"hard": (0.5, -1.0)}, "hard: weight -1.0"),
        ({"hard": (0.5, float("inf"))}, "hard: weight inf"),
        ({"hard": (0.5, 1.0), "easy": (0.5, 2.0)}, "hard, easy: two pools have the same threshold"),
    ],
)
def test_pools_that_are_refused(pools, match):
    with pytest.raises(ValueError, match=match):
        DifficultyPoolConfig(pools).check()
    with pytest.raises(ValueError, match=match):
        DifficultyPoolSampler(TASKS, DifficultyPoolConfig(pools))


@pytest.mark.parametrize(("low", "high"), [(0.1, -0.1), (float("nan"), 0.0), (0.0, float("nan"))])
def test_ranges_that_are_refused(low, high):
    with pytest.raises(ValueError, match=r"--gate.reject-min"):
        AdvRangeConfig(low, high).check()
    with pytest.raises(ValueError, match=r"--gate.reject-max"):
        AdvRangeGate(AdvRangeConfig(low, high))


@pytest.mark.parametrize("sampler", [DifficultyPoolSampler, StandardSampler])
def test_tasks_that_are_refused(sampler):
    with pytest.raises(ValueError, match="no tasks"):
        sampler([])
    with pytest.raises(ValueError, match="same key"):
        sampler([TASKS[0], TASKS[0]])


def test_a_curriculum_is_built_from_configs_and_resumes():
    gates = {"low_signal": AdvRangeConfig(-0.05, 0.05), "extreme": AdvRangeConfig(5.0, 9.0)}
    one, two = (make_curriculum(TASKS, DifficultyPoolConfig({"all": (1.0, 1.0)}), gates, seed=7) for _ in range(2))
    assert not one.observe(group("a", 0.0, 1.0, advantage=0.05))
    assert one.observe(group("b", 0.0, 1.0, advantage=0.5))
    assert one.metrics() == {
        "unseen": 2.0,
        "pool/all": 2.0,
        "low_signal/seen": 2.0,
        "low_signal/rejected": 1.0,
        "extreme/seen": 2.0,
        "extreme/rejected": 0.0,
    }  # the rejected group was observed too
    one.sample()
    state = json.loads(json.dumps(one.state_dict()))
    two.load_state_dict(state)
    assert two.metrics() == one.metrics() and two.state_dict() == one.state_dict()
    assert draws(two, 20) == draws(one, 20)
    del state["gates"]["extreme"]
    two.load_state_dict(state)  # a gate that is new begins afresh


def test_every_sampler_and_gate_has_a_config_of_its_own():
    assert {cls.Config for cls in SAMPLERS.values()} == {StandardConfig, DifficultyPoolConfig}
    assert {cls.Config for cls in GATES.values()} == {AdvRangeConfig}
    for cls in SAMPLERS.values():
        cls.Config().check()
        assert isinstance(make_curriculum(TASKS, cls.Config(), {}), Curriculum)
    assert Pool(*json.loads(json.dumps(Pool(0.5, 1.0)))) == Pool(0.5, 1.0)
