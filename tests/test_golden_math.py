"""Golden values of the training math: losses and their sum, packing, the exact-prefix merge, filtering, GRPO.

Adapters only: they move numbers into the project's functions and back out. A golden sample becomes a `Branch`, goes
through the real `pack`, and the trainer's log-probs are laid out as `pack` laid the tokens. In float32 everything is what
a run would see; in float64 the streams are laid out again in double (pack casts to float32), which is why N is held
against the golden N in float32 only.
"""

import asyncio
import importlib
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import losses
from algos import ALGORITHMS
from losses import as_scalars, compute_loss, make_rl_loss, member_mask, merge, summarize
from packing import COMPONENTS, IDENTITY, MicroBatch, pack
from policy import TokenLogprobs
from rollouts import Queue, prune
from tests.golden_cases import DOCS, cases, check, claimed, close, kind_of
from traces import STREAMS, Branch, Episode, Task, Trace

ENDLESS = 2**20  # a seq_len that cuts nothing
DTYPES = {"float64": torch.float64, "float32": torch.float32}


def test_golden_every_case_has_an_adapter():
    for path in Path(__file__).parent.glob("test_golden_*.py"):
        importlib.import_module(f"tests.{path.stem}")
    found = {kind_of(case) for doc in DOCS.values() for case in doc["cases"]}
    assert found, "no golden case found"
    assert found <= claimed


# Samples in and out


def branch_of(sample: dict, lead: int = 0) -> Branch:
    """A golden sample as a branch. `lead` unsampled tokens stand in front: some cases have a member at position 0, where
    a real sequence can have none."""

    def stream(name: str, placeholder: float, dtype: type) -> np.ndarray | None:
        values = sample.get(name)
        return None if values is None else np.array([placeholder] * lead + values, dtype)

    token_ids = stream("token_ids", 0, np.int32)
    return Branch(
        token_ids=token_ids,
        sampled=stream("loss_mask", False, bool),
        logprobs=stream("inference_logprobs", np.nan, np.float64),
        is_content=np.ones(len(token_ids), bool),
        **{name: stream(name, IDENTITY[name], np.float64) for name in STREAMS},
    )


def laid_out(values: list, batch: MicroBatch, dtype: torch.dtype, padding: float = torch.nan) -> Tensor:
    """One list per sequence, put where pack put the sequence's tokens."""
    tensor = torch.full(batch.token_ids.shape, padding, dtype=dtype)
    for sequence, of_sequence in enumerate(values):
        tensor[batch.sequence_ids == sequence] = torch.tensor(of_sequence, dtype=dtype)
    return tensor


def read_back(tensor: Tensor, batch: MicroBatch, lead: int = 0) -> list[list]:
    """The inverse of laid_out."""
    return [
        tensor[batch.sequence_ids == sequence][lead:].tolist() for sequence in range(int(batch.sequence_ids.max()) + 1)
    ]


def in_double(batch: MicroBatch, branches: list[Branch]) -> MicroBatch:
    """The micro batch with the branches' streams as they were before pack cast them."""
    streams = {"inference_logprobs": laid_out([b.logprobs.tolist() for b in branches], batch, torch.float64, 0.0)}
    for name in STREAMS:
        if getattr(batch, name) is not None:
            values = [getattr(branch, name) for branch in branches]
            identities = [[IDENTITY[name]] * len(branch) for branch in branches]
            values = [i if v is None else v.tolist() for v, i in zip(values, identities, strict=True)]
            streams[name] = laid_out(values, batch, torch.float64, 0.0)
    return replace(batch, **streams)


# Losses


