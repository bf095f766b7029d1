"""A model that says given texts, through the real renderer: what an environment does with them."""

import asyncio

from engines.base import Completion
from envs.base import Agent, Env
from make_tiny import EOS, make_tokenizer, text_ids
from renderers import make_renderer
from traces import Task, Trace

RENDERER = make_renderer("qwen3", make_tokenizer(), "qwen3")


def play(env: Env, task: Task, *replies: str) -> Trace:
    """The trace of an episode in which the model says these texts; the last one over and over."""

    async def sample(prompt_ids, turn, messages, tools):
        ids = [*text_ids(replies[min(turn, len(replies) - 1)]), EOS]
        return Completion(ids, [-1.0] * len(ids), "stop", 0)

    trace = Trace()
    asyncio.run(env.play(task, Agent(trace, RENDERER, sample)))
    return trace
