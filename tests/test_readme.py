"""What README shows works as it stands."""

import ast
import asyncio
import re
import sys
from types import ModuleType

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from command_line import parse
from engines.hf import HFEngine
from envs import ENVS
from monitor import Monitor
from renderers import make_renderer
from rollouts import Rollouts
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_every_block_is_python(block):
    ast.parse(block)


def test_the_game_takes_fifteen_lines_and_can_be_played(monkeypatch, tmp_path):
    (block,) = [block for block in BLOCKS if "(Env)" in block]
    (line,) = re.findall(r"the line is `(.*?)`", README)
    written = block[block.index("@dataclass") :].strip()
    assert len([text for text in written.splitlines() if text.strip()]) <= 15
    module = ModuleType("envs.guess")
    monkeypatch.setitem(sys.modules, "envs.guess", module)
    exec(block, vars(module))
    name, env = next(iter(eval("{" + line + "}", vars(module)).items()))
    monkeypatch.setitem(ENVS, name, env)
    (command,) = re.findall(r"`python train.py (--env guess.*?)`", README)
    config, _ = parse([*command.split(), "--batch-size", "16", "--eval-samples", "4"])
    path = ROOT / "models" / "tiny" / "base"
    engine = HFEngine(path, max_context=config.seq_len)
    monitor = Monitor(tmp_path, 1, Console(quiet=True))
    rollouts = Rollouts(config, engine, make_renderer("auto", AutoTokenizer.from_pretrained(path), "qwen3"), monitor)
    branches, metrics = asyncio.run(rollouts.collect(1))
    monitor.close()
    assert metrics["rollouts/errored"] == 0 and len(branches) >= 16 and 0 < metrics["reward/guess/mean"] < 1
    assert {len(branch.turns) for branch in branches} == {3}, "one sequence for three turns"
    train, held_out = ({task.key for task in env().tasks(split)} for split in ("train", "eval"))
    assert train and held_out and not train & held_out
