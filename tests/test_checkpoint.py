"""A run that cannot be lost: kill, resume, damage, and the model as others read it."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import checkpoint
from checkpoint import (
    Snapshot,
    flatten,
    generator_states,
    list_steps,
    load,
    newest_whole,
    problem,
    save,
    unflatten,
)
from engines.hf import HFEngine
from monitor import claim, cut_records
from policy import OptimizerConfig, Policy
from tests.conftest import ROOT, run_train, save_model
from tests.test_policy import make_policy, sample, train_step
from traces import Branch, Segment, Turn

CONFIGS = {  # what a run must remember: scores and a generator of a pool and of gates; running baselines; a batch that waits
    "difficulty pool": ([str(ROOT / "configs" / "difficulty_pool.py"), "--eval-every", "3", "--eval-samples", "8"]),
    "lora": (["--lora.rank", "4", "--lora.alpha", "8", "--lr", "5e-3", "--eval-every", "0"]),
    "rae, overlap": (["--algo", "rae", "--overlap", "--eval-every", "0", "--group-size", "3"]),
    "echo, overlap, a surplus": (["--env", "calculator", "--algo", "echo", "--overlap", "--eval-every", "0", "--group-size", "5"]),
}  # fmt: skip


def run(tmp_path, *flags, code=0):
    """train.py with six small steps."""
    config = [flags[0]] if not str(flags[0]).startswith("-") else []
    given = ["--batch-size", 16, "--steps", 6, "--save-every", 3, "--runs-dir", tmp_path]
    assert run_train(*config, *given, *flags[len(config) :]) == code
    return tmp_path / flags[flags.index("--name") + 1]


def metrics_of(folder):
    """metrics.jsonl without what a clock says."""
    rows = [json.loads(line) for line in open(folder / "metrics.jsonl")]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in rows]


def trained(folder, step=6):
    return load_file(next((folder / "checkpoints" / f"step_{step}" / "trainer").glob("*.safetensors")))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_resumed_run_is_the_same_run(kind, tmp_path, monkeypatch):
    """A18: metrics of steps 4 to 6, the records, and the weights at the end, to the bit."""
    keep = checkpoint.save

    def save_and_copy(checkpoints, snapshot, *args):
        """At step 3 the folder is put aside as a kill a moment later would leave it: records further on than the checkpoint."""
        folder = keep(checkpoints, snapshot, *args)
        if snapshot.step == 3:
            shutil.copytree(checkpoints.parent, tmp_path / "killed")
            for name in ("metrics.jsonl", "rollouts.jsonl"):
                with open(tmp_path / "killed" / name, "a") as file:
                    file.write('{"step": 4}\n{"half a li')
            (tmp_path / "killed" / "checkpoints" / ".unfinished_6").mkdir()
        return folder

    monkeypatch.setattr(checkpoint, "save", save_and_copy)
    flags = CONFIGS[kind]
    straight = run(tmp_path, *flags, "--name", "straight")
    monkeypatch.undo()
    resumed = run(tmp_path, "--name", "killed", "--resume")
    assert [row["step"] for row in metrics_of(straight)][-6:] == [1, 2, 3, 4, 5, 6]
    assert metrics_of(resumed) == metrics_of(straight)
    assert (resumed / "rollouts.jsonl").read_bytes() == (straight / "rollouts.jsonl").read_bytes()
    once, again = trained(straight), trained(resumed)
    assert once.keys() == again.keys() and all(torch.equal(once[name], again[name]) for name in once)
    assert any(name.startswith("optimizer.") and name.endswith("exp_avg_sq") for name in once)


def test_kill_9_and_resume(tmp_path):
    """The same with a real kill, in processes of its own; the same command line begins the run and goes on with it."""
    command = [
        sys.executable,
        "train.py",
        "--batch-size",
        "16",
        "--steps",
        "6",
        "--save-every",
        "3",
        "--eval-every",
        "0",
    ]
    command += ["--runs-dir", str(tmp_path), "--name", "run", "--resume"]
    env = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.time() + 100
    while not (tmp_path / "run" / "checkpoints" / "step_3").exists() and time.time() < end:
        time.sleep(0.001)
    process.kill()
    process.wait()
    killed = len(list_steps(tmp_path / "run" / "checkpoints"))
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and killed == 1 and "goes on from" in done.stdout
    straight = run(tmp_path, "--eval-every", "0", "--name", "straight")
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert metrics_of(straight) == metrics_of(tmp_path / "run"), "to the bit"


def test_kills_while_saving(tmp_path):
    done = subprocess.run(
        [sys.executable, "tests/kill_while_saving.py", str(tmp_path), "6"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("6 kills, "), done.stdout


@pytest.mark.parametrize(("number", "grace", "steps"), [(signal.SIGTERM, 60, 1), (signal.SIGINT, 0.5, 0)])
def test_a_signal_saves_and_says_how_to_go_on(number, grace, steps, tmp_path, monkeypatch):
    """With time the step at hand is finished; without, the run is left as it was after the one before, and goes on alike."""
    from rollouts import Rollouts

    collect = Rollouts.collect

    async def stopped(self, step):
        if step == 3:
            os.kill(os.getpid(), number)
            if not steps:
                await collect(self, step)  # what an unfinished step has drawn is forgotten
                time.sleep(30)
        return await collect(self, step)

    monkeypatch.setattr(Rollouts, "collect", stopped)
    flags = ["--eval-every", "0", "--save-every", "100"]
    threads = set(threading.enumerate())
    folder = run(tmp_path, *flags, "--name", "run", "--grace", grace, code=0 if steps else 128 + number)
    monkeypatch.undo()
    left = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer) and thread not in threads]
    assert not [thread for thread in left if not thread.finished.is_set()], (
        "a signal to come would hit whoever is there by then"
    )
    saved = [path.name for path in list_steps(folder / "checkpoints")]
    assert saved == [f"step_{2 + steps}"]
    run(tmp_path, "--name", "run", "--resume", "--grace", 60)
    straight = run(tmp_path, *flags, "--name", "straight")
    assert metrics_of(folder) == metrics_of(straight)
    once, again = trained(straight), trained(folder)
    assert all(torch.equal(once[name], again[name]) for name in once)


# What is saved, piece by piece.


@pytest.fixture
def saved(tiny_path, tmp_path):
    """(checkpoints, policy) after an update, saved as step 1."""
    policy = make_policy(tiny_path)
    train_step(policy, sample(HFEngine(tiny_path)))
    folder = tmp_path / "checkpoints"
    save(
        folder,
        Snapshot(1, {"a": 1}, generators=generator_states()),
        policy,
        AutoTokenizer.from_pretrained(tiny_path),
        2,
    )
    return folder, policy


@pytest.mark.parametrize("tied", [True, False])
def test_hf_is_the_trained_model(tied, tmp_path):
    path = save_model(tmp_path / "model", tied=tied)
    policy = make_policy(path)
    train_step(policy, sample(HFEngine(path)))
    tokenizer = AutoTokenizer.from_pretrained(path)
    folder = save(tmp_path / "checkpoints", Snapshot(1, generators=generator_states()), policy, tokenizer, 1)
    loaded = AutoModelForCausalLM.from_pretrained(folder / "hf")
    assert type(loaded).__name__ == "Qwen3ForCausalLM" and loaded.config.architectures == ["Qwen3ForCausalLM"]
    ids, positions = torch.arange(5, 25)[None], torch.arange(20)[None]
    logprobs = loaded(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    everything = torch.arange(logprobs.shape[-1]).expand(logprobs.shape)
    _, _, trainers = policy.model(ids, positions, positions > 0, everything)
    assert (trainers[0, 1:] - logprobs[0, :-1]).abs().max() < 1e-5
    assert loaded.generation_config.eos_token_id == policy.model.lm.generation_config.eos_token_id
    assert AutoTokenizer.from_pretrained(folder / "hf").encode("hi <|im_end|>") == tokenizer.encode("hi <|im_end|>")
    names = {path.name for path in folder.rglob("*") if path.is_file()}
    assert not [name for name in names if name.endswith((".pt", ".bin", ".metadata", ".pkl"))]
    again = make_policy(folder / "hf")
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(policy.weights(), again.weights(), strict=True))


def test_training_goes_on_with_the_moments(saved, tiny_path):
    folder, policy = saved
    other = make_policy(tiny_path)
    snapshot = load(folder / "step_1", other)
    assert snapshot.step == 1 and snapshot.state == {"a": 1} and other.updates == 1
    branches = sample(HFEngine(tiny_path))
    assert train_step(policy, branches, 2) == train_step(other, branches, 2)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(policy.weights(), other.weights(), strict=True))


def test_branches_come_back_as_they_were():
    rng = np.random.default_rng(0)
    branch = Branch(
        np.arange(4, dtype=np.int32), np.array([0, 0, 1, 1], bool), np.array([np.nan, np.nan, -1, -2], np.float32),
        np.ones(4, bool), [Segment("user", 0, 2), Segment("assistant", 2, 4)], [Turn(2, 2, 7, "stop")], "subagent_call-1",
        advantages=rng.normal(size=4), topk_ids=np.ones((4, 2), np.int32), topk_logprobs=np.full((4, 2), -np.inf, np.float32),
    )  # fmt: skip
    groups = [[branch], [], [Branch(), branch]]
    tensors, described = flatten(groups, "x.")
    back = unflatten(tensors, json.loads(json.dumps(described)), "x.")
    assert [len(group) for group in back] == [1, 0, 2]
    for once, again in zip([branch, Branch(), branch], [b for group in back for b in group], strict=True):
        for name, value in vars(once).items():
            other = getattr(again, name)
            same = np.array_equal(value, other, equal_nan=value.dtype.kind == "f") and value.dtype == other.dtype if isinstance(value, np.ndarray) else value == other  # fmt: skip
            assert same, name


def damage(folder, how):
    shard = next((folder / "trainer").glob("*.safetensors"))
    if how == "cut":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif how == "missing":
        shard.unlink()
    elif how == "other header":
        shard.write_bytes(b"\x00" * shard.stat().st_size)
    elif how == "no state":
        (folder / "state.json").unlink()
    elif how == "half a state":
        (folder / "state.json").write_text((folder / "state.json").read_text()[:50])
    elif how == "other format":
        (folder / "state.json").write_text('{"format": 99}')
    elif how == "no checkpoint":
        shutil.rmtree(folder)
        folder.mkdir()


DAMAGES = ["cut", "missing", "other header", "no state", "half a state", "other format", "no checkpoint"]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_told_and_another_offered(how, saved, tiny_path):
    folder, _ = saved
    shutil.copytree(folder / "step_1", folder / "step_2")
    damage(folder / "step_2", how)
    with pytest.raises(ValueError, match="step_2: .*newest whole one beside it is .*step_1") as told:
        load(folder / "step_2", make_policy(tiny_path))
    assert "\n" not in str(told.value)
    assert newest_whole(folder)[0] == folder / "step_1" and problem(folder / "step_2")


def test_a_checkpoint_of_another_model_is_refused(saved, tmp_path):
    folder, _ = saved
    for options in ({"hidden_size": 48}, {"num_hidden_layers": 3}):
        other = save_model(tmp_path / str(options), **options)
        with pytest.raises(ValueError, match="not of this --model"):
            load(folder / "step_1", make_policy(other))


def test_only_the_newest_are_kept_and_a_step_can_be_saved_again(saved, tiny_path):
    folder, policy = saved
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    for step in (2, 10, 10):
        save(folder, Snapshot(step, generators=generator_states()), policy, tokenizer, keep=2)
    assert [path.name for path in list_steps(folder)] == ["step_2", "step_10"]
    assert sorted(path.name for path in folder.iterdir()) == ["step_10", "step_2"]


def test_damaged_ones_and_what_a_kill_has_left_take_no_place(saved, tiny_path):
    """A run that has passed over a damaged checkpoint saves ones of earlier steps: these must not go in its favour. And one that
    is killed while it saves, again and again, does not fill the disk."""
    folder, policy = saved
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    for step in (9, 2):
        shutil.copytree(folder / "step_1", folder / f"step_{step}")
        damage(folder / f"step_{step}", "cut")
    for left in (".unfinished_5", ".doomed_step_1"):
        shutil.copytree(folder / "step_1", folder / left)
    for step, there in ((3, ["step_1", "step_3", "step_9"]), (4, ["step_3", "step_4", "step_9"])):
        save(folder, Snapshot(step, generators=generator_states()), policy, tokenizer, keep=2)
        assert sorted(path.name for path in folder.iterdir()) == there
    save(folder, Snapshot(9, generators=generator_states()), policy, tokenizer, keep=5)
    assert sorted(path.name for path in folder.iterdir()) == ["step_3", "step_4", "step_9"]
    assert newest_whole(folder) == (folder / "step_9", [])


def test_a_whole_checkpoint_is_never_taken_away_to_write_it_again(saved, tiny_path, monkeypatch):
    """A run that is interrupted in the step after it saves once more: a kill must find that step's checkpoint at any moment."""
    folder, policy = saved
    monkeypatch.setattr("checkpoint.os.replace", None)
    save(folder, Snapshot(1, generators=generator_states()), policy, AutoTokenizer.from_pretrained(tiny_path), keep=1)
    assert newest_whole(folder) == (folder / "step_1", [])


