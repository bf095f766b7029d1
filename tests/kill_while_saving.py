"""Kill a run at random moments while it writes checkpoints: python tests/kill_while_saving.py FOLDER KILLS. Exits with 1 at the
first kill after which the newest whole checkpoint is missing, is older than what was whole before, or does not hold together."""

import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
from transformers import AutoTokenizer

from checkpoint import Snapshot, generator_states, load, newest_whole, save
from policy import OptimizerConfig, Policy
from tests.conftest import save_model

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def in_a_child(work) -> int:
    """Run work in a fork of this process, which must not have a thread yet. Returns its pid."""
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return pid


def policy_of(step: int) -> Policy:
    """A policy whose every weight says which step it is of."""
    policy = Policy(folder / "model", OptimizerConfig(1e-2), 1000)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.fill_(float(step))
    policy.prepare_moments(step + 1)
    return policy


def write() -> None:
    """Save one checkpoint after the other, each of the step after the newest."""
    newest, _ = newest_whole(checkpoints)
    policy = policy_of(0)
    step = int(newest.name.removeprefix("step_")) if newest else 0
    while True:
        step += 1
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.fill_(float(step))
        save(checkpoints, Snapshot(step, {"step": step}, generators=generator_states()), policy, tokenizer, keep=1)


def read() -> None:
    """Fail unless the newest whole checkpoint is of one piece."""
    newest, _ = newest_whole(checkpoints)
    if newest is None:
        os._exit(1)
    policy = policy_of(0)
    snapshot = load(newest, policy)
    whole = snapshot.state == {"step": snapshot.step} and newest.name == f"step_{snapshot.step}"
    os._exit(
        0 if whole and all((value.full_tensor() == snapshot.step).all() for value in policy.model.parameters()) else 1
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    checkpoints, chance = folder / "checkpoints", random.Random(0)
    save_model(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    seen = unfinished = 0
    for kill in range(kills):
        pid = in_a_child(write)
        while not (newest := newest_whole(checkpoints)[0]) or int(newest.name.removeprefix("step_")) <= seen:
            time.sleep(0.001)
        time.sleep(chance.random() * 0.05)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        unfinished += any(checkpoints.glob(".unfinished_*"))
        if os.waitpid(in_a_child(read), 0)[1] != 0:
            sys.exit(f"kill {kill}: the run can not be resumed; {sorted(path.name for path in checkpoints.iterdir())}")
        newest, _ = newest_whole(checkpoints)
        step = int(newest.name.removeprefix("step_"))
        if step <= seen:
            sys.exit(f"kill {kill}: step {step} is the newest, step {seen} was there before")
        seen = step
    print(f"{kills} kills, {unfinished} of them in the middle of a checkpoint; {seen} checkpoints")
