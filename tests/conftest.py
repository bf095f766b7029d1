"""Small models and tokenizers that tests build for themselves: no hub, no network, no GPU."""

import os
import runpy
import signal
import subprocess
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in train.py
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the two would else be in each other's way

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from make_tiny import make_tokenizer

ROOT = Path(__file__).parent.parent


def save_model(folder: Path, tied: bool = True, seed: int = 0, spread: float = 0.3, **options) -> Path:
    """A random Qwen3 of 2 layers, hidden 32, with the tiny tokenizer; `spread` large enough for a peaked distribution."""
    torch.manual_seed(seed)
    sizes = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    config = Qwen3Config(
        vocab_size=len(make_tokenizer()),
        tie_word_embeddings=tied,
        initializer_range=spread,
        max_position_embeddings=512,
        **sizes | options,
    )
    model = Qwen3ForCausalLM(config)
    if not tied:
        torch.nn.init.normal_(model.lm_head.weight, std=spread)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory) -> Path:
    """Folder of a random tied model."""
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def untied_path(tmp_path_factory) -> Path:
    """Folder of a random model with a head of its own."""
    return save_model(tmp_path_factory.mktemp("untied"), tied=False)


def run_script(name: str, *arguments) -> int:
    """One of the scripts in this process, which it leaves as it was. Returns the exit code."""
    signals = signal.SIGINT, signal.SIGTERM
    handlers, argv = [signal.getsignal(number) for number in signals], sys.argv
    sys.argv = [name, *map(str, arguments)]
    try:
        runpy.run_path(str(ROOT / name), run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = argv
        for number, handler in zip(signals, handlers, strict=True):
            signal.signal(number, handler)
    return 0


def run_train(*arguments) -> int:
    """train.py in this process. Returns the exit code."""
    return run_script("train.py", *arguments)


@pytest.fixture
def script(capfd):
    """script(name, *flags) -> what subprocess.run would give of it, with text; it runs in this process."""

    def run(name, *flags):
        capfd.readouterr()
        return subprocess.CompletedProcess((name, *flags), run_script(name, *flags), *capfd.readouterr())

    return run


@pytest.fixture
def train(script):
    """train(*flags) -> exit code, stdout and stderr of train.py, in this process."""

    def run(*flags):
        done = script("train.py", *flags)
        return done.returncode, done.stdout, done.stderr

    return run
