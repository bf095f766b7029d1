"""Save a run so that it can go on as if nothing had happened, and the model so that anything can read it.

    runs/<name>/checkpoints/step_<n>/
        trainer/        weights and the optimizer's moments, a file for each rank that trains (any number of ranks reads them)
        state.json      the step, samplers, gates, baselines, counters, generators, how long the run's records were, its id at trackers
        branches.safetensors    rollouts that wait to be trained on
        adapter/        with --lora.rank: what was trained, as peft loads it onto the base model
        hf/             the model as transformers and vLLM load it: weights, config, tokenizer
        files.json      the size of every other file, written last

A checkpoint is written under another name and renamed when it is whole, so a kill at any moment leaves the one before. All
tensors are safetensors and the rest is JSON: nothing in it is executed when it is read.
"""

import json
import os
import random
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedTokenizerBase

from lora import require_same, save_adapter
from packing import Counts, MicroBatch
from policy import Policy
from ranks import ALONE, Ranks
from traces import Branch, Segment, Turn

FORMAT = 1
NOT_SAVED = (OSError, SafetensorError, CheckpointException)  # what `save` raises where a disk is full, or gone
ARRAYS = (
    "token_ids", "sampled", "logprobs", "is_content", "advantages", "rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs",
    "topk_ids", "topk_logprobs",
)  # fmt: skip


@dataclass
class Snapshot:
    """What a run is at the end of a step, beside its model.

    state: of the rollouts (JSON types). waiting: the branches of traces that wait for a batch. ahead: a batch that was sampled
    already, with its metrics. sizes: bytes of the run's records by file name. tracked: the run's id by tracker.
    """

    step: int
    state: dict[str, Any] = field(default_factory=dict)
    waiting: list[list[Branch]] = field(default_factory=list)
    ahead: tuple[list[Branch], dict[str, float]] | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    tracked: dict[str, str] = field(default_factory=dict)


def generator_states() -> dict[str, Any]:
    """The states of Python's, NumPy's and PyTorch's global generators, as JSON types. Sampling uses none of them, but an
    environment may."""
    kind, keys, *rest = np.random.get_state()
    return {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest], "torch": torch.get_rng_state().tolist()}


