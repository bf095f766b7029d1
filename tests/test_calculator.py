"""The calculator: what it computes, what it answers to calls that make no sense, how an episode ends and what it earns."""

import asyncio
import json
import re
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.base import Completion
from envs.base import Agent, read_call
from envs.calculator import TOOL, Calculator, as_text, evaluate
from make_tiny import EOS, make_tokenizer, text_ids
from renderers import make_renderer
from traces import Trace

RENDERER = make_renderer("qwen3", make_tokenizer(), "qwen3")


def call_of(arguments, name="calculator"):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def play(*replies, task=None, stop=True, **options):
    """The trace of an episode in which the model says these texts; the last one over and over. And the prompts it saw."""
    env, prompts = Calculator(**options), []

    async def sample(prompt_ids, turn, messages, tools):
        prompts.append(RENDERER.decode(prompt_ids))
        ids = [*text_ids(replies[min(turn, len(replies) - 1)]), *[EOS] * stop]
        return Completion(ids, [-1.0] * len(ids), "stop" if stop else "length", 0)

    task = task or next(task for task in env.tasks("train") if task.key == "47*86")
    trace = Trace()
    asyncio.run(env.play(task, Agent(trace, RENDERER, sample)))
    return trace, prompts


# Arithmetic


LEAVES = st.integers(0, 999).map(lambda n: (str(n), Fraction(n)))


def tree(children):
    """Expressions with their values; every part in parentheses, so that precedence plays no role."""

    def join(parts):
        (left, a), symbol, (right, b) = parts
        value = {
            "+": lambda: a + b,
            "-": lambda: a - b,
            "*": lambda: a * b,
            "/": lambda: a / b if b else None,
            "//": lambda: Fraction(a // b) if b else None,
            "%": lambda: a % b if b else None,
        }[symbol]
        return f"({left} {symbol} {right})", None if a is None or b is None else value()

    return st.tuples(children, st.sampled_from("+ - * / // %".split()), children).map(join)


@given(st.recursive(LEAVES, tree, max_leaves=6))
@settings(max_examples=200, deadline=None)
def test_it_agrees_with_exact_fractions(case):
    expression, value = case
    if len(expression) > 100:
        return
    if value is None:
        with pytest.raises(ZeroDivisionError):
            evaluate(expression)
    else:
        assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression", "1+2*3 8-3-2 2**3**2 -2**2 2**-1 7//2*2 7%4*3 -7//2 2*-3 --3 1.5+.25 (1+2)*3 10-(2-3) 100/8/5".split()
)
def test_precedence_is_python_s(expression):
    assert float(evaluate(expression)) == eval(expression)


def test_every_task_is_what_its_question_asks():
    env = Calculator(max_number=20)
    train, held_out = env.tasks("train"), env.tasks("eval")
    pattern = re.compile(r"What is (\d+) (plus|minus|times) (\d+)\?")
    seen = set()
    for task in train + held_out:
        a, word, b = pattern.fullmatch(task.prompt[0]["content"]).groups()
        a, b = int(a), int(b)
        assert task.info["answer"] == {"plus": a + b, "minus": a - b, "times": a * b}[word]
        assert evaluate(task.info["expression"]) == task.info["answer"]
        seen.add((a, word, b))
    assert len(seen) == len(train) + len(held_out) == 19 * 3 * 19
    assert not {task.key for task in train} & {task.key for task in held_out}


@pytest.mark.parametrize(
    ("value", "text"),
    [("4042", "4042"), ("-3", "-3"), ("5/2", "2.5"), ("-1/8", "-0.125"), ("1/3", "1/3"), ("1/10000000", "1/10000000"),
     ("0", "0"), ("-1/2", "-0.5")],
)  # fmt: skip
def test_results_are_written_exactly(value, text):
    assert as_text(Fraction(value)) == text and Fraction(text) == Fraction(value)


