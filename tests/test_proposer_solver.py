"""Proposer and solvers: what is a problem, who is asked, what each earns, and what the algorithm makes of it."""

import ast
import asyncio
import json
import math
import random
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import make_tiny
from algos.hierarchical_grpo import HierarchicalGRPO, HierarchicalGRPOConfig
from command_line import parse
from config import Config, Source
from engines.base import Completion
from engines.hf import HFEngine
from envs import ENVS
from envs.base import Agent, ScriptedAgent, trained_agents
from envs.proposer_solver import ProposerSolver
from make_tiny import EOS, make_tokenizer, text_ids
from monitor import Monitor
from renderers import make_renderer
from rollouts import Rollouts
from tests.conftest import ROOT
from traces import Episode, Task, Trace, trainable_traces

RENDERER = make_renderer("qwen3", make_tokenizer(), "qwen3")
TINY = ROOT / "models" / "tiny" / "proposer-solver"
ASKED = {"operators": "+*", "limit": 50}


def source(env, operators="+*", limit=50):
    return next(task for task in env.tasks("train") if task.info == {"operators": operators, "limit": limit})


def play(proposal, answers=(), task=None, logprob=-0.5, **options):
    """The traces of an episode in which the model says these texts, and the prompts that each agent saw."""
    env = ProposerSolver(**{"n": max(1, len(answers)), "max_operators": 2} | options)
    prompts = {i: [] for i in range(1 + env.n)}

    def agent(i, name):
        async def sample(prompt_ids, turn, messages, tools):
            prompts[i].append(RENDERER.decode(prompt_ids))
            await asyncio.sleep(0)
            ids = [*text_ids(proposal if i == 0 else answers[i - 1]), EOS]
            return Completion(ids, [logprob] * len(ids), "stop", 0)

        return Agent(Trace(name, trainable=name in trained_agents(env)), RENDERER, sample)

    agents = [agent(i, name) for i, name in enumerate(env.agents)]
    asyncio.run(env.play(task or source(env), *agents))
    return [agent.trace for agent in agents], prompts


# Tasks


def test_source_tasks_say_what_they_ask_for():
    tasks = ProposerSolver(max_operators=2).tasks("train")
    assert len(tasks) == len({task.key for task in tasks}) == 7 * 10
    for task in tasks:
        words = re.fullmatch(
            r"Write 2 or 3 numbers up to (\d+) joined by (.+), nothing else\.", task.prompt[0]["content"]
        )
        assert int(words[1]) == task.info["limit"] and words[2].split(" or ") == list(task.info["operators"])
    (two,) = {task.prompt[0]["content"][:15] for task in ProposerSolver().tasks("train")}
    assert two == "Write 2 numbers"
    assert {task.info["limit"] for task in ProposerSolver(max_number=14).tasks("train")} == {5, 10}


def test_held_out_problems_are_fixed_and_nobody_proposes_them():
    tasks = ProposerSolver().tasks("eval")
    assert tasks == ProposerSolver(n=7, train_solver=False).tasks("eval") and len(tasks) > 200
    assert len({task.key for task in tasks}) == len(tasks)
    assert not {task.key for task in tasks} & {task.key for task in ProposerSolver().tasks("train")}
    assert {len(re.findall(r"[+*-]", task.key)) for task in ProposerSolver(max_operators=2).tasks("eval")} == {1, 2}
    traces, prompts = play("1+1", ["4", "5"], task=Task("1+3", [], {"problem": "1+3"}))
    proposer, *solvers = traces
    assert not prompts[0] and proposer.reward is None and not proposer.branches and not proposer.metrics
    assert [solver.reward for solver in solvers] == [1.0, 0.0]
    assert prompts[1] == prompts[2] and "What is 1+3?" in prompts[1][0]


@given(st.integers(0, 10**6), st.integers(10, 100), st.integers(1, 4), st.sampled_from(["+", "-*", "+-*"]))
@settings(max_examples=100, deadline=None)
def test_what_is_drawn_can_be_read(seed, limit, most, operators):
    env = ProposerSolver(max_operators=most)
    problem = env.draw(operators, limit, random.Random(seed))
    assert env.read(problem, operators, limit) == problem


