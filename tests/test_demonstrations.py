"""Demonstrations from a file: what is read, what is refused and in which words, and opsd on it out of the box."""

import asyncio
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from command_line import parse
from config import Config
from engines.hf import HFEngine
from envs.demonstrations import Demonstrations, fault_of
from envs.reverse_text import ReverseText
from losses import as_scalars, compute_loss, make_rl_loss, merge
from monitor import Monitor
from packing import pack
from policy import OptimizerConfig, Policy
from rollouts import Rollouts
from tests.conftest import ROOT
from tests.test_envs_base import RENDERER, agent_of

OPSD = ROOT / "models" / "tiny" / "opsd"


def line_of(*texts, **more):
    """A line whose texts are the user's and the assistant's in turn."""
    roles = ("user", "assistant")
    return json.dumps({"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]} | more)


@pytest.fixture
def file(tmp_path):
    def write(*lines):
        path = tmp_path / "demos.jsonl"
        path.write_text("\n".join(lines))
        return str(path)

    return write


def test_tasks_are_what_stands_in_the_file(file):
    lines = [line_of(f"q{n}", f"a{n}") for n in range(40)]
    lines[3] = line_of("hi", "hello", "q3", "a\u20283", source="somewhere")
    lines[4:4] = ["", "  "]
    env = Demonstrations(file("\ufeff" + lines[0], *lines[1:], ""))
    env.check()
    train, held_out = env.tasks("train"), env.tasks("eval")
    assert len(train) == 36 and [task.info["demonstration"] for task in held_out] == ["a1", "a11", "a21", "a31"]
    by_key = {task.key: task for task in train}
    assert [m["content"] for m in by_key["line-4"].prompt] == ["hi", "hello", "q3"]
    assert by_key["line-4"].info == {"demonstration": "a\u20283"} and by_key["line-7"].info == {"demonstration": "a4"}


def test_a_prompt_with_several_demonstrations_is_in_one_split(file):
    lines = [line_of(f"q{n % 5}", f"a{n % 10}") for n in range(20)]
    env = Demonstrations(file(*lines), eval_share=0.4)
    train, held_out = env.tasks("train"), env.tasks("eval")
    assert len(train) + len(held_out) == 10, "what stands there twice counts once"
    prompts = [{task.prompt[0]["content"] for task in tasks} for tasks in (train, held_out)]
    assert not prompts[0] & prompts[1] and len(held_out) == 4


def test_what_cannot_be_used_is_said_in_one_line(tmp_path, file):
    good = line_of("q", "a")
    cases = {
        "{bad": "not valid JSON: Expecting property name",
        "[" * 100_000: "not valid JSON: ",
        "[]": 'must be an object with "messages", a list',
        "3": 'must be an object with "messages", a list',
        '{"messages": "x"}': 'must be an object with "messages", a list',
        '{"prompt": "x", "completion": "y"}': 'must be an object with "messages", a list',
        '{"messages": []}': "0 messages: a prompt and an answer are two at least",
        line_of("q"): "1 messages",
        line_of("q", "a", "q"): "the last message is the user's, and must be the assistant's",
        line_of("q", " \n"): "says nothing that could be demonstrated",
        line_of("q", None): "message 2: content must be a text, not NoneType",
        line_of("q", "\ud800"): "half a surrogate pair",
        line_of([{"type": "text", "text": "q"}], "a"): "message 1: content must be a text, not list",
        '{"messages": ["q", "a"]}': "message 1: role 'q' is none of system, user, assistant, tool",
        '{"messages": [{"role": ["user"], "content": "q"}, {"role": "assistant", "content": "a"}]}': "message 1: role",
        '{"messages": [{"role": "human", "content": "q"}, {"role": "assistant", "content": "a"}]}': "role 'human' is none",
    }
    for line, fault in cases.items():
        path = file(good, "", line)
        with pytest.raises(ValueError) as error:
            Demonstrations(path).check()
        message = str(error.value)
        assert message.startswith(f"--env.path {path}:3: ") and fault in message and "\n" not in message
    (tmp_path / "latin.jsonl").write_bytes('{"messages": "é"}'.encode("latin-1"))
    files = {"none.jsonl": "No such file", ".": "Is a directory", "latin.jsonl": "is not UTF-8"}
    for name, fault in files.items():
        with pytest.raises(ValueError, match=f"--env.path {tmp_path / name}: {fault}"):
            Demonstrations(str(tmp_path / name)).check()
    for lines, fault in ([""], "holds no conversation"), ([good, good], "needs two different prompts at least"):
        with pytest.raises(ValueError, match=fault):
            Demonstrations(file(*lines)).check()
    for share in (0, 0.6, -1, float("nan")):
        with pytest.raises(ValueError, match="--env.eval-share .*: must be above 0 and at most 0.5"):
            Demonstrations(file(good, line_of("r", "b")), eval_share=share).check()


@given(
    st.recursive(
        st.none() | st.text() | st.integers(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["messages", "role", "content"]), inner),
    )
)
@settings(max_examples=60, deadline=None)
def test_no_line_raises(value):
    assert fault_of(value)


@pytest.mark.parametrize(
    ("said", "similarity", "exact"),
    [
        ("abcd", 1, 1),
        (" abcd\n", 1, 1),
        ("abc", 3 / 4, 0),
        ("", 0, 0),
        ("<think>\nabcd\n</think>\n\n", 0, 0),
        ("\x00é", 0, 0),
    ],
)
def test_rewards(file, said, similarity, exact):
    path = file(line_of("q", "abcd"), line_of("r", "b"))
    for kind, wanted in (("similarity", similarity), ("exact", exact)):
        env = Demonstrations(path, reward=kind)
        agent, engine, trace = agent_of(lambda prompt: said)
        asyncio.run(env.play(env.tasks("train")[0], agent))
        assert trace.reward == wanted and trace.metrics == {"exact": exact} and len(engine.prompts) == 1


def test_a_very_long_reply_is_graded_soon(file):
    env = Demonstrations(file(line_of("q", "ab" * 50_000), line_of("r", "b")))
    agent, _, trace = agent_of(lambda prompt: "ba" * 20_000)
    asyncio.run(asyncio.wait_for(env.play(env.tasks("train")[0], agent), 5))
    assert 0.9 < trace.reward < 1


# With opsd


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["--env.path"]),
        (["--env.path", "none.jsonl"], [": --env.path none.jsonl: No such file or directory\n"]),
        (["--env.path", "BROKEN"], ["broken.jsonl:1: not valid JSON"]),
        (["--env.path", "GOOD", "--demo-key", "answer"], ["--demo-key answer", "'line-1'", "['demonstration']"]),
    ],
)
def test_the_command_line_says_what_is_wrong(args, words, tmp_path, capsys):
    (tmp_path / "broken.jsonl").write_text("x")
    (tmp_path / "good.jsonl").write_text(line_of("q", "a") + "\n" + line_of("r", "b"))
    args = [{"BROKEN": str(tmp_path / "broken.jsonl"), "GOOD": str(tmp_path / "good.jsonl")}.get(a, a) for a in args]
    with pytest.raises(SystemExit) as exit:
        parse(["--algo", "opsd", "--env", "demonstrations", *args])
    shown = "".join(capsys.readouterr())
    assert exit.value.code == 2 and all(word in shown for word in words)


