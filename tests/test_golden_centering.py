"""Golden cases of score centering: the gradient by the logits, the head that a sampler's candidates give, and its absence."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engines.base import head_of
from losses import as_scalars, compute_loss, make_rl_loss
from tests.golden_cases import cases, check

DTYPES = {"float64": torch.float64, "float32": torch.float32}
STREAMS = ("head_mass", "tail_scale", "logit_correction_l1")


def padded(rows: list[list[float]], fill: float, dtype: torch.dtype) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=dtype)


def centered(case: dict, tokens: list[dict], temperature: float, n: float, dtype: torch.dtype):
    """Loss and gradients of a row of independent positions, through the project's own loss."""
    knobs = {key: value for key, value in case["loss"].items() if key != "type"}
    raw = torch.tensor([token["trainer_logits"] for token in tokens], dtype=dtype, requires_grad=True)
    scaled = raw / temperature
    scaled.retain_grad()
    logprobs = scaled.log_softmax(-1)
    ids = padded([token["head_ids"] for token in tokens], 0, torch.int64)
    stream = {
        name: torch.tensor([[token[name] for token in tokens]], dtype=dtype)
        for name in ("inference_logprob", "advantage", "rl_weight")
    }
    batch = SimpleNamespace(
        sequence_ids=torch.zeros(1, len(tokens), dtype=torch.int64),
        loss_mask=torch.ones(1, len(tokens), dtype=torch.bool),
        inference_logprobs=stream["inference_logprob"],
        advantages=stream["advantage"],
        rl_weights=stream["rl_weight"],
        ce_weights=None,
        ref_kl_weights=None,
        ref_logprobs=None,
        topk_logprobs=padded([token["head_probs"] for token in tokens], 0.0, dtype).log()[None],
    )
    action = torch.tensor([[token["action"]] for token in tokens])
    loss, metrics = compute_loss(
        batch, logprobs.gather(-1, action).T, {"rl": n, "ce": 0.0, "ref_kl": 0.0}, make_rl_loss(case["loss"]["type"], **knobs), logprobs.gather(-1, ids)[None]
    )  # fmt: skip
    loss.backward()
    scalars = as_scalars(metrics)
    return raw.grad.tolist(), scaled.grad.tolist(), {name: scalars[f"score_centering/{name}"] for name in STREAMS}


def run_centering(case: dict, dtype: torch.dtype) -> dict:
    if "tokens" in case:
        raw, scaled, metrics = centered(case, case["tokens"], case["temperature"], case["N_rl"], dtype)
        return {"tokens": [{"grad_raw_logits": a, "grad_scaled_logits": b} for a, b in zip(raw, scaled)]} | metrics
    probs = torch.tensor(case["sampler_probs_full"], dtype=dtype)
    tokens = [
        {"trainer_logits": case["trainer_logits"], "action": a, "inference_logprob": probs[a].log().item(), "advantage": -1.0, "rl_weight": 1.0,
         "head_ids": case["head_ids"], "head_probs": [case["sampler_probs_full"][i] for i in case["head_ids"]]}
        for a in range(case["vocab_size"])
    ]  # fmt: skip
    # The loss descends, the update ascends: at advantage -1 the one is the other.
    raw, _, _ = centered(case, tokens, 1.0, 1.0, dtype)
    return {"update_per_action": raw, "mean_over_sampler": (probs @ torch.tensor(raw, dtype=dtype)).tolist()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("file", "doc", "case"), cases("centering"))
def test_golden_centering(file, doc, case, dtype):
    wanted = case["expected"]
    if "tokens" in wanted:  # decisions of acceptance show in the gradient
        gradients = [
            {key: token[key] for key in ("grad_raw_logits", "grad_scaled_logits")} for token in wanted["tokens"]
        ]
        # In float32 a tail of 4e-6 is a difference of two numbers near 1: its gradient is exact enough, its scale is not.
        metrics = {name: wanted[name] for name in STREAMS} if dtype == "float64" else {}
        wanted = {"tokens": gradients} | metrics
    check(doc, case | {"expected": wanted}, lambda: run_centering(case, DTYPES[dtype]), dtype)


@pytest.mark.parametrize(("file", "doc", "case"), cases("head_recovery"))
def test_golden_head_recovery(file, doc, case):
    def run():
        shuffled = sorted(case["candidates"])
        ids, probs = (np.array([column]) for column in zip(*shuffled))
        head, _ = head_of(ids.astype(int), np.log(probs), case["topk"])
        return {"head_ids": sorted(i for i in head[0].tolist() if i >= 0)}

    check(doc, case, run)


@pytest.mark.parametrize(("file", "doc", "case"), cases("missing_head"))
def test_golden_missing_head(file, doc, case):
    token = {
        "trainer_logits": [0.1, 0.2, 0.3],
        "action": 0,
        "inference_logprob": -1.0,
        "advantage": 1.0,
        "rl_weight": 1.0,
        "head_ids": [1],
    }
    loss = {"loss": {"type": "icepop", "score_centering": True}}
    tokens = [token | {"head_probs": [0.4]}, token | {"head_probs": [float("nan")]}]
    check(doc, case, lambda: centered(loss, tokens, 1.0, 2.0, torch.float64)[2])


def test_a_run_without_heads_is_refused():
    inputs = SimpleNamespace(
        sequence_ids=torch.zeros(1, 1), loss_mask=torch.ones(1, 1, dtype=torch.bool), inference_logprobs=torch.zeros(1, 1), advantages=torch.ones(1, 1),
        rl_weights=None, ce_weights=None, ref_kl_weights=None, ref_logprobs=None, topk_logprobs=None,
    )  # fmt: skip
    with pytest.raises(ValueError, match="need `trainer_head`"):
        compute_loss(
            inputs,
            torch.zeros(1, 1, requires_grad=True),
            {"rl": 1, "ce": 0, "ref_kl": 0},
            make_rl_loss("icepop", score_centering=True),
        )