@pytest.mark.parametrize(
    ("expression", "error"),
    [("9**9**9", OverflowError), ("9**9**9**9**9", OverflowError), ("(9**40)**(9**40)", OverflowError),
     ("2**(0-10**30)", OverflowError), ("(1/3)**10000", OverflowError), ("9" * 99, OverflowError),
     ("1/0", ZeroDivisionError), ("1//0", ZeroDivisionError), ("1%0", ZeroDivisionError), ("0**-1", ZeroDivisionError),
     ("1/(2-2)", ZeroDivisionError), ("2**0.5", ArithmeticError),
     ("", ValueError), ("nan", ValueError), ("inf", ValueError), ("1e5", ValueError), ("0x10", ValueError),
     ("1 2", ValueError), ("1+", ValueError), ("*1", ValueError), ("()", ValueError), ("(1", ValueError),
     ("1)", ValueError), ("1;2", ValueError), ("__import__('os').system('true')", ValueError), ("(" * 100, ValueError),
     ("-" * 100, ValueError), ("(" * 50 + "1" + ")" * 50, ValueError), ("1\0", ValueError), ("²", ValueError),
     ("٣+1", ValueError), ("1+1" * 40, ValueError), ("the end", ValueError)],
)  # fmt: skip
def test_what_has_no_value_is_said_at_once(expression, error):
    start = time.perf_counter()
    with pytest.raises(error):
        evaluate(expression)
    assert time.perf_counter() - start < 0.1


def test_one_to_the_power_of_anything_is_one():
    assert evaluate("1**" + "9" * 16) == 1 and evaluate("(0-1)**1000001") == -1 and evaluate("0**7") == 0


# Play


