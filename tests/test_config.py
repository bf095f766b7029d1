"""The command line: flags over file over defaults, and a message that names the option for everything else."""

import json
import subprocess
import sys
from dataclasses import fields

import pytest

from algos import ALGORITHMS
from algos.grpo import GRPOConfig
from config import Config, IcePop, Run, Source, config_class, parse
from envs.arithmetic import Arithmetic
from envs.reverse_text import ReverseText
from tests.conftest import ROOT


def run(*args):
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *map(str, args)], capture_output=True, text=True, cwd=ROOT
    )


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "my_run.py"
        path.write_text(text)
        return str(path)

    return write


FILE = """
from config import *
from envs.reverse_text import ReverseText
config = Config(sources=[Source(env=ReverseText(max_words=2), group_size=4)], loss=IcePop(ratio_high=3.0), steps=7, constant_batch_size=False, lr=1e-3)
"""


def test_flag_beats_file_beats_default(file):
    """A21: for numbers, booleans and nested knobs."""
    path = file(FILE)
    config, _ = parse([path])
    assert config.sources == [Source(env=ReverseText(max_words=2), group_size=4)] and config.loss == IcePop(
        ratio_high=3.0
    )
    assert (config.steps, config.constant_batch_size, config.lr, config.seed) == (7, False, 1e-3, 0)
    config, _ = parse(
        [
            path,
            "--steps",
            "9",
            "--constant-batch-size",
            "--lr=1e-6",
            "--loss.ratio-low",
            "0.1",
            "--env.max-words=1",
            "--group-size",
            "2",
        ]
    )
    assert (config.steps, config.constant_batch_size, config.lr) == (9, True, 1e-6)
    assert config.loss == IcePop(ratio_low=0.1, ratio_high=3.0) and config.sources == [
        Source(env=ReverseText(max_words=1), group_size=2)
    ]
    config, _ = parse([path, "--no-constant-batch-size", "--lr", "None"])
    assert not config.constant_batch_size and config.lr == 5e-4, "None asks for the default of the model"


def test_another_choice_drops_the_knobs_of_the_file_and_says_so(file):
    config, notes = parse([file(FILE), "--env", "arithmetic", "--loss", "ipo", "--loss.eps", "0.2"])
    assert config.sources[0].env == Arithmetic() and config.loss.eps == 0.2
    assert notes == [
        "--env arithmetic replaces the config file's reverse-text and drops its knobs",
        "--loss ipo replaces the config file's icepop and drops its knobs",
    ]


def test_the_dump_reads_back(file):
    config, _ = parse([file(FILE), "--seed", "3"])
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("args, message", [
    (["--lr", "banana"], ["--lr", "banana"]),
    (["--algo", "nope"], ["--algo nope", "grpo"]),
    (["--env", "nope"], ["--env nope", "reverse-text"]),
    (["--stepz", "3"], ["--stepz", "did you mean --steps"]),
    (["--steps"], ["--steps"]),
    (["--seq-len", "0"], ["--seq-len 0", "at least 2"]),
    (["--temperature", "0"], ["--temperature 0"]),
    (["--lr", "nan"], ["--lr nan"]),
    (["--lr", "-1"], ["--lr -1"]),
    (["--group-size", "0"], ["--group-size 0"]),
    (["--loss.eps", "-1"], ["--loss.eps -1"]),
    (["--loss.ratio-low", "0.1"], ["--loss.ratio-low belongs to --loss icepop", "--loss ipo"]),
    (["--env.max-number", "3"], ["--env.max-number belongs to --env arithmetic"]),
    (["--constant-batch-size", "false"], ["false"]),
    (["--device", "tpu"], ["--device tpu"]),
    (["--name", "../x"], ["--name ../x"]),
    (["--renderer", "nope", "--steps", "0"], ["--renderer nope"]),
    (["--model", "/does/not/exist", "--steps", "0"], ["--model /does/not/exist"]),
    (["--loss", "custom", "--loss.import-path", "no.where", "--steps", "0"], ["--loss.import-path no.where"]),
    (["missing.py"], ["missing.py"]),
])  # fmt: skip
def test_a_mistake_gives_one_message_and_exit_code_2(args, message, tmp_path):
    result = run(*args, "--runs-dir", tmp_path) if args[0] != "missing.py" else run(*args)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    assert all(part in " ".join(result.stderr.split()) for part in message), result.stderr


@pytest.mark.parametrize("text, message", [
    ("x = 1", "must define `config = Config(...)`, found no `config`"),
    ("config = 3", "found int"),
    ("1 / 0", "my_run.py:1: ZeroDivisionError"),
    ("\nimport nowhere", "my_run.py:2: ModuleNotFoundError"),
    ("config = = 3", "SyntaxError"),
    ("from config import *\nconfig = Config(stepz=3)", "unexpected keyword argument 'stepz'"),
    ("raise SystemExit(3)", "SystemExit"),
])  # fmt: skip
def test_a_broken_config_file(file, text, message):
    result = run(file(text), "--dry-run")
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr, result.stderr


def test_several_sources_are_the_files_business(file):
    path = file(
        "from config import *\nfrom envs import *\nconfig = Config(sources=[Source(env=ENVS['reverse-text']()), Source(env=ENVS['arithmetic'](), ratio=2.0)])"
    )
    config, _ = parse([path, "--steps", "3"])
    assert len(config.sources) == 2 and config.steps == 3
    for args, message in (
        (["--env", "arithmetic"], "2 sources"),
        (["--env.max-words", "2"], "several sources"),
        (["--group-size", "4"], "--group-size"),
    ):
        result = run(path, *args)
        assert result.returncode == 2 and message in result.stderr, result.stderr


def test_a_group_of_one_warns():
    assert any("--group-size 1" in note for note in parse(["--group-size", "1"])[1])
    assert not parse(["--group-size", "2"])[1]


def test_dry_run_shows_configuration_and_loss_and_writes_nothing(tmp_path):
    result = run("--dry-run", "--runs-dir", tmp_path / "runs", "--loss", "icepop")
    assert result.returncode == 0 and '"ratio_low": 0.2' in result.stdout and "1[0.2 <= pi/mu <= 5]" in result.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_algorithm_takes_the_name_of_a_knob_of_the_run(name):
    taken = {f.name for f in fields(Run)} | {"algo", "env", "loss", "group_size", "ratio", "sources"}
    assert not {f.name for f in fields(config_class(ALGORITHMS, name))} & taken


def test_sources_do_not_share_their_algorithm():
    assert (
        Source(env=ReverseText()).algo is not Source(env=ReverseText()).algo
        and Source(env=ReverseText()).algo == GRPOConfig()
    )