class LossRun:
    """The training step of a golden case, `layout` naming the samples of each micro batch."""

    def __init__(self, case: dict, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.case, self.dtype = case, dtype
        knobs = {key: value for key, value in case["rl_loss"].items() if key != "type"}
        self.rl_loss = self.spied("rl", make_rl_loss(case["rl_loss"]["type"], **knobs))
        ref_kl = partial(losses.ref_kl, drop_below=case["ref_kl"]["drop_below"])
        monkeypatch.setattr(losses, "ref_kl", self.spied("ref_kl", ref_kl))

    def spied(self, name: str, loss_fn):
        def call(inputs, *rest):
            self.seen[name] = inputs, loss_fn(inputs, *rest)
            return self.seen[name][1]

        return call

    def denominators(self) -> dict[str, float]:
        """N of the whole step."""
        _, counts = pack([branch_of(sample, lead=1) for sample in self.case["samples"]], ENDLESS)
        exact = self.dtype == "float64" and self.case["expected"] is not None
        return self.case["expected"]["N"] if exact else counts.denominators()

    def micro_batch(self, samples: list[int], counts: dict) -> tuple[MicroBatch, Tensor, dict]:
        """Backpropagate one micro batch: (batch, d loss / d trainer_logprobs, metric summaries with the total)."""
        self.seen = {}
        branches = [branch_of(self.case["samples"][i], lead=1) for i in samples]
        (batch,), _ = pack(branches, ENDLESS)
        if self.dtype == "float64":
            batch = in_double(batch, branches)
        values = [[torch.nan, *self.case["samples"][i]["trainer_logprobs"]] for i in samples]
        logprobs = laid_out(values, batch, DTYPES[self.dtype]).requires_grad_()
        loss, summaries = compute_loss(batch, logprobs, counts, self.rl_loss)
        loss.backward()
        return batch, logprobs.grad, summaries | {"loss/total": summarize(loss)}

    def __call__(self, layout: list[list[int]]) -> dict:
        counts, summaries = self.denominators(), []
        of_sample = defaultdict(lambda: [None] * len(self.case["samples"]))  # field -> one list per sample
        for samples in layout:
            batch, gradient, summary = self.micro_batch(samples, counts)
            fields = {"grad": gradient}
            for name in COMPONENTS:
                weights = getattr(batch, f"{name}_weights")
                fields[f"members.{name}"] = member_mask(name, batch.loss_mask, weights)
            for name, (inputs, output) in self.seen.items():
                dropped = torch.zeros_like(inputs.loss_mask)
                dropped[inputs.loss_mask] = output.metrics["is_masked"].bool()
                fields[f"kept.{name}"] = inputs.loss_mask & ~dropped
                for split, mask in (("masked", dropped), ("unmasked", fields[f"kept.{name}"])):
                    drift = losses._drift(name, replace(inputs, loss_mask=mask))
                    summary[f"{name}/mismatch_kl_{split}"] = drift[f"{name}/mismatch_kl"]
            for name in COMPONENTS:  # an N of 0 switches the other components off
                alone = {component: counts[component] if component == name else 0.0 for component in COMPONENTS}
                _, fields[f"grad.{name}"], _ = self.micro_batch(samples, alone)
            for field, tensor in fields.items():
                for i, values in zip(samples, read_back(tensor, batch, lead=1), strict=True):
                    of_sample[field][i] = values
            summaries.append(summary)
        scalars = as_scalars(merge(summaries))
        singly = [as_scalars(self.micro_batch([i], counts)[2]) for i in range(len(self.case["samples"]))]
        drifts = ("mismatch_kl", "mismatch_kl_masked", "mismatch_kl_unmasked")
        return {
            "N": counts,
            "loss": scalars["loss/total"],
            "component_loss": {name: scalars[f"loss/{name}"] for name in COMPONENTS},
            "grad_trainer_logprobs": of_sample["grad"],
            "component_grad_trainer_logprobs": {name: of_sample[f"grad.{name}"] for name in COMPONENTS},
            "members": {name: of_sample[f"members.{name}"] for name in COMPONENTS},
            "kept": {name: of_sample[f"kept.{name}"] for name in ("rl", "ref_kl")},
            "metrics": {
                name: {key: scalars.get(f"{name}/{key}", 0.0) for key in ("is_masked", *drifts)}
                | {"is_masked_per_sample": [one.get(f"{name}/is_masked") for one in singly]}
                for name in ("rl", "ref_kl")
            },
        }


def layouts_of(case: dict) -> list[list[list[int]]]:
    """The case's layouts as lists of micro batches. layout[rank][micro_batch] = samples, and a rank only says who runs a
    micro batch: gradients are summed over all of them."""
    layouts = case.get("layouts", [])
    layouts = [named["layout"] for named in layouts.values()] if isinstance(layouts, dict) else layouts
    return [[samples for rank in layout for samples in rank] for layout in layouts]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("file", "doc", "case"), cases("losses"))