def test_opsd_out_of_the_box(file, tmp_path):
    """The gap between the policy with a demonstration and without it closes on the tasks of the file."""
    tasks = ReverseText(num_tasks=64).tasks("train")
    path = file(*[line_of(task.prompt[0]["content"], task.info["answer"]) for task in tasks])
    args = ["--algo", "opsd", "--env", "demonstrations", "--env.path", path, "--model", str(OPSD), "--batch-size", "16"]
    config, notes = parse([*args, "--group-size", "2", "--max-new-tokens", "24", "--lr", "3e-4", "--steps", "3"])
    assert notes == [] and Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    policy = Policy(OPSD, OptimizerConfig.of(config), config.steps)
    engine, monitor = HFEngine(OPSD, max_context=config.seq_len), Monitor(tmp_path / "run", 1, Console(quiet=True))
    rollouts = Rollouts(config, engine, RENDERER, monitor)
    gaps = []
    with asyncio.Runner() as runner:
        runner.run(rollouts.setup())
        for step in range(1, config.steps + 1):
            branches, metrics = runner.run(rollouts.collect(step))
            assert metrics["rollouts/errored"] == 0 and "env/demonstrations/exact" in metrics
            summaries = []
            batches, counts = pack(branches, config.seq_len, config.micro_batch_tokens)
            for batch in batches:
                logprobs, _, _ = policy(batch)
                loss, summary = compute_loss(batch, logprobs, counts.denominators(), make_rl_loss("ipo"))
                loss.backward()
                summaries.append(summary)
            policy.step(step)
            gaps.append(as_scalars(merge(summaries))["loss/ref_kl"])
            engine.load_weights(policy.weights(), version=step)
        assert "eval/demonstrations/mean" in runner.run(rollouts.evaluate(config.steps))
    torch.set_num_threads(threads)
    monitor.close()
    assert gaps[-1] < 0.9 * gaps[0], gaps