def restore_generators(states: dict[str, Any]) -> None:
    """Set the global generators to what `generator_states` gave."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))


def save(
    checkpoints: Path,
    snapshot: Snapshot,
    policy: Policy | None,
    tokenizer: PreTrainedTokenizerBase,
    keep: int,
    ranks: Ranks = ALONE,
) -> Path:
    """Write checkpoints/step_<n> unless it is there, then delete those before it but for the newest whole ones: `keep` with this
    one. Returns its path.

    A run goes on from its newest whole checkpoint. So a whole one of this step is this snapshot, and those after it are damaged:
    they count for nothing, and are written again in their turn.

    All ranks take part, in one file system: those that train (others have no policy) write their part of it, the lead, whose
    snapshot it is, the rest.
    """
    folder = checkpoints / f"step_{snapshot.step}"
    unfinished = checkpoints / f".unfinished_{snapshot.step}"
    if ranks.share(problem(folder) is None):
        return folder
    if ranks.leads:
        for left in (*checkpoints.glob(".unfinished_*"), *checkpoints.glob(".doomed_*")):  # by a kill, at whatever step
            shutil.rmtree(left, ignore_errors=True)
        unfinished.mkdir(parents=True)
    ranks.barrier()
    if policy is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its remarks on how a world of one writes
            writer = dcp.HuggingFaceStorageWriter(str(unfinished / "trainer"), save_distributed=True)
            dcp.save(policy.tensors(), storage_writer=writer)
        policy.export(unfinished / "hf")
        if policy.lora:
            save_adapter(policy.model.lm, unfinished / "adapter")
    done = ranks.gather((policy.updates, policy.lora) if policy is not None else None)
    if not ranks.leads:
        return folder
    updates, lora = next(each for each in done if each is not None)
    tokenizer.save_pretrained(unfinished / "hf")
    tensors, waiting = flatten(snapshot.waiting)
    state = {
        "format": FORMAT, "step": snapshot.step, "updates": updates, "lora": lora, "sizes": snapshot.sizes,
        "generators": snapshot.generators, "rollouts": snapshot.state, "waiting": waiting, "ahead": None,
        "tracked": snapshot.tracked,
    }  # fmt: skip
    if snapshot.ahead is not None:
        branches, metrics = snapshot.ahead
        more, described = flatten([branches], "ahead.")
        tensors |= more
        state["ahead"] = {"branches": described, "metrics": metrics}
    save_file(tensors, unfinished / "branches.safetensors")
    (unfinished / "state.json").write_text(json.dumps(state))
    (unfinished / "files.json").write_text(json.dumps(_sizes(unfinished)))
    _remove(folder)  # a damaged one
    os.replace(unfinished, folder)
    before = [old for old in list_steps(checkpoints) if _number(old) < snapshot.step]
    whole = [old for old in before if problem(old) is None]
    for old in before:
        if old not in whole[::-1][: keep - 1]:
            _remove(old)
    return folder


def load(folder: Path, policy: Policy | None) -> Snapshot:
    """Give the policy its weights and moments back, set the global generators, and return the rest. Any number of ranks reads
    what any number has written.

    Raises ValueError where the checkpoint is damaged, is no checkpoint, or is that of another model or of other adapters.
    """
    reason = problem(folder)
    if reason:
        raise ValueError(f"--resume-from {folder}: {reason}{_offer(folder)}")
    state = json.loads((folder / "state.json").read_text())
    if policy is not None:
        require_same(state.get("lora"), policy.lora, folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if policy is not None:
                policy.prepare_moments(state["step"], state["updates"])
                dcp.load(policy.tensors(), storage_reader=dcp.HuggingFaceStorageReader(str(folder / "trainer")))
    except (CheckpointException, RuntimeError, ValueError) as error:
        raise ValueError(
            f"--resume-from {folder}: it is not of this --model ({str(error).strip().splitlines()[-1][:200]})"
        ) from None
    restore_generators(state["generators"])
    tensors = load_file(folder / "branches.safetensors")
    ahead = state["ahead"]
    if ahead is not None:
        (branches,) = unflatten(tensors, ahead["branches"], "ahead.")
        ahead = branches, ahead["metrics"]
    return Snapshot(
        state["step"],
        state["rollouts"],
        unflatten(tensors, state["waiting"]),
        ahead,
        state["sizes"],
        state["generators"],
        state.get("tracked", {}),  # a checkpoint may be older than trackers
    )


def write_batch(folder: Path, step: int, micro_batches: list[MicroBatch], counts: Counts) -> None:
    """Write what a step trains on to folder/step_<n>/<i>.safetensors: a file for each micro batch of all ranks, with the counts of
    the whole step in its header."""
    there = folder / f"step_{step}"
    shutil.rmtree(there, ignore_errors=True)  # a resumed run comes by here again
    there.mkdir(parents=True)
    header = {name: json.dumps(value) for name, value in vars(counts).items()}
    for i, micro_batch in enumerate(micro_batches):
        tensors = {name: tensor for name, tensor in vars(micro_batch).items() if tensor is not None}
        save_file(tensors, there / f"{i:04d}.safetensors", metadata=header)


def cut_batches(folder: Path, after: int) -> None:
    """Delete what `write_batch` wrote in steps after this one, from which a run goes on."""
    for step in list_steps(folder):
        if _number(step) > after:
            shutil.rmtree(step)


def find_batches(folder: Path, after: int, last: int, vocabulary: int) -> list[tuple[int, Path]]:
    """(step, folder) of what `write_batch` wrote in steps after the one named, up to the last. Raises ValueError where there are none,
    where one is no batch of a model with so many tokens, and where some of it is missing."""
    steps = [(_number(step), step) for step in list_steps(folder) if after < _number(step) <= last]
    if not steps:
        raise ValueError(
            f"--replay {folder}: holds no batch of steps {after + 1} to {last}, such as runs/NAME/batches does"
        )
    known = {f.name: f.default is MISSING for f in fields(MicroBatch)}  # name -> whether there is no batch without
    for _, step in steps:
        files, slots = _files_of(step), 0
        if not files:
            raise ValueError(f"--replay {folder}: {step.name} is empty")
        for path in files:
            try:
                with safe_open(path, "pt") as file:
                    names = file.keys()
                    shapes = {name: file.get_slice(name).get_shape() for name in names}
                    token_ids = file.get_tensor("token_ids")
                    lowest, highest = int(token_ids.min()), int(token_ids.max())
                    counts = _counts_of(file)
            except (OSError, ValueError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
                raise ValueError(f"--replay {folder}: {step.name}/{path.name} is no batch: {error}") from None
            foreign = sorted(shapes.keys() - known)
            odd = [name for name, shape in shapes.items() if shape[:2] != list(token_ids.shape) or token_ids.ndim != 2]
            lacking = [name for name, needed in known.items() if needed and name not in shapes]
            why = (
                f"holds {', '.join(foreign)}" if foreign
                else f"holds token {highest}, which --model does not have" if highest >= vocabulary
                else f"holds token {lowest}" if lowest < 0
                else f"lacks {', '.join(lacking)}" if lacking
                else f"holds {odd[0]} of shape {shapes[odd[0]]}" if odd
                else None
            )  # fmt: skip
            if why:
                raise ValueError(f"--replay {folder}: {step.name}/{path.name} {why}")
            slots += token_ids.numel()
        if slots != counts.slots:  # it was being written when the run was killed, or some was deleted
            raise ValueError(
                f"--replay {folder}: {step.name} is not whole: its files hold {slots} of {counts.slots} slots"
            )
    return steps


def read_batch(step: Path) -> tuple[list[MicroBatch], Counts]:
    """What `write_batch` wrote of a step."""
    files = _files_of(step)
    with safe_open(files[0], "pt") as file:
        counts = _counts_of(file)
    return [MicroBatch(**load_file(path)) for path in files], counts


def _files_of(step: Path) -> list[Path]:
    return sorted(step.glob("*.safetensors"))


def _counts_of(file: Any) -> Counts:
    return Counts(**{name: json.loads(value) for name, value in file.metadata().items()})


def list_steps(checkpoints: Path) -> list[Path]:
    """The checkpoints of a run, or its batches, oldest first, whole or not."""
    found = [path for path in checkpoints.glob("step_*") if path.name.removeprefix("step_").isdigit()]
    return sorted(found, key=_number)


def newest_whole(checkpoints: Path) -> tuple[Path | None, list[str]]:
    """(the newest checkpoint that can be read, what is wrong with those after it)."""
    wrong = []
    for folder in reversed(list_steps(checkpoints)):
        reason = problem(folder)
        if reason is None:
            return folder, wrong
        wrong.append(f"{folder}: {reason}")
    return None, wrong


def problem(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None: is every file there, of the size that it was written with, and to be read?"""
    try:
        sizes = json.loads((folder / "files.json").read_text())
        state = json.loads((folder / "state.json").read_text())
        if state["format"] != FORMAT:
            return f"written in format {state['format']}, this version reads {FORMAT}"
        found = _sizes(folder)
        wrong = [name for name, size in sizes.items() if found.get(name) != size]
        for name in sizes if not wrong else ():
            if name.endswith(".safetensors"):
                with safe_open(folder / name, "pt"):
                    pass  # its header can be read
    except FileNotFoundError as error:
        return f"no checkpoint: {Path(error.filename or str(error)).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        return f"damaged: {error}"
    return f"damaged: {wrong[0]} is {'cut' if wrong[0] in found else 'missing'}" if wrong else None


