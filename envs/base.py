"""What an environment is: tasks, and how one is played.

An environment yields tasks and plays an episode in plain async Python through an `Agent`. The agent renders messages,
samples from the model, records every turn token by token, and gives back the reply as a message. The environment grades
by setting `agent.trace.reward`. README has a whole one in thirteen lines, `arithmetic.py` beside this file is another.

What a rollout counts for:

| what happened | reward | in the group's mean | trained | counted under |
|---|---|---|---|---|
| a wrong answer | low, as the environment says | yes | yes | reward/mean |
| a reply cut at --max-new-tokens or the context | as the environment says | yes | yes | rollouts/stop_max_new_tokens, stop_context |
| more turns than --max-turns, a conversation longer than --seq-len | what was set so far, else 0 | yes | yes | rollouts/stop_max_turns, stop_context |
| reward None, NaN or inf | none | no | no | rollouts/errored |
| an agent of several that was never asked | none | no | no | nowhere |
| `play` raised, or ran past --rollout-timeout | none | no | no | rollouts/errored, stop_error, stop_timeout |

More than one agent: `agents = ("player0", "player1")`, and `play(self, task, player0, player1)`. Each leaves a trace with a
reward of its own. All of them are the policy, until the environment says otherwise (`Env.player`): a field
`player1: Player` makes `--env.player1.model.name` and `--env.player1.model.base-url` bind that one to a served model,
and a `player` of your own that gives a function (messages, rng) -> text has that speak for it.

Tools: `agent.say(..., tools=[tool.schema])` shows them, `await agent.answer_calls(reply, tool)` gives the messages to say next;
several at once, if they await something. An environment whose tools are there before an episode begins names them in `tools()`;
chat.py offers them.
`agent.subagent()` begins a conversation of its own inside the same trace, `await agent.compact(...)` goes on from a summary.
"""

import asyncio
import contextlib
import inspect
import itertools
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from frozen import FrozenModel
from traces import ROOT, Edge, Message, Task, Trace

Script = Callable[[list[Message], random.Random], str]


def user(text: str) -> Message:
    """A user message."""
    return {"role": "user", "content": text}


class Cut(Exception):
    """The episode has reached a limit: "max_turns", or "context", the longest conversation. An environment may catch it and grade
    what is there."""


async def together(*coroutines: Awaitable[Any]) -> list[Any]:
    """What these give, run at once. Where one raises (or a limit ends the episode), the others are stopped before it goes on."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True)
class Tool:
    """Something that a model may call. `function` takes the call's arguments by name and returns (or awaits) the tool's answer;
    it raises ValueError for arguments that it can not understand. parameters: JSON schemas by name, all of them required.
    shown: whether the model reads of it in its prompt; one that was taught the tool need not."""

    function: Callable[..., str | Awaitable[str]]
    description: str
    parameters: dict[str, dict[str, Any]]
    shown: bool = True

    @property
    def name(self) -> str:
        """The function's."""
        return self.function.__name__

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI form."""
        parameters = {"type": "object", "properties": self.parameters, "required": list(self.parameters)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def schemas_of(tools: Iterable[Tool]) -> list[dict[str, Any]] | None:
    """What `Agent.say` takes to show these tools; None where there is nothing to show."""
    return [tool.schema for tool in tools if tool.shown] or None


JSON_TYPES = {"string": str, "integer": int, "number": int | float, "boolean": bool, "array": list, "object": dict}


def read_call(call: Message, tools: dict[str, Tool]) -> tuple[Tool, dict[str, Any]]:
    """(tool, arguments) of one entry of `tool_calls`. Raises ValueError, in words for the model, where it is none of `tools`
    or its arguments are not the tool's."""
    if "error" in call:  # the renderer's: no JSON, not closed, ...
        raise ValueError(call["error"])
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if name not in tools:
        raise ValueError(f"there is no tool {str(name)[:20]!r}, only {', '.join(map(repr, tools))}")
    wanted = tools[name].parameters
    for parameter, schema in wanted.items():
        kind = schema.get("type", "")
        value = arguments.get(parameter) if isinstance(arguments, dict) else None
        right = isinstance(value, JSON_TYPES.get(kind, object)) and (kind == "boolean" or not isinstance(value, bool))
        if value is None or not right:
            raise ValueError(f"{name} needs the argument {parameter}, of type {kind or 'any'}")
    return tools[name], {parameter: arguments[parameter] for parameter in wanted}


