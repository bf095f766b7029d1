"""What an environment is: tasks, and how one is played.

An environment yields tasks and plays an episode in plain async Python through an `Agent`. The agent renders messages,
samples from the model, records every turn token by token, and gives back the reply as a message. The environment grades
by setting `agent.trace.reward`. A whole one:

    @dataclass
    class GuessTheNumber(Env):
        high: int = 9

        def tasks(self, split):
            return [Task(f"{split}-{n}", [user(f"Guess a number from 0 to {self.high}.")], {"answer": n}) for n in range(self.high + 1)]

        async def play(self, task, agent):
            reply = await agent.say(*task.prompt)
            agent.trace.reward = float(reply["content"].strip() == str(task.info["answer"]))

What a rollout counts for:

| what happened | reward | in the group's mean | trained | counted under |
|---|---|---|---|---|
| a wrong answer | low, as the environment says | yes | yes | reward/mean |
| cut by a length limit | as the environment says | yes | yes | rollouts/truncated |
| reward None, NaN or inf | none | no | no | rollouts/errored |
| `play` raised | none | no | no | rollouts/errored |
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from traces import Message, Task, Trace


def user(text: str) -> Message:
    """A user message."""
    return {"role": "user", "content": text}


class Agent:
    """One player's view of an episode: say something to the model, get its reply, keep the token record.

    sample(prompt_ids, turn, messages, tools) -> Completion is given by whoever plays the episode; a reply is parsed by the renderer, and
    the next prompt extends the sampled tokens verbatim where the renderer can (`bridge`).
    """

    def __init__(self, trace: Trace, renderer: Any, sample: Callable[..., Awaitable[Any]]) -> None:
        self.trace = trace
        self.renderer = renderer
        self._sample = sample
        self._last: tuple[list[int], list[int]] | None = None  # prompt and completion of the turn before

    async def say(self, *messages: Message, tools: list[dict] | None = None) -> Message:
        """Add messages to the conversation, sample the model's turn and return it as an assistant message.

        Its "content" is always a string; "reasoning_content" and "tool_calls" are there if the model wrote any.
        """
        self.trace.messages.extend(messages)
        rendered = self.renderer.bridge(*self._last, list(messages), tools=tools) if self._last else None
        if rendered is not None:
            prompt_ids = self._last[0] + self._last[1] + rendered.token_ids
        else:
            rendered = self.renderer.render(self.trace.messages, tools=tools, add_generation_prompt=True)
            prompt_ids = rendered.token_ids
        completion = await self._sample(prompt_ids, self.trace.num_turns, self.trace.messages, tools)
        topk = None if completion.topk_ids is None else (completion.topk_ids, completion.topk_logprobs)
        self.trace.add_turn(
            prompt_ids, completion.token_ids, completion.logprobs, version=completion.version,
            finish_reason=completion.finish_reason, roles=rendered.roles, is_content=rendered.is_content, topk=topk,
        )  # fmt: skip
        self._last = prompt_ids, list(completion.token_ids)
        reply = self.renderer.parse_response(completion.token_ids, prompt_ids, tools=tools).message()
        reply["content"] = reply.get("content") or ""
        self.trace.messages.append(reply)
        return reply


@dataclass
class Env:
    """Base of all environments. The fields of a subclass are its options (`--env.max-words 3`)."""

    agents: ClassVar[tuple[str, ...]] = ("agent",)

    def tasks(self, split: Literal["train", "eval"]) -> Iterable[Task]:
        """The tasks of a split, in a fixed order; a list, or an endless iterator. No task of one stands in the other."""
        return []

    def check(self) -> None:
        """Raise ValueError, naming the option, for values that can not work."""

    async def play(self, task: Task, *agents: Agent) -> None:
        """Play one episode with one agent for each name in `agents`, and set the reward of their traces."""
        raise TypeError(f"{type(self).__name__} does not say how it is played")


def require_at_least(env: Env, **least: int) -> None:
    """Raise ValueError for the first of these options of an environment that is smaller."""
    for name, minimum in least.items():
        value = getattr(env, name)
        if value < minimum:
            raise ValueError(f"--env.{name.replace('_', '-')} {value}: must be at least {minimum}")
