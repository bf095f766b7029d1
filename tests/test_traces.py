"""Token streams: the exact-prefix merge, credit assignment, routing."""

import numpy as np
import pytest

from traces import Episode, Task, Trace, assign_advantages, assign_ref_logprobs, route_actions, trainable_traces


def trace_of(*turns, **fields):
    trace = Trace(**fields)
    for prompt, completion in turns:
        trace.add_turn(prompt, completion, [-0.5] * len(completion))
    return trace


def test_extending_turns_share_a_branch():
    trace = trace_of(([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]))
    (branch,) = trace.branches
    assert branch.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert branch.sampled.tolist() == [False, False, True, True, False, True]
    assert np.isnan(branch.logprobs).tolist() == [True, True, False, False, True, False]
    assert [(turn.prompt_len, turn.completion_len) for turn in branch.turns] == [(2, 2), (5, 1)]
    assert [(s.role, s.start, s.stop) for s in branch.segments] == [
        ("user", 0, 2),
        ("assistant", 2, 4),
        ("user", 4, 5),
        ("assistant", 5, 6),
    ]


def test_a_changed_history_starts_a_branch_and_no_token_trains_twice():
    trace = trace_of(([1], [2, 3]), ([1, 2, 9], [4]))
    assert [branch.token_ids.tolist() for branch in trace.branches] == [[1, 2, 3], [1, 2, 9, 4]]
    assert [branch.sampled.tolist() for branch in trace.branches] == [[False, True, True], [False, False, False, True]]
    assert trace.num_sampled == 3


def test_the_longest_prefix_wins():
    trace = trace_of(([1], [2]), ([1], [2, 3]), ([1, 2, 3, 4], [5]))
    assert [branch.token_ids.tolist() for branch in trace.branches] == [[1, 2], [1, 2, 3, 4, 5]]


def test_calls_do_not_mix():
    trace = Trace()
    trace.add_turn([1], [2], [-1.0], call="a")
    trace.add_turn([1, 2], [3], [-1.0], call="b")
    assert [branch.call for branch in trace.branches] == ["a", "b"]


def test_roles_and_content_of_the_new_tokens_alone():
    trace = Trace()
    trace.add_turn([1, 2], [3], [-1.0], roles=["system", "user"], is_content=[False, True])
    trace.add_turn([1, 2, 3, 7, 8], [4], [-1.0], roles=["tool", "assistant"], is_content=[True, False])
    (branch,) = trace.branches
    assert [s.role for s in branch.segments] == ["system", "user", "assistant", "tool", "assistant", "assistant"]
    assert branch.is_content.tolist() == [False, True, True, True, False, True]


def test_heads_stay_aligned_with_tokens():
    trace = Trace()
    head = np.array([[5, 6]]), np.array([[-0.1, -2.0]])
    trace.add_turn([1], [2], [-1.0], topk=head)
    trace.add_turn([1, 2, 3], [4], [-1.0])
    trace.add_turn([1, 2, 3, 4], [5], [-1.0], topk=head)
    (branch,) = trace.branches
    assert branch.topk_ids[:, 0].tolist() == [-1, 5, -1, -1, 5]


def test_lengths_that_disagree_are_refused():
    with pytest.raises(ValueError, match="agent solver: 2 sampled tokens came with 1 log-probs"):
        Trace(agent="solver").add_turn([1], [2, 3], [-1.0])
    with pytest.raises(ValueError, match="new prompt tokens"):
        Trace().add_turn([1, 2], [3], [-1.0], roles=["user"], is_content=[True])


def test_advantages_by_scalar_and_by_token():
    trace = trace_of(([1], [2, 3]), ([9], [4]))
    assign_advantages(trace, 0.5)
    assert [branch.advantages.tolist() for branch in trace.branches] == [[0, 0.5, 0.5], [0, 0.5]]
    assign_advantages(trace, [1, 2, 3])
    assert [branch.advantages.tolist() for branch in trace.branches] == [[0, 1, 2], [0, 3]]
    assign_ref_logprobs(trace, [-1, -2, -3])
    assert trace.branches[0].ref_logprobs.tolist() == [0, -1, -2]
    with pytest.raises(ValueError, match="agent agent: shape .2,. given, but the trace has 3 sampled tokens"):
        assign_advantages(trace, [1, 2])


@pytest.mark.parametrize("loss", ["ce", "ref_kl"])
def test_routing_moves_actions_and_keeps_what_was_written(loss):
    trace = trace_of(([1], [2]), ([1, 2, 3], [4]))
    trace.branches[0].ce_weights = np.array([0, 0, 0.1, 0])
    route_actions(trace, loss)
    (branch,) = trace.branches
    assert branch.rl_weights.tolist() == [0, 0, 0, 0]
    assert branch.ce_weights.tolist() == ([0, 1, 0.1, 1] if loss == "ce" else [0, 0, 0.1, 0])
    assert branch.ref_kl_weights is None if loss == "ce" else branch.ref_kl_weights.tolist() == [0, 1, 0, 1]


def test_rl_needs_no_streams():
    trace = trace_of(([1], [2]))
    route_actions(trace, "rl")
    assert trace.branches[0].rl_weights is None


def test_who_is_trainable():
    turn = ([1], [2])
    good = trace_of(turn, reward=1.0)
    others = [trace_of(turn, reward=None), trace_of(turn, reward=float("nan")), trace_of(turn, reward=float("inf"))]
    others += [trace_of(turn, reward=1.0, trainable=False), trace_of(turn, reward=1.0, error="boom"), Trace(reward=1.0)]
    task = Task("t", [])
    assert trainable_traces(
        [Episode("a", "e", task, [*others, good]), Episode("b", "e", task, [good], error="boom")]
    ) == [good]