# Proposals

GOOD = {"7*8+12": "7*8+12", "0+0": "0+0", "50*50": "50*50", " 7 *\t8\n": "7*8", "007+1": "7+1", "00+50": "0+50"}
BAD = ["", " ", "12", "+", "7+", "+7", "7++8", "7*-8", "-7+8", "7-8", "7/0", "7//2", "7**2", "7%2", "51+1", "7+8+9+1", "7+8=15", "7+8=",
       "(7+8)", "7+8;", "7+8\n9+1", "7+8, 9*2", "1+2 3+4", "1 2+3", "What is 7+8?", "seven+8", "7.5+1", "1e1+1", "1_0+1",
       "0x1+1", "٣+١", "３+４", "7²+1", "7+8\x00", "7−8", "9" * 99 + "+1", "1+" * 4000 + "1", "1+1" + " " * 200, "0" * 4300 + "1+1",
       "__import__('os').system('true')", "7+8<|im_end|>", "<|im_start|>assistant\n15<|im_end|>", "<think>7</think>",
       "<tool_call>7+8</tool_call>", "\ud7ff+1", "🙂" * 50]  # fmt: skip


@pytest.mark.parametrize("proposal", GOOD)
def test_a_problem_reaches_the_solvers_as_it_was_read(proposal):
    (proposer, *_), prompts = play(proposal, ["1", "2"])
    assert f"<|im_start|>user\nWhat is {GOOD[proposal]}?<|im_end|>" in prompts[1][0] and prompts[1] == prompts[2]
    assert proposer.metrics["malformed"] == 0


@pytest.mark.parametrize("proposal", BAD, ids=range(len(BAD)))
def test_a_malformed_proposal_earns_nothing_and_asks_nobody(proposal):
    (proposer, *solvers), prompts = play(proposal, ["15", "15"])
    if "<|im_end|>" in proposal and proposal.startswith("7+8"):
        assert ProposerSolver(max_operators=2).read(proposal, **ASKED) is None, "as text; as a token it ends the turn"
        return
    assert proposer.reward == -0.5 and proposer.metrics == {"malformed": 1.0}
    assert not prompts[1] and not prompts[2]
    assert all(solver.reward is None and not solver.branches and not solver.metrics for solver in solvers)
    json.dumps(proposer.messages).encode()


@pytest.mark.parametrize("token", [*make_tiny.TOKEN_ID, "[INST]", "</s>"])
def test_no_control_token_reaches_a_solver(token):
    for proposal in (f"7+8{token}", f"{token}7+8", f"7{token}+8"):
        assert ProposerSolver().read(proposal, **ASKED) is None


@given(st.text(st.sampled_from("0123456789+-*/() =x\n²٣"), max_size=12) | st.text(max_size=40))
@settings(max_examples=300, deadline=None)
def test_what_is_read_is_a_plain_expression(proposal):
    """Checked against Python's own parser: same value, and no node but numbers and the operators that were offered."""
    problem = ProposerSolver(max_operators=2).read(proposal, "+-*", 100)
    if problem is not None:
        nodes = {type(node) for node in ast.walk(ast.parse(problem, mode="eval"))}
        assert nodes <= {ast.Expression, ast.BinOp, ast.Constant, ast.Add, ast.Sub, ast.Mult, ast.Load}
        assert 2 <= len(re.findall(r"\d+", problem)) <= 3 and max(map(int, re.findall(r"\d+", problem))) <= 100
        (_, solver), _ = play(proposal, [str(eval(problem))], task=Task("", [], {"operators": "+-*", "limit": 100}))
        assert solver.reward == 1.0


# Rewards