def test_golden_losses(file, doc, case, dtype, monkeypatch):
    everyone = list(range(len(case["samples"])))
    layouts = [[everyone], [[i] for i in everyone]]
    layouts += layouts_of(case)
    with monkeypatch.context() as patch:
        run = LossRun(case, dtype, patch)
        for layout in layouts:
            got = check(doc, case, partial(run, layout), dtype)
    if "same_rl_gradient_as" in case:
        (base,) = [other for other in doc["cases"] if other["name"] == case["same_rl_gradient_as"]]
        with monkeypatch.context() as patch:
            want = LossRun(base, dtype, patch)([[i] for i in range(len(base["samples"]))])
        want = want["component_grad_trainer_logprobs"]["rl"]
        assert got["component_grad_trainer_logprobs"]["rl"][: len(want)] == want
    if "same_gradient_as_samples" in case:
        kept = case["same_gradient_as_samples"]
        reduced = case | {"samples": [case["samples"][i] for i in kept]}
        with monkeypatch.context() as patch:
            want = LossRun(reduced, dtype, patch)([list(range(len(kept)))])
        assert [got["grad_trainer_logprobs"][i] for i in kept] == want["grad_trainer_logprobs"]


# A whole model


class Bigram(nn.Module):
    """A language model whose hidden state is the token itself, one-hot, and whose head is W: logits of t = W[token[t-1]]."""

    def __init__(self, w: list[list[float]]) -> None:
        super().__init__()
        self.one_hot = nn.Embedding.from_pretrained(torch.eye(len(w)), freeze=False)
        self.head = nn.Linear(len(w), len(w), bias=False)
        self.head.weight.data = torch.tensor(w).T.contiguous()

    def get_decoder(self):
        return lambda input_ids, **_: SimpleNamespace(last_hidden_state=self.one_hot(input_ids))

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


def run_bigram(doc: dict, case: dict, layout: list[list[int]], one_row: bool) -> dict:
    """The trainer's forward pass, loss and gradient accumulation (float32, as the head's softmax is).

    one_row: a long branch without members widens the rows until all samples of a micro batch share one.
    """
    room = [0] * sum(len(sample["token_ids"]) for sample in case["samples"])
    wide = [branch_of({"token_ids": room, "loss_mask": room, "inference_logprobs": room})] if one_row else []
    branches = [branch_of(sample) for sample in case["samples"]]
    (temperature,) = {sample["temperature"] for sample in case["samples"]}
    model = TokenLogprobs(Bigram(case["W"]), temperature)
    knobs = {key: value for key, value in case["rl_loss"].items() if key != "type"}
    rl_loss = make_rl_loss(case["rl_loss"]["type"], **knobs)
    _, counts = pack(branches, ENDLESS)

    def gradient(denominators: dict) -> tuple[list, dict]:
        model.zero_grad()
        summaries = []
        for samples in layout:
            (batch,), _ = pack([*(branches[i] for i in samples), *wide], ENDLESS)
            assert not one_row or len(batch.token_ids) == 2
            logprobs, _, _ = model(batch.token_ids, batch.position_ids, batch.needed)
            given = laid_out([case["samples"][i]["trainer_logprobs"] for i in samples], batch, torch.float32)
            torch.testing.assert_close(logprobs[batch.needed], given[batch.needed], **doc["tolerances"]["float32"])
            loss, summary = compute_loss(batch, logprobs, denominators, rl_loss)
            loss.backward()
            summaries.append(summary | {"loss/total": summarize(loss)})
        return model.lm.head.weight.grad.T.tolist(), as_scalars(merge(summaries))

    total, scalars = gradient(counts.denominators())
    alone = {
        name: {component: getattr(counts, component) if component == name else 0.0 for component in COMPONENTS}
        for name in COMPONENTS
    }
    return {
        "N": counts.denominators(),
        "loss": scalars["loss/total"],
        "component_loss": {name: scalars[f"loss/{name}"] for name in COMPONENTS},
        "grad_W": total,
        "component_grad_W": {name: gradient(denominators)[0] for name, denominators in alone.items()},
    }


