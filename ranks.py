"""Who does what in a run of several processes, and what they say to each other.

    python train.py --ranks 4                                     # one process for each device, started here
    torchrun --nproc-per-node 4 train.py                          # the same by hand
    torchrun --nproc-per-node 4 train.py --rollout-ranks 0        # rank 0 samples while the other three train

Every rank runs train.py from top to bottom. Without --rollout-ranks each one both samples and trains. With it those ranks
sample the next batch while the others train on this one, and the weights travel in between.

The lead, the first rank that samples, decides: it deals tasks, scores groups, admits, packs, and says when to evaluate, save
and stop. The others play what they are dealt and train on what they get, so that all take part in the same collectives in the
same order, whatever happens to one of them. What ends the lead's round early ends everybody's (`together`).

Control and rollouts go over a group of gloo on the CPU, which notices at once when a process is gone; the sharded model has a
group of its own, and the weights another.
"""

import asyncio
import atexit
import contextlib
import os
import pickle
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from config import fail
from limits import RunStopped, Stop

FOREVER = timedelta(days=30)  # a rank may wait for as long as others sample
BUCKET_BYTES = 64 * 2**20
TORCHRUN = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip


class RankLost(RuntimeError):
    """Another rank is gone."""


class Ranks:
    """This process among the others. `Ranks()` is a world of one, where nothing is sent.

    rank, world, nodes: as torchrun counts them. rollout, train: the ranks that sample, and those that train.
    """

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        nodes: int = 1,
        rollout: tuple[int, ...] = (0,),
        train: tuple[int, ...] = (0,),
    ) -> None:
        self.rank, self.world, self.nodes, self.rollout, self.train = rank, world, nodes, rollout, train
        self.lead = rollout[0]
        self.leads, self.samples, self.trains = rank == self.lead, rank in rollout, rank in train
        self.apart = rollout != train
        self.interruptible: Callable[[], AbstractContextManager] = contextlib.nullcontext  # around an own play
        self._owed: set[int] = set()  # ranks that play for the lead
        self._everyone: Any = None
        self._weights: Any = None
        self._store: Any = None

    @property
    def followers(self) -> list[int]:
        """The ranks that sample, without the lead."""
        return [rank for rank in self.rollout if rank != self.lead]

    def send(self, to: int, value: Any) -> None:
        """Give another rank a value that it is about to `receive`. Raises RankLost where it is gone, and TypeError for a value that
        can not travel."""
        try:
            data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        except Exception as error:
            what = "what a Task holds, and what a play leaves in its traces, goes from rank to rank"
            raise TypeError(
                f"--ranks {self.world}: {what}: plain data, or classes of a module (a config file is none): {error}"
            ) from error
        with _lost(to):
            self._everyone.send([torch.tensor([len(data)])], to, 0).wait()
            self._everyone.send([data], to, 0).wait()

    def receive(self, source: int) -> Any:
        """The next value that another rank sends here. Raises RankLost where it is gone."""
        with _lost(source):
            size = torch.zeros(1, dtype=torch.int64)
            self._everyone.recv([size], source, 0).wait()
            data = torch.empty(int(size), dtype=torch.uint8)
            self._everyone.recv([data], source, 0).wait()
        return pickle.loads(data.numpy().tobytes())

    def share(self, value: Any = None) -> Any:
        """The lead's value, on every rank."""
        return self.scatter([value] * self.world)

    def scatter(self, values: list[Any] | None) -> Any:
        """Of the lead's values the one that is this rank's."""
        if not self.leads:
            return self.receive(self.lead)
        for rank in range(self.world):
            if rank != self.rank:
                self.send(rank, values[rank])
        return values[self.rank]

    def gather(self, value: Any) -> list[Any]:
        """Everybody's values by rank at the lead, nothing elsewhere."""
        if not self.leads:
            self.send(self.lead, value)
            return []
        return [value if rank == self.rank else self.receive(rank) for rank in range(self.world)]

    def say_why(self, kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        """What is said of an error that ends this rank: where another one is gone, one line at the lead."""
        broken = kind is RuntimeError and "Connection" in str(error)  # in a collective of the sharded model
        if not issubclass(kind, RankLost) and not broken:
            sys.__excepthook__(kind, error, traceback)
        elif self.leads:
            who = "another rank is gone" if broken else error
            print(f"{who}; what it said last tells why. --resume goes on from the newest checkpoint", file=sys.stderr)

    def fail(self, message: str) -> NoReturn:
        """`config.fail`, at the lead, and elsewhere if the lead has nothing to say: it mostly finds the same mistake, and its end is
        everybody's."""
        if not self.leads:
            time.sleep(3)
        fail(message if self.leads else f"rank {self.rank}: {message}")

    def any(self, condition: bool) -> bool:
        """Whether it holds on some rank, on every rank."""
        return self.share(any(self.gather(condition)))

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.any(False)

    def deal(self, micro_batches: list[Any], counts: Any) -> tuple[list[Any], Any]:
        """Of the lead's micro batches those that this rank trains on, and the counts of all of them."""
        n = len(self.train)
        own = {rank: micro_batches[i::n] for i, rank in enumerate(self.train)}
        return self.scatter([(own.get(rank, []), counts) for rank in range(self.world)])

    async def play(self, works: list[Any], own: Callable[[Any], Coroutine]) -> list[Any]:
        """At the lead: have works[i] played by the i-th rank that samples, the first by `own`, and return what each gives.

        Raises KeyboardInterrupt where one of them was interrupted.
        """
        for rank, work in zip(self.followers, works[1:], strict=True):
            self.send(rank, work)
            self._owed.add(rank)
        with self.interruptible():
            played = [await own(works[0])]
        for rank in self.followers:
            played.append(await asyncio.to_thread(self._collect, rank))
        if any(result is None for result in played):
            raise KeyboardInterrupt
        return played

    async def follow(self, own: Callable[[Any], Coroutine]) -> "Ended":
        """At the other ranks: play what the lead sends until it says how the round ended."""
        while not isinstance(work := await asyncio.to_thread(self.receive, self.lead), Ended):
            with self.interruptible():
                played = await own(work)
            await asyncio.to_thread(self.send, self.lead, played)
        return work

    def together(self, runner: asyncio.Runner, lead: Callable[[], Coroutine], own: Callable[[Any], Coroutine]) -> Any:
        """Run a round: the lead's coroutine at the lead (its value is returned there, None elsewhere), and beside it what it has
        the other ranks play. What ends it at the lead, an interruption or RunStopped, is raised on every rank."""
        if not self.leads:
            ended = self._follow(runner, own)
            if ended.how is not None:
                raise ended.how
            return None
        how: BaseException | None = SystemExit(1)
        try:
            value = runner.run(lead())
            how = None
            return value
        except (KeyboardInterrupt, RunStopped) as error:
            how = type(error)(*error.args)
            if self.apart:
                _end_all(runner)
            raise
        finally:
            for rank in list(self._owed):
                self._collect(rank)
            for rank in range(self.world):
                if rank != self.rank:
                    self.send(rank, Ended(how))

    def listen(self, stop: Stop) -> None:
        """Make a stop that any rank is asked for everybody's."""
        if self.world == 1:
            return
        self.interruptible, said, store = stop.released, set(), self._store

        def tell(word: str) -> None:
            said.add(word)
            threading.Thread(target=store.set, args=(word, ""), daemon=True).start()

        def poll() -> None:
            while not over.wait(0.2):
                for word in ("asked", "now"):
                    with contextlib.suppress(RuntimeError):  # the store ends with the first process that does
                        if word not in said and store.check([word]):
                            said.add(word)
                            heard.append(word)
                            os.kill(os.getpid(), signal.SIGUSR1)

        def leave() -> None:
            over.set()
            poller.join(5)

        heard: list[str] = []
        stop.tell = tell
        signal.signal(signal.SIGUSR1, lambda *_: [stop.hear(heard.pop(0)) for _ in range(len(heard))])
        over, poller = threading.Event(), threading.Thread(target=poll, daemon=True)
        poller.start()
        atexit.register(leave)  # Python would end it inside of the store, which aborts a process that has done its work

    def weights(self, policy: Any) -> Iterator[tuple[str, Tensor]]:
        """The model's whole tensors by name: of this rank's policy, or where it has none, as they come from the first rank that
        trains. All ranks take part, and iterate to the end."""
        if not self.apart:
            yield from policy.weights()
        elif self.trains:
            for bucket in buckets(policy.weights(), policy.dtype):
                if self.rank == self.train[0]:
                    self._send_bucket(bucket)
            if self.rank == self.train[0]:
                for rank in self.rollout:
                    self.send(rank, None)
        else:
            while (header := self.receive(self.train[0])) is not None:
                yield from self._receive_bucket(*header)

    def _follow(self, runner: asyncio.Runner, own: Callable[[Any], Coroutine]) -> "Ended":
        if not self.samples:
            return self.receive(self.lead)
        try:
            return runner.run(self.follow(own))
        except KeyboardInterrupt:
            # In the middle of what it was to play: it owes an answer, and the lead will end the round.
            _end_all(runner)
            self.send(self.lead, None)
            return self.receive(self.lead)

    def _collect(self, rank: int) -> Any:
        self._owed.discard(rank)
        return self.receive(rank)

    def _send_bucket(self, bucket: list[tuple[str, Tensor]]) -> None:
        header = [(name, tensor.shape) for name, tensor in bucket], bucket[0][1].dtype, bucket[0][1].device.type
        for rank in self.rollout:
            self.send(rank, header)
        self._broadcast(torch.cat([tensor.flatten() for _, tensor in bucket]))

    def _receive_bucket(self, shapes: list, dtype: torch.dtype, device: str) -> Iterator[tuple[str, Tensor]]:
        flat = torch.empty(sum(shape.numel() for _, shape in shapes), dtype=dtype, device=device)
        self._broadcast(flat)
        start = 0
        for name, shape in shapes:
            yield name, flat[start : start + shape.numel()].view(shape)
            start += shape.numel()

    def _broadcast(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with _lost(self.train[0]):
            self._weights.broadcast([tensor], options).wait()


ALONE = Ranks()


@dataclass
class Ended:
    """The lead's round is over; how: what is to be raised everywhere."""

    how: BaseException | None


def join(number: int | None, rollout_ranks: str | None, device: str) -> Ranks:
    """This process among those that torchrun started, with the groups that they need; a world of one without torchrun.

    number: of ranks that were asked for. To be called before anything looks at a GPU. Raises ValueError for roles that can not be.
    """
    world = int(os.environ.get("WORLD_SIZE", 1))
    if number not in (None, world):
        raise ValueError(f"--ranks {number}: torchrun has started {world} processes")
    if world == 1:
        if rollout_ranks is not None:
            raise ValueError(f"--rollout-ranks {rollout_ranks}: needs --ranks (or torchrun) with at least 2 processes")
        return Ranks()
    rank, local, nodes = (int(os.environ.get(key, 1)) for key in ("RANK", "LOCAL_RANK", "GROUP_WORLD_SIZE"))
    everybody = tuple(range(world))
    rollout = everybody if rollout_ranks is None else tuple(sorted({int(r) for r in rollout_ranks.split(",")}))
    train = everybody if rollout_ranks is None else tuple(r for r in everybody if r not in rollout)
    if rollout[-1] >= world:
        raise ValueError(f"--rollout-ranks {rollout_ranks}: there are ranks 0 to {world - 1}")
    if not train:
        raise ValueError(f"--rollout-ranks {rollout_ranks}: of {world} ranks none is left to train")
    ranks = Ranks(rank, world, nodes, rollout, train)
    sys.excepthook = ranks.say_why
    store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=timedelta(minutes=10)))
    ranks._store = dist.PrefixStore("stop", store.clone())
    ranks._everyone = dist.ProcessGroupGloo(dist.PrefixStore("everyone", store), rank, world, FOREVER)
    on_gpu = device != "cpu"
    if ranks.apart and rank in rollout:
        for name in TORCHRUN:  # vLLM makes a world of its own
            os.environ.pop(name, None)
        os.environ["CUDA_VISIBLE_DEVICES"] = _visible(local)
    elif on_gpu and torch.cuda.is_available():
        torch.cuda.set_device(local)
    on_gpu = on_gpu and torch.cuda.is_available()
    if ranks.trains:
        # Before vLLM, which joins a world that it finds.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=dist.PrefixStore("train", store),
            rank=train.index(rank),
            world_size=len(train),
            timeout=timedelta(hours=1),
        )
    if ranks.apart and rank in (*rollout, train[0]):
        members = (train[0], *rollout)
        kind = dist.ProcessGroupNCCL if on_gpu else dist.ProcessGroupGloo
        ranks._weights = kind(dist.PrefixStore("weights", store), members.index(rank), len(members), FOREVER)
    return ranks


def buckets(named_tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors in `dtype`, in lists of at most BUCKET_BYTES or of one tensor."""
    bucket, size = [], 0
    for name, tensor in named_tensors:
        tensor = tensor.to(dtype)
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def launch(ranks: int, grace: float) -> NoReturn:
    """Run this command line once for each of so many devices of this machine, and end as they end."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.2,
        shutdown_timeout=int(grace) + 60,  # to end a step, and to save
    )
    try:
        elastic_launch(config, sys.executable)("-u", *sys.argv)
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        raise SystemExit(next((code for code in codes if code > 0), 1)) from None
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None
    raise SystemExit(0)


def _end_all(runner: asyncio.Runner) -> None:
    """End the plays that an interruption has left where they were: among ranks that train beside, weights are about to change, and
    may not while a play waits for its engine."""

    async def end() -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=1)

    runner.run(end())


def _visible(local: int) -> str:
    """What CUDA_VISIBLE_DEVICES must be for this process to see one device alone."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return listed.split(",")[local] if listed else str(local)


@contextlib.contextmanager
def _lost(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"rank {rank} is gone ({str(error).partition('. ')[0][-200:]})") from error