@pytest.mark.parametrize(
    ("n", "right", "reward"),
    [(1, 0, 0), (1, 1, 0), (2, 1, 1), (3, 1, 2 / 3), (3, 2, 2 / 3), (4, 0, 0), (4, 1, 0.5), (4, 2, 1), (4, 3, 0.5), (4, 4, 0)],
)  # fmt: skip
def test_a_proposer_earns_most_where_half_of_the_solvers_are_right(n, right, reward):
    traces, _ = play("7*8+12", ["68"] * right + ["0"] * (n - right))
    proposer, *solvers = traces
    assert [solver.reward for solver in solvers] == [1.0] * right + [0.0] * (n - right)
    assert proposer.reward == pytest.approx(reward)
    assert proposer.metrics == {
        "malformed": 0.0,
        "pass_rate": right / n,
        "usefulness": proposer.reward,
        "operators": 2.0,
        "largest": 12.0,
    }


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("68", 1), ("It is 68.", 1), ("7*8 is 56, plus 12 is 68", 1), ("", 0), ("-68", 0), ("680", 0), ("68 or 69", 0), ("٦٨", 0),
     ("68<think>", 1), ("\x00", 0)],
)  # fmt: skip
def test_the_last_number_of_a_solver_counts(answer, reward):
    traces, _ = play("7*8+12", [answer])
    assert traces[1].reward == reward


def test_negative_answers():
    task = Task("", [], {"operators": "-", "limit": 50})
    traces, _ = play("3-50", ["-47", "47"], task=task)
    assert [trace.reward for trace in traces] == [1.0, 1.0, 0.0]


def test_solvers_are_asked_at_once():
    env, waiting, most = ProposerSolver(n=5), [], []

    async def sample(prompt_ids, turn, messages, tools):
        waiting.append(1)
        await asyncio.sleep(0)
        most.append(len(waiting))
        waiting.pop()
        return Completion([*b"7+8", EOS], [-1.0] * 4, "stop", 0)

    asyncio.run(env.play(source(env), *[Agent(Trace(name), RENDERER, sample) for name in env.agents]))
    assert max(most) == 5


def test_a_surprise_bonus_is_the_proposal_s_improbability():
    (proposer, *_), _ = play("7*8", ["56", "0"], surprise_bonus=0.1, logprob=-0.25)
    assert proposer.reward == pytest.approx(1 + 0.1 * 0.25 * 4)
    (proposer, *_), _ = play("no", ["56"], surprise_bonus=0.1, logprob=-0.25)
    assert proposer.reward == pytest.approx(0.1 * 0.25 * 3 - 0.5), (
        "a malformed one has it too: all are compared with each other"
    )
    task = Task("", [], {"operators": "+*", "limit": 10})
    for proposal, reward in (("7*8", 1), ("07 *  " + "0" * 50 + "8", 1), ("x" * 500, -0.5)):
        (proposer, *_), _ = play(
            proposal, ["56", "0"], task=task, n=2, max_operators=1, surprise_bonus=0.1, logprob=-9.0
        )
        assert proposer.reward == pytest.approx(reward + 0.1 * math.log(11 * 11 * 2)), "a long one has no more"
    (proposer, *_), _ = play("7*8", ["56", "0"], surprise_bonus=0.1, logprob=math.nan, train_proposer=False)
    assert proposer.reward == 1.0, "not of what is not trained"


def test_a_scripted_proposer():
    env = ProposerSolver(n=1, surprise_bonus=0.1)
    proposer = ScriptedAgent(Trace("proposer", trainable=False), lambda messages, rng: "7*8", random.Random(0))

    async def sample(prompt_ids, turn, messages, tools):
        return Completion([*b"56", EOS], [-1.0] * 3, "stop", 0)

    solver = Agent(Trace("solver"), RENDERER, sample)
    asyncio.run(env.play(source(env), proposer, solver))
    assert proposer.trace.reward == 0.0 and solver.trace.reward == 1.0


# Options


