"""From tasks to training branches: play episodes in groups, drive the algorithm's two hooks, gate, filter, fill a batch.

One call of `collect` makes one batch:

    deal groups -> play all of them at once -> score each episode as it ends -> in deal order, for each complete group:
    score the group, route its tokens, show it to the sampler, ask the gates, drop what carries no signal, queue the rest
    -> until batch_size traces are queued

What is left over in the queue starts the next batch. Nothing here knows which algorithm runs.
"""

import asyncio
import contextlib
import itertools
import random
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from algos import ALGORITHMS, Algorithm
from config import Config, Source, name_of
from curriculum import Curriculum, make_curriculum
from engines.base import Completion, Engine, Sampling, seed_of
from envs import ENVS, Agent, Env
from envs.base import Cut, ScriptedAgent, trained_agents
from frozen import FrozenModel
from limits import Clock, RunStopped, Watchdog
from monitor import Monitor
from ranks import ALONE, Ranks
from renderers.base import Body
from traces import Branch, Episode, Message, Task, Trace, trainable_traces

TRAIN, EVAL = 0, 1  # the two streams of randomness
STOPS = ("max_new_tokens", "max_turns", "context", "timeout", "error")  # why an episode ended, if it was not done


@dataclass
class Stage:
    """A source at work: its environment, its algorithm, and who chooses and admits its tasks."""

    name: str
    env: Env
    algorithm: Algorithm | None = None  # these two: None where nothing is trained
    curriculum: Curriculum | None = None
    group_size: int = 1
    ratio: float = 1.0
    dealt: int = 0
    tokens: int = 0  # that were sampled in `episodes` so far
    episodes: int = 0

    @property
    def mean_tokens(self) -> float:
        """How long an episode was so far."""
        return (self.tokens + 1) / (self.episodes + 1)


@dataclass
class Group:
    """All plays of one task. `index` counts deals over the whole run and seeds the plays."""

    index: int
    stage: Stage
    task: Task
    episodes: list[Episode] = field(default_factory=list)
    admitted: bool = True
    survivors: int = 0  # traces that were queued


@dataclass
class Queue:
    """Traces that wait to be trained on, in deal order.

    With `constant`, only traces with a live branch count and wait, so replacements fill the batch. Without, every trace
    counts, and a batch ships what of it is alive.
    """

    batch_size: int
    constant: bool
    waiting: list[list[Branch]] = field(default_factory=list)  # the live branches of each trace

    def add(self, traces: list[Trace]) -> int:
        """Drop what carries no signal and queue the rest. Returns how many traces have a live branch."""
        live = [[branch for branch in trace.training_branches() if prune(branch)] for trace in traces]
        self.waiting += [branches for branches in live if branches or not self.constant]
        return sum(bool(branches) for branches in live)

    def drop_older(self, version: int) -> int:
        """Forget traces that weights before `version` sampled a token of, and return how many. What a frozen model sampled
        has no age."""
        fresh = [
            branches
            for branches in self.waiting
            if all(branch.version < 0 or branch.version >= version for branch in branches)
        ]
        dropped, self.waiting = len(self.waiting) - len(fresh), fresh
        return dropped

    def missing(self) -> int:
        """Traces that the next batch still lacks."""
        return max(0, self.batch_size - len(self.waiting))

    def take(self) -> list[Branch]:
        """The next batch: the live branches of the first batch_size traces."""
        batch, self.waiting = self.waiting[: self.batch_size], self.waiting[self.batch_size :]
        return [branch for branches in batch for branch in branches]


def prune(branch: Branch) -> bool:
    """Take sampled tokens of zero advantage out of rl; False if no token is left in any component.

    The test is exactly zero. They leave the mask and the denominator, and so the mismatch KL too.
    """
    rl = branch.sampled.copy() if branch.rl_weights is None else branch.sampled & (branch.rl_weights != 0)
    if branch.advantages is not None:
        dead = rl & (branch.advantages == 0)
        if dead.any():
            branch.rl_weights = np.where(dead, 0.0, 1.0 if branch.rl_weights is None else branch.rl_weights)
            rl &= ~dead
    elif rl.any():
        rl[:] = False
        branch.rl_weights = np.zeros(len(branch))
    others = [weights is not None and (weights != 0).any() for weights in (branch.ce_weights, branch.ref_kl_weights)]
    return bool(rl.any() or any(others))


