"""The batches of a run, dumped and trained on again without an engine."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint import find_batches, list_steps, read_batch, write_batch
from packing import Counts, MicroBatch, pack
from tests.conftest import run_train
from tests.many_ranks import ended, mixed_batch, start, train_on_ranks

STEPS = 3
OF_TRAINING = ("loss/", "optim/", "mismatch_kl/", "rl/", "ce/", "ref_kl/", "entropy/", "pack/")


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """A run of echo, whose branches carry streams of two components, with its batches in files of one row each."""
    runs = tmp_path_factory.mktemp("runs")
    small = ["--batch-size", 8, "--group-size", 4, "--eval-every", 0, "--seq-len", 256, "--micro-batch-tokens", 256]
    arguments = ["--algo", "echo", "--env", "calculator", *small, "--dump-batches"]
    assert run_train(*arguments, "--steps", STEPS, "--runs-dir", runs, "--name", "dumped") == 0
    return runs / "dumped"


def of_training(folder):
    """What training says of itself, by step."""
    rows = [json.loads(line) for line in open(folder / "metrics.jsonl")]
    return {row["step"]: {key: row[key] for key in row if key.startswith(OF_TRAINING)} for row in rows}


def replay(dumped, runs, name, *flags):
    arguments = ["--env", "calculator", "--replay", dumped / "batches", "--steps", STEPS, "--runs-dir", runs]
    return [*arguments, "--name", name, *flags]


def test_a_replayed_run_is_the_run(dumped, tmp_path):
    assert run_train(*replay(dumped, tmp_path, "again")) == 0
    expected = of_training(dumped)
    assert list(expected) == [1, 2, 3] and expected[1]["loss/ce"] != 0 and "optim/grad_norm" in expected[3]
    assert of_training(tmp_path / "again") == expected, "to the bit"
    assert not (tmp_path / "again" / "checkpoints").exists()


def test_two_ranks_replay_what_one_has_dumped(dumped, tmp_path):
    assert ended(start(2, train_on_ranks, tmp_path / "log", *replay(dumped, tmp_path, "two"))) == [0, 0]
    expected, found = of_training(dumped), of_training(tmp_path / "two")
    assert expected.keys() == found.keys()
    for step, metrics in expected.items():
        for name, value in metrics.items():
            if name != "pack/fill":  # which counts fillers
                assert found[step][name] == pytest.approx(value, rel=1e-3, abs=1e-6), (step, name)


def test_a_batch_is_read_as_it_was_written(tmp_path):
    micro_batches, counts = pack(mixed_batch(), 30, 30, ranks=4)
    for _ in range(2):  # a resumed run comes by again
        write_batch(tmp_path, 7, micro_batches, counts)
    assert find_batches(tmp_path, 6, 7, 10**6) == [(7, tmp_path / "step_7")]
    again, same_counts = read_batch(tmp_path / "step_7")
    assert same_counts == counts and len(again) == 4
    for written, read in zip(micro_batches, again):
        for name, tensor in vars(written).items():
            other = getattr(read, name)
            assert (tensor is None and other is None) or torch.equal(tensor.nan_to_num(9), other.nan_to_num(9)), name


def batch_of(token_ids, **others):
    """A micro batch of these tokens that says nothing else."""
    names = ("token_ids", "position_ids", "sequence_ids", "loss_mask", "inference_logprobs")
    return MicroBatch(**{name: torch.tensor(token_ids) for name in names} | others)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda step: None, "holds no batch of steps 1 to 3"),
        (lambda step: step.rename(step.with_name("step_2")), "step_2 is empty"),
        (lambda step: (step / "0000.safetensors").write_bytes(b"no"), "step_1/0000.safetensors is no batch"),
        (lambda step: save_file({"x": torch.ones(1)}, step / "0.safetensors"), "step_1/0.safetensors is no batch"),
        (
            lambda step: save_file({"token_ids": torch.tensor([[7]])}, step / "0.safetensors", {"rl": "1", "more": "2"}),
            "is no batch",
        ),
        (
            lambda step: save_file({"token_ids": torch.tensor([[7]])}, step / "0.safetensors", {"rl": "1"}),
            "holds token 7, which --model does not have",
        ),
        (
            lambda step: save_file(
                {"token_ids": torch.tensor([[1]]), "tokens": torch.ones(1)}, step / "0.safetensors", {"rl": "1"}
            ),
            "holds tokens",
        ),
        (lambda step: write_batch(step.parent, 1, [batch_of([[-1]])], Counts(slots=1)), "holds token -1"),
        (
            lambda step: save_file({"token_ids": torch.tensor([[1]])}, step / "0.safetensors", {"rl": "1"}),
            "lacks position_ids, sequence_ids, loss_mask, inference_logprobs",
        ),
        (
            lambda step: write_batch(step.parent, 1, [batch_of([[1, 2]], loss_mask=torch.ones(1, 3))], Counts(slots=2)),
            "holds loss_mask of shape",
        ),
        (lambda step: write_batch(step.parent, 1, [batch_of([1, 2])], Counts(slots=2)), "of shape"),
        (lambda step: write_batch(step.parent, 1, [batch_of([[1]])], Counts(slots=3)), "not whole: its files hold 1 of 3"),
    ],
)  # fmt: skip
def test_what_is_no_batch_is_told(damage, said, tmp_path):
    step = tmp_path / "step_1"
    step.mkdir()
    damage(step)
    if said.startswith("holds no"):
        step.rmdir()
    with pytest.raises(ValueError, match=said) as error:
        find_batches(tmp_path, 0, 3, 7)
    assert str(error.value).startswith(f"--replay {tmp_path}: ")


def test_a_replay_needs_batches_and_no_rollout_ranks(dumped, train, tmp_path):
    code, _, err = train("--replay", tmp_path, "--runs-dir", tmp_path, "--name", "none")
    assert code == 2 and err.startswith(f"train.py: --replay {tmp_path}: holds no batch") and err.count("\n") == 1
    assert not (tmp_path / "none").exists()
    code, _, err = train("--replay", dumped / "batches", "--ranks", 2, "--rollout-ranks", "0")
    assert code == 2 and "leave it out with --replay" in err


def test_a_replay_goes_on_from_a_checkpoint(dumped, tmp_path):
    """Steps that it has done are not replayed; the moments are those of the run."""
    small = ["--batch-size", 8, "--group-size", 4, "--eval-every", 0, "--seq-len", 256, "--micro-batch-tokens", 256]
    same = ["--algo", "echo", "--env", "calculator", *small, "--steps", STEPS, "--runs-dir", tmp_path]
    assert run_train(*same, "--save-every", 1, "--keep", 9, "--name", "saves") == 0
    begin = tmp_path / "saves" / "checkpoints" / "step_2"
    assert run_train(*replay(dumped, tmp_path, "rest", "--resume-from", begin)) == 0
    assert of_training(tmp_path / "rest") == {3: of_training(dumped)[3]}


def test_a_resumed_run_forgets_the_batches_after_its_checkpoint(dumped, tmp_path):
    shutil.copytree(dumped, tmp_path / "run")
    for step in range(4, 7):
        shutil.copytree(dumped / "batches" / "step_1", tmp_path / "run" / "batches" / f"step_{step}")
    where = ["--runs-dir", tmp_path, "--name", "run", "--resume", "--steps", 4, "--save-every", 0]
    assert run_train(*where) == 0  # there is a checkpoint of step 3
    assert [path.name for path in list_steps(tmp_path / "run" / "batches")] == [f"step_{step}" for step in range(1, 5)]
    assert [step for step, _ in find_batches(tmp_path / "run" / "batches", 0, 9, 10**6)] == [1, 2, 3, 4]


def test_a_dumped_file_is_plain_tensors(dumped):
    """For whoever wants to look: rows, streams, and the denominators in the header."""
    (first, *rest) = sorted((dumped / "batches" / "step_1").glob("*.safetensors"))
    tensors = load_file(first)
    assert rest and {"token_ids", "sequence_ids", "loss_mask", "advantages", "ce_weights"} <= tensors.keys()
    assert {tensor.shape for tensor in tensors.values()} == {tensors["token_ids"].shape}