def test_a_call_is_answered_and_the_answer_graded():
    trace, prompts = play(call_of({"expression": "47*86"}), "4042")
    assert trace.reward == 1.0 and trace.metrics == {"calls": 1.0, "malformed_calls": 0.0}
    assert [message["role"] for message in trace.messages] == ["user", "assistant", "tool", "assistant"]
    (call,) = trace.messages[1]["tool_calls"]
    assert trace.messages[2] == {"role": "tool", "tool_call_id": call["id"], "content": "The result is 4042."}
    assert prompts[1].endswith(
        "<tool_response>\nThe result is 4042.\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    (branch,) = trace.branches  # one stream over both turns
    tool = [segment for segment in branch.segments if segment.role == "tool"]
    said = [branch.token_ids[t] for s in tool for t in range(s.start, s.stop) if branch.is_content[t]]
    assert RENDERER.decode(said) == "The result is 4042." and not branch.sampled[tool[0].start : tool[-1].stop].any()


@pytest.mark.parametrize(
    ("reply", "reward"),
    [("4042", 1), ("It is 4042.", 1), ("4,042", 1), ("47 times 86 is 4042", 1), ("4042 or 4043", 0), ("4043", 0), ("", 0),
     ("I do not know", 0), ("-4042", 0), ("40421", 0), ("4042 4042", 1), ("four", 0), ("\x00\ufffd", 0)],
)  # fmt: skip
def test_the_last_number_of_the_final_reply_counts(reply, reward):
    """Also without any call: an answer from the head is an answer."""
    assert play(reply)[0].reward == reward
    assert play(call_of({"expression": "1+1"}), reply)[0].reward == reward


def test_negative_results():
    task = next(task for task in Calculator().tasks("train") if task.info["answer"] == -39)
    trace, _ = play(call_of({"expression": task.info["expression"]}), "-39", task=task)
    assert trace.messages[2]["content"] == "The result is -39." and trace.reward == 1.0
    assert play("39", task=task)[0].reward == 0.0


MALFORMED = {
    "broken JSON": "<tool_call>\n{bad\n</tool_call>",
    "not closed": '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}',
    "empty": "<tool_call></tool_call>",
    "a list": "<tool_call>[1]</tool_call>",
    "no name": '<tool_call>{"arguments": {"expression": "1+1"}}</tool_call>',
    "name is no text": '<tool_call>{"name": 3, "arguments": {"expression": "1+1"}}</tool_call>',
    "unknown tool": call_of({"expression": "1+1"}, name="shell"),
    "arguments are text": call_of("1+1"),
    "arguments are a list": call_of(["1+1"]),
    "arguments are nothing": call_of(None),
    "no expression": call_of({"formula": "1+1"}),
    "a number": call_of({"expression": 2}),
    "NaN": '<tool_call>{"name": "calculator", "arguments": {"expression": NaN}}</tool_call>',
    "nested": call_of({"expression": {"expression": "1+1"}}),
    "no expression at all": call_of({"expression": "rm -rf /"}),
    "deep": "<tool_call>" + "[" * 3000 + "</tool_call>",
    "surrogate": '<tool_call>{"name": "calculator", "arguments": {"expression": "\\ud800"}}</tool_call>',
    "strange name": call_of({"expression": "1"}, name="\ud800"),
}


@pytest.mark.parametrize("kind", MALFORMED)
@pytest.mark.parametrize("show_tool", [False, True])
def test_a_malformed_call_is_answered_and_counted(kind, show_tool):  # known fault A11
    trace, prompts = play(MALFORMED[kind], "4042", show_tool=show_tool)
    assert trace.metrics == {"calls": 1.0, "malformed_calls": 1.0} and trace.reward == 1.0
    assert trace.messages[2]["role"] == "tool" and trace.messages[2]["content"].startswith("error: ")
    assert "<tool_response>\nerror: " in prompts[1]
    json.dumps(trace.messages).encode()


@pytest.mark.parametrize("expression", ["1/0", "9**9**9", "2**0.5"])
def test_a_call_without_a_result_is_answered_and_not_malformed(expression):
    trace, _ = play(call_of({"expression": expression}), "4042")
    assert trace.metrics == {"calls": 1.0, "malformed_calls": 0.0}
    assert trace.messages[2]["content"].startswith("error: ")


def test_several_calls_in_one_turn_get_an_answer_each():
    both = call_of({"expression": "47*86"}) + "\n" + call_of({"expression": "1/4"}) + "\n<tool_call>{</tool_call>"
    trace, prompts = play(both, "4042")
    assert [m["content"] for m in trace.messages[2:4]] == ["The result is 4042.", "The result is 0.25."]
    assert trace.messages[4]["content"].startswith("error: ")
    calls = trace.messages[1]["tool_calls"]
    assert [m["tool_call_id"] for m in trace.messages[2:5]] == [call["id"] for call in calls] and len(calls) == 3
    assert len({call["id"] for call in calls}) == 3
    assert trace.metrics == {"calls": 3.0, "malformed_calls": 1.0} and trace.reward == 1.0
    assert prompts[1].count("<tool_response>") == 3 and len(trace.branches) == 1


@pytest.mark.parametrize("max_turns", [1, 2, 5])
def test_turns_are_bounded_and_who_still_calls_has_not_answered(max_turns):
    trace, _ = play("4042" + call_of({"expression": "47*86"}), max_turns=max_turns)
    assert trace.num_turns == trace.metrics["calls"] == max_turns and trace.reward == 0.0
    assert trace.messages[-1]["role"] == "assistant"


def test_no_turns_are_refused():
    with pytest.raises(ValueError, match="--env.max-turns 0"):
        Calculator(max_turns=0).check()
    with pytest.raises(ValueError, match="--env.max-number 1: must be at least 2"):
        Calculator(max_number=1).check()


def test_a_turn_that_was_cut_goes_on():
    trace, _ = play(call_of({"expression": "47*86"})[:-12], "4042", stop=False)
    assert trace.metrics["malformed_calls"] == 1 and trace.reward == 1.0 and trace.truncated


def test_the_schema_stands_in_the_prompt_on_request():
    for show_tool in (False, True):
        _, prompts = play(call_of({"expression": "1+1"}), "2", show_tool=show_tool)
        assert all((json.dumps(TOOL.schema) in prompt) == show_tool for prompt in prompts)
        assert prompts[1].startswith(prompts[0])
    assert TOOL.schema["type"] == "function" and set(TOOL.schema["function"]["parameters"]["properties"]) == {
        "expression"
    }


@given(st.text(max_size=60), st.booleans())
@settings(max_examples=30, deadline=None)
def test_no_reply_raises(text, wrapped):
    trace, _ = play(f"<tool_call>{text}</tool_call>" if wrapped else text)
    assert trace.reward in (0.0, 1.0) and np.isfinite(list(trace.metrics.values())).all()


@given(st.dictionaries(st.sampled_from(["expression", "x"]), st.one_of(st.none(), st.floats(), st.text(max_size=30))))
@settings(max_examples=150, deadline=None)
def test_no_arguments_raise(arguments):
    try:
        tool, read = read_call({"function": {"name": "calculator", "arguments": arguments}}, {"calculator": TOOL})
        content = tool.function(**read)
    except ValueError as error:
        content = f"error: {error}"
    assert content.startswith("The result is ") or content.startswith("error: ")
