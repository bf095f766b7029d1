"""A calculator to call: several turns, one tool, and no shell.

    user       What is 47 times 86?
    assistant  <tool_call>{"name": "calculator", "arguments": {"expression": "47*86"}}</tool_call>
    tool       The result is 4042.
    assistant  4042

The home of algorithms that learn from what the environment says (echo): a tool's answer can be predicted, and is worth
predicting. Expect a model to learn first to write the call, then to copy what it gets; a model that adds in its head may
as well answer at once. `env/calculator/calls` and `env/calculator/malformed_calls` tell how often the tool was called and
how often in a way that it could not understand; such a call is answered by an error message, and the model may try again.
"""

import operator
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from envs.base import Agent, Env, Tool, require_at_least, schemas_of, user
from traces import Task

WORDS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "plus": ("+", operator.add),
    "minus": ("-", operator.sub),
    "times": ("*", operator.mul),
}
MAX_CHARS = 100  # of an expression: bounds the depth of the reader
MAX_SIZE = 10**40  # of numerators and denominators
END = "the end"


@dataclass
class Calculator(Env):
    """a plus, minus or times b with 2 <= a, b <= max_number; reward 1 if the last number of the final reply is right, else 0.

    The final reply is the first that calls no tool. Who still calls in turn max_turns has not answered.
    """

    max_number: int = 99
    max_turns: int = 3
    """turns of the model, the final reply included"""
    show_tool: bool = False
    """write the tool's schema into the prompt, for a model that was not taught this tool (the tiny ones were)"""

    def check(self) -> None:
        """Refuse no numbers and no turns."""
        require_at_least(self, max_number=2, max_turns=1)

    def tasks(self, split: Literal["train", "eval"]) -> list[Task]:
        """All questions in a fixed random order: every tenth is held out."""
        numbers = range(2, self.max_number + 1)
        questions = [(a, word, b) for a in numbers for word in WORDS for b in numbers]
        random.Random(0).shuffle(questions)
        chosen = [question for i, question in enumerate(questions) if (i % 10 == 0) == (split == "eval")]
        tasks = []
        for a, word, b in chosen:
            symbol, compute = WORDS[word]
            info = {"expression": f"{a}{symbol}{b}", "answer": compute(a, b)}
            tasks.append(Task(info["expression"], [user(f"What is {a} {word} {b}?")], info))
        return tasks

    def tools(self) -> list[Tool]:
        """The calculator."""
        return [replace(TOOL, shown=self.show_tool)]

    async def play(self, task: Task, agent: Agent) -> None:
        """Answer every call, until a reply has none."""
        messages, tools = task.prompt, self.tools()
        for _ in range(self.max_turns):
            reply = await agent.say(*messages, tools=schemas_of(tools))
            messages = await agent.answer_calls(reply, *tools)
            if not messages:
                break
        numbers = [] if messages else re.findall(r"-?\d+", reply["content"].replace(",", ""))
        agent.trace.reward = float(numbers[-1:] == [str(task.info["answer"])])


def calculator(expression: str) -> str:
    """What the tool says. Raises ValueError for what is no expression."""
    try:
        return f"The result is {as_text(evaluate(expression))}."
    except ArithmeticError as error:
        return f"error: {error}"


TOOL = Tool(
    calculator,
    "Work out an arithmetic expression, exactly.",
    {"expression": {"type": "string", "description": "for example (1 + 2) * 3"}},
)


def evaluate(expression: str) -> Fraction:
    """The exact value of an expression of numbers, + - * / // % ** and parentheses, with Python's precedence.

    Raises ValueError for what is no such expression and ArithmeticError for what has no value or too large a one.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"an expression has at most {MAX_CHARS} characters, this one {len(expression)}")
    tokens = re.findall(r"\d+\.?\d*|\.\d+|\*\*|//|\S", expression, re.ASCII)
    tokens.append(END)
    value = _binary(tokens)
    if tokens != [END]:
        raise ValueError(f"an operator was expected, not {tokens[0]!r}")
    return value


# Each of these takes what it reads off the front of `tokens`.
LEVELS = (
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": operator.truediv, "//": operator.floordiv, "%": operator.mod},
)


def _binary(tokens: list[str], level: int = 0) -> Fraction:
    if level == len(LEVELS):
        return _signed(tokens)
    value = _binary(tokens, level + 1)
    while tokens[0] in LEVELS[level]:
        operation = LEVELS[level][tokens.pop(0)]
        other = _binary(tokens, level + 1)
        if other == 0 and operation not in (operator.add, operator.sub, operator.mul):
            raise ZeroDivisionError("division by zero")
        value = _bounded(operation(value, other))
    return value


def _signed(tokens: list[str]) -> Fraction:
    token = tokens.pop(0)
    if token in ("+", "-"):
        value = _signed(tokens)
        return -value if token == "-" else value
    if token == "(":
        value = _binary(tokens)
        if tokens.pop(0) != ")":
            raise ValueError("a parenthesis is not closed")
    elif re.fullmatch(r"\d+\.?\d*|\.\d+", token, re.ASCII):
        value = _bounded(Fraction(token))
    else:
        raise ValueError(f"a number was expected, not {token!r}")
    if tokens[0] != "**":
        return value
    tokens.pop(0)
    return _power(value, _signed(tokens))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ArithmeticError("an exponent must be a whole number")
    if base == 0 and exponent < 0:
        raise ZeroDivisionError("division by zero")
    # 2^bits <= the larger of numerator and denominator: nothing that could not fit is ever computed.
    bits = max(abs(base.numerator), base.denominator).bit_length() - 1
    if bits * abs(exponent) > MAX_SIZE.bit_length():
        raise OverflowError("the number is too large")
    return _bounded(base**exponent.numerator)


def _bounded(value: Fraction | int) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= MAX_SIZE:
        raise OverflowError("the number is too large")
    return Fraction(value)


def as_text(value: Fraction) -> str:
    """A whole number, a decimal number of at most six places if that is exact, else a fraction."""
    if value.denominator == 1:
        return str(value.numerator)
    if 10**6 % value.denominator:
        return str(value)
    whole, rest = divmod(abs(value), 1)
    return f"{'-' if value < 0 else ''}{whole}.{int(rest * 10**6):06}".rstrip("0")
