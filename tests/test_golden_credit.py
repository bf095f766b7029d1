"""Golden values of credit assignment (A), curricula (E) and routing (G).

Adapters only: a golden trace becomes a `Trace`, goes through the two hooks as in a run, and its streams are read back.
"""

import asyncio
from collections.abc import Iterable

import numpy as np
import pytest

from algos import ALGORITHMS
from algos.advantage import shaped_rewards, subagent_calls, token_counts
from curriculum import (
    AdvRangeConfig,
    AdvRangeGate,
    Curriculum,
    DifficultyPoolConfig,
    DifficultyPoolSampler,
    StandardSampler,
)
from packing import pack
from rollouts import Queue
from tests.golden_cases import cases, check
from traces import Branch, Edge, Episode, Task, Trace, Turn, route_actions

ENDLESS = 10**6


def algorithm(name: str, **knobs):
    return ALGORITHMS[name](ALGORITHMS[name].Config(**knobs))


def sampled_branch(tokens: int, turns: Iterable[Turn] = (), call: str | None = None) -> Branch:
    """One prompt token and `tokens` sampled ones."""
    branch = Branch(turns=list(turns), call=call)
    branch.append(np.zeros(1, np.int32), False, [np.nan], ["user"], [True])
    branch.append(np.ones(tokens, np.int32), True, [0.0] * tokens, ["assistant"] * tokens, [True] * tokens)
    return branch


def trace_of(golden: dict, tokens: int = 3) -> Trace:
    return Trace(
        agent=golden.get("agent", "agent"),
        reward=golden.get("reward"),
        trainable=golden.get("trainable", True),
        error="boom" if golden.get("has_error") else None,
        branches=[sampled_branch(golden.get("sampled_tokens", tokens))],
    )


def episodes_of(traces: Iterable[Trace], task: str = "task") -> list[Episode]:
    """One episode for each trace, all of one task."""
    return [Episode(str(i), "env", Task(task, []), [trace]) for i, trace in enumerate(traces)]


def value(trace: Trace, stream: str = "advantages") -> float | None:
    """The one value of a stream that all sampled tokens of the trace agree on; None where nobody wrote it."""
    values = [getattr(branch, stream) for branch in trace.training_branches()]
    if not values or values[0] is None:
        assert all(one is None for one in values)
        return None
    (found,) = {number for one, branch in zip(values, trace.training_branches()) for number in one[branch.sampled]}
    return float(found)


def credit(algo, traces: list[Trace]) -> list[float | None]:
    """The advantages of one group of episodes with one trace each."""
    asyncio.run(algo.finalize_group(episodes_of(traces)))
    return [value(trace) for trace in traces]


# A: advantages


@pytest.mark.parametrize(("file", "doc", "case"), cases("grpo", "max_rl"))
def test_golden_group_mean(file, doc, case):
    traces = [trace_of({"reward": reward}) for reward in case["inputs"]["rewards"]]
    check(doc, case, lambda: {"advantages": credit(algorithm(case["kind"]), traces)})


@pytest.mark.parametrize(("file", "doc", "case"), cases("grpo_traces"))
def test_golden_which_traces_count(file, doc, case):
    traces = [trace_of(golden) for golden in case["inputs"]["traces"]]
    check(doc, case, lambda: {"advantages": credit(algorithm("grpo"), traces)})


def counted(inputs: dict) -> list[Trace]:
    """Traces with the given counts. A turn beyond the first stands in a branch of its own, in which nothing happens."""
    lengths = inputs.get("trainable_tokens", [3] * len(inputs["rewards"]))
    traces = []
    for i, (reward, length) in enumerate(zip(inputs["rewards"], lengths, strict=True)):
        trace = Trace(reward=reward, branches=[sampled_branch(length)])
        if "num_turns" in inputs:
            first, *others = [Turn(0, 0, 0, "stop")] * inputs["num_turns"][i]
            first = Turn(inputs["num_input_tokens"][i], inputs["num_output_tokens"][i], 0, "stop")
            trace.branches[0].turns = [first]
            trace.branches += [Branch(turns=[turn]) for turn in others]
        traces.append(trace)
    return traces


