"""The command line: flags over file over defaults, and a message that names the option for everything else."""

import json
import shutil
import subprocess
import sys
from dataclasses import fields
from functools import partial

import pytest

from algos import ALGORITHMS
from algos.grpo import GRPOConfig
from algos.rae import RAEConfig
from command_line import parse
from config import CHOICES, Config, IcePop, Run, Source, config_class
from curriculum import AdvRangeConfig, DifficultyPoolConfig
from envs.arithmetic import Arithmetic
from envs.reverse_text import ReverseText
from tests.conftest import ROOT


@pytest.fixture
def run(script):
    return partial(script, "train.py")


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
    assert config.sources == [
        Source(env=ReverseText(max_words=2), algo=GRPOConfig(), group_size=4)
    ] and config.loss == IcePop(ratio_high=3.0)
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
        Source(env=ReverseText(max_words=1), algo=GRPOConfig(), group_size=2)
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
    (["--name", ".."], ["--name ..: must be a plain folder name"]),
    (["--name", "x" * 256], ["must be a plain folder name"]),
    (["--renderer", "nope", "--steps", "0"], ["--renderer nope"]),
    (["--renderer-args", "effort=low", "--steps", "0"], ["train.py: --renderer-args effort=low", "thinking_retention, thinking"]),
    (["--renderer-args", "thinking=maybe", "--steps", "0"], ["--renderer-args thinking=maybe", "True, False"]),
    (["--renderer-args", "thinking"], ["--renderer-args", "NAME=VALUE"]),
    (["--thinking-retention", "some"], ["--thinking-retention", "some"]),
    (["--model", "/does/not/exist", "--steps", "0"], ["--model /does/not/exist"]),
    (["--loss", "custom", "--loss.import-path", "no.where", "--steps", "0"], ["--loss.import-path no.where"]),
    (["missing.py"], ["missing.py"]),
])  # fmt: skip
def test_a_mistake_gives_one_message_and_exit_code_2(run, args, message, tmp_path):
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
def test_a_broken_config_file(run, file, text, message):
    result = run(file(text), "--dry-run")
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr, result.stderr


def test_several_sources_are_the_files_business(run, file):
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


def test_a_tiny_model_that_was_not_taught_this_is_warned_about():
    flags = ["--env.parts", "2", "--env.max-items", "6", "--env.max-turns", "2", "--env.no-explain"]
    _, notes = parse(["--env", "delegate"])
    assert any(" ".join(flags) in note for note in notes)
    assert parse(["--env", "delegate", *flags])[1] == []
    assert parse(["--env", "delegate", "--model", "Qwen/Qwen3-0.6B"])[1] == []
    assert parse(["--env", "alphabet-sort"])[1] == []
    assert parse([str(ROOT / "configs" / "delegate_tiny.py")])[1] == []


def test_a_group_of_one_warns():
    assert any("--group-size 1" in note for note in parse(["--group-size", "1"])[1])
    assert not parse(["--group-size", "2"])[1]


