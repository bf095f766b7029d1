"""A conversation in the terminal: what it shows, what it never lets through, and how it ends."""

import asyncio
import io
import re
import signal
import subprocess
import sys
import unicodedata

import pytest
from rich.console import Console

from chat import Chat, Conversation
from command_line import parse_beside_env
from engines.base import Completion, Sampling
from envs.base import Tool
from envs.calculator import TOOL, Calculator
from make_tiny import EOS, make_tokenizer, text_ids
from monitor import visible
from renderers import make_renderer
from tests.conftest import ROOT, run_script

RENDERER = make_renderer("qwen3", make_tokenizer(), "qwen3")
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'


class Scripted:
    """An engine that writes these texts or ids, or raises these errors; a text that ends in … is cut there."""

    def __init__(self, *replies, max_context=4000):
        self.replies, self.max_context, self.prompts = list(replies), max_context, []

    async def generate(self, prompt_ids, sampling):
        self.prompts.append((list(prompt_ids), sampling))
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        cut = reply[-1:] == "…"
        ids = list(text_ids(reply.removesuffix("…")) if isinstance(reply, str) else reply)
        ids += [] if cut else [EOS]
        return Completion(ids, [0.0] * len(ids), "length" if cut else "stop", 0)


def talk(*said, engine, tools=(), terminal=False, **knobs):
    """What the console shows of a conversation."""
    file = io.StringIO()
    console = Console(file=file, highlight=False, soft_wrap=True, force_terminal=terminal)
    conversation = Conversation(engine, RENDERER, Sampling(100, key=(0,)), console, Chat(**knobs), tools)
    for text in said:
        asyncio.run(conversation.answer(text))
    return file.getvalue(), conversation


def prompts_of(engine):
    return [RENDERER.decode(ids) for ids, _ in engine.prompts]


# What is shown.


def test_controls_are_made_visible_and_text_stays():
    assert visible("a\x1b[31mb\r\x00\x7f") == "a␛[31mb␍␀␡"
    assert (
        visible("\x9b1m \u202eabc\u2066 \ud800 \u2028 \U000e0041")
        == r"\u009b1m \u202eabc\u2066 \ud800 \u2028 \U000e0041"
    )
    for text in ("two\nlines\tand a tab", "Grüße 世界 👩‍🚀 é", "[bold]x[/]"):
        assert visible(text) == text
    assert not any(unicodedata.category(c) == "Cc" for c in visible("".join(map(chr, range(0x300)))) if c not in "\n\t")


def test_neither_a_model_nor_a_tool_moves_the_cursor_or_uses_markup():
    def evil() -> str:
        return "\x1b]0;title\x07[red]t[/red] \u202e"

    call = '<tool_call>\n{"name": "evil", "arguments": {}}\n</tool_call>'
    engine = Scripted(f"<think>\n\x1b[2Jhm\n</think>\n\n[bold]x[/bold] \x1b[31m{call}", "\x9b2Jdone :smile: \r")
    shown, _ = talk("\x1bhi", engine=engine, tools=[Tool(evil, "e", {})])
    assert not set("\x1b\x9b\x07\r\u202e") & set(shown)
    assert "␛[2Jhm" in shown and "[bold]x[/bold] ␛[31m" in shown and "␛]0;title␇[red]t[/red] \\u202e" in shown
    assert "\\u009b2Jdone :smile: ␍" in shown


def test_reasoning_calls_and_what_tools_say_are_dim():
    engine = Scripted(f"<think>\nlet me see\n</think>\n\nOne moment.{CALL}", "42")
    shown, _ = talk("6 times 7?", engine=engine, tools=[TOOL], terminal=True)
    dim = re.findall(r"\x1b\[2m(.*?)\x1b\[0m", shown, re.S)
    assert [text.strip() for text in dim] == [
        "let me see",
        'calls calculator {"expression": "6*7"}',
        "The result is 42.",
    ]
    assert "\nOne moment.\n" in shown and shown.endswith("\n42\n")


def test_a_reply_that_is_cut_is_told_and_half_a_character_is_no_error():
    shown, _ = talk("a", "b", engine=Scripted("gr…", "x"))
    assert "(cut at the end of the context; /reset)" in shown
    half = list(text_ids("grü"))[:-1]
    engine = Scripted(half, "next")
    shown, _ = talk("a", "b", engine=engine, trace=True)
    assert "gr\ufffd" in shown and "next" in shown
    assert re.search(r"writes .*114 'r'  195 '\S+'", shown), "the piece as the vocabulary has it"
    assert engine.prompts[1][0][len(engine.prompts[0][0]) :][: len(half)] == half, "and the very token goes on"


def test_a_trace_is_all_that_the_model_read_and_wrote():
    engine = Scripted("one", "two")
    shown, _ = talk("a", "b", engine=engine, trace=True, system="be brief")
    lines = [line for line in shown.splitlines() if line.startswith(("reads ", "writes "))]
    ids = [int(id_) for line in lines for id_ in re.findall(r"(?:^\w+ |  )(\d+) ['\"]", line)]
    assert ids == [*engine.prompts[1][0], *text_ids("two"), EOS]
    assert [line.split()[0] for line in lines] == ["reads", "writes"] * 2
    assert prompts_of(engine)[0].startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na<|im_end|>")


# How it goes on.