@pytest.mark.parametrize("algo", ["grpo", "echo"])
@pytest.mark.parametrize(("file", "doc", "case"), cases("linear"))
def test_golden_length_penalty(file, doc, case, algo):
    algo, traces = algorithm(algo, length_penalty="linear", **case["inputs"]["config"]), counted(case["inputs"])
    check(
        doc,
        case,
        lambda: {"shaped_rewards": shaped_rewards(traces, algo.config), "advantages": credit(algo, traces)},
    )


def with_subagents(inputs: dict) -> list[Trace]:
    traces = []
    for reward, golden in zip(inputs["rewards"], inputs["traces"], strict=True):
        trace = Trace(reward=reward, edges=[Edge(**edge) for edge in golden["edges"]])
        for branch in golden["branches"]:
            turns = [Turn(version=0, finish_reason="stop", **turn) for turn in branch["turns"]]
            trace.branches.append(sampled_branch(3, turns, branch["call"]))
        traces.append(trace)
    assert [trace.num_turns for trace in traces] == inputs["num_turns"]
    return traces


@pytest.mark.parametrize(("file", "doc", "case"), cases("linear-subagent"))
def test_golden_length_penalty_of_subagents(file, doc, case):
    algo = algorithm("grpo", length_penalty="linear-subagent", **case["inputs"]["config"])
    traces = with_subagents(case["inputs"])

    def run():
        outputs, inputs = zip(*[token_counts(trace, algo.config) for trace in traces])
        return {
            "subagent_calls": [sorted(subagent_calls(trace.edges)) for trace in traces],
            "output_tokens": outputs,
            "input_tokens": inputs,
            "shaped_rewards": shaped_rewards(traces, algo.config),
            "advantages": credit(algo, traces),
        }

    check(doc, case, run)


@pytest.mark.parametrize(("file", "doc", "case"), cases("length_weighted_baseline"))
def test_golden_length_weighted_baseline(file, doc, case):
    penalty = (case["inputs"]["length_penalty"] or {"type": "none"})["type"]
    algo, traces = algorithm("grpo", length_penalty=penalty, length_weighted_baseline=True), counted(case["inputs"])

    def run():
        advantages = credit(algo, traces)
        streams = np.concatenate([trace.branches[0].advantages for trace in traces])
        shaped = shaped_rewards(traces, algo.config)
        return {"shaped_rewards": shaped, "advantages": advantages, "token_sum": float(streams.sum())}

    check(doc, case, run)


@pytest.mark.parametrize("algo", ["grpo", "echo"])
@pytest.mark.parametrize(("file", "doc", "case"), cases("loss_aggregation_prompt"))
def test_golden_prompt_aggregation(file, doc, case, algo):
    groups = [counted(group) for group in case["inputs"]["groups"]]

    def weight(traces: Iterable[Trace]) -> float:
        return pack([branch for trace in traces for branch in trace.branches], ENDLESS)[1].rl

    def survivors(traces: list[Trace]) -> float:
        queue = Queue(batch_size=1, constant=True)
        queue.add(traces)
        return pack([branch for branches in queue.waiting for branch in branches], ENDLESS)[1].rl

    def run():
        got = {"advantages": [credit(algorithm(algo, loss_aggregation="prompt"), traces) for traces in groups]}
        got["rl_weight_per_token"] = []
        for traces in groups:
            (one,) = {value(trace, "rl_weights") for trace in traces}
            got["rl_weight_per_token"].append(one)
        got["group_weight_before_filter"] = [weight(traces) for traces in groups]
        got["group_weight_after_zero_filter"] = [survivors(traces) for traces in groups]
        got["N_rl"] = survivors([trace for traces in groups for trace in traces])
        return got

    check(doc, case, run, "float32")  # packing casts the weights