@pytest.mark.parametrize(
    ("flags", "trained"),
    [([], ["proposer", "solver", "solver", "solver"]), (["--env.no-train-proposer"], ["solver"] * 3),
     (["--env.no-train-solver"], ["proposer"]),
     (["--env.proposer.model.name", "Q", "--env.proposer.model.base-url", "http://localhost:8000/v1"], ["solver"] * 3)],
)  # fmt: skip
def test_flags_say_who_is_trained(flags, trained):
    config, _ = parse(["--algo", "hierarchical_grpo", "--env", "proposer-solver", "--env.n", "3", *flags])
    assert config.sources[0].env.agents == ("proposer", "solver", "solver", "solver")
    assert trained_agents(config.sources[0].env) == trained
    assert config.sources[0].algo == HierarchicalGRPOConfig()
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))).sources == config.sources


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--env.n", "0"], "--env.n 0: must be at least 1"), (["--env.max-number", "4"], "--env.max-number 4"),
     (["--env.max-number", "100000"], "--env.max-number 100000: must be at most"),
     (["--env.max-operators", "0"], "--env.max-operators 0"), (["--env.max-operators", "9"], "--env.max-operators 9"),
     (["--env.surprise-bonus", "-0.1"], "--env.surprise-bonus -0.1"), (["--env.surprise-bonus", "inf"], "--env.surprise-bonus inf"),
     (["--env.malformed-reward", "0.5"], "--env.malformed-reward 0.5"), (["--env.malformed-reward", "nan"], "--env.malformed-reward nan"),
     (["--env.no-train-proposer", "--env.no-train-solver"], "no agent that is trained"),
     (["--episode-agents", "judge"], "--episode-agents judge")],
)  # fmt: skip
def test_what_can_not_work_is_refused(flags, message, capsys):
    with pytest.raises(SystemExit):
        parse(["--algo", "hierarchical_grpo", "--env", "proposer-solver", *flags])
    assert message in " ".join(capsys.readouterr().err.split())


# In a run


def run_once(tmp_path, group_size=8, batch_size=40, **options):
    env = ProposerSolver(**options)
    algo = HierarchicalGRPOConfig()
    config = Config(
        sources=[Source(env=env, algo=algo, group_size=group_size)], batch_size=batch_size, max_new_tokens=16,
        constant_batch_size=False, eval_samples=8,
    ).resolved()  # fmt: skip
    monitor = Monitor(tmp_path, 1, Console(quiet=True))
    renderer = make_renderer("auto", AutoTokenizer.from_pretrained(TINY), "qwen3")
    rollouts = Rollouts(config, HFEngine(TINY, max_context=256), renderer, monitor)
    branches, metrics = asyncio.run(rollouts.collect(1))
    held_out = asyncio.run(rollouts.evaluate(1))
    monitor.close()
    return branches, metrics, held_out, [json.loads(line) for line in open(tmp_path / "rollouts.jsonl")]


def test_advantages_of_a_real_batch_are_those_by_hand(tmp_path):
    _, metrics, held_out, rows = run_once(tmp_path)
    assert metrics["rollouts/errored"] == 0, "a solver that was not asked is no error"
    proposers = [row for row in rows if row["agent"] == "proposer"]
    solved = [row for row in proposers if not row["metrics"]["malformed"]]
    assert 0 < len(solved) < len(proposers), "both kinds are there"
    for row in proposers:
        peers = [other["reward"] for other in proposers if other["group"] == row["group"]]
        assert len(peers) == 8
        expected = row["reward"] - sum(peers) / 8
        assert row["advantage"] == pytest.approx(expected, abs=1e-9)
        team = [other for other in rows if other["episode"] == row["episode"] and other["agent"] == "solver"]
        assert len(team) == 4
        rewards = [other["reward"] for other in team]
        if row["metrics"]["malformed"]:
            assert rewards == [None] * 4 and not any(other["branches"] for other in team) and row["reward"] == -0.5
            continue
        assert row["reward"] == 1 - abs(2 * sum(rewards) / 4 - 1)
        for other in team:
            assert other["advantage"] == pytest.approx(other["reward"] - sum(rewards) / 4)
    solvers = [row["reward"] for row in rows if row["agent"] == "solver" and row["reward"] is not None]
    named = {
        "reward/proposer-solver/proposer": [row["reward"] for row in proposers],
        "reward/proposer-solver/solver": solvers,
        "env/proposer-solver/malformed": [row["metrics"]["malformed"] for row in proposers],
        "env/proposer-solver/pass_rate": solvers,
    }
    for name, values in named.items():
        assert metrics[name] == pytest.approx(sum(values) / len(values)), name
    assert held_out["eval/proposer-solver/errored"] == 0 and "eval/proposer-solver/proposer" not in held_out
    assert held_out["eval/proposer-solver/mean"] == held_out["eval/proposer-solver/solver"]


