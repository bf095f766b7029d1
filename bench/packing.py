"""Pack 10,000 sequences of log-normal length into rows of 4,096 tokens: how long it takes, and how full the rows are.

    python bench/packing.py                  # beside TRL's best-fit decreasing packer where trl and datasets are installed

The last line packs whole branches for four ranks: tensors, fillers and all, and how evenly tokens and attention are spread over
what runs at the same time.
"""

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from packing import LINEAR_LENGTH, fill_rows, pack
from traces import Branch

WIDTH, NUMBER, RANKS = 4096, 10_000, 4


def branch_of(length: int) -> Branch:
    """A branch whose second half was sampled."""
    sampled = np.arange(length) >= length // 2
    branch = Branch(np.ones(length, np.int32), sampled, np.where(sampled, -1.0, np.nan), np.ones(length, bool))
    branch.advantages = np.ones(length)
    return branch


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.0, 1.0, NUMBER).astype(int), 1, WIDTH).tolist()
    start = time.perf_counter()
    rows = fill_rows(lengths, WIDTH)
    seconds = time.perf_counter() - start
    assert sorted(i for row in rows for i in row) == list(range(NUMBER)) and rows == fill_rows(lengths, WIDTH)
    assert max(sum(lengths[i] for i in row) for row in rows) <= WIDTH
    print(f"nanopost: {len(rows)} rows, fill {sum(lengths) / (len(rows) * WIDTH):.4f}, {seconds:.2f} s")

    try:
        from datasets import Dataset
        from trl import pack_dataset
    except ImportError as error:
        print(f"TRL: not installed ({error})")
    else:
        data = Dataset.from_dict({"input_ids": [[1] * length for length in lengths]})
        start = time.perf_counter()
        theirs = len(pack_dataset(data, seq_length=WIDTH, strategy="bfd"))
        seconds = time.perf_counter() - start
        print(
            f"TRL:      {theirs} rows, fill {sum(lengths) / (theirs * WIDTH):.4f}, {seconds:.2f} s (with its data set)"
        )

    branches = [branch_of(length) for length in lengths]
    start = time.perf_counter()
    micro_batches, counts = pack(branches, WIDTH, 4 * WIDTH, RANKS)
    seconds = time.perf_counter() - start
    costs = np.zeros(len(micro_batches))
    for i, batch in enumerate(micro_batches):
        numbers = np.unique(batch.sequence_ids.numpy(), return_counts=True)
        costs[i] = sum(n * (1 + n / LINEAR_LENGTH) for s, n in zip(*numbers, strict=True) if s >= 0)
    at_once = costs.reshape(-1, RANKS)
    waiting = 1 - at_once.sum() / (at_once.max(axis=1).sum() * RANKS)
    print(
        f"{len(micro_batches)} micro batches for {RANKS} ranks: fill {counts.tokens / counts.slots:.4f}, "
        f"{waiting:.2%} of the time a rank waits for a slower one, {seconds:.2f} s"
    )
