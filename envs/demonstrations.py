"""Conversations from a file, each with a good last answer: for opsd, and for a warm start by imitation.

    {"messages": [{"role": "user", "content": "Reverse: abc"}, {"role": "assistant", "content": "cba"}]}

One such line for each task, in OpenAI's form. The last message is the assistant's, and all before it is the prompt. Its text is
`info["demonstration"]`, where opsd looks: `python train.py --algo opsd --env demonstrations --env.path FILE`. Other keys of a
line are ignored, `tools` among them.

The reward is a yardstick and no more: there are good answers that resemble no demonstration. It tells whether the policy
comes to say what was demonstrated; an algorithm that trains on it (grpo) imitates letters.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from envs.base import Agent, Env, Message
from envs.reverse_text import similarity
from traces import Task

ROLES = ("system", "user", "assistant", "tool")
COMPARED = 500  # letters: an edit distance takes the product of two lengths, and nobody else runs meanwhile


@dataclass
class Demonstrations(Env):
    """Answer as somebody else did; reward = likeness to the demonstration, a yardstick alone."""

    path: str
    """JSONL, a conversation a line: {"messages": [...]}, the last one the assistant's"""
    eval_share: float = 0.1
    """of the prompts, evenly spread over the file: never trained on"""
    reward: Literal["similarity", "exact"] = "similarity"
    """1 - edit distance / length of the longer text, both cut at 500 letters; or 1 for the very same text, else 0"""

    def check(self) -> None:
        """Refuse a share that leaves nothing to train on, and a file that does not hold such conversations."""
        if not 0 < self.eval_share <= 0.5:
            raise ValueError(f"--env.eval-share {self.eval_share:g}: must be above 0 and at most 0.5")
        if not self.tasks("eval"):
            raise ValueError(
                f"--env.path {self.path}: needs two different prompts at least, to train on one and hold one out"
            )

    @cached_property
    def conversations(self) -> list[tuple[int, list[Message]]]:
        """(line, messages) of the file, read once. Raises ValueError that names file, line and fault."""
        return read_conversations(self.path)

    def tasks(self, split: Literal["train", "eval"]) -> list[Task]:
        """The conversations in the order of the file, named by their lines; one that stands there twice counts once. All
        demonstrations of one prompt are in one split."""
        every = round(1 / self.eval_share)
        prompts: dict[str, int] = {}
        tasks: dict[tuple[str, str], Task] = {}
        for line, messages in self.conversations:
            *prompt, last = messages
            text = json.dumps(prompt, sort_keys=True)
            held_out = prompts.setdefault(text, len(prompts)) % every == 1
            if held_out == (split == "eval"):
                task = Task(f"line-{line}", prompt, {"demonstration": last["content"]})
                tasks.setdefault((text, last["content"]), task)
        return list(tasks.values())

    async def play(self, task: Task, agent: Agent) -> None:
        """One answer to the whole conversation before the demonstration."""
        reply = await agent.say(*task.prompt)
        said, shown = reply["content"].strip(), task.info["demonstration"].strip()
        exact = float(said == shown)
        agent.trace.metrics["exact"] = exact
        agent.trace.reward = exact if self.reward == "exact" else similarity(said[:COMPARED], shown[:COMPARED])


def read_conversations(path: str) -> list[tuple[int, list[Message]]]:
    """(line number, messages) of a JSONL file. Raises ValueError, naming the line, for the first that is no conversation."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ValueError(f"--env.path {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--env.path {path}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            conversation = json.loads(line)
            fault = fault_of(conversation)
        except (ValueError, RecursionError) as error:
            fault = f"not valid JSON: {error}"
        if fault:
            raise ValueError(f"--env.path {path}:{number}: {fault}")
        found.append((number, conversation["messages"]))
    if not found:
        raise ValueError(f"--env.path {path}: holds no conversation")
    return found


def fault_of(conversation: Any) -> str | None:
    """Why a line is no conversation that ends with a demonstration; None where it is one."""
    messages = conversation.get("messages") if isinstance(conversation, dict) else None
    if not isinstance(messages, list):
        return 'must be an object with "messages", a list'
    if len(messages) < 2:
        return f"{len(messages)} messages: a prompt and an answer are two at least"
    for number, message in enumerate(messages, 1):
        where = f"message {number}"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, dict) else message
            return f"{where}: role {role!r} is none of {', '.join(ROLES)}"[:300]
        calls = message["role"] == "assistant" and bool(message.get("tool_calls"))
        content = message.get("content")
        if not isinstance(content, str) and not (calls and content is None):
            return f"{where}: content must be a text, not {type(content).__name__}"
    if messages[-1]["role"] != "assistant":
        return f"the last message is the {messages[-1]['role']}'s, and must be the assistant's"
    if not (messages[-1]["content"] or "").strip():
        return "the last message says nothing that could be demonstrated"
    try:
        json.dumps(messages, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "half a surrogate pair, which is no character"
    return None