class Agent:
    """One player's view of an episode: say something to the model, get its reply, keep the token record.

    sample(prompt_ids, turn, messages, tools) -> Completion is given by whoever plays the episode; a reply is parsed by the renderer, and
    the next prompt extends the sampled tokens verbatim where the renderer can (`bridge`). `messages` is the conversation so far.
    `with agent.outside():` is for what an environment awaits beside the model (a process, a server), so that nobody waits for this
    episode meanwhile.
    """

    def __init__(
        self,
        trace: Trace,
        renderer: Any,
        sample: Callable[..., Awaitable[Any]] | None,
        outside: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ) -> None:
        self.trace = trace
        self.renderer = renderer
        self.messages = trace.messages
        self.call = ROOT
        self.outside = outside
        self._sample = sample
        self._requests: Iterator[int] = itertools.count()  # shared with sub-agents, so that no two have the same number
        self._last: tuple[list[int], list[int]] | None = None  # prompt and completion of the turn before

    async def say(self, *messages: Message, tools: list[dict] | None = None) -> Message:
        """Add messages to the conversation, sample the model's turn and return it as an assistant message.

        Its "content" is always a string; "reasoning_content" and "tool_calls" are there if the model wrote any. Raises `Cut`
        at the end of the turns or of the context.
        """
        self.messages.extend(messages)
        rendered = self.renderer.bridge(*self._last, list(messages), tools=tools) if self._last else None
        if rendered is not None:
            prompt_ids = self._last[0] + self._last[1] + rendered.token_ids
        else:
            rendered = self.renderer.render(self.messages, tools=tools, add_generation_prompt=True)
            prompt_ids = rendered.token_ids
        completion = await self._sample(prompt_ids, next(self._requests), self.messages, tools)
        topk = None if completion.topk_ids is None else (completion.topk_ids, completion.topk_logprobs)
        self.trace.add_turn(
            prompt_ids, completion.token_ids, completion.logprobs, version=completion.version, call=self.call,
            finish_reason=completion.finish_reason, roles=rendered.roles, is_content=rendered.is_content, topk=topk,
        )  # fmt: skip
        self._last = prompt_ids, list(completion.token_ids)
        reply = self.renderer.parse_response(completion.token_ids, prompt_ids, tools=tools).message()
        reply["content"] = reply.get("content") or ""
        self.messages.append(reply)
        return reply

    async def answer_calls(self, reply: Message, *tools: Tool) -> list[Message]:
        """What the tools say to a reply: one message for each call, to be said next; none where it calls nothing.

        Tools that await something (a sub-agent) do so all at once. A call that can not be understood is answered by an error
        message. `calls` and `malformed_calls` of the trace's metrics count them.
        """
        metrics, by_name = self.trace.metrics, {tool.name: tool for tool in tools}
        metrics.setdefault("calls", 0.0)
        metrics.setdefault("malformed_calls", 0.0)
        answers, slow = [], []

        def malformed(error: ValueError) -> str:
            metrics["malformed_calls"] += 1
            return f"error: {error}"

        async def settle(answer: Message, content: Awaitable[str]) -> None:
            try:
                answer["content"] = await content
            except ValueError as error:
                answer["content"] = malformed(error)

        for call in reply.get("tool_calls") or []:
            metrics["calls"] += 1
            try:
                tool, arguments = read_call(call, by_name)
                content = tool.function(**arguments)
            except ValueError as error:
                content = malformed(error)
            answers.append({"role": "tool", "tool_call_id": call["id"], "content": content})
            if inspect.isawaitable(content):
                slow.append(settle(answers[-1], content))
        if slow:
            await together(*slow)
        return answers

    def subagent(self, edge: str = "subagent_call") -> "Agent":
        """A helper with a conversation of its own, in new branches of this agent's trace: it earns this agent's reward.

        edge: how it follows from this conversation ("subagent_call", "continuation", ...; length penalties read it).
        """
        helper = type(self).__new__(type(self))
        vars(helper).update(vars(self))
        helper._begin(edge, self.call, [])
        return helper

    def returns_to(self, other: "Agent") -> None:
        """Say that what this agent found was handed back to the one that called it."""
        self.trace.edges.append(Edge(self.call, other.call, "return"))

    async def compact(self, *request: Message, keep: int = 1, tools: list[dict] | None = None) -> Message:
        """Let the model sum up the conversation, and go on in a new branch from its first `keep` messages and the summary, as a
        user message. Returns the summary; where it is empty, the old conversation goes on.

        The request and its answer extend the branch that they sum up. What was not said yet, such as a tool's answer, stands
        before it.
        """
        kept = self.messages[:keep]
        summary = await self.say(*request, tools=tools)
        if summary["content"].strip():
            self._begin("compaction", self.call, [*kept, user(summary["content"])])
        return summary

    def _begin(self, edge: str, src: str, messages: list[Message]) -> None:
        self.call = f"{edge}-{len(self.trace.calls) + 1}"
        self.trace.edges.append(Edge(src, self.call, edge))
        self.trace.calls[self.call] = self.messages = messages
        self._last = None