class Rollouts:
    """Plays everything that a run samples. Lives as long as the run."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        renderer: Any,
        monitor: Monitor,
        connect: Callable[[FrozenModel], Engine] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.config, self.engine, self.renderer, self.monitor, self.connect = config, engine, renderer, monitor, connect
        self.ranks = ranks
        self.stages: list[Stage] = []
        for source in config.sources:
            self.stages.append(self._stage(source))
        self.queue = Queue(config.batch_size, config.constant_batch_size)
        self.dealt = 0
        self.sampling = Sampling(
            config.max_new_tokens,
            config.temperature,
            config.top_p,
            stop_token_ids=tuple(renderer.stop_token_ids),
            top_logprobs=config.head_size,
        )
        engine.check(self.sampling)
        self._fruitless: Counter[str] = Counter()  # rollouts since the last one that could be trained on, by reason
        self._empty_rounds = 0
        self._last_error = ""
        self._clocks: set[Clock] = set()  # of the episodes that are being played

    def _stage(self, source: Source) -> Stage:
        name = name_of(ENVS, source.env)
        namesakes = sum(type(stage.env) is type(source.env) for stage in self.stages)
        name += f"-{namesakes + 1}" if namesakes else ""  # two sources may share an environment, not their metrics
        algorithm = ALGORITHMS[name_of(ALGORITHMS, source.algo)](source.algo, self.engine, self.renderer, self.connect)
        curriculum = make_curriculum(source.env.tasks("train"), source.sampler, source.gates, self.config.seed)
        return Stage(name, source.env, algorithm, curriculum, source.group_size, source.ratio)

    async def setup(self) -> None:
        """Set the algorithms up."""
        for stage in self.stages:
            await stage.algorithm.setup()

    async def close(self) -> None:
        """Close the algorithms."""
        for stage in self.stages:
            await stage.algorithm.close()

    async def collect(self, step: int) -> tuple[list[Branch], dict[str, float]]:
        """One batch of branches for optimizer step `step`, and metrics of the rollouts that were played for it.

        The batch is empty only with constant_batch_size off, when none of its traces carries a signal. Raises RunStopped
        after max_empty_steps rounds in a row without anything to train on.
        """
        played: list[Group] = []
        limit = self.config.max_off_policy_steps
        dropped = 0 if limit is None else self.queue.drop_older(step - 1 - limit)
        with self.monitor.phase("sample"):
            while self.queue.missing():
                groups = self._deal(self.queue.missing())
                await self._play_everywhere(groups, step, TRAIN)
                with self.monitor.phase("score"):
                    for group in groups:
                        await self._finish(group, step)
                played += groups
        branches = self.queue.take()
        return branches, self._metrics(played, branches, step) | {"off_policy/dropped": float(dropped)}

    async def evaluate(self, step: int) -> dict[str, float]:
        """What `measured` says of held-out tasks, one rollout each, as `eval/<env>/mean` and so on."""
        metrics = {}
        with self.monitor.phase("eval"):
            for stage in self.stages:
                groups = self.held_out(stage)
                await self._play_everywhere(groups, step, EVAL, rollouts=1)
                measured = await self.measured(stage, [episode for group in groups for episode in group.episodes])
                metrics |= {f"eval/{stage.name}/{name}": value for name, value in measured.items()}
        return metrics

    def held_out(self, stage: Stage) -> list[Group]:
        """The first eval_samples held-out tasks, yet to be played."""
        tasks = itertools.islice(stage.env.tasks("eval"), self.config.eval_samples)
        return [Group(i, stage, task) for i, task in enumerate(tasks)]

    async def play(
        self,
        groups: list[Group],
        step: int,
        stream: int,
        rollouts: int | None = None,
        at_once: int | None = None,
        seen: Callable[[Group, int, Episode], None] | None = None,
    ) -> None:
        """Play each group `rollouts` times (default: its source's group size), on this rank and all at once; `at_once` bounds how many
        episodes live at a time. seen(group, rollout, episode) is called as each one ends."""
        free = asyncio.Semaphore(at_once) if at_once else contextlib.nullcontext()

        async def play(group: Group, rollout: int) -> Episode:
            async with free:
                episode = await self._play(group, rollout, step, stream)
            if seen is not None:
                seen(group, rollout, episode)
            return episode

        async def play_group(group: Group) -> None:
            size = rollouts or group.stage.group_size
            group.episodes = await asyncio.gather(*[play(group, rollout) for rollout in range(size)])

        with Watchdog(self.config.rollout_timeout, self._clocks):
            await asyncio.gather(*[play_group(group) for group in groups])

    async def play_share(self, share: tuple[list[tuple[int, str, Task]], tuple]) -> list[list[Episode]]:
        """Play what the lead has dealt to this rank: (index, stage, task) of each group, and how. Gives their episodes."""
        dealt, how = share
        stages = {stage.name: stage for stage in self.stages}
        groups = [Group(index, stages[name], task) for index, name, task in dealt]
        await self.play(groups, *how)
        return [group.episodes for group in groups]

    async def _play_everywhere(self, groups: list[Group], step: int, stream: int, rollouts: int | None = None) -> None:
        """Play groups on all ranks that sample. They stay whole, and each goes to the rank that has least to do, as far as one can
        know: by how many tokens an episode of its source took so far."""
        shares: list[list[Group]] = [[] for _ in self.ranks.rollout]
        load = [0.0] * len(shares)
        for group in groups:
            rank = load.index(min(load))
            shares[rank].append(group)
            load[rank] += (rollouts or group.stage.group_size) * group.stage.mean_tokens
        dealt = [[(group.index, group.stage.name, group.task) for group in share] for share in shares]
        works = [(share, (step, stream, rollouts)) for share in dealt]
        for share, played in zip(shares, await self.ranks.play(works, self.play_share), strict=True):
            for group, episodes in zip(share, played, strict=True):
                group.episodes = episodes
                group.stage.episodes += len(episodes)
                group.stage.tokens += sum(trace.num_sampled for episode in episodes for trace in episode.traces)

    async def measured(self, stage: Stage, episodes: list[Episode], own: bool = True) -> dict[str, float]:
        """Mean reward ("mean") and means of the environment's metrics, and with `own` what the environment evaluates itself.
        Errored rollouts are left out and counted."""
        values = {name: float(np.mean(column)) for name, column in _columns(stage.env, episodes).items()}
        values |= await stage.env.evaluate(self._logprob) if own else {}
        return values | {"errored": float(sum(episode.failure is not None for episode in episodes))}

    async def _logprob(self, messages: list[Message], text: str) -> float:
        """Log-probability that the policy answers a conversation by exactly this text: bare, or as the format writes an answer
        (Qwen3's begins with an empty thinking block)."""
        reply = {"role": "assistant", "content": text}
        prompt_ids = self.renderer.render_ids(messages, add_generation_prompt=True)
        bare = self.renderer.writer()
        bare.write(-1, "assistant", Body(text))
        ended = [*bare.finish().token_ids, self.renderer.token_id(self.renderer.reply_end(reply))]
        ways = dict.fromkeys(map(tuple, (ended, self.renderer.render_reply(messages, reply))))
        scores = await asyncio.gather(
            *[self.engine.score([*prompt_ids, *way], self.config.temperature) for way in ways]
        )
        return float(np.logaddexp.reduce([score[len(prompt_ids) :].sum(dtype=np.float64) for score in scores]))

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know beside the queue (JSON types)."""
        return {
            "dealt": self.dealt,
            "fruitless": dict(self._fruitless),
            "empty_rounds": self._empty_rounds,
            "stages": {
                stage.name: {
                    "dealt": stage.dealt,
                    "curriculum": stage.curriculum.state_dict(),
                    "algorithm": stage.algorithm.state_dict(),
                }
                for stage in self.stages
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; an algorithm of another kind begins afresh. Raises ValueError where it is that of
        other sources."""
        names = [stage.name for stage in self.stages]
        if names != list(state["stages"]):
            raise ValueError(f"its sources are {', '.join(state['stages'])}, this run's are {', '.join(names)}")
        self.dealt, self._empty_rounds = state["dealt"], state["empty_rounds"]
        self._fruitless = Counter(state["fruitless"])
        for stage in self.stages:
            own = state["stages"][stage.name]
            stage.dealt = own["dealt"]
            stage.curriculum.load_state_dict(own["curriculum"])
            if own["algorithm"].keys() == stage.algorithm.state_dict().keys():
                stage.algorithm.load_state_dict(own["algorithm"])

    def _deal(self, traces: int) -> list[Group]:
        """Groups that will give at least so many traces, each from the source that is furthest behind its share."""
        groups = []
        while traces > 0:
            stage = min(self.stages, key=lambda stage: stage.dealt / stage.ratio)
            groups.append(Group(self.dealt, stage, stage.curriculum.sample()))
            stage.dealt += 1
            self.dealt += 1
            traces -= stage.group_size * len(trained_agents(stage.env))
        return groups

    async def _play(self, group: Group, rollout: int, step: int, stream: int) -> Episode:
        """Play one episode and score it. Whatever goes wrong in it ends this episode alone."""
        stage, key = group.stage, (self.config.seed, stream, step, group.index, rollout)
        trained = trained_agents(stage.env)
        traces = [Trace(agent, trainable=agent in trained) for agent in stage.env.agents]
        episode = Episode(".".join(map(str, key)), stage.name, group.task, traces)
        clock = Clock(self.config.rollout_timeout)
        self._clocks.add(clock)
        with self.engine.playing(episode.id):
            try:
                agents = [
                    self._agent(stage, trace, (*key, number), stream, clock) for number, trace in enumerate(traces)
                ]
                async with clock:
                    try:
                        await stage.env.play(group.task, *agents)
                    except Cut as cut:
                        episode.stop_reason = str(cut)
                        for trace in traces:
                            trace.reward = 0.0 if trace.reward is None else trace.reward
                for trace in traces:
                    _plain_numbers(trace)
                    last = trace.last_turn if trace.trainable else None
                    if last is not None and last.finish_reason == "length" and episode.stop_reason == "done":
                        full = last.completion_len < self.config.max_new_tokens
                        episode.stop_reason = "context" if full else "max_new_tokens"
                if stream == TRAIN:
                    await stage.algorithm.finalize_episode(episode)
            except (KeyboardInterrupt, GeneratorExit):  # from outside
                raise
            except BaseException as error:
                # An exit too, a panic of a library in Rust, or something of its own that it cancelled.
                if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():
                    raise
                episode.error = f"{type(error).__name__}: {error}"
                episode.stop_reason = "timeout" if clock.over else "error"
                self.monitor.warn(
                    f"{stage.name}: an episode failed\n{traceback.format_exc()}",
                    once=f"{stage.name} {type(error).__name__} {error}",
                )
            finally:
                self._clocks.discard(clock)
        return episode

    def _agent(self, stage: Stage, trace: Trace, key: tuple[int, ...], stream: int, clock: Clock) -> Agent:
        """Who speaks in an episode: a function, a served model, or the policy."""
        player = stage.env.player(trace.agent)
        if callable(player):
            return ScriptedAgent(trace, player, random.Random(seed_of(key)), self.engine.outside)
        served = self.connect(player) if player is not None else stage.algorithm.sampler if stream == TRAIN else None
        heads = self.sampling.top_logprobs if stream == TRAIN and trace.trainable else 0

        async def sample(
            prompt_ids: list[int], turn: int, messages: list[Message], tools: list[dict] | None
        ) -> Completion:
            if self.config.max_turns is not None and turn >= self.config.max_turns:
                raise Cut("max_turns")
            if turn and len(prompt_ids) >= (served or self.engine).max_context:
                raise Cut("context")
            sampling = replace(self.sampling, key=(*key, turn), top_logprobs=heads)
            with clock.stopped():
                if served is None:
                    return await self.engine.complete(prompt_ids, sampling, messages, tools)
                with self.engine.outside():
                    completion = await served.complete(prompt_ids, sampling, messages, tools)
                    return replace(completion, version=-1)

        return Agent(trace, self.renderer, sample, self.engine.outside)

    async def _finish(self, group: Group, step: int) -> None:
        """Score a complete group, let sampler and gates see it, and queue what can be trained on."""
        stage, episodes = group.stage, group.episodes
        for episode in episodes:
            reason = episode.failure
            if reason is not None:
                self._last_error = f"{stage.name}: {reason}"
                self.monitor.warn(f"{stage.name}: a rollout is left out: {reason}", once=f"{stage.name} {reason}")
        await stage.algorithm.finalize_group(episodes)
        group.admitted = stage.curriculum.observe(episodes)
        usable = trainable_traces(episodes)
        group.survivors = self.queue.add(usable) if group.admitted else 0
        self.monitor.rollouts([row_of(step, group, episode, trace) for episode in episodes for trace in episode.traces])
        self._count_fruitless(
            group.survivors,
            {
                "errored": sum(episode.failure is not None for episode in episodes),
                "with nothing sampled that may be trained": sum(
                    episode.failure is None and not trainable_traces([episode]) for episode in episodes
                ),
                "without a signal (all advantages 0)": len(usable) if group.admitted else 0,
                "rejected by a gate": 0 if group.admitted else len(usable),
            },
        )

    def _count_fruitless(self, survivors: int, reasons: dict[str, int]) -> None:
        """Warn after each round of batch_size rollouts without a survivor, and stop after too many of them in a row."""
        if survivors:
            self._fruitless.clear()
            self._empty_rounds = 0
            return
        self._fruitless.update(reasons)
        if self._fruitless.total() < self.config.batch_size:
            return
        self._empty_rounds += 1
        why = ", ".join(f"{count} {reason}" for reason, count in self._fruitless.items() if count)
        last = f"; last error: {self._last_error}" if self._fruitless["errored"] else ""
        self._fruitless.clear()
        text = f"nothing to train on in {self.config.batch_size} rollouts: {why}{last}"
        self.monitor.warn(
            f"{text} (empty round {self._empty_rounds} of at most {self.config.max_empty_steps} in a row)"
        )
        if self._empty_rounds >= self.config.max_empty_steps:
            raise RunStopped(
                f"{self._empty_rounds} empty rounds in a row (--max-empty-steps {self.config.max_empty_steps}). The last: {text}"
            )

    def _metrics(self, played: list[Group], branches: list[Branch], step: int) -> dict[str, float]:
        episodes = [episode for group in played for episode in group.episodes]
        columns: dict[str, list[float]] = defaultdict(list)
        for stage in self.stages:
            own = _columns(
                stage.env, [episode for group in played if group.stage is stage for episode in group.episodes]
            )
            columns["reward/mean"] += own.get("mean", [])
            rewards = {"mean", *stage.env.agents}
            for name, values in own.items():
                columns[f"{'reward' if name in rewards else 'env'}/{stage.name}/{name}"] = values
        ages = [step - 1 - branch.version for branch in branches if branch.version >= 0]
        if ages:
            columns["off_policy/mean"] = ages
        metrics = {name: float(np.mean(values)) for name, values in columns.items() if values}
        for stage in self.stages:
            metrics |= {f"curriculum/{stage.name}/{name}": value for name, value in stage.curriculum.metrics().items()}
        usable = trainable_traces(episodes)
        admitted = [group for group in played if group.admitted]
        return metrics | {
            "off_policy/max": float(max(ages, default=0)),
            "rollouts/finished": float(len(episodes)),
            "rollouts/errored": float(sum(episode.failure is not None for episode in episodes)),
            "rollouts/truncated": float(sum(trace.truncated for trace in usable)),
            **{f"rollouts/stop_{reason}": float(sum(e.stop_reason == reason for e in episodes)) for reason in STOPS},
            "rollouts/no_signal": float(
                sum(len(trainable_traces(group.episodes)) - group.survivors for group in admitted)
            ),
            "rollouts/rejected": float(
                sum(len(trainable_traces(group.episodes)) for group in played if not group.admitted)
            ),
            "rollouts/waiting": float(len(self.queue.waiting)),
            "perf/sampled_tokens": float(sum(trace.num_sampled for episode in episodes for trace in episode.traces)),
        }


def _plain_numbers(trace: Trace) -> None:
    """Turn reward and metrics into floats (numpy scalars, bools). Raises TypeError or ValueError that names the culprit."""
    try:
        trace.reward = None if trace.reward is None else float(trace.reward)
    except (TypeError, ValueError) as error:
        raise type(error)(f"reward of {trace.agent} is {trace.reward!r}: {error}") from error
    for name, value in trace.metrics.items():
        try:
            trace.metrics[name] = float(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"metric {name} of {trace.agent} is {value!r}: {error}") from error


def _columns(env: Env, episodes: list[Episode]) -> dict[str, list[float]]:
    """Rewards ("mean", and of each agent by its name where there are several) and the environment's own metrics. An agent that is
    not trained counts under its own name alone."""
    columns: dict[str, list[float]] = defaultdict(list)
    several = len(set(env.agents)) > 1
    for trace in trainable_traces(episodes):
        columns["mean"].append(trace.reward)
        for name, value in trace.metrics.items():
            columns[name].append(value)
    for episode in episodes:
        for trace in episode.traces:
            if several and episode.failure is None and trace.reward is not None:
                columns[trace.agent].append(trace.reward)
    return columns


def row_of(step: int, group: Group, episode: Episode, trace: Trace) -> dict[str, Any]:
    """One line of rollouts.jsonl."""
    advantages = [
        branch.advantages[branch.sampled] for branch in trace.training_branches() if branch.advantages is not None
    ]
    return {
        "step": step,
        "group": group.index,
        "episode": episode.id,
        "env": episode.env,
        "task": group.task.key,
        "agent": trace.agent,
        "reward": trace.reward,
        "advantage": float(np.concatenate(advantages).mean()) if advantages else None,
        "error": episode.error or trace.error,
        "stop_reason": episode.stop_reason,
        "metrics": trace.metrics,
        "messages": trace.messages,
        **({"calls": trace.calls, "edges": [edge._asdict() for edge in trace.edges]} if trace.calls else {}),
        "branches": [
            {
                "tokens": len(branch),
                "sampled": int(branch.sampled.sum()),
                "turns": [turn._asdict() for turn in branch.turns],
            }
            for branch in trace.branches
        ],
    }