def test_tools_are_offered_as_their_environment_says():
    (quiet,), (shown,) = Calculator().tools(), Calculator(show_tool=True).tools()
    for tool, offered in ((quiet, False), (shown, True)):
        engine = Scripted(CALL, "42")
        talk("?", engine=engine, tools=[tool])
        assert ("Work out an arithmetic expression" in prompts_of(engine)[0]) == offered
        assert "<tool_response>\nThe result is 42.\n</tool_response>" in prompts_of(engine)[1]
    engine = Scripted(CALL)
    output, _ = talk("?", engine=engine)
    assert "calls calculator" in output and len(engine.prompts) == 1, "nobody answers where no tool is at hand"
    output, _ = talk("?", engine=Scripted("<tool_call>\n{bad\n</tool_call>", "sorry"), tools=[TOOL])
    assert "{bad" in output and "error: " in output and "sorry" in output


def test_tools_that_are_called_for_ever():
    engine = Scripted(CALL, CALL, "at last")
    output, conversation = talk("?", "well?", engine=engine, tools=[TOOL], max_turns=2)
    assert "(stopped after --max-turns 2)" in output and output.endswith("at last\n")
    prompt = engine.prompts[2][0]
    assert prompt[: len(engine.prompts[1][0])] == engine.prompts[1][0], "one stream of tokens"
    assert RENDERER.decode(prompt).count("The result is 42.") == 2, "the last answer is said with the next message"
    roles = [message["role"] for message in conversation.agent.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "user", "assistant"]


def test_an_error_takes_back_what_was_said_or_begins_anew():
    engine = Scripted("fine", RuntimeError("out of\x1b memory"), "again")
    output, conversation = talk("a", "b", "c", engine=engine)
    assert "RuntimeError: out of␛ memory\n" in output and output.endswith("again\n")
    assert [message["content"] for message in conversation.agent.messages] == ["a", "fine", "c", "again"]

    def broken() -> str:
        raise OSError("gone")

    call = '<tool_call>\n{"name": "broken", "arguments": {}}\n</tool_call>'
    output, conversation = talk("a", engine=Scripted(call), tools=[Tool(broken, "b", {})], system="s")
    assert "OSError: gone; a new conversation begins" in output
    assert conversation.agent.messages == [{"role": "system", "content": "s"}]
    engine = Scripted("x", max_context=20)
    output, conversation = talk("far too long " * 3, engine=engine)
    assert "the model's context has 20: /reset" in output and not engine.prompts and not conversation.agent.messages


def test_each_reply_has_a_key_of_its_own():
    engine = Scripted("a", "b", "a")
    _, conversation = talk("x", "y", engine=engine, seed=3)
    conversation.begin()
    asyncio.run(conversation.answer("x"))
    assert [sampling.key for _, sampling in engine.prompts] == [(3, 0, 0), (3, 0, 1), (3, 1, 0)]
    assert engine.prompts[0][0] == engine.prompts[2][0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "-1"], "--temperature -1"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["--env", "nope"], "--env nope: choose one of"),
        (["--env.show-tool"], "--env.show-tool belongs to --env calculator"),
        (["--sistem", "x"], "did you mean --system?"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(flags, message, capsys):
    with pytest.raises(SystemExit) as end:
        parse_beside_env(flags, Chat, None, "")
    err = capsys.readouterr().err
    assert end.value.code == 2 and message in err and len(err.splitlines()) == 1
    assert parse_beside_env([], Chat, None, "")[1] is None
    assert parse_beside_env(["--env", "calculator"], Chat, None, "")[1] == Calculator()


# The script.


def chat(stdin, *flags, encoding="utf-8"):
    """(exit code, stdout, stderr) of chat.py in this process, with these bytes on its standard input."""
    shown, err = io.BytesIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding))
        patch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding, write_through=True))
        patch.setattr(sys, "stderr", err)
        code = run_script("chat.py", *flags)
        return code, shown.getvalue().decode(encoding), err.getvalue()


def test_a_conversation_with_the_tiny_model_and_its_tool():
    asked = "".join(f"What is 47 times {n}?\n/reset\n" for n in range(83, 87))  # it calls its tool in most of them
    said = f"{asked}\n/nope\n/trace\n/reset\n  /path\n/quit\nnever read\n"
    code, out, err = chat(said.encode(), "--env", "calculator", "--max-new-tokens", 96)
    assert code == 0 and not err, err
    called = re.findall(r'^calls calculator \{"expression": "47\*(\d+)"\}\nThe result is (\d+)\.$', out, re.M)
    assert called and all(int(answer) == 47 * int(n) for n, answer in called) and "tools: calculator" in out
    assert "no such command" in out and "tokens are shown" in out and "a new conversation" in out
    assert out.count("reads 257 ") == 1, "the trace begins with the new conversation"
    assert "32 ' '  32 ' '  47 '/'" in out, "a message that begins with a slash"


def test_a_model_that_writes_anything_and_input_that_is_no_text(tiny_path):
    """All 256 bytes are tokens of it, and it is random. Nothing breaks the other side, nor a terminal that knows ASCII alone."""
    flags = ("--model", tiny_path, "--temperature", 3, "--max-new-tokens", 150)
    code, out, err = chat(b"\xff\xfe \xc3\nhi \x1b[31m\n", *flags, encoding="ascii")
    assert code == 0 and not err, err
    assert out.isascii() and not [char for char in out if unicodedata.category(char) == "Cc" and char not in "\n\t"]
    assert re.search(r"\\u24[01][0-9a-f]", out), "some of its controls are seen"


def test_what_can_not_be_loaded_is_one_line():
    code, _, err = chat(b"", "--model", "/does/not/exist")
    assert code == 2 and err.startswith("chat.py: --model /does/not/exist") and "Traceback" not in err


def test_ctrl_c_leaves():
    command = [sys.executable, "chat.py"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, cwd=ROOT, **pipes)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and not err, err