@pytest.mark.parametrize(("file", "doc", "case"), cases("rae"))
def test_golden_rae(file, doc, case):
    def run():
        algo = algorithm("rae", decay=case["inputs"]["decay"])
        advantages, baselines = [], []
        for group in case["inputs"]["groups"]:
            advantages.append(credit(algo, [trace_of(golden) for golden in group]))
            baselines.append(algo.state_dict()["baselines"])
        return {"advantages": advantages, "baselines_after_group": baselines}

    check(doc, case, run)


@pytest.mark.parametrize(("file", "doc", "case"), cases("hierarchical_grpo"))
def test_golden_hierarchical_grpo(file, doc, case):
    traces, episodes = [], {}
    for golden in case["inputs"]["traces"]:
        traces.append(trace_of(golden))
        name = golden["episode"]
        episodes.setdefault(name, Episode(name, "env", Task("task", []))).traces.append(traces[-1])

    def run():
        algo = algorithm("hierarchical_grpo", episode_agents=tuple(case["inputs"]["episode_agents"]))
        asyncio.run(algo.finalize_group(list(episodes.values())))
        return {"advantages": [value(trace) for trace in traces]}

    check(doc, case, run)


# E: curricula


def tasks_of(keys: list[str] | str):
    """A finite set, or a stream where the case says "generator"."""
    return iter([Task("t", [])]) if keys == "generator" else [Task(key, []) for key in keys]


def scored_group(advantages: list[list[float] | None], traces: list[dict]) -> list[Episode]:
    group = []
    for values, golden in zip(advantages, traces, strict=True):
        trace = trace_of({"reward": 0.0} | golden, tokens=len(values or [0.0]))
        if values is not None:
            trace.branches[0].advantages = np.array([np.nan, *values])  # the prompt's token has none
        group.append(trace)
    return episodes_of(group)


@pytest.mark.parametrize(("file", "doc", "case"), cases("standard"))
def test_golden_standard_sampler(file, doc, case):
    def run():
        curriculum = Curriculum(StandardSampler(tasks_of(case["tasks"])), {"gate": AdvRangeGate(AdvRangeConfig())})
        order = []
        for _ in range(case["draws"]):
            order.append(curriculum.sample().key)
            if case.get("observe_rejected_groups"):
                assert not curriculum.observe(scored_group([[0.0]], [{}]))
        return {"order": order}

    check(doc, case, run)


@pytest.mark.parametrize(("file", "doc", "case"), cases("standard_resume"))
def test_golden_standard_sampler_resumes(file, doc, case):
    def run():
        before, after = StandardSampler(tasks_of(case["tasks"])), StandardSampler(tasks_of(case["tasks"]))
        for _ in range(case["draws_before_checkpoint"]):
            before.sample()
        after.load_state_dict(before.state_dict())
        return {"order_after": [after.sample().key for _ in range(case["draws_after"])]}

    check(doc, case, run)


@pytest.mark.parametrize(("file", "doc", "case"), cases("difficulty_pool"))
def test_golden_difficulty_pool(file, doc, case):
    def run():
        pools = {name: (pool["threshold"], pool["weight"]) for name, pool in case["pools"].items()}
        sampler = DifficultyPoolSampler(tasks_of(case["tasks"]), DifficultyPoolConfig(pools))
        states = []
        for observation in case["observations"]:
            sampler.observe(episodes_of([trace_of(golden) for golden in observation["traces"]], observation["task"]))
            if case.get("draw"):
                sampler.sample()
            metrics = sampler.metrics()
            states.append(
                {
                    "scores": dict(sampler.scores),
                    "pool": {key: sampler.pool(key) for key in case["tasks"]},
                    "weights": list(sampler.weights().values()),
                    "probabilities": list(sampler.probabilities().values()),
                    "unseen": metrics["unseen"],
                    "occupancy": {name: metrics[f"pool/{name}"] for name in pools},
                }
            )
        return {"after_each_observation": states}

    check(doc, case, run)


