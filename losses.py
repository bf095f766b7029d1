"""The training loss: the sum of three components, each with its own denominator.

    L = sum(rl) / N_rl + sum(ce) / N_ce + sum(ref_kl) / N_ref_kl

N_rl is the sum of the rl weights, N_ce and N_ref_kl count member tokens, all over the whole step: every micro batch of
every rank. So gradients do not depend on how tokens were packed, split or spread, and adding tokens to one component
leaves the gradient of another as it was. A component without members is 0.

Notation, as in the docstrings below: pi = probability of a sampled token under the policy that is being trained, mu =
under the policy that sampled it, r = pi / mu the importance ratio, A = advantage, w = the token's weight in the
component. Membership: rl = sampled and w != 0; ce, ref_kl = w != 0. A token outside of a component is *selected away
before* any arithmetic, so whatever stands there (NaN, inf) can reach neither loss nor gradient.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Beyond exp(20) a ratio is no longer a correction but a numerical accident (float32 overflows at exp(88)): such a token
# is dropped like one outside of the trust region, and counted as masked.
MAX_LOG_RATIO = 20.0
MIN_TAIL = 1e-6  # floor of both tail masses in score centering


@dataclass
class LossInputs:
    """Streams of one sequence or of a whole micro batch, all of one shape.

    loss_mask selects the component's member tokens. loss_weights is the component's weight stream (None = 1.0).
    trainer_head, inference_head [..., K]: log-probs of the head candidates under policy and sampler, for score centering.
    """

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor | None
    loss_mask: Tensor
    loss_weights: Tensor | None
    trainer_head: Tensor | None = None
    inference_head: Tensor | None = None

    def members(self, stream: str) -> Tensor:
        """The stream's values at the member tokens, [M]. Raises ValueError where the stream is missing."""
        values = getattr(self, stream)
        if values is None:
            if stream == "loss_weights":
                return torch.ones_like(self.trainer_logprobs[self.loss_mask])
            if self.loss_mask.any():
                raise ValueError(
                    f"{int(self.loss_mask.sum())} tokens need `{stream}`, but no algorithm wrote that stream"
                )
            return torch.zeros_like(self.trainer_logprobs[self.loss_mask])
        return values[self.loss_mask]


