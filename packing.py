"""Branches become flat micro batches.

A micro batch is [B, T]. Several short sequences share a row; each keeps its own number (`sequence_ids`) and its own
positions from 0, and what a token may attend to follows from those two alone. The width T is that of the longest branch
(at most `seq_len`), because attention is quadratic in it: many short rows beat one long one.

Streams that some branch carries are filled for the others with their identity (rl weight 1, ce and ref_kl weight 0), so
that branches of different algorithms share a row. A stream that nobody carries stays None.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from traces import STREAMS, Branch

IDENTITY = {"advantages": 0.0, "rl_weights": 1.0, "ce_weights": 0.0, "ref_kl_weights": 0.0, "ref_logprobs": 0.0}
COMPONENTS = ("rl", "ce", "ref_kl")
LINEAR_LENGTH = 12_288  # at this length attention costs as much as the rest of a layer: 12 times the width, here 1,024


@dataclass
class MicroBatch:
    """Rows of packed sequences, every tensor [B, T].

    token_ids, position_ids int64; sequence_ids int64 numbers the sequences over the whole step, -1 is padding;
    loss_mask bool: sampled; inference_logprobs and the streams float32. Position 0 of a sequence has no predecessor, so
    it is never a member of any component. topk_ids int64 and topk_logprobs float32 [B, T, K] hold the sampler's heads (id
    -1: no candidate; log-prob NaN: no head was captured for that token).
    """

    token_ids: Tensor
    position_ids: Tensor
    sequence_ids: Tensor
    loss_mask: Tensor
    inference_logprobs: Tensor
    advantages: Tensor | None = None
    rl_weights: Tensor | None = None
    ce_weights: Tensor | None = None
    ref_kl_weights: Tensor | None = None
    ref_logprobs: Tensor | None = None
    topk_ids: Tensor | None = None
    topk_logprobs: Tensor | None = None

    @property
    def needed(self) -> Tensor:
        """Tokens whose log-probability some component or metric asks for, [B, T] bool."""
        needed = self.loss_mask.clone()
        for weights in (self.ce_weights, self.ref_kl_weights):
            if weights is not None:
                needed |= weights != 0
        return needed

    def to(self, device: torch.device | str) -> "MicroBatch":
        """The same micro batch on another device."""
        return MicroBatch(**{name: value if value is None else value.to(device) for name, value in vars(self).items()})


@dataclass
class Counts:
    """What a whole step holds: the three denominators (rl: sum of weights; ce, ref_kl: member tokens), and statistics."""

    rl: float = 0.0
    ce: float = 0.0
    ref_kl: float = 0.0
    tokens: int = 0
    slots: int = 0
    cut: int = 0

    def denominators(self) -> dict[str, float]:
        """N by component name."""
        return {"rl": self.rl, "ce": self.ce, "ref_kl": self.ref_kl}


def pack(
    branches: Sequence[Branch], seq_len: int, micro_batch_tokens: int | None = None, ranks: int = 1
) -> tuple[list[MicroBatch], Counts]:
    """Lay branches out in rows and rows in micro batches of at most `micro_batch_tokens` tokens (default: one for each rank).

    Deterministic in its input. A branch longer than seq_len keeps its first seq_len tokens of every stream and is counted
    in `Counts.cut`. There is a multiple of `ranks` micro batches, and rank r takes [r::ranks]: those that run at the same time
    stand together and cost about the same. Where rows are too few, fillers stand in that hold no member of any component.
    Raises ValueError where a stream's length is not the token count, where a member token lacks a stream or a finite value,
    and where a branch is empty.
    """
    for index, branch in enumerate(branches):
        _validate(index, branch)
    lengths = [min(len(branch), seq_len) for branch in branches]
    width = max(lengths, default=0)
    rows = fill_rows(lengths, width)
    rows_per_batch = max(1, micro_batch_tokens // width) if micro_batch_tokens and width else -(-len(rows) // ranks)
    at_once = max(1, rows_per_batch * ranks)
    present = [name for name in STREAMS if any(getattr(branch, name) is not None for branch in branches)]
    micro_batches = [
        _micro_batch([[(i, branches[i], lengths[i]) for i in row] for row in share], present)
        for start in range(0, len(rows), at_once)
        for share in balance(rows[start : start + at_once], lengths, ranks)
    ]
    counts = Counts(cut=sum(len(branch) > seq_len for branch in branches), tokens=sum(lengths))
    for batch in micro_batches:
        counts.slots += batch.token_ids.numel()
        counts.rl += (
            float((batch.rl_weights.double()[batch.loss_mask]).sum())
            if batch.rl_weights is not None
            else int(batch.loss_mask.sum())
        )
        counts.ce += int((batch.ce_weights != 0).sum()) if batch.ce_weights is not None else 0
        counts.ref_kl += int((batch.ref_kl_weights != 0).sum()) if batch.ref_kl_weights is not None else 0
    return micro_batches, counts


def fill_rows(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Best-fit decreasing: each sequence, longest first, goes to the fullest row that still has room for it."""
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fullest = bisect_left(rooms, (lengths[i], -1))
        if fullest < len(rooms):
            room, row = rooms.pop(fullest)
        else:
            room, row = width, len(rows)
            rows.append([])
        rows[row].append(i)
        insort(rooms, (room - lengths[i], row))
    return rows


