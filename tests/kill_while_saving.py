"""Kill a run at random moments while it writes checkpoints: python tests/kill_while_saving.py FOLDER KILLS. Exits with 1 at the
first kill after which the newest whole checkpoint is missing, is older than what was whole before, or does not hold together."""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ["OMP_NUM_THREADS"] = "1"  # a process that has threads can not be forked

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoTokenizer

from checkpoint import Snapshot, generator_states, newest_whole, save
from policy import OptimizerConfig, Policy
from tests.conftest import save_model

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def write() -> None:
    """Save one checkpoint after the other, each of the step after the newest."""
    newest, _ = newest_whole(checkpoints)
    policy = Policy(folder / "model", OptimizerConfig(1e-2), 1000)
    policy.prepare_moments(1, 1)
    step = int(newest.name.removeprefix("step_")) if newest else 0
    while True:
        step += 1
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.fill_(float(step))
        save(checkpoints, Snapshot(step, {"step": step}, generators=generator_states()), policy, tokenizer, keep=1)


def is_of_one_piece(folder: Path) -> bool:
    """Whether state, weights and hf/ are those of the step that the folder names."""
    step = int(folder.name.removeprefix("step_"))
    weights = load_file(next((folder / "trainer").glob("*.safetensors"))) | load_file(
        folder / "hf" / "model.safetensors"
    )
    state = json.loads((folder / "state.json").read_text())
    values = [value for name, value in weights.items() if not name.startswith("optimizer.")]
    return state["step"] == state["rollouts"]["step"] == step and all((value == step).all() for value in values)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    checkpoints, chance = folder / "checkpoints", random.Random(0)
    save_model(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    seen = unfinished = 0
    for kill in range(kills):
        pid = os.fork()  # this process has no thread yet, and what it has imported need not be imported again
        if pid == 0:
            write()
        try:
            while not (newest := newest_whole(checkpoints)[0]) or int(newest.name.removeprefix("step_")) <= seen:
                if os.waitpid(pid, os.WNOHANG)[0]:
                    sys.exit(f"kill {kill}: the process that saves has ended by itself")
                time.sleep(0.001)
            time.sleep(chance.random() * 0.3)
        finally:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        unfinished += any(checkpoints.glob(".unfinished_*"))
        newest, _ = newest_whole(checkpoints)
        if newest is None or not is_of_one_piece(newest):
            sys.exit(f"kill {kill}: the run can not be resumed; {sorted(path.name for path in checkpoints.iterdir())}")
        step = int(newest.name.removeprefix("step_"))
        if step <= seen:
            sys.exit(f"kill {kill}: step {step} is the newest, step {seen} was there before")
        seen = step
    print(f"{kills} kills, {unfinished} of them in the middle of a checkpoint; {seen} checkpoints")
