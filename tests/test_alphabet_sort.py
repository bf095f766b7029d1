"""Sorting over several turns: tasks, grading, and what a template that drops past reasoning does to the sequences."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.base import Completion
from envs.alphabet_sort import AlphabetSort, names_of
from envs.base import Agent, Cut
from make_tiny import EOS, make_tokenizer, text_ids
from renderers import make_renderer
from tests.test_envs_base import RENDERER, agent_of
from traces import Trace

TASK = AlphabetSort().tasks("train")[0]
FIRST, SECOND = (" ".join(answer) for answer in TASK.info["answers"])


def play(*replies, task=TASK, env=None, renderer=RENDERER):
    """(trace, engine) of an episode in which the model says these."""
    said = list(replies)
    agent, engine, trace = agent_of(lambda prompt: said.pop(0), renderer)
    asyncio.run((env or AlphabetSort()).play(task, agent))
    return trace, engine


@pytest.mark.parametrize(
    "env", [AlphabetSort(), AlphabetSort(turns=1), AlphabetSort(turns=3, names=4, more=2, syllables=3, num_tasks=500)]
)
def test_tasks_are_right_distinct_and_apart(env):
    train, held_out = env.tasks("train"), env.tasks("eval")
    env.check()
    assert len({task.key for task in train + held_out}) == 2 * env.num_tasks
    assert not {n for t in train for n in t.key.split()} & {n for t in held_out for n in t.key.split()}
    for task in train[:100]:
        said = [task.prompt[0]["content"], *task.info["later"]]
        names = [text.partition(": ")[2].split() for text in said]
        assert [len(some) for some in names] == [env.names] + [env.more] * (env.turns - 1)
        for turn, answer in enumerate(task.info["answers"], 1):
            assert answer == sorted(sum(names[:turn], [])) and len(set(answer)) == len(answer)
    assert [task.key for task in env.tasks("train")] == [task.key for task in train]


def test_names_follow_a_rule():
    assert {"Ba", "Zu"} <= set(names_of("train", 1)) | set(names_of("eval", 1))
    assert len(names_of("train", 2)) + len(names_of("eval", 2)) == 80**2


def test_a_play_through_both_turns():
    trace, engine = play(FIRST, SECOND)
    assert trace.reward == 1.0 and trace.metrics == {"exact": 1.0, "turn_1": 1.0, "turn_2": 1.0}
    assert [m["content"] for m in trace.messages] == [TASK.prompt[0]["content"], FIRST, TASK.info["later"][0], SECOND]
    (branch,) = trace.branches
    assert len(branch.turns) == 2 and FIRST in engine.prompts[1]


@pytest.mark.parametrize(
    ("first", "reward"),
    [
        (FIRST, 1.0), (FIRST.upper(), 1.0), (FIRST.replace(" ", ", ") + ".", 1.0), (FIRST.replace(" ", "\n"), 1.0),
        (f"1. {FIRST}", 1.0), (" ".join(FIRST.split()[:2]), 2 / 3), (f"Names: {FIRST}", 3 / 4), ("", 0.0), ("1 2 3", 0.0),
        (" ".join(FIRST.split()[::-1]), 1 / 3), (f"{FIRST} {FIRST}", 1 / 2), ("é\ufffd\x00", 0.0),
        ("<think>\n" + FIRST + "\n</think>\n\n", 0.0), ("<think>\nhm\n</think>\n\n" + FIRST, 1.0),
    ],
)  # fmt: skip
def test_a_turn_earns_what_is_in_place(first, reward):
    trace, _ = play(first, SECOND)
    assert trace.reward == pytest.approx((reward + 1) / 2) and trace.metrics["turn_1"] == pytest.approx(reward)
    assert trace.metrics["exact"] == float(reward == 1)


def test_a_turn_that_a_limit_takes_away_counts_0_and_is_not_exact():
    trace = Trace()

    async def sample(prompt_ids, turn, messages, tools):
        if turn:
            raise Cut("context")
        return Completion([*text_ids(FIRST), EOS], [-1.0] * (len(FIRST) + 1), "stop", 0)

    with pytest.raises(Cut):
        asyncio.run(AlphabetSort().play(TASK, Agent(trace, RENDERER, sample)))
    assert trace.reward == 0.5 and trace.metrics == {"exact": 0.0, "turn_1": 1.0}


@given(st.text(max_size=200), st.text(max_size=20))
@settings(max_examples=40, deadline=None)
def test_no_reply_raises_or_earns_more_than_one(first, second):
    trace, _ = play(first, second)
    assert 0 <= trace.reward <= 1


@pytest.mark.parametrize(("retention", "branches"), [("all", 1), ("template", 3)])
@pytest.mark.parametrize("thinks", [True, False])
def test_a_template_that_drops_past_reasoning_splits_the_conversation(retention, branches, thinks):
    env = AlphabetSort(turns=3, names=2, more=1)
    task = env.tasks("train")[0]
    thought = "<think>\nlet me see\n</think>\n\n" if thinks else ""
    replies = [thought + " ".join(answer) for answer in task.info["answers"]]
    renderer = make_renderer("qwen3", make_tokenizer(), "qwen3", thinking_retention=retention)
    trace, engine = play(*replies, task=task, env=env, renderer=renderer)
    assert trace.reward == 1.0 and len(trace.branches) == (branches if thinks else 1)
    assert engine.prompts[2].count("let me see") == (2 if thinks and retention == "all" else 0)
    sampled = [RENDERER.decode(branch.token_ids[branch.sampled]) for branch in trace.branches]
    assert "".join(sampled) == "".join(f"{reply}<|im_end|>" for reply in replies), "each token trains once"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"turns": 0}, "--env.turns 0: must be at least 1"),
        ({"more": 0}, "--env.more 0: must be at least 1"),
        ({"syllables": 1, "names": 19}, "--env.names 19: 20 names in all turns, and only 19 to choose from"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        AlphabetSort(**options).check()