class ScriptedAgent(Agent):
    """An agent that a function speaks for. It leaves messages and no tokens."""

    def __init__(self, trace: Trace, script: Script, rng: random.Random, *outside: Any) -> None:
        super().__init__(trace, None, None, *outside)
        self.script, self.rng = script, rng

    async def say(self, *messages: Message, tools: list[dict] | None = None) -> Message:
        """Add messages to the conversation and let the function answer."""
        self.messages.extend(messages)
        reply = {"role": "assistant", "content": self.script(self.messages, self.rng)}
        self.messages.append(reply)
        return reply


@dataclass
class Player:
    """Who speaks for an agent: the policy, unless a served model is named."""

    model: FrozenModel = field(default_factory=FrozenModel)
    """a served model that plays this agent; its tokens are never trained"""


@dataclass
class Env:
    """Base of all environments. The fields of a subclass are its options (`--env.max-words 3`).

    agents: one name for each agent of an episode; those that do the same job share a name.
    tiny: the options that the shipped tiny model was taught with, where they are not the defaults.
    """

    agents: ClassVar[tuple[str, ...]] = ("agent",)
    tiny: ClassVar[dict[str, Any]] = {}

    def tasks(self, split: Literal["train", "eval"]) -> Iterable[Task]:
        """The tasks of a split, in a fixed order; a list, or an endless iterator. No task of one stands in the other."""
        return []

    def check(self) -> None:
        """Raise ValueError, naming the option, for values that can not work."""

    async def play(self, task: Task, *agents: Agent) -> None:
        """Play one episode with one agent for each name in `agents`, and set the reward of their traces."""
        raise TypeError(f"{type(self).__name__} does not say how it is played")

    def tools(self) -> list[Tool]:
        """What the model may call in every episode, where that is known before one begins."""
        return []

    def player(self, agent: str) -> FrozenModel | Script | None:
        """Who speaks for an agent: None = the live policy, a served model, or a function (messages, rng) -> text."""
        player = getattr(self, agent, None)
        return player.model if isinstance(player, Player) and player.model != FrozenModel() else None

    def trains(self, agent: str) -> bool:
        """Whether what the policy says as this agent is trained on."""
        return True

    async def evaluate(self, logprob: Callable[[list[Message], str], Awaitable[float]]) -> dict[str, float]:
        """What an evaluation tells beside mean rewards, by name. logprob(messages, text): how probable the policy finds that very
        reply, its end included."""
        return {}


def trained_agents(env: Env) -> list[str]:
    """The agents whose tokens are trained, one for each trace."""
    return [agent for agent in env.agents if env.player(agent) is None and env.trains(agent)]


def served_players(env: Env) -> list[tuple[str, FrozenModel]]:
    """(option, model) of the agents that served models play."""
    players = {agent: env.player(agent) for agent in env.agents}
    return [
        (f"env.{agent.replace('_', '-')}.model", player)
        for agent, player in players.items()
        if isinstance(player, FrozenModel)
    ]


def require_at_least(env: Env, **least: int) -> None:
    """Raise ValueError for the first of these options of an environment that is smaller."""
    for name, minimum in least.items():
        value = getattr(env, name)
        if value < minimum:
            raise ValueError(f"--env.{name.replace('_', '-')} {value}: must be at least {minimum}")