def test_dry_run_shows_configuration_and_loss_and_writes_nothing(tmp_path):
    command = [sys.executable, "train.py", "--dry-run", "--runs-dir", str(tmp_path / "runs"), "--loss", "icepop"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0 and '"ratio_low": 0.2' in result.stdout and "1[0.2 <= pi/mu <= 5]" in result.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_algorithm_takes_the_name_of_a_knob_of_the_run(name):
    taken = {f.name for f in fields(Run)} | {f.name for f in fields(Source)} | {"loss", "sources", "gate"}
    assert not {f.name for f in fields(config_class(ALGORITHMS, name))} & taken


def test_a_source_without_an_algorithm_takes_the_runs_and_a_dict_changes_some_knobs():
    sources = [
        Source(env=ReverseText()),
        Source(env=ReverseText(), algo={"num_turns_weight": 0.5}),
        Source(env=ReverseText(), algo=RAEConfig()),
    ]
    resolved = Config(sources=sources, algo=GRPOConfig(length_penalty="linear")).sources
    assert [source.algo for source in resolved] == [
        GRPOConfig(length_penalty="linear"),
        GRPOConfig(length_penalty="linear", num_turns_weight=0.5),
        RAEConfig(),
    ]
    assert Config(sources=sources).sources[0].algo == GRPOConfig()


def test_tables_gates_and_samplers():
    config, _ = parse(
        [
            "--algo",
            "echo",
            "--roles",
            "tool=0.25",
            "user=0.05",
            "--renderer-args",
            "thinking=false",
            "date=2026-01-15",
            "--thinking-retention",
            "template",
            "--gate.reject-max",
            "0.1",
            "--sampler",
            "difficulty-pool",
        ]
    )
    (source,) = config.sources
    assert source.algo.roles == {"tool": 0.25, "user": 0.05}, "the whole table is replaced"
    assert config.renderer_args == {"thinking": False, "date": "2026-01-15"} and config.thinking_retention == "template"
    assert source.gates == {"gate": AdvRangeConfig(0.0, 0.1)} and source.sampler == DifficultyPoolConfig()
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("name, args", [
    ("opd", ["--teacher.name", "q", "--teacher.base-url", "http://localhost:1/v1"]),
    ("sft", ["--sample-from.name", "q", "--sample-from.base-url", "http://localhost:1/v1"]),
    ("rae", ["--decay", "0.9"]),
    ("opsd", ["--demo-key", "answer"]),
    ("max_rl", ["--length-penalty", "linear"]),
])  # fmt: skip
def test_every_algorithm_has_its_knobs_at_the_top_level(name, args):
    config, _ = parse(["--algo", name, *args])
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("args, message", [
    (["--decay", "0.9"], "--decay belongs to --algo rae; this run has --algo grpo"),
    (["--algo", "opd"], "opd needs --teacher.base-url"),
    (["--algo", "sft"], "sft needs --sample-from.base-url"),
    (["--algo", "grpo", "--sample-from.name", "q"], "--sample-from.name belongs to --algo sft"),
    (["--algo", "hierarchical_grpo"], "no proposer-solver environment"),
    (["--algo", "opsd"], "--demo-key demonstration"),
    (["--algo", "opsd", "--demo-key", "answer", "--temperature", "0.7"], "--temperature 0.7"),
    (["--algo", "echo", "--roles", "robot=1"], "--roles robot=1"),
    (["--algo", "echo", "--roles", "tool=-1"], "--roles tool=-1"),
    (["--num-turns-weight", "nan", "--length-penalty", "linear"], "--num-turns-weight nan"),
    (["--gate.reject-min", "1", "--gate.reject-max", "0"], "--gate.reject-min 1"),
    (["--sampler", "nope"], "--sampler nope"),
])  # fmt: skip
def test_rules_of_algorithms_are_checked_before_a_model_is_loaded(args, message, capsys):
    with pytest.raises(SystemExit) as exit:
        parse(args)
    assert exit.value.code == 2 and message in capsys.readouterr().err


def test_rl_sources_agree_on_their_aggregation(file, capsys):
    path = file("""
from config import *
from algos.grpo import GRPOConfig
from envs import ENVS
config = Config(sources=[Source(env=ENVS["arithmetic"](), algo=GRPOConfig(loss_aggregation=how)) for how in ("token", "prompt")])
""")
    with pytest.raises(SystemExit):
        parse([path])
    assert "--loss-aggregation" in capsys.readouterr().err


def test_no_knob_is_called_name():
    """config.json writes the name of the choice among its knobs."""
    for classes in CHOICES.values():
        for name in classes:
            assert "name" not in {f.name for f in fields(config_class(classes, name))}


def test_a_model_folder_without_a_model_and_a_runs_folder_that_is_a_file(run, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    shutil.copytree(ROOT / "models" / "tiny" / "base", tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"not weights")
    cases = [("--runs-dir", tmp_path / "file"), ("--model", tmp_path / "empty"), ("--model", tmp_path / "damaged")]
    for option, path in cases:
        result = run("--runs-dir", tmp_path / "runs", "--steps", 0, option, path)
        assert result.returncode == 2 and f"{option} {path}: " in result.stderr, result.stderr
        assert "Traceback" not in result.stderr + result.stdout
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("schedule='nope'", "--schedule 'nope': must be 'linear' or 'cosine' or 'constant'"),
        ("engine='fast'", "--engine 'fast'"),
        ("steps='3'", "--steps '3': must be int"),
        ("betas=[1]", "--betas [1]"),
        ("loss=3", "int is not listed: known are ipo"),
        ("loss=IPO(eps='a')", "--loss.eps 'a': must be float"),
        ("sources=[3]", "must be a list of Source"),
        ("sources=[Source(env=ENVS['reverse-text'](max_words='a'))]", "--env.max-words 'a': must be int"),
        ("sources=[Source(env=ENVS['reverse-text'])]", "--env <class"),
        ("sources=[Source(env=Mine())]", "Mine is not listed: known are reverse-text, arithmetic"),
        ("sources=[Source(env=ENVS['reverse-text'](), group_size=2.5)]", "--group-size 2.5: must be int"),
        ("sources=[Source(env=ENVS['reverse-text'](), algo={'loss_aggregation': 'x'})]", "--loss-aggregation 'x'"),
        ("sources=[Source(env=ENVS['reverse-text'](), gates={'a': 1})]", "--gates {'a': 1}"),
        ("sources=[Source(env=ENVS['reverse-text'](), sampler=1)]", "int is not listed: known are standard"),
    ],
)
def test_a_value_of_a_wrong_type_in_a_config_file_is_named(values, message, tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(f"from config import *\n\nclass Mine(Env):\n    pass\n\nconfig = Config({values})")
    with pytest.raises(SystemExit) as end:
        parse([str(file)])
    err = capsys.readouterr().err
    assert end.value.code == 2 and message in err and str(file) in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--env.max-words 0", "--env.max-words 0: must be at least 1"),
        ("--env.num-tasks -1", "--env.num-tasks -1: must be at least 1"),
        ("--env arithmetic --env.max-number 0", "--env.max-number 0: must be at least 1"),
    ],
)
def test_an_environments_options_are_checked_before_the_run(flags, message, capsys):
    with pytest.raises(SystemExit) as end:
        parse(flags.split())
    assert end.value.code == 2 and message in capsys.readouterr().err
