"""The loss as a whole: what must not matter (layout, order, other components) does not, and nothing is ever NaN.

The formulas themselves are held against golden values in test_golden_math.py.
"""

import asyncio
import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algos import ALGORITHMS
from losses import LossInputs, LossOutputs, as_scalars, compute_loss, ipo, make_rl_loss, merge, summarize
from packing import pack
from rollouts import Queue, prune
from traces import Branch, Episode, Task, Trace

IPO = make_rl_loss("ipo")
ENDLESS = 2**20


def sequence_of(rng: np.random.Generator, length: int) -> tuple[Branch, np.ndarray]:
    """A random branch with a random subset of the streams, and the trainer's log-probs of its tokens."""
    sampled = rng.random(length) < 0.7
    logprobs = np.where(sampled, -rng.exponential(1.0, length), np.nan)
    branch = Branch(rng.integers(0, 9, length), sampled, logprobs, np.ones(length, bool))
    branch.advantages = rng.normal(size=length)
    if rng.random() < 0.5:
        branch.rl_weights = rng.choice([0.0, 0.5, 1.0], length)
    if rng.random() < 0.5:
        branch.ce_weights = rng.choice([0.0, 0.1, 1.0], length)
    if rng.random() < 0.5:
        branch.ref_kl_weights = np.where(sampled, rng.choice([0.0, 1.0], length), 0.0)
        branch.ref_logprobs = -rng.exponential(1.0, length)
    return branch, -rng.exponential(1.0, length)


def gradients_of(sequences, groups=None, micro_batch_tokens=None, rl_loss=IPO, only=None):
    """Loss, and d loss / d trainer_logprobs of each sequence (None: it is in no group).

    groups: the sequences that are packed together (default: all). only: the one component that counts.
    """
    _, counts = pack([branch for branch, _ in sequences], ENDLESS)
    denominators = {name: n if only in (None, name) else 0.0 for name, n in counts.denominators().items()}
    total, gradients = 0.0, [None] * len(sequences)
    for group in [range(len(sequences))] if groups is None else groups:
        for batch in pack([sequences[i][0] for i in group], ENDLESS, micro_batch_tokens)[0]:
            logprobs = torch.full(batch.token_ids.shape, torch.nan)
            spans = {i: batch.sequence_ids == k for k, i in enumerate(group) if (batch.sequence_ids == k).any()}
            for i, span in spans.items():
                logprobs[span] = torch.from_numpy(sequences[i][1]).float()
            logprobs.requires_grad_()
            loss, metrics = compute_loss(batch, logprobs, denominators, rl_loss)
            assert not any(math.isnan(value) for value in as_scalars(merge([metrics])).values())
            loss.backward()
            total += loss.item()
            gradients = [logprobs.grad[spans[i]] if i in spans else old for i, old in enumerate(gradients)]
    return total, gradients