def flatten(
    groups: Sequence[Sequence[Branch]], prefix: str = ""
) -> tuple[dict[str, Tensor], list[list[dict[str, Any]]]]:
    """(tensors by name, the rest as JSON types) of branches in groups; `unflatten` reads both."""
    tensors, described = {}, []
    for g, group in enumerate(groups):
        described.append([])
        for b, branch in enumerate(group):
            for name in ARRAYS:
                if getattr(branch, name) is not None:
                    tensors[f"{prefix}{g}.{b}.{name}"] = torch.from_numpy(np.ascontiguousarray(getattr(branch, name)))
            described[-1].append({"segments": branch.segments, "turns": branch.turns, "call": branch.call})
    return tensors, described


def unflatten(
    tensors: dict[str, Tensor], described: list[list[dict[str, Any]]], prefix: str = ""
) -> list[list[Branch]]:
    """The branches that `flatten` took apart."""
    groups = []
    for g, group in enumerate(described):
        groups.append([])
        for b, rest in enumerate(group):
            arrays = {name: tensors.get(f"{prefix}{g}.{b}.{name}") for name in ARRAYS}
            arrays = {name: None if tensor is None else tensor.numpy() for name, tensor in arrays.items()}
            segments, turns = [Segment(*s) for s in rest["segments"]], [Turn(*t) for t in rest["turns"]]
            groups[-1].append(Branch(**arrays, segments=segments, turns=turns, call=rest["call"]))
    return groups


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _sizes(folder: Path) -> dict[str, int]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "files.json"]
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def _remove(folder: Path) -> None:
    """Delete a checkpoint so that a kill in the middle leaves none that looks whole."""
    if folder.exists():
        doomed = folder.with_name(f".doomed_{folder.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(folder, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _offer(folder: Path) -> str:
    whole, _ = newest_whole(folder.parent)
    return f"; the newest whole one beside it is {whole}" if whole and whole != folder else ""