@dataclass
class LossOutputs:
    """A loss, summed over tokens and not yet divided by N, and metrics as tensors of one value per token (or scalar)."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


RLLoss = Callable[[LossInputs], LossOutputs]


def ipo(inputs: LossInputs, eps: float = 0.3, adv_tau: float = 1.0) -> LossOutputs:
    """Importance-weighted policy gradient inside a trust region on the *probability* of the sampled token (IPO).

    L = -sum_t w 1[|pi - mu| <= eps] adv_tau A r

    A bound on pi - mu and not on r lets rare tokens move: from 0.001 to 0.01 is a ratio of 10 but a step of 0.009.
    """
    log_pi, log_mu = inputs.members("trainer_logprobs"), inputs.members("inference_logprobs")
    keep = (log_pi.detach().exp() - log_mu.exp()).abs() <= eps  # |pi - mu| <= eps
    return _policy_gradient(inputs, log_pi - log_mu, keep, adv_tau)


def icepop(
    inputs: LossInputs,
    ratio_low: float = 0.2,
    ratio_high: float = 5.0,
    adv_tau: float = 1.0,
    score_centering: bool = False,
    score_centering_topk: int = 128,
) -> LossOutputs:
    """Importance-weighted policy gradient that drops tokens whose *ratio* leaves a band (IcePop, arXiv:2510.18855).

    L = -sum_t w 1[ratio_low <= r <= ratio_high] adv_tau A r

    With score_centering the expected update of the tokens that were *not* sampled is subtracted (`centered_score`);
    score_centering_topk is what the sampler was asked for and changes nothing here.
    """
    log_ratio = inputs.members("trainer_logprobs") - inputs.members("inference_logprobs")
    output = _policy_gradient(inputs, log_ratio, _in_band(log_ratio, ratio_low, ratio_high), adv_tau)
    if score_centering and inputs.loss_mask.any():
        baseline, metrics = centered_score(
            inputs.members("trainer_head"), inputs.members("inference_head"), ratio_low, ratio_high
        )
        output.loss = (
            output.loss + (inputs.members("loss_weights") * adv_tau * inputs.members("advantages") * baseline).sum()
        )
        output.metrics |= {f"score_centering/{name}": value for name, value in metrics.items()}
    return output


def centered_score(
    log_p: Tensor, log_q: Tensor, ratio_low: float, ratio_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The score that a token has in expectation over the sampler, as something to subtract (arXiv:2609.20807).

    update = A (w_a grad log p_a - sum_v q_v w_v grad log p_v),   w_v = p_v/q_v 1[ratio_low <= p_v/q_v <= ratio_high]

    p is the policy, q the sampler, a the sampled token; w and q are constants in the gradient. Only the head of q is known.
    The rest of its mass, Q = 1 - sum_head q, is modelled as proportional to the policy's own tail, P = 1 - sum_head p, so
    all tail tokens have the ratio P/Q and are accepted or rejected together. Since q_v w_v = p_v 1_v, and since
    sum_tail p_v grad log p_v = grad P = -sum_head p_v grad log p_v, the sum needs the head alone:

    sum_v q_v w_v grad log p_v = sum_head p_v (1_v - 1_tail) grad log p_v

    log_p, log_q [M, K]: the head under policy (differentiable) and sampler; log_q is -inf for no candidate, NaN where no
    head was captured, which raises ValueError. Returns the sum as [M], whose gradient is meant, and metrics [M] each.
    """
    if log_q.isnan().any():
        raise ValueError(
            f"score centering: {int(log_q.isnan().any(-1).sum())} rl tokens came without a head of candidates"
        )
    real = log_q.isfinite()
    log_p, log_q = torch.where(real, log_p, 0.0).double(), log_q.double()  # tails are differences from 1
    p, q = torch.where(real, log_p.detach().exp(), 0.0), log_q.exp()
    P, Q = (1 - p.sum(-1)).clamp(min=MIN_TAIL), (1 - q.sum(-1)).clamp(min=MIN_TAIL)
    accept = real & _in_band(log_p - torch.where(real, log_q, 0.0), ratio_low, ratio_high)  # 1_v
    accept_tail = _in_band(P.log() - Q.log(), ratio_low, ratio_high)  # 1_tail
    baseline = (p * (accept.to(p) - accept_tail.to(p)[:, None]) * log_p).sum(-1)
    # The correction of the logits is c - (sum c) p with c_v = p_v 1_v: its L1 norm, head and tail.
    total = (p * accept).sum(-1) + accept_tail * (1 - p.sum(-1))
    l1 = (p * (accept.to(p) - total[:, None])).abs().sum(-1) + (accept_tail.to(p) - total).abs() * (1 - p.sum(-1))
    return baseline, {"head_mass": q.sum(-1), "tail_scale": Q / P, "logit_correction_l1": l1}


