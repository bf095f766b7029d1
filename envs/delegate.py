"""Hand parts of a task to helpers: a main agent that sees no list, and sub-agents that see one list each.

    user       ... How often does "pear" stand in all 3 lists together? ...
    assistant  ask 1: How often does "pear" stand in your list?
               ask 2: How often does "pear" stand in your list?
        user       List 1: fig, pear, plum, pear ...        (a conversation of the helper's own)
        assistant  2
    user       > ask 1: ...
               2
               ...
    assistant  3

The home of branches, edges and the length penalty that tells helpers from the main agent (`--length-penalty
linear-subagent`). Main agent and helpers are one model and one trace: all of them earn what the final answer earns, so a
helper is blamed for a sum that its caller got wrong. Who never asks can guess: with the default options the commonest answer is right in 22 % of the
held-out tasks, and `env/delegate/calls` tells whether the model asks.

A model may ask by a line or by a call of the tool `ask`; lines are answered in a user message, calls in tool messages. The
helpers of one reply work at once. `env/delegate/malformed_calls` counts what made no sense.
"""

import random
import re
import zlib
from dataclasses import dataclass
from typing import ClassVar, Literal

from envs.base import Agent, Env, Message, Tool, require_at_least, user
from traces import Task

FRUIT = ("apple", "cherry", "fig", "lemon", "pear", "plum")
PROMPT = 'There are {parts} lists of fruit, which you can not see. How often does "{word}" stand in all {parts} lists together?'
HOW_TO_ASK = """
Each list has a helper who can read it. To ask the helper of list 2, write a line like this one:
ask 2: your question
You may ask several helpers in one reply; each knows its own list and your question, nothing else. When you know the answer, reply with that number and ask nothing."""
SUM_UP = "Sum up what you know so far: your reply and the first message are all that you will remember."
GO_ON = "Go on."


@dataclass
class Delegate(Env):
    """Count a word in lists that only helpers see; reward 1 if the last number of the final reply is right, else 0.

    The final reply is the first that asks nothing. Who still asks in turn max_turns has not answered.
    """

    tiny: ClassVar = {"parts": 2, "max_items": 6, "max_turns": 2, "explain": False}

    parts: int = 3
    """lists, each with a helper; so many may be asked in one reply"""
    max_items: int = 12
    """words in a list, at most"""
    max_turns: int = 4
    """turns of the main agent, the final reply included, summaries not"""
    compact_after: int = 0
    """after so many turns the main agent sums up and forgets the rest; 0: never"""
    show_tool: bool = False
    """offer the tool's schema too, for a model that calls tools"""
    explain: bool = True
    """say in the prompt how to ask, for a model that was not taught it (the tiny one was: configs/delegate_tiny.py)"""
    num_tasks: int = 1024

    def check(self) -> None:
        """Refuse no parts, empty lists and no turns."""
        require_at_least(self, parts=1, max_items=1, max_turns=1, compact_after=0, num_tasks=1)

    def tasks(self, split: Literal["train", "eval"]) -> list[Task]:
        """Distinct random lists, each with a word; a checksum of them decides which split they belong to."""
        rng = random.Random(0)
        template = PROMPT + HOW_TO_ASK if self.explain else PROMPT
        found: dict[str, Task] = {}
        for _ in range(100 * self.num_tasks):
            lists = [rng.choices(FRUIT, k=rng.randint(1, self.max_items)) for _ in range(self.parts)]
            word = rng.choice(FRUIT)
            key = "; ".join([word, *(" ".join(items) for items in lists)])
            if (zlib.crc32(key.encode()) % 4 == 0) == (split == "eval"):
                info = {"parts": [", ".join(items) for items in lists], "answer": sum(i.count(word) for i in lists)}
                found[key] = Task(key, [user(template.format(parts=self.parts, word=word))], info)
            if len(found) == self.num_tasks:
                break
        return list(found.values())

    async def play(self, task: Task, agent: Agent) -> None:
        """Let helpers answer what is asked, until a reply asks nothing."""
        parts = task.info["parts"]

        async def ask(part: int, question: str) -> str:
            if not 1 <= part <= len(parts):
                raise ValueError(f"there is no list {part}: they are 1 to {len(parts)}")
            helper = agent.subagent()
            reply = await helper.say(user(f"List {part}: {parts[part - 1]}\n\n{question}"))
            helper.returns_to(agent)
            return reply["content"]

        tool = Tool(
            ask,
            "Ask the helper who can read a list.",
            {"part": {"type": "integer", "description": "number of the list"}, "question": {"type": "string"}},
        )
        tools = [tool.schema] if self.show_tool else None
        messages, agent.trace.reward = task.prompt, 0.0
        await agent.answer_calls({}, tool)  # who answers at once has asked 0 times
        for turn in range(1, self.max_turns + 1):
            reply = await agent.say(*messages, tools=tools)
            lines = [] if reply.get("tool_calls") else asking_lines(reply["content"])
            calls = reply.get("tool_calls") or [read_line(line) for line in lines]
            if not calls:
                numbers = re.findall(r"-?\d+", reply["content"])
                agent.trace.reward = float(numbers[-1:] == [str(task.info["answer"])])
            if not calls or turn == self.max_turns:
                return
            # A reply can hold very many calls, and each is a request to the model.
            too_many = f"at most {len(parts)} questions in one reply"
            calls = [call if i < len(parts) else call | {"error": too_many} for i, call in enumerate(calls)]
            messages = await agent.answer_calls({"tool_calls": calls}, tool)
            if lines:
                said = [f"> {line}\n{answer['content']}" for line, answer in zip(lines, messages, strict=True)]
                messages = [user("\n\n".join(said))]
            if self.compact_after and turn % self.compact_after == 0:
                summary = await agent.compact(*messages, user(SUM_UP), tools=tools)
                messages = [] if summary["content"].strip() else [user(GO_ON)]


def asking_lines(text: str) -> list[str]:
    """The lines of a reply that ask somebody."""
    return [line.strip() for line in text.splitlines() if re.match(r"\s*ask\b[^:]*:", line, re.IGNORECASE)]


def read_line(line: str) -> Message:
    """A line "ask PART: QUESTION" as a call of the tool; a part that is no number stays text, and is refused as one."""
    asked, _, question = line.partition(":")
    part = asked[len("ask") :].strip()
    number = int(part) if re.fullmatch(r"\d{1,9}", part, re.ASCII) else part
    return {
        "id": "",
        "type": "function",
        "function": {"name": "ask", "arguments": {"part": number, "question": question.strip()}},
    }
