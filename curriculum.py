"""Which task is dealt next, and which groups may be trained on.

A source has one sampler, which chooses tasks, and any number of named gates. Both see every finished group, also a
rejected one; the group trains if every gate admits it. What they hold between steps is part of the checkpoint.

    --sampler standard                  tasks in their own order
    --sampler difficulty-pool           more often those whose last group was neither hopeless nor solved
    --gate.reject-min -0.05 --gate.reject-max 0.05      no group whose advantages all lie in that range
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from traces import Episode, Task, trainable_traces


class Sampler(Protocol):
    """Chooses the tasks of a source. A new one is a class here and a line in SAMPLERS."""

    def sample(self) -> Task: ...
    def observe(self, episodes: Sequence[Episode]) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def metrics(self) -> dict[str, float]: ...


class Gate(Protocol):
    """Admits or rejects finished groups. A new one is a class here and a line in GATES."""

    def admits(self, episodes: Sequence[Episode]) -> bool: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def metrics(self) -> dict[str, float]: ...


@dataclass
class StandardConfig:
    """Tasks in their own order."""

    def check(self) -> None:
        """Nothing can be wrong."""


class StandardSampler:
    """Tasks in their own order; a finite set starts again at its end.

    Raises ValueError where there is no task, or where two tasks of a finite set share a key.
    """

    Config: ClassVar = StandardConfig

    def __init__(self, tasks: Iterable[Task], config: StandardConfig | None = None, seed: int = 0) -> None:
        self.tasks = _distinct(tasks) if isinstance(tasks, Sequence) else None
        self._stream: Iterator[Task] | None = None if self.tasks is not None else iter(tasks)
        self.drawn = 0

    def sample(self) -> Task:
        """The next task."""
        if self.tasks is not None:
            task = self.tasks[self.drawn % len(self.tasks)]
        else:
            task = next(self._stream, None)
            if task is None:
                raise ValueError("the environment ran out of tasks: give a list to start again at its end")
        self.drawn += 1
        return task

    def observe(self, episodes: Sequence[Episode]) -> None:
        """See a finished group, also one that a gate rejected."""

    def state_dict(self) -> dict[str, Any]:
        """How many tasks were drawn."""
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        if self._stream is not None:
            for _ in range(state["drawn"] - self.drawn):
                next(self._stream, None)
        self.drawn = state["drawn"]

    def metrics(self) -> dict[str, float]:
        """How many tasks were drawn."""
        return {"drawn": float(self.drawn)}


class Pool(NamedTuple):
    """Tasks whose score is at most `threshold` (and above the next lower pool's); each is drawn with relative `weight`."""

    threshold: float
    weight: float


@dataclass
class DifficultyPoolConfig:
    """Tasks by how their last group went."""

    pools: dict[str, Pool] = field(
        default_factory=lambda: {"hard": Pool(0.25, 0.2), "normal": Pool(0.75, 1.0), "easy": Pool(1.0, 0.2)}
    )
    """name -> (inclusive threshold on the mean reward, weight of a task; 0: never again)"""

    def check(self) -> None:
        """Raise ValueError for pools that can not be told apart and for numbers that are none."""
        pools = {name: Pool(*pool) for name, pool in self.pools.items()}
        if not pools:
            raise ValueError("--sampler.pools: difficulty-pool needs at least one pool")
        for name, (threshold, weight) in pools.items():
            if not math.isfinite(threshold):
                raise ValueError(f"--sampler.pools {name}: threshold {threshold} must be a finite number")
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"--sampler.pools {name}: weight {weight} must be a finite number, at least 0")
        if len({pool.threshold for pool in pools.values()}) < len(pools):
            raise ValueError(f"--sampler.pools {', '.join(pools)}: two pools have the same threshold")


