"""Which task is dealt next, and which groups may be trained on."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from traces import Episode, Task


class StandardSampler:
    """Tasks in their own order; a finite set starts again at its end.

    Raises ValueError where there is no task, or where two tasks of a finite set share a key.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.tasks = list(tasks) if isinstance(tasks, Sequence) else None
        self._stream: Iterator[Task] | None = None if self.tasks is not None else iter(tasks)
        self.drawn = 0
        if self.tasks is not None:
            if not self.tasks:
                raise ValueError("the environment has no tasks to sample")
            if len({task.key for task in self.tasks}) < len(self.tasks):
                raise ValueError("two tasks of the environment have the same key")

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