def balance(rows: list[list[int]], lengths: Sequence[int], ranks: int) -> list[list[list[int]]]:
    """Deal rows to ranks that run at the same time, to none more than its share rounded up: the most expensive first, each to the
    rank that has least to do. A sequence costs its tokens and what they attend to."""
    most = -(-len(rows) // ranks)
    costs = [sum(lengths[i] * (1 + lengths[i] / LINEAR_LENGTH) for i in row) for row in rows]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for r in sorted(range(len(rows)), key=lambda r: (-costs[r], r)):
        rank = min((rank for rank in range(ranks) if len(shares[rank]) < most), key=lambda rank: (load[rank], rank))
        shares[rank].append(r)
        load[rank] += costs[r]
    return [[rows[r] for r in sorted(share)] for share in shares]


def fill_up(micro_batches: list[MicroBatch], ranks: int) -> list[MicroBatch]:
    """The same with fillers behind them, as many as make it a multiple of `ranks`."""
    return micro_batches + [_micro_batch([], []) for _ in range(-len(micro_batches) % ranks)]


def _micro_batch(rows: list[list[tuple[int, Branch, int]]], present: list[str]) -> MicroBatch:
    rows = rows or [[]]  # a filler
    width = max(1, *(sum(length for _, _, length in row) for row in rows))
    shape = (len(rows), width)
    token_ids, position_ids = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    sequence_ids, loss_mask = np.full(shape, -1, np.int64), np.zeros(shape, bool)
    logprobs = np.zeros(shape, np.float32)
    streams = {name: np.zeros(shape, np.float64) for name in present}
    k = max(
        (branch.topk_ids.shape[1] for row in rows for _, branch, _ in row if branch.topk_ids is not None), default=0
    )
    topk_ids, topk_logprobs = np.full((*shape, k), -1, np.int64), np.full((*shape, k), np.nan, np.float32)
    for r, row in enumerate(rows):
        start = 0
        for index, branch, length in row:
            span = (r, slice(start, start + length))
            token_ids[span] = branch.token_ids[:length]
            position_ids[span] = np.arange(length)
            sequence_ids[span] = index
            loss_mask[span] = branch.sampled[:length]
            logprobs[span] = np.where(np.isnan(branch.logprobs), 0.0, branch.logprobs)[:length]
            for name, stream in streams.items():
                values = getattr(branch, name)
                stream[span] = IDENTITY[name] if values is None else values[:length]
            if branch.topk_ids is not None:
                topk_ids[span][:, : branch.topk_ids.shape[1]] = branch.topk_ids[:length]
                topk_logprobs[span] = -np.inf
                topk_logprobs[span][:, : branch.topk_ids.shape[1]] = branch.topk_logprobs[:length]
            # Nothing predicts the first token of a sequence: the label before it belongs to its neighbour in the row.
            loss_mask[r, start] = False
            for name in ("ce_weights", "ref_kl_weights"):
                if name in streams:
                    streams[name][r, start] = 0.0
            start += length
        position_ids[r, start:] = np.arange(width - start)
    tensors = {name: torch.from_numpy(stream.astype(np.float32)) for name, stream in streams.items()}
    if k:
        tensors |= {"topk_ids": torch.from_numpy(topk_ids), "topk_logprobs": torch.from_numpy(topk_logprobs)}
    return MicroBatch(
        torch.from_numpy(token_ids), torch.from_numpy(position_ids), torch.from_numpy(sequence_ids),
        torch.from_numpy(loss_mask), torch.from_numpy(logprobs), **tensors,
    )  # fmt: skip


def _validate(index: int, branch: Branch) -> None:
    length = len(branch)
    if not length:
        raise ValueError(f"branch {index} is empty")
    for name in ("sampled", "logprobs", "is_content", *STREAMS, "topk_ids", "topk_logprobs"):
        values = getattr(branch, name)
        if values is not None and len(values) != length:
            raise ValueError(f"branch {index}: {name} has {len(values)} entries for {length} tokens")
    members = {
        "rl": branch.sampled if branch.rl_weights is None else branch.sampled & (branch.rl_weights != 0),
        "ce": np.zeros(length, bool) if branch.ce_weights is None else branch.ce_weights != 0,
        "ref_kl": np.zeros(length, bool) if branch.ref_kl_weights is None else branch.ref_kl_weights != 0,
    }
    for component, name in (("rl", "rl_weights"), ("rl", "advantages"), ("rl", "logprobs"), ("ce", "ce_weights"),
                            ("ref_kl", "ref_kl_weights"), ("ref_kl", "ref_logprobs"), ("ref_kl", "logprobs")):  # fmt: skip
        needed = members[component][1:]
        values = getattr(branch, name)
        if values is None:
            if needed.any() and not name.endswith("_weights"):
                raise ValueError(
                    f"branch {index}: {int(needed.sum())} tokens of {component} need {name}, which nobody wrote"
                )
        elif np.isnan(values[1:][needed]).any() or (
            name not in ("logprobs", "ref_logprobs") and np.isinf(values[1:][needed]).any()
        ):
            raise ValueError(f"branch {index}: {name} is not finite on a token of {component}")