@pytest.mark.parametrize(("file", "doc", "case"), cases("bigram"))
def test_golden_bigram(file, doc, case, monkeypatch):
    ref_kl = partial(losses.ref_kl, drop_below=case["ref_kl"]["drop_below"])
    monkeypatch.setattr(losses, "ref_kl", ref_kl)
    for layout, one_row in product(layouts_of(case), (False, True)):
        check(doc, case, partial(run_bigram, doc, case, layout, one_row), "float32")


# Packing


def run_packing(case: dict, micro_batch_tokens: int | None) -> dict:
    batches, counts = pack([branch_of(sample) for sample in case["samples"]], case["seq_len"], micro_batch_tokens)
    spans = [None] * len(case["samples"])
    for batch in batches:
        tensors = {name: tensor for name, tensor in vars(batch).items() if tensor is not None}
        assert {tensor.shape for tensor in tensors.values()} == {batch.token_ids.shape}
        assert batch.token_ids.shape[1] <= case["seq_len"]
        padding = batch.sequence_ids < 0
        for name in ("loss_mask", "inference_logprobs", *STREAMS):
            assert name not in tensors or not tensors[name][padding].any(), f"{name} is not 0 on the padding"
        for i in batch.sequence_ids[~padding].unique().tolist():
            rows, columns = (batch.sequence_ids == i).nonzero(as_tuple=True)
            assert spans[i] is None and len(rows.unique()) == 1, "a sample lies in one row, once"
            assert columns.tolist() == list(range(columns[0], columns[-1] + 1)), "and in one piece"
            spans[i] = {
                name: tensors[name][rows, columns].tolist() if name in tensors else [IDENTITY[name]] * len(rows)
                for name in ("token_ids", "position_ids", "loss_mask", "inference_logprobs", *STREAMS)
            }
    if case["expected"]:
        assert sum(len(batch.token_ids) for batch in batches) >= case["expected"]["min_micro_batches"]
    return {"spans": spans, "denominators": counts.denominators(), "total_tokens": counts.tokens}


@pytest.mark.parametrize(("file", "doc", "case"), cases("packing"))
def test_golden_packing(file, doc, case):
    for micro_batch_tokens in (None, case["seq_len"]):
        got = check(doc, case, partial(run_packing, case, micro_batch_tokens), "float32")
        if got is not None:
            ids = [span["token_ids"] for span in case["expected"]["spans"]]
            assert [span["token_ids"] for span in got["spans"]] == ids


# The exact-prefix merge


def run_merge(case: dict) -> dict:
    trace, steps = Trace(), defaultdict(list)
    for index, step in enumerate(case["steps"]):
        branch = trace.add_turn(step["prompt_ids"], step["completion_ids"], step["completion_logprobs"])
        steps[id(branch)].append(index)
    branches = trace.training_branches()
    return {
        "num_samples": len(branches),
        "samples": [
            {
                "token_ids": branch.token_ids.tolist(),
                "sampled_mask": branch.sampled.tolist(),
                "logprobs": np.nan_to_num(branch.logprobs, nan=0.0).tolist(),  # ours are NaN where nothing was sampled
                "steps": steps[id(branch)],
            }
            for branch in branches
        ],
        "trained_tokens": trace.num_sampled,
        "total_tokens": sum(len(branch) for branch in branches),
    }


@pytest.mark.parametrize(("file", "doc", "case"), cases("merge"))
def test_golden_merge(file, doc, case):
    got = check(doc, case, lambda: run_merge(case), "float32")
    if got is not None:
        wanted = [case["expected"], case.get("also_acceptable", {})]
        ids = [[sample["token_ids"] for sample in want.get("samples", [])] for want in wanted]
        assert [sample["token_ids"] for sample in got["samples"]] in ids