def _in_band(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """low <= r <= high, without a gradient."""
    ratio = log_ratio.detach().exp()
    return (low <= ratio) & (ratio <= high)


def _policy_gradient(inputs: LossInputs, log_ratio: Tensor, keep: Tensor, adv_tau: float) -> LossOutputs:
    """-sum_t w 1[keep] adv_tau A r, over member tokens."""
    weights, advantages = inputs.members("loss_weights"), inputs.members("advantages")
    keep = keep & _is_sane(log_ratio)
    ratio = log_ratio[keep].exp()
    loss = -(weights[keep] * adv_tau * advantages[keep] * ratio).sum()
    return LossOutputs(loss, {"is_masked": (~keep).float()})


def ce(inputs: LossInputs) -> LossOutputs:
    """Weighted negative log-likelihood: L = -sum_t w log pi."""
    log_pi, weights = inputs.members("trainer_logprobs"), inputs.members("loss_weights")
    keep = log_pi.detach().isfinite()
    loss = -(weights[keep] * log_pi[keep]).sum()
    return LossOutputs(loss, {"nll": -log_pi.detach()[keep], "is_masked": (~keep).float()})


def ref_kl(inputs: LossInputs, drop_below: float = 0.2) -> LossOutputs:
    """Reverse KL to a reference model as the policy-gradient signal (on-policy distillation).

    L = -sum_t w 1[pi - mu >= -drop_below] stop_grad(log pi_ref - log pi) r

    One-sided: only tokens that the policy has already moved away from are dropped.
    """
    log_pi, log_mu = inputs.members("trainer_logprobs"), inputs.members("inference_logprobs")
    log_ref, weights = inputs.members("ref_logprobs"), inputs.members("loss_weights")
    signal = log_ref - log_pi.detach()
    log_ratio = log_pi - log_mu
    keep = (log_pi.detach().exp() - log_mu.exp() >= -drop_below) & _is_sane(log_ratio) & signal.isfinite()
    loss = -(weights[keep] * signal[keep] * log_ratio[keep].exp()).sum()
    return LossOutputs(loss, {"is_masked": (~keep).float(), "kl": -signal[signal.isfinite()]})


def _is_sane(log_ratio: Tensor) -> Tensor:
    """Which log-ratios may be exponentiated. Where pi = 0 the ratio is 0 but its gradient NaN: dropping it gives the same 0."""
    log_ratio = log_ratio.detach()
    return log_ratio.isfinite() & (log_ratio <= MAX_LOG_RATIO)


def per_sequence(loss_fn: RLLoss) -> Callable[[LossInputs, Tensor], LossOutputs]:
    """Turn a loss of one sequence into one of a micro batch: sum the losses, collect the metrics, one value a sequence.

    sequence_ids [B, T] numbers the sequences; negative numbers are padding. Sequences without a member are passed over.
    """

    def loss_of_batch(inputs: LossInputs, sequence_ids: Tensor) -> LossOutputs:
        outputs = []
        for sequence in sequence_ids[inputs.loss_mask].unique().tolist():
            here = sequence_ids == sequence
            streams = {name: None if value is None else value[here] for name, value in vars(inputs).items()}
            outputs.append(loss_fn(LossInputs(**streams)))
        loss = (
            torch.stack([output.loss for output in outputs]).sum()
            if outputs
            else inputs.trainer_logprobs[inputs.loss_mask].sum()
        )
        names = {name for output in outputs for name in output.metrics}
        return LossOutputs(
            loss,
            {
                name: torch.stack([o.metrics[name].detach().float().mean() for o in outputs if name in o.metrics])
                for name in names
            },
        )

    return loss_of_batch


def make_rl_loss(name: str, **knobs: Any) -> Callable[[LossInputs, Tensor], LossOutputs]:
    """The rl component by name: "ipo", "icepop", or "custom" with `import_path` ("module.function") and `kwargs`.

    A custom loss sees one sequence at a time and must apply `loss_weights` itself where it wants them.
    Raises ValueError where the import path leads nowhere.
    """
    if name == "custom":
        module, _, function = knobs["import_path"].rpartition(".")
        try:
            loss_fn = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"--loss.import-path {knobs['import_path']}: {error}") from error
        return per_sequence(lambda inputs: loss_fn(inputs, **knobs["kwargs"]))
    loss_fn = {"ipo": ipo, "icepop": icepop}[name]
    return lambda inputs, sequence_ids: loss_fn(inputs, **knobs)