def test_records_are_cut_back(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("one\ntwo\n")
    (tmp_path / "rollouts.jsonl").write_text("one\n")
    cut_records(tmp_path, {"metrics.jsonl": 4, "rollouts.jsonl": 99})
    assert (tmp_path / "metrics.jsonl").read_text() == "one\n" == (tmp_path / "rollouts.jsonl").read_text()
    cut_records(tmp_path, {})
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_moments_before_the_first_update(tiny_path, tmp_path):
    policy = make_policy(tiny_path)
    folder = save(
        tmp_path, Snapshot(0, generators=generator_states()), policy, AutoTokenizer.from_pretrained(tiny_path), 1
    )
    other = make_policy(tiny_path)
    load(folder, other)
    branches = sample(HFEngine(tiny_path))
    assert train_step(policy, branches) == train_step(other, branches)


def test_offloaded_moments_are_saved_too(tiny_path, tmp_path):
    policy = Policy(tiny_path, OptimizerConfig(1e-2), 10, offload_optimizer=True)
    branches = sample(HFEngine(tiny_path))
    train_step(policy, branches)
    folder = save(
        tmp_path, Snapshot(1, generators=generator_states()), policy, AutoTokenizer.from_pretrained(tiny_path), 1
    )
    other = make_policy(tiny_path)
    load(folder, other)
    assert train_step(policy, branches, 2) == train_step(other, branches, 2)


# The command line.


def refused(tmp_path, *flags):
    with contextlib.redirect_stderr(open(tmp_path / "stderr", "w")):
        run(tmp_path, *flags, code=2)
    return (tmp_path / "stderr").read_text().strip().splitlines()[-1]


def test_the_command_line(tmp_path):
    short = ["--eval-every", "0", "--steps", "2", "--save-every", "1"]
    folder = run(tmp_path, *short, "--name", "a")
    assert "exists; choose another name, or --resume" in refused(tmp_path, *short, "--name", "a")
    assert run_train("--resume", "--runs-dir", tmp_path) == 2
    longer = run(tmp_path, "--name", "a", "--resume", "--steps", "3")
    assert [row["step"] for row in metrics_of(longer)] == [1, 2, 3] and longer == folder
    assert json.loads((folder / "config.json").read_text())["steps"] == 3
    assert "has other environments" in refused(tmp_path, "--name", "a", "--resume", "--env", "arithmetic")
    assert "has other model" in refused(tmp_path, "--name", "a", "--resume", "--model", "smollm2")
    other = run(tmp_path, *short[:2], "--steps", "5", "--name", "b", "--resume-from", folder / "checkpoints" / "step_3")
    assert [row["step"] for row in metrics_of(other)] == [4, 5]
    said = refused(tmp_path, *short, "--name", "c", "--resume-from", folder / "checkpoints" / "step_1")
    assert "no checkpoint" in said and "step_3" in said and not (tmp_path / "c").exists()
    said = refused(
        tmp_path,
        "--steps",
        "9",
        "--env",
        "arithmetic",
        "--name",
        "c",
        "--resume-from",
        folder / "checkpoints" / "step_3",
    )
    assert "its sources are reverse-text, this run's are arithmetic" in said and not (tmp_path / "c").exists()


def test_what_would_lose_a_run_is_refused(tmp_path):
    short = ["--eval-every", "0", "--steps", "2", "--save-every", "1"]
    folder = run(tmp_path, *short, "--name", "a")
    last, before = folder / "checkpoints" / "step_2", (folder / "metrics.jsonl").read_bytes()
    said = refused(tmp_path, "--name", "a", "--resume", "--steps", "1")
    assert "--steps 1" in said and "has done 2 already" in said
    assert json.loads((folder / "config.json").read_text())["steps"] == 2
    said = refused(tmp_path, *short, "--name", "b", "--resume-from", last)
    assert "--steps 2" in said and not (tmp_path / "b").exists()
    with claim(folder):
        assert "another process" in refused(tmp_path, "--name", "a", "--resume", "--steps", "3")
    for checkpoint_folder in (folder / "checkpoints").iterdir():
        (checkpoint_folder / "state.json").write_text("{")
    assert "can be read" in refused(tmp_path, "--name", "a", "--resume", "--steps", "3")
    assert (folder / "metrics.jsonl").read_bytes() == before
    known = (folder / "config.json").read_text()
    (folder / "config.json").write_text(known.replace('"reverse-text"', '"of-a-file"'))
    assert "names 'of-a-file'" in refused(tmp_path, "--name", "a", "--resume", "--steps", "3")


def test_a_disk_that_is_full_ends_the_run_with_one_line(tmp_path, train, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("checkpoint.save_file", full)
    small = ["--eval-every", 0, "--batch-size", 4, "--group-size", 2, "--max-new-tokens", 4, "--save-every", 1]
    code, said, errors = train("--runs-dir", tmp_path, "--name", "a", *small, "--steps", 2)
    assert code == 1 and "step 1 could not be saved: [Errno 28] No space left on device; make room" in said
    assert "Traceback" not in said + errors and not list_steps(tmp_path / "a" / "checkpoints")


def test_a_run_without_a_checkpoint_begins_where_it_began(tmp_path):
    short = ["--eval-every", "0", "--save-every", "1"]
    folder = run(tmp_path, *short, "--steps", "2", "--name", "a")
    run(tmp_path, *short, "--steps", "3", "--name", "b", "--resume-from", folder / "checkpoints" / "step_2")
    expected = metrics_of(tmp_path / "b")
    shutil.rmtree(tmp_path / "b" / "checkpoints")
    assert metrics_of(run(tmp_path, "--steps", "3", "--name", "b", "--resume")) == expected
    said = refused(tmp_path, "--name", "b", "--resume", "--resume-from", folder / "checkpoints" / "step_2")
    assert "leave --resume out" in said


def test_another_algorithm_and_sampler_begin_afresh(tmp_path):
    short = ["--eval-every", "0", "--save-every", "1"]
    folder = run(tmp_path, *short, "--steps", "1", "--name", "a")
    others = ["--algo", "rae", "--sampler", "difficulty-pool"]
    run(tmp_path, *short, *others, "--steps", "2", "--name", "b", "--resume-from", folder / "checkpoints" / "step_1")
