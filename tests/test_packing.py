"""Packing: every sequence once, streams aligned, nothing across a border."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packing import fill_rows, pack
from traces import Trace, assign_advantages


def branch_of(tokens, sampled_from=1, advantage=1.0):
    trace = Trace()
    trace.add_turn(tokens[:sampled_from], tokens[sampled_from:], [-0.5] * (len(tokens) - sampled_from))
    if advantage is not None:
        assign_advantages(trace, advantage)
    return trace.branches[0]


def test_short_sequences_share_a_row_as_wide_as_the_longest():
    (batch,), counts = pack([branch_of([1, 2, 3, 4, 5, 6]), branch_of([7, 8, 9]), branch_of([10, 11])], seq_len=64)
    assert batch.token_ids.tolist() == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 0]]
    assert batch.sequence_ids.tolist() == [[0] * 6, [1, 1, 1, 2, 2, -1]]
    assert batch.loss_mask.tolist() == [[False] + [True] * 5, [False, True, True, False, True, False]]
    assert counts.denominators() == {"rl": 8, "ce": 0, "ref_kl": 0}
    assert batch.rl_weights is None and batch.ce_weights is None and batch.ref_logprobs is None


def test_a_missing_stream_beside_a_present_one_is_its_identity():
    a, b = branch_of([1, 2, 3]), branch_of([4, 5, 6])
    a.rl_weights = np.array([0.0, 0.5, 0.5])
    b.ce_weights = np.array([1.0, 0.0, 0.3])
    (batch,), counts = pack([a, b], seq_len=3)
    assert batch.rl_weights.tolist() == [[0, 0.5, 0.5], [1, 1, 1]]
    assert batch.ce_weights[0].tolist() == [0, 0, 0]
    assert batch.ce_weights[1, 0] == 0, "nothing predicts the first token, so it is no member"
    assert counts.rl == 3.0 and counts.ce == 1 and counts.ref_kl == 0


def test_a_long_branch_is_cut_and_counted():
    branch = branch_of(list(range(10)))
    (batch,), counts = pack([branch, branch_of([1, 2])], seq_len=6)
    assert counts.cut == 1 and batch.token_ids.shape[1] == 6 and counts.rl == 5 + 1


@pytest.mark.parametrize("stream", ["sampled", "logprobs", "is_content", "advantages", "rl_weights", "ref_logprobs"])
def test_every_length_is_checked_before_the_cut(stream):
    branch = branch_of(list(range(10)))
    setattr(branch, stream, np.zeros(8))
    with pytest.raises(ValueError, match=f"branch 0: {stream} has 8 entries for 10 tokens"):
        pack([branch], seq_len=4)


def test_members_without_what_they_need_are_refused():
    with pytest.raises(ValueError, match="2 tokens of rl need advantages"):
        pack([branch_of([1, 2, 3], advantage=None)], 8)
    with pytest.raises(ValueError, match="advantages is not finite on a token of rl"):
        pack([branch_of([1, 2, 3], advantage=np.nan)], 8)
    branch = branch_of([1, 2, 3])
    branch.logprobs[2] = np.nan
    with pytest.raises(ValueError, match="logprobs is not finite"):
        pack([branch], 8)
    branch.rl_weights = np.zeros(3)  # no member any more: a placeholder is fine
    pack([branch], 8)
    with pytest.raises(ValueError, match="branch 0 is empty"):
        pack([Trace().add_turn([], [], [])], 8)


def test_the_end_token_trains_where_pad_and_end_are_one_id():
    """A17: membership comes from lengths, never from comparing ids with the pad id (0 here, which is also sampled)."""
    (batch,), counts = pack([branch_of([5, 6, 0]), branch_of([5, 6, 7, 8, 9])], seq_len=5)
    assert batch.loss_mask.tolist() == [[False, True, True, True, True], [False, True, True, False, False]]
    assert batch.token_ids[1].tolist() == [5, 6, 0, 0, 0] and counts.rl == 6


def test_micro_batches_split_rows_and_keep_the_denominators():
    branches = [branch_of(list(range(n))) for n in (9, 9, 4, 5, 2, 7)]
    whole, counts = pack(branches, 64)
    parts, counts_of_parts = pack(branches, 64, micro_batch_tokens=18)
    assert len(whole) == 1 and len(parts) == 2
    assert all(batch.token_ids.numel() <= 18 for batch in parts)
    assert counts.denominators() == counts_of_parts.denominators()


def test_nothing_to_pack():
    assert pack([], 8)[0] == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 80))
def test_every_sequence_lies_in_one_row_and_no_row_is_too_wide(lengths, width):
    rows = fill_rows(lengths, width)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= width for row in rows)


def test_many_sequences_pack_fast_and_full():
    """A26: best-fit decreasing over a sorted list of gaps."""
    lengths = np.random.default_rng(0).lognormal(6, 1, 10_000).clip(1, 4096).astype(int).tolist()
    rows = fill_rows(lengths, 4096)
    assert sum(lengths) / (len(rows) * 4096) >= 0.97