def compute_loss(
    micro_batch: Any,
    logprobs: Tensor,
    counts: Mapping[str, float],
    rl_loss: Callable[[LossInputs, Tensor], LossOutputs],
    head_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one micro batch and its metrics.

    micro_batch: streams [B, T] (`packing.MicroBatch`). logprobs [B, T]: log pi, differentiable; head_logprobs [B, T, K]:
    of the head candidates, where there are any. counts: N of "rl", "ce" and "ref_kl" over the whole step. Returns the scalar to call backward on (its sum over all micro batches of all ranks
    is L) and metrics in the form of `summarize`. Raises ValueError where a member token lacks a stream it needs.
    """
    losses, metrics = [], {}
    for name in ("rl", "ce", "ref_kl"):
        weights = getattr(micro_batch, f"{name}_weights")
        inputs = LossInputs(
            trainer_logprobs=logprobs,
            inference_logprobs=micro_batch.inference_logprobs,
            ref_logprobs=micro_batch.ref_logprobs,
            advantages=micro_batch.advantages,
            loss_mask=member_mask(name, micro_batch.loss_mask, weights),
            loss_weights=weights,
            trainer_head=head_logprobs,
            inference_head=micro_batch.topk_logprobs,
        )
        if name == "rl":
            output = rl_loss(inputs, micro_batch.sequence_ids)
        else:
            output = {"ce": ce, "ref_kl": ref_kl}[name](inputs)
        # Without members the sum over an empty selection is a zero that can still be backpropagated.
        loss = output.loss / counts[name] if counts[name] else output.loss * 0.0
        losses.append(loss)
        metrics[f"loss/{name}"] = summarize(loss.detach())
        metrics[f"tokens/{name}"] = summarize(inputs.loss_mask.sum())
        for key, value in output.metrics.items():
            metrics[key if "/" in key else f"{name}/{key}"] = summarize(value)
        if name != "ce":
            metrics = merge([metrics, _drift(name, inputs)])
    return torch.stack(losses).sum(), metrics


def member_mask(component: str, loss_mask: Tensor, weights: Tensor | None) -> Tensor:
    """Which tokens belong to a component. Absent weights are 1.0 on the sampled tokens for rl, 0.0 for ce and ref_kl."""
    if weights is None:
        return loss_mask.clone() if component == "rl" else torch.zeros_like(loss_mask)
    return loss_mask & (weights != 0) if component == "rl" else weights != 0


@torch.no_grad()
def _drift(name: str, inputs: LossInputs) -> dict[str, Tensor]:
    """How far sampler and trainer are apart on the members: mismatch KL, r - log r - 1 >= 0, and r itself, unmasked."""
    log_ratio = inputs.members("trainer_logprobs") - inputs.members("inference_logprobs")
    # What the loss drops still shows here, as the largest ratio that is not infinite.
    log_ratio = log_ratio.double().nan_to_num(0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    mismatch = summarize(log_ratio.expm1() - log_ratio)  # r - log r - 1 without the cancellation near r = 1
    return {"mismatch_kl": mismatch, f"{name}/mismatch_kl": mismatch, f"{name}/ratio": summarize(log_ratio.exp())}


@torch.no_grad()
def summarize(values: Tensor) -> Tensor:
    """[sum, count, min, max] of the values in float64: a metric that can be merged over micro batches and ranks."""
    values = values.detach().double().flatten()
    if not len(values):
        return torch.tensor([0.0, 0.0, torch.inf, -torch.inf], dtype=torch.float64)
    return torch.stack([values.sum(), torch.tensor(float(len(values))).to(values), values.min(), values.max()]).cpu()


def merge(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Merge summaries of several micro batches."""
    merged: dict[str, Tensor] = {}
    for part in parts:
        for name, (total, count, low, high) in part.items():
            if name in merged:
                t, c, lo, hi = merged[name]
                total, count, low, high = t + total, c + count, torch.minimum(lo, low), torch.maximum(hi, high)
            merged[name] = torch.stack([total, count, low, high])
    return merged


def as_scalars(merged: Mapping[str, Tensor]) -> dict[str, float]:
    """Named numbers for a log: losses and token counts are sums, `mismatch_kl` gives mean and max, a ratio min, mean and
    max, everything else a mean. What no token contributed to is left out."""
    scalars = {}
    for name, (total, count, low, high) in ((name, summary.tolist()) for name, summary in merged.items()):
        if name.startswith(("loss/", "tokens/")):
            scalars[name] = total
        elif count and name == "mismatch_kl":
            scalars |= {f"{name}/mean": total / count, f"{name}/max": high}
        elif count and name.endswith("/ratio"):
            scalars |= {f"{name}/min": low, f"{name}/mean": total / count, f"{name}/max": high}
        elif count:
            scalars[name] = total / count
    return scalars