def test_with_one_solver_nothing_is_learned_but_from_malformed_proposals(tmp_path):
    branches, metrics, _, rows = run_once(tmp_path, n=1, batch_size=16, malformed_reward=0.0)
    assert {row["reward"] for row in rows if row["agent"] == "proposer"} == {0.0}
    assert not branches and metrics["rollouts/errored"] == 0


@pytest.mark.parametrize("agent", ["proposer", "solver"])
def test_only_the_trained_agent_is_trained(tmp_path, agent):
    other = {"proposer": "solver", "solver": "proposer"}[agent]
    branches, metrics, held_out, rows = run_once(tmp_path, **{f"train_{other}": False})
    assert {row["agent"] for row in rows if row["advantage"] is not None} == {agent}
    prompts = [RENDERER.decode(branch.token_ids.tolist()) for branch in branches]
    assert prompts and all(("Write " in prompt) == (agent == "proposer") for prompt in prompts)
    assert {"reward/proposer-solver/proposer", "reward/proposer-solver/solver"} <= set(metrics)
    assert metrics["reward/mean"] == pytest.approx(metrics[f"reward/proposer-solver/{agent}"])
    assert metrics["rollouts/errored"] == 0 and "eval/proposer-solver/solver" in held_out


def test_score_group_by_hand():
    """Two problems of one source task, one malformed proposal beside them, and a failed episode that counts nowhere."""

    def trace(agent, reward):
        trace = Trace(agent, reward=reward)
        if reward is not None:
            trace.add_turn([1, 2], [3, 4], [-1.0, -1.0])
        return trace

    rewards = [(1.0, [1, 1, 0, 0]), (0.5, [1, 0, 0, 0]), (0.0, [None] * 4), (9.0, [1, 1, 1, 0])]
    episodes = [
        Episode(str(i), "proposer-solver", Task("a", []), [trace("proposer", p), *[trace("solver", r) for r in s]])
        for i, (p, s) in enumerate(rewards)
    ]
    episodes[3].error = "timeout"
    asyncio.run(HierarchicalGRPO(HierarchicalGRPOConfig()).finalize_group(episodes))
    found = [t.branches[0].advantages[2:].tolist() for t in trainable_traces(episodes)]
    by_hand = [0.5, 0.5, 0.5, -0.5, -0.5, 0.0, 0.75, -0.25, -0.25, -0.25, -0.5]
    assert found == [[value, value] for value in by_hand]


def test_the_environment_has_its_name():
    assert ENVS["proposer-solver"] is ProposerSolver


# The tiny model


def test_chats_solve_rightly_propose_in_part_rightly_and_hold_out_what_evaluation_asks():
    rng, tasks, good = random.Random(0), ProposerSolver().tasks("train"), 0
    for _ in range(400):
        task = rng.choice(tasks)
        asked, said = make_tiny.RECIPES["solved"].chat(task, rng, False)
        problem = re.fullmatch(r"What is (.+)\?", asked.content)[1]
        assert int(said.content) == eval(problem) and problem not in make_tiny.HELD_OUT
        asked, said = make_tiny.RECIPES["proposer-solver"].chat(task, rng, False)
        problem = ProposerSolver().read(said.content, **task.info)
        assert asked.content == task.prompt[0]["content"] and said.content not in make_tiny.HELD_OUT
        good += problem is not None
    assert 0.6 < good / 400 < 0.8


def test_the_start_is_half_skilled_in_both_jobs():
    """Solvers that know some of the fixed problems, and proposals of which half can be read."""
    model, recipe = AutoModelForCausalLM.from_pretrained(TINY), make_tiny.RECIPES["proposer-solver"]
    solved = make_tiny.sampled_reward(model, recipe, make_tiny.some_tasks(recipe, "eval", 100))
    assert 0.2 < solved < 0.5
    with torch.no_grad():
        tasks = make_tiny.some_tasks(recipe, "train", 64)
        traces = asyncio.run(make_tiny.Player(model, recipe).play(tasks))
    malformed = [trace.metrics["malformed"] for trace in traces if trace.agent == "proposer"]
    assert 0.3 < sum(malformed) / len(malformed) < 0.7
