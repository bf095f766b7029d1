"""python -m renderers.check: what it says and how it exits."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from renderers.check import main, read_args
from tests.renderer_data import DATA, needs_data

ROOT = Path(__file__).parent.parent
TINY = ROOT / "models" / "tiny" / "base"
# Qwen3's turns and nothing else: no tools, no reasoning, and one turn a tool result.
TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def folder(path, template):
    """The tiny model's tokenizer and config, with a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    shutil.copy(TINY / "config.json", path)
    return str(path)


def rows(text):
    """name -> (passed, failed, note) of the table."""
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    return {row[0]: (int(row[1]), int(row[2]), row[3]) for row in cells if row[0]}


def test_the_tiny_model_passes():
    command = [sys.executable, "-m", "renderers.check", "models/tiny/base"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("renderer qwen3: model type qwen3 with the control tokens of qwen3\n")
    table = rows(done.stdout)
    assert table.pop("equals the chat template")[2].startswith("not compared: the tokenizer has no chat template")
    assert len(table) == 5 and all(passed and not failed for passed, failed, _ in table.values())


def test_a_difference_is_shown_with_both_rows(tmp_path, capsys):
    path = folder(tmp_path, TURNS.replace("assistant\n'", "assistant'"))
    assert main([path, "--renderer", "qwen3"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("renderer qwen3: chosen by name\n")
    assert rows(out)["equals the chat template"][1]
    shown = out[out.index("equals the chat template: a question") :].splitlines()
    at = shown[1].index("<-") - 3  # the last newline is missing: the template's row ends there
    assert [shown[line].split()[0] for line in (2, 4)] == ["renderer", "template"]
    assert (shown[2][at:].split()[0], shown[3][at:].split()[0]) == ("10", "\\n")
    assert not shown[4][at:].strip() and not shown[5][at:].strip()
    assert shown[5].split()[-4:] == ["t", "a", "n", "t"]


def test_a_template_of_no_family_is_checked_through_default(tmp_path, capsys):
    assert main([folder(tmp_path, TURNS)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("renderer default: model type qwen3, but control tokens or chat template are not")
    table = rows(out)
    assert table["keeps the prefix"][0] and table["one branch"][0] == 20
    assert table["parses what it renders"][2] == "reasoning is not rendered; calls are not read"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["{}"], "no tokenizer there"),
        ([str(TINY), "--renderer", "default"], "needs a chat template, and this tokenizer has none"),
        ([str(TINY), "--renderer", "qwen33"], "--renderer qwen33"),
        (
            [str(TINY), "--renderer-args", "reasoning_effort=low"],
            "--renderer-args reasoning_effort=low: qwen3 has no such option",
        ),
        ([str(TINY), "--renderer-args", "thinking"], "NAME=VALUE"),
        ([str(TINY), "--template", "{}/none.jinja"], "none.jinja"),
    ],
)
def test_nothing_to_check_is_one_clear_line(args, message, tmp_path, capsys):
    assert main([arg.format(tmp_path) for arg in args]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_options_are_read():
    assert read_args(["thinking=false", "date=2026-01-15", "x=a=b"]) == {
        "thinking": False,
        "date": "2026-01-15",
        "x": "a=b",
    }
    assert read_args(["thinking=none"]) == {"thinking": None}


@needs_data
def test_the_families_equal_their_templates(tmp_path, capsys):
    template = (DATA / "templates" / "qwen3.jinja").read_text(encoding="utf-8")
    assert main([folder(tmp_path, template), "--renderer-args", "thinking=false"]) == 0
    table = rows(capsys.readouterr().out)
    assert table["equals the chat template"][:2] == (21, 0)
    tampered = folder(tmp_path, template.replace(r"'\n</tool_response>'", r"'\n\n</tool_response>'"))
    assert main([tampered]) == 1
    passed, failed, _ = rows(capsys.readouterr().out)["equals the chat template"]
    assert passed > failed > 0
    gpt_oss = str(DATA / "tokenizers" / "gpt-oss")
    assert main([gpt_oss, "--renderer", "gpt-oss", "--renderer-args", "date=2025-06-28", "reasoning_effort=low"]) == 0
    assert "harmony" in rows(capsys.readouterr().out)["equals the chat template"][2]
