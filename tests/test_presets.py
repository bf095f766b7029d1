"""Every preset is a whole configuration, and says what it shows, what it costs and what to expect."""

import runpy

import pytest

import envs.gsm8k
from command_line import parse
from envs.gsm8k import GSM8K
from tests.conftest import ROOT
from traces import Task

PRESETS = sorted((ROOT / "configs").glob("*.py"))


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    """What a preset needs and this machine may lack: the packages that fetch and grade GSM8K, and a sandbox."""
    monkeypatch.setattr(envs.gsm8k, "installed", lambda package: True)
    monkeypatch.setattr(GSM8K, "tasks", lambda self, split: [Task(split, [], {"answer": "1", "demonstration": "1"})])
    monkeypatch.setattr("envs.terminal.Terminal.check", lambda self: None)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_is_a_whole_configuration(path):
    config, notes = parse([str(path), "--name", "x"])
    assert not [note for note in notes if note.startswith("warning")], notes
    header = runpy.run_path(str(path))["__doc__"]
    assert f"python train.py configs/{path.name}" in header
    if path.stem.endswith("_tiny"):
        assert "measured" in header and "Costs" in header
    if "qwen3" in path.stem:
        assert "Not run here" in header.split("\n\n")[0] or "not run here" in header.lower()
        assert config.model.startswith("Qwen/Qwen3-") and "GPU" in header


def test_every_algorithm_has_both():
    from algos import ALGORITHMS

    names = {path.stem for path in PRESETS}
    assert {f"{name}_{size}" for name in ALGORITHMS for size in ("tiny", "qwen3")} <= names