@pytest.mark.parametrize(("file", "doc", "case"), cases("adv_range"))
def test_golden_advantage_range_gate(file, doc, case):
    def run():
        gate = AdvRangeGate(AdvRangeConfig(case["reject_min"], case["reject_max"]))
        traces = [trace for episode in case["group"] for trace in episode["traces"]]
        return {"admit": gate.admits(scored_group([trace["advantages"] for trace in traces], traces))}

    def run_on_grpo():
        gate = AdvRangeGate(AdvRangeConfig(case["reject_min"], case["reject_max"]))
        episodes = episodes_of(trace_of({"reward": reward}) for reward in case["rewards"])
        asyncio.run(algorithm("grpo").finalize_group(episodes))
        return {"admit": gate.admits(episodes)}

    check(doc, case, run)
    if "rewards" in case:
        check(doc, case, run_on_grpo)


class Scripted:
    """A sampler and a gate that count how often they are asked."""

    def __init__(self, decision: bool = True) -> None:
        self.decision, self.asked = decision, []

    def observe(self, episodes):
        self.asked.append(episodes)

    def admits(self, episodes):
        self.asked.append(episodes)
        return self.decision


@pytest.mark.parametrize(("file", "doc", "case"), cases("curriculum"))
def test_golden_curriculum(file, doc, case):
    def run():
        got = {"admit": [], "sampler_observes": [], "gates_called": []}
        for decisions in case["gate_decisions"]:
            sampler, gates = Scripted(), {str(i): Scripted(decision) for i, decision in enumerate(decisions)}
            got["admit"].append(Curriculum(sampler, gates).observe([]))
            got["sampler_observes"].append(bool(sampler.asked))
            got["gates_called"].append(len([call for gate in gates.values() for call in gate.asked]))
        return got

    check(doc, case, run)


# G: routing


def keep(trace: Trace, *, mask: list[bool]) -> list[list[bool]]:
    """A user's token filter."""
    assert len(trace.training_branches()) == 1
    return [mask]


@pytest.mark.parametrize(("file", "doc", "case"), cases("echo"))
def test_golden_echo(file, doc, case):
    branch = Branch()
    for message in case["messages"]:
        n = message["num_tokens"]
        content = [True] * n if message["is_content"] is None else message["is_content"]
        branch.append(np.zeros(n, np.int32), message["sampled"], [0.0] * n, [message["role"]] * n, content)
    mask = case["filter_keep_mask"]
    narrowed = {} if mask is None else {"filter": f"{__name__}.keep", "filter_kwargs": {"mask": mask}}

    def run():
        (episode,) = episodes_of([Trace(reward=0.0, branches=[branch])])
        asyncio.run(algorithm("echo", roles=case["roles"], **narrowed).finalize_episode(episode))
        weights = branch.ce_weights
        return {"ce_weights": None if weights is None else weights.tolist(), "loss_mask": branch.sampled.tolist()}

    check(doc, case, run)


@pytest.mark.parametrize(("file", "doc", "case"), cases("stamp"))
def test_golden_routing(file, doc, case):
    sampled = np.array(case["loss_mask"])
    before = case["ce_weights_before"]
    branch = Branch(
        token_ids=np.zeros(len(sampled), np.int32),
        sampled=sampled,
        ce_weights=None if before is None else np.array(before),
    )

    def run():
        route_actions(Trace(branches=[branch]), case["action_loss"])
        streams = {name: getattr(branch, name) for name in ("rl_weights", "ce_weights", "ref_kl_weights")}
        return {name: None if stream is None else stream.tolist() for name, stream in streams.items()}

    check(doc, case, run)