class DifficultyPoolSampler:
    """Draws from a finite set with replacement, each task with the weight of its pool.

    A task's score is the mean reward of its latest group with a usable trace, and its pool is the first by threshold that
    the score does not exceed (above the last one: the last). Tasks that were never seen weigh 1. Raises ValueError for
    tasks that are no finite set of distinct keys, and at a draw where every task weighs 0.
    """

    Config: ClassVar = DifficultyPoolConfig
    UNSEEN_WEIGHT: ClassVar[float] = 1.0

    def __init__(self, tasks: Iterable[Task], config: DifficultyPoolConfig | None = None, seed: int = 0) -> None:
        if not isinstance(tasks, Sequence):
            raise ValueError("--sampler difficulty-pool needs a finite set of tasks, and this environment streams them")
        config = config or DifficultyPoolConfig()
        config.check()
        self.tasks = _distinct(tasks)
        self.pools = dict(
            sorted(((name, Pool(*pool)) for name, pool in config.pools.items()), key=lambda item: item[1].threshold)
        )
        self.scores: dict[str, float] = {}
        self._index = {task.key: i for i, task in enumerate(self.tasks)}
        self._weights = np.full(len(self.tasks), self.UNSEEN_WEIGHT)
        self._rng = np.random.Generator(np.random.PCG64(seed))

    def sample(self) -> Task:
        """A task, drawn by weight."""
        ends = np.cumsum(self._weights)
        if ends[-1] <= 0:
            raise ValueError(
                f"--sampler.pools: all {len(self.tasks)} tasks lie in pools of weight 0, so none can be drawn"
            )
        # The first end beyond the drawn point; a task of weight 0 ends where it begins and is never that.
        point = min(self._rng.random() * ends[-1], np.nextafter(ends[-1], 0.0))
        return self.tasks[int(np.searchsorted(ends, point, side="right"))]

    def observe(self, episodes: Sequence[Episode]) -> None:
        """Score the task of a finished group, also of one that a gate rejected."""
        traces = trainable_traces(episodes)
        if traces and episodes[0].task.key in self._index:
            self._set(episodes[0].task.key, fmean(trace.reward for trace in traces))

    def pool(self, key: str) -> str | None:
        """The name of the pool that a task lies in, None where it was never seen."""
        if key not in self.scores:
            return None
        return next(
            (name for name, pool in self.pools.items() if self.scores[key] <= pool.threshold), [*self.pools][-1]
        )

    def weights(self) -> dict[str, float]:
        """The relative weight of every task, by key."""
        return dict(zip(self._index, self._weights.tolist(), strict=True))

    def probabilities(self) -> dict[str, float]:
        """The probability of every task at the next draw, by key."""
        return dict(zip(self._index, (self._weights / self._weights.sum()).tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """The scores, and the state of the random generator."""
        return {"scores": dict(self.scores), "rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. Scores of tasks that are no longer there are left out."""
        self.scores, self._weights[:] = {}, self.UNSEEN_WEIGHT
        for key, score in state["scores"].items():
            if key in self._index:
                self._set(key, score)
        self._rng.bit_generator.state = state["rng"]

    def metrics(self) -> dict[str, float]:
        """How many tasks were never seen, and how many lie in each pool."""
        counts = {name: 0.0 for name in self.pools}
        for key in self.scores:
            counts[self.pool(key)] += 1
        return {"unseen": float(len(self.tasks) - len(self.scores))} | {f"pool/{name}": n for name, n in counts.items()}

    def _set(self, key: str, score: float) -> None:
        self.scores[key] = score
        self._weights[self._index[key]] = self.pools[self.pool(key)].weight


@dataclass
class AdvRangeConfig:
    """Reject groups whose advantages are all alike in size."""

    reject_min: float = 0.0
    """lower end of the rejected range, itself in it"""
    reject_max: float = 0.0
    """upper end of the rejected range, itself in it"""

    def check(self) -> None:
        """Raise ValueError for a range that holds nothing."""
        if not self.reject_min <= self.reject_max:
            raise ValueError(
                f"--gate.reject-min {self.reject_min}: must be a number, at most --gate.reject-max {self.reject_max}"
            )


class AdvRangeGate:
    """Rejects a group if every advantage of its trainable tokens lies in [reject_min, reject_max], ends included.

    A group without any advantage (distillation) is admitted.
    """

    Config: ClassVar = AdvRangeConfig

    def __init__(self, config: AdvRangeConfig) -> None:
        config.check()
        self.config = config
        self.seen = self.rejected = 0

    def admits(self, episodes: Sequence[Episode]) -> bool:
        """Whether the group may be trained on."""
        branches = [branch for trace in trainable_traces(episodes) for branch in trace.training_branches()]
        advantages = [branch.advantages[branch.sampled] for branch in branches if branch.advantages is not None]
        inside = [((self.config.reject_min <= a) & (a <= self.config.reject_max)).all() for a in advantages]
        admitted = not (inside and all(inside))
        self.seen += 1
        self.rejected += not admitted
        return admitted

    def state_dict(self) -> dict[str, Any]:
        """The counts."""
        return {"seen": self.seen, "rejected": self.rejected}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting."""
        self.seen, self.rejected = state["seen"], state["rejected"]

    def metrics(self) -> dict[str, float]:
        """Groups that were seen and that were rejected since the run began."""
        return {"seen": float(self.seen), "rejected": float(self.rejected)}


SAMPLERS: dict[str, type] = {"standard": StandardSampler, "difficulty-pool": DifficultyPoolSampler}
GATES: dict[str, type] = {"adv-range": AdvRangeGate}


class Curriculum:
    """The sampler and the gates of a source. `metrics` are logged under curriculum/<env>/, a gate's under its name."""

    def __init__(self, sampler: Sampler, gates: Mapping[str, Gate] | None = None) -> None:
        self.sampler, self.gates = sampler, dict(gates or {})

    def sample(self) -> Task:
        """The next task."""
        return self.sampler.sample()

    def observe(self, episodes: Sequence[Episode]) -> bool:
        """Show a finished, scored group to the sampler and to every gate. Returns whether all gates admit it."""
        self.sampler.observe(episodes)
        return all([gate.admits(episodes) for gate in self.gates.values()])  # a list: every gate sees every group

    def state_dict(self) -> dict[str, Any]:
        """State of the sampler and of each gate (JSON types)."""
        return {
            "sampler": self.sampler.state_dict(),
            "gates": {name: gate.state_dict() for name, gate in self.gates.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. A gate that is new begins afresh, and so does a sampler of another kind."""
        if state["sampler"].keys() == self.sampler.state_dict().keys():
            self.sampler.load_state_dict(state["sampler"])
        for name, gate in self.gates.items():
            if name in state["gates"]:
                gate.load_state_dict(state["gates"][name])

    def metrics(self) -> dict[str, float]:
        """Metrics of the sampler, and of each gate as <name>/<metric>."""
        return self.sampler.metrics() | {
            f"{name}/{key}": value for name, gate in self.gates.items() for key, value in gate.metrics().items()
        }


def make_curriculum(tasks: Iterable[Task], sampler: Any, gates: Mapping[str, Any], seed: int = 0) -> Curriculum:
    """The curriculum that the configs of a sampler and of named gates describe."""

    def build(classes: dict[str, type], config: Any, *args: Any) -> Any:
        return next(cls for cls in classes.values() if cls.Config is type(config))(*args)

    return Curriculum(
        build(SAMPLERS, sampler, tasks, sampler, seed),
        {name: build(GATES, gate, gate) for name, gate in gates.items()},
    )


def _distinct(tasks: Sequence[Task]) -> list[Task]:
    """The tasks of a finite set. Raises ValueError where there is none, or where two share a key."""
    if not tasks:
        raise ValueError("the environment has no tasks to sample")
    if len({task.key for task in tasks}) < len(tasks):
        raise ValueError("two tasks of the environment have the same key")
    return list(tasks)
