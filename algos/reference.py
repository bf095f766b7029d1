"""What the algorithms with a reference model share: its log-probabilities of the sampled tokens, by one prefill.

The trainer compares them with the policy's own token by token, so they must be those of the very same token stream at the
very same temperature: vLLM's prompt log-probs ignore the temperature, hence it has to be 1.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from traces import Branch, Trace, assign_ref_logprobs


def check_temperature(algo: str, run: Any) -> None:
    """Raise ValueError for a temperature other than 1."""
    if run.temperature != 1:
        raise ValueError(
            f"--temperature {run.temperature:g}: {algo} needs 1, since its reference scores at temperature 1"
        )


async def score_trace(
    engine: Any, trace: Trace, hint: Callable[[Branch], tuple[int, Sequence[int]]] = lambda branch: (0, ())
) -> None:
    """Write the reference log-probs of a trace's sampled tokens, as `engine` sees them.

    hint: (at, ids) for a branch: token ids that the engine reads before position `at` of the branch and the policy did
    not. Raises ValueError where hint and branch do not fit the engine's context, and where a log-prob is missing.
    """
    branches = trace.training_branches()
    scores = await asyncio.gather(*[_score_branch(engine, branch, *hint(branch)) for branch in branches])
    assign_ref_logprobs(trace, np.concatenate(scores))


async def _score_branch(engine: Any, branch: Branch, at: int, hint: Sequence[int]) -> np.ndarray:
    ids = branch.token_ids.tolist()
    ids[at:at] = hint
    if len(ids) > engine.max_context:
        raise ValueError(
            f"{len(hint)} tokens of a hint and {len(branch)} of a rollout do not fit the reference's context of {engine.max_context} (the policy's is --seq-len)"
        )
    scores = np.asarray(await engine.score(ids), np.float64)
    if scores.shape != (len(ids),):
        raise ValueError(f"the reference gave log-probs of shape {scores.shape} for {len(ids)} tokens")
    scores = np.delete(scores, slice(at, at + len(hint)))[branch.sampled]
    if not np.isfinite(scores).all():
        raise ValueError("the reference gave no finite log-prob for a sampled token")
    return scores