def assert_same(mine, other):
    """Equal up to the order of float32 sums."""
    assert mine[0] == pytest.approx(other[0], rel=1e-5, abs=1e-6)
    for a, b in zip(mine[1], other[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@st.composite
def steps(draw, max_size=7):
    """The sequences of a step."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return [sequence_of(rng, length) for length in draw(st.lists(st.integers(1, 9), min_size=1, max_size=max_size))]


@settings(max_examples=60, deadline=None)
@given(steps(), st.data())
def test_layout_over_rows_and_micro_batches_does_not_matter(sequences, data):
    """A7 (one rank): no mean of means."""
    order = data.draw(st.permutations(range(len(sequences))))
    cuts = data.draw(st.sets(st.integers(1, len(sequences)), max_size=3))
    bounds = sorted({0, len(sequences), *cuts})
    groups = [order[start:stop] for start, stop in pairwise(bounds)]
    whole = gradients_of(sequences)
    assert_same(gradients_of(sequences, groups), whole)
    assert_same(gradients_of(sequences, micro_batch_tokens=data.draw(st.integers(1, 30))), whole)


@settings(max_examples=40, deadline=None)
@given(steps(), st.data())
def test_permuted_sequences_have_permuted_gradients(sequences, data):
    order = data.draw(st.permutations(range(len(sequences))))
    loss, gradients = gradients_of(sequences)
    assert_same(gradients_of([sequences[i] for i in order]), (loss, [gradients[i] for i in order]))


@settings(max_examples=60, deadline=None)
@given(steps(), st.integers(0, 2**32 - 1))
def test_ce_tokens_leave_the_rl_gradient_as_it_was_to_the_bit(sequences, seed):
    """A7: on the observations of the same sequences (echo) and as sequences of their own (sft)."""
    rng = np.random.default_rng(seed)
    for branch, _ in sequences:
        branch.ce_weights = branch.ref_kl_weights = None
    before = gradients_of(sequences)[1]
    for branch, _ in sequences:
        branch.ce_weights = np.where(branch.sampled, 0.0, 0.3)
    echo = gradients_of(sequences)[1]
    more = [sequence_of(rng, length) for length in (4, 11)]
    for branch, _ in more:
        branch.rl_weights, branch.ce_weights = np.zeros(len(branch)), np.ones(len(branch))
        branch.ref_kl_weights = None
    sft = gradients_of([*sequences, *more])[1]
    only_rl = gradients_of([*sequences, *more], only="rl")[1]
    for (branch, _), old, echoed, mixed, rl in zip(sequences, before, echo, sft, only_rl, strict=False):
        sampled = torch.from_numpy(branch.sampled)
        assert torch.equal(old[sampled], echoed[sampled]) and torch.equal(old[sampled], mixed[sampled])
        assert torch.equal(old, rl)
    assert not any(gradient.any() for gradient in only_rl[len(sequences) :])


@settings(max_examples=40, deadline=None)
@given(steps(), st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("way", ["not sampled", "rl weight 0", "advantage 0", "one token of advantage 0"])
def test_what_is_no_member_leaves_numerator_and_denominator(way, sequences, seed):
    """A8: a masked rollout, weights of 0, and advantages of 0 change nothing, as if they were not there."""
    branch, trainer = sequence_of(np.random.default_rng(seed), 6)
    for each in (branch, *(branch for branch, _ in sequences)):
        each.ce_weights = each.ref_kl_weights = None
    if way == "not sampled":
        branch.sampled[:] = False
    elif way == "rl weight 0":
        branch.rl_weights = np.zeros(6)
    elif way == "advantage 0":
        branch.advantages[:] = 0
        assert not prune(branch)
    else:
        branch.rl_weights, branch.advantages[2] = None, 0
        branch.sampled[1:3], branch.logprobs[1:3] = True, -0.5
        branch.sampled[3:] = False
        prune(branch)
        shorter = Branch(branch.token_ids[:2], branch.sampled[:2], branch.logprobs[:2], branch.is_content[:2])
        shorter.advantages = branch.advantages[:2]
        loss, gradients = gradients_of([*sequences, (shorter, trainer[:2])])
        longer = gradients_of([*sequences, (branch, trainer)])
        assert not longer[1][-1][2:].any()
        assert_same((longer[0], [*longer[1][:-1], longer[1][-1][:2]]), (loss, gradients))
        return
    loss, gradients = gradients_of([*sequences, (branch, trainer)])
    assert not gradients[-1].any()
    assert_same((loss, gradients[:-1]), gradients_of(sequences))


def group_of(rewards: list[float]) -> list[Trace]:
    """A group that GRPO has scored."""
    traces = []
    for reward in rewards:
        traces.append(Trace(reward=reward))
        traces[-1].add_turn([1, 2], [3, 4, 5], [-0.5, -1.0, -1.5])
    algorithm = ALGORITHMS["grpo"](ALGORITHMS["grpo"].Config())
    asyncio.run(algorithm.finalize_group([Episode("", "", Task("", []), [trace]) for trace in traces]))
    return traces


@pytest.mark.parametrize("name", ["ipo", "icepop", "custom"])
def test_a_micro_batch_without_members_is_a_zero_that_backpropagates(name):
    """A14: a group of equal rewards beside a good one, micro batches of one sequence."""
    knobs = {"import_path": "losses.ipo", "kwargs": {}} if name == "custom" else {}
    rl_loss, trainer = make_rl_loss(name, **knobs), np.array([0.0, 0.0, -0.6, -0.9, -1.4])
    good, same = group_of([1.0, 0.0]), group_of([1.0, 1.0])
    sequences = [(trace.branches[0], trainer) for trace in (*same, *good)]
    assert [prune(branch) for branch, _ in sequences] == [False, False, True, True]
    alone = gradients_of(sequences[2:], rl_loss=rl_loss)
    mixed = gradients_of(sequences, [[i] for i in range(4)], rl_loss=rl_loss)
    assert not mixed[1][0].any() and not mixed[1][1].any() and mixed[1][2].any()
    assert_same((mixed[0], mixed[1][2:]), alone)
    loss, gradients = gradients_of(sequences[:2], rl_loss=rl_loss)
    assert loss == 0.0 and not any(gradient.any() for gradient in gradients)


def test_groups_without_a_signal_never_reach_the_loss():
    """A14: rewards [1, 1, 1, 1] and [0, 0, 0, 0] alone make no batch."""
    queue = Queue(8, constant=True)
    assert [queue.add(group_of([reward] * 4)) for reward in (1.0, 0.0)] == [0, 0]
    assert queue.missing() == 8 and pack(queue.take(), 8)[0] == []


def test_members_beyond_all_bounds_are_dropped_and_metrics_stay_finite():
    branch = Branch(np.arange(5), np.ones(5, bool), np.array([0, -0.5, -np.inf, -90.0, -0.5]), np.ones(5, bool))
    branch.advantages = branch.ce_weights = branch.ref_kl_weights = np.ones(5)
    branch.ref_logprobs = np.array([0, -0.4, -0.4, -0.4, -np.inf])
    (batch,), counts = pack([branch], 5)
    logprobs = torch.tensor([[torch.nan, -0.6, -0.7, -0.8, -torch.inf]]).requires_grad_()
    loss, metrics = compute_loss(batch, logprobs, counts.denominators(), make_rl_loss("ipo", eps=1.0))
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all() and logprobs.grad[0, 1] != 0
    scalars = as_scalars(merge([metrics]))
    assert all(math.isfinite(value) for value in scalars.values()), scalars
    assert [scalars[f"{name}/is_masked"] for name in ("rl", "ce", "ref_kl")] == [0.75, 0.25, 0.75]


def test_members_without_their_stream_are_refused():
    inputs = LossInputs(torch.zeros(2), torch.zeros(2), None, None, torch.tensor([False, True]), None)
    with pytest.raises(ValueError, match="1 tokens need `advantages`"):
        ipo(inputs)


seen: list[LossInputs] = []


def weighted(inputs: LossInputs, scale: float = 1.0) -> LossOutputs:
    """A custom loss that applies the weights."""
    seen.append(inputs)
    ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).exp()
    weights = 1.0 if inputs.loss_weights is None else inputs.loss_weights
    loss = -(scale * weights * inputs.advantages * ratio)[inputs.loss_mask].sum()
    return LossOutputs(loss, {"length": inputs.loss_mask.sum(), "ratio_of_token": ratio[inputs.loss_mask]})


def unweighted(inputs: LossInputs) -> LossOutputs:
    """A custom loss that forgets the weights."""
    return LossOutputs(-(inputs.advantages * inputs.trainer_logprobs)[inputs.loss_mask].sum())


def sequences_of_two() -> list[tuple[Branch, np.ndarray]]:
    """Two sequences of 2 and 4 rl members, weights 0.5 and 1, in one row beside a longer one without members."""
    sequences = []
    for length, weight in ((3, 0.5), (5, 1.0), (9, 0.0)):
        ones = np.ones(length)
        branch = Branch(np.arange(length), np.arange(length) > 0, -0.5 * ones, ones.astype(bool))
        branch.advantages, branch.rl_weights = 2.0 * ones, weight * ones
        sequences.append((branch, -0.5 * ones))
    return sequences


def test_a_custom_loss_sees_one_sequence_at_a_time_and_applies_the_weights_itself():
    seen.clear()
    custom = make_rl_loss("custom", import_path=f"{__name__}.weighted", kwargs={"scale": 3.0})
    loss, gradients = gradients_of(sequences_of_two(), rl_loss=custom)
    assert sorted(len(inputs.trainer_logprobs) for inputs in seen) == [3, 5], "one call per sequence with a member"
    assert [inputs.loss_weights.unique().tolist() for inputs in seen] == [[0.5], [1.0]]
    assert all(inputs.loss_mask.tolist() == [False] + [True] * (len(inputs.loss_mask) - 1) for inputs in seen)
    assert loss == pytest.approx(-3.0 * 2.0 * (0.5 * 2 + 1.0 * 4) / (0.5 * 2 + 1.0 * 4))
    for gradient, want in zip(gradients, ([0, *[-0.6] * 2], [0, *[-1.2] * 4], [0] * 9), strict=True):
        assert gradient.tolist() == pytest.approx(want)
    forgetful = make_rl_loss("custom", import_path=f"{__name__}.unweighted", kwargs={})
    _, gradients = gradients_of(sequences_of_two(), rl_loss=forgetful)
    assert gradients[0][1] == gradients[1][1], "nobody applies the weights in its place"


def test_custom_metrics_are_averaged_over_sequences():
    custom = make_rl_loss("custom", import_path=f"{__name__}.weighted", kwargs={})
    summaries = []
    for branches in ([branch for branch, _ in sequences_of_two()[:2]], [sequences_of_two()[0][0]]):
        for batch in pack(branches, ENDLESS)[0]:
            _, metrics = compute_loss(
                batch, torch.zeros(batch.token_ids.shape), {"rl": 1, "ce": 0, "ref_kl": 0}, custom
            )
            summaries.append(metrics)
    scalars = as_scalars(merge(summaries))
    assert scalars["rl/length"] == pytest.approx((2 + 4 + 2) / 3)
    assert scalars["rl/ratio_of_token"] == pytest.approx(math.exp(0.5)), "a vector counts as its mean"


@pytest.mark.parametrize("path", ["no_such_module.loss", "losses.no_such_loss", "no_module_at_all", "losses.", ""])
def test_a_custom_loss_that_is_not_there_is_named(path):
    with pytest.raises(ValueError, match=f"--loss.import-path {path}"):
        make_rl_loss("custom", import_path=path, kwargs={})


def test_a_custom_loss_equals_the_built_in_one():
    """`losses.ipo` one sequence at a time is `ipo` over the micro batch: it sums and applies its weights."""
    rng = np.random.default_rng(1)
    sequences = [sequence_of(rng, length) for length in (7, 5, 3, 9)]
    custom = make_rl_loss("custom", import_path="losses.ipo", kwargs={"eps": 0.2})
    assert_same(gradients_of(sequences, rl_loss=custom), gradients_of(sequences, rl_loss=make_rl_loss("ipo", eps=0.2)))


@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=5), min_size=1, max_size=5))
def test_merged_summaries_are_the_summary_of_everything(parts):
    merged = merge({"x": summarize(torch.tensor(part, dtype=torch.float64))} for part in parts)["x"]
    whole = summarize(torch.tensor([value for part in parts for value in part], dtype=torch.float64))
    torch.testing.assert_close(merged, whole)


def test_scalars_say_sum_mean_or_range_by_name():
    values = torch.tensor([1.0, 3.0])
    names = ("loss/rl", "tokens/ce", "mismatch_kl", "rl/ratio", "rl/is_masked")
    assert as_scalars({name: summarize(values) for name in names} | {"ce/nll": summarize(values[:0])}) == {
        "loss/rl": 4,
        "tokens/ce": 4,
        "mismatch_kl/mean": 2,
        "mismatch_kl/max": 3,
        "rl/ratio/min": 1,
        "rl/ratio/mean": 2,
        "rl/ratio/max": 3,
        "rl/is_masked": 2,
    }
    assert as_scalars({}) == {} and merge([]) == {}


def test_the_largest_ratio_shows_though_the_loss_drops_it():
    """A sampler that is far off must not look perfect in the metric that is there to tell."""
    batch = SimpleNamespace(
        sequence_ids=torch.zeros(1, 2), loss_mask=torch.ones(1, 2, dtype=torch.bool), inference_logprobs=torch.tensor([[-30.0, -1.0]]),
        advantages=torch.ones(1, 2), rl_weights=None, ce_weights=None, ref_kl_weights=None, ref_logprobs=None, topk_logprobs=None,
    )  # fmt: skip
    logprobs = torch.tensor([[-0.1, -1.0]], requires_grad=True)
    scalars = as_scalars(compute_loss(batch, logprobs, {"rl": 2, "ce": 0, "ref_kl": 0}, make_rl_loss("ipo"))[1])
    assert scalars["rl/ratio/max"] > 1e8 and scalars["mismatch_kl/max"] > 1e8 and scalars["rl/is_masked"] == 0.5