# Filtering


def unscored(sample: dict) -> dict:
    """Filtering cases leave out what filtering never reads and packing needs."""
    zeros = [0.0] * len(sample["token_ids"])
    return {"inference_logprobs": zeros, "ref_logprobs": zeros} | sample


def run_prune(case: dict) -> dict:
    branch = branch_of(unscored(case["sample"]), lead=1)
    keep = prune(branch)
    (batch,), counts = pack([branch], ENDLESS)
    members = read_back(member_mask("rl", batch.loss_mask, batch.rl_weights), batch, lead=1)
    weights = None if branch.rl_weights is None else branch.rl_weights[branch.sampled].tolist()
    return {
        "keep_sample": keep,
        "rl_members": members[0],
        "N": counts.denominators(),
        "rl_weights_on_mask": weights,
    }


@pytest.mark.parametrize(("file", "doc", "case"), cases("prune"))
def test_golden_filtering_prune(file, doc, case):
    check(doc, case, lambda: run_prune(case), "float32")


def run_sink(case: dict, constant: bool) -> dict:
    queue, batches = Queue(case["batch_size"], constant), []
    owners, pending = {}, []
    for index, group in enumerate(case["groups"]):
        for golden in group["traces"]:
            trace = Trace(branches=[branch_of(unscored(sample)) for sample in golden["samples"]])
            owners |= {id(branch): golden["id"] for branch in trace.branches}
            before = len(queue.waiting)
            queue.add([trace])
            pending += [golden["id"]] if len(queue.waiting) > before else []
        while not queue.missing():
            branches = queue.take()
            batches.append(
                {
                    "after_group": index,
                    "collected": pending[: case["batch_size"]],
                    "shipped": list(dict.fromkeys(owners[id(branch)] for branch in branches)),
                    "shipped_samples": len(branches),
                    "skipped_empty": not branches,
                }
            )
            del pending[: case["batch_size"]]
    return {"batches": batches, "left_pending": pending}


@pytest.mark.parametrize(("file", "doc", "case"), cases("sink"))
def test_golden_filtering_sink(file, doc, case):
    check(doc, case, lambda: {f"constant_{word}".lower(): run_sink(case, word) for word in (True, False)})


# GRPO


def run_grpo(traces: list[dict]) -> dict:
    """One episode per trace, scored as one group; a trace's advantage where all its sampled tokens agree on it."""
    algorithm = ALGORITHMS["grpo"](ALGORITHMS["grpo"].Config())
    episodes = []
    for golden in traces:
        sampled = [1] * golden.get("sampled_tokens", 3)
        trace = Trace(reward=golden["reward"], trainable=golden.get("trainable", True))
        trace.error = "boom" if golden.get("has_error") else None
        trace.add_turn([0, 0], sampled, [0.0] * len(sampled))
        episodes.append(Episode("", "", Task("", []), [trace]))
    asyncio.run(algorithm.finalize_group(episodes))
    advantages = []
    for episode in episodes:
        (branch,) = episode.traces[0].branches
        (value,) = {None} if branch.advantages is None else set(branch.advantages[branch.sampled].tolist())
        advantages.append(value)
    return {"advantages": advantages}


@pytest.mark.parametrize(("file", "doc", "case"), cases("grpo"))
def test_golden_grpo(file, doc, case):
    check(doc, case, lambda: run_grpo([{"reward": reward} for reward in case["inputs"]["rewards"]]))


@pytest.mark.parametrize(("file", "doc", "case"), cases("grpo_traces"))
def test_golden_grpo_traces(file, doc, case):
    check(doc, case, lambda: run_grpo(case["inputs"]["traces"]))


def test_golden_close_is_strict():
    """The comparison itself: what a wrong adapter might return does not pass."""
    assert not close({"a": 1.0}, {"a": 1.0, "b": 2.0}) and not close([1.0], [1.0, 2.0])
    assert not close(None, 0.0) and not close(float("nan"), 0.0) and not close(float("inf"), 1.0)
