"""Several ranks: the same numbers as one, and no way to wait for each other for ever."""

import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from checkpoint import load
from limits import RunStopped, Stop
from packing import LINEAR_LENGTH, balance, fill_rows, pack
from ranks import ALONE, RankLost, Ranks, buckets, join
from tests.conftest import ROOT, run_train, save_model
from tests.many_ranks import LAYOUTS, ended, everything, mixed_batch, start, step_on_ranks, train_on_ranks
from tests.test_policy import make_policy


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one(model, tmp_path_factory):
    """What one rank makes of it."""
    out = tmp_path_factory.mktemp("one")
    everything(model, out, ALONE)
    return out


@pytest.fixture(scope="module")
def two(model, tmp_path_factory):
    """What two ranks make of it that both sample and train."""
    out = tmp_path_factory.mktemp("two")
    assert ended(start(2, step_on_ranks, model, out)) == [0, 0]
    return out


@pytest.fixture(scope="module")
def three(model, tmp_path_factory):
    """What a rank that samples and two that train make of it."""
    out = tmp_path_factory.mktemp("three")
    assert ended(start(3, step_on_ranks, model, out, "0")) == [0, 0, 0]
    return out


@pytest.fixture(scope="module")
def nodes(model, tmp_path_factory):
    """What four ranks make of it that stand for two nodes of two: each node has all parameters, and gradients meet."""
    out = tmp_path_factory.mktemp("nodes")
    assert ended(start(4, step_on_ranks, model, out, None, 2)) == [0, 0, 0, 0]
    return out


def distance(once, again):
    """Norm of the difference over the norm, over all tensors together."""
    assert once.keys() == again.keys()
    total = sum((once[name] - again[name]).double().pow(2).sum() for name in once)
    return (total / sum(once[name].double().pow(2).sum() for name in once)).sqrt().item()


@pytest.mark.parametrize("several", ["two", "three", "nodes"])
def test_gradient_loss_and_metrics_do_not_depend_on_ranks_and_layout(several, one, request):
    there = request.getfixturevalue(several)
    numbers = []
    expected = json.loads((one / "report_0.json").read_text())
    found = json.loads((there / "report_0.json").read_text())
    for layout in LAYOUTS:
        reference = load_file(one / "whole.safetensors")
        assert distance(reference, load_file(there / f"{layout}.safetensors")) < 1e-5
        assert distance(reference, load_file(one / f"{layout}.safetensors")) < 1e-5
        for name, value in expected["whole"][0].items():
            assert found[layout][0][name] == pytest.approx(value, rel=1e-5, abs=1e-7), (layout, name)
        numbers.append(expected[layout][1])
    assert numbers == [1, 2, 2] and {"loss/rl", "loss/ce", "loss/ref_kl"} <= expected["whole"][0].keys()
    assert all(expected["whole"][0][f"loss/{name}"] != 0 for name in ("rl", "ce", "ref_kl"))
    trained = json.loads((there / ("report_2.json" if several == "three" else "report_0.json")).read_text())
    assert [trained[layout][1] for layout in LAYOUTS] == [1, 1, 2]
    assert trained["update"] == pytest.approx(expected["update"], rel=1e-5)


@pytest.mark.parametrize("several", ["two", "three", "nodes"])
def test_engines_get_the_trained_weights(several, one, request):
    there = request.getfixturevalue(several)
    expected = load_file(one / "weights_0.safetensors")
    for path in sorted(there.glob("weights_*.safetensors")):
        weights = load_file(path)
        assert distance(expected, weights) < 1e-5
    assert len(list(there.glob("weights_*"))) == {"two": 2, "three": 1, "nodes": 4}[several]


def test_a_checkpoint_is_read_by_any_number_of_ranks(one, two, three, nodes, model, tmp_path):
    """Saved on two and read on one, and the reverse: the next gradient, weights and moments are the same."""
    straight = make_policy(model)
    load(one / "checkpoints" / "step_1", straight)
    for saved in (two, three, nodes):
        policy = make_policy(model)
        assert load(saved / "checkpoints" / "step_1", policy).step == 1 and policy.updates == 1
        whole = [{name: t.full_tensor() for name, t in p.tensors().items()} for p in (straight, policy)]
        assert any("exp_avg_sq" in name for name in whole[0])
        assert distance(*whole) < 1e-5
    begin, again = one / "checkpoints" / "step_1", [tmp_path / "one", tmp_path / "two"]
    everything(model, again[0], ALONE, start=begin)
    assert ended(start(2, step_on_ranks, model, again[1], None, 1, begin)) == [0, 0]
    assert distance(*[load_file(out / "whole.safetensors") for out in again]) < 1e-5
    assert distance(*[load_file(out / "weights_0.safetensors") for out in again]) < 1e-5


class Wired(Ranks):
    """Ranks that are threads."""

    def __init__(self, rank, world, wires, **roles):
        super().__init__(rank, world, **roles)
        self.wires = wires

    def send(self, to, value):
        self.wires[self.rank, to].put(value)

    def receive(self, source):
        try:
            return self.wires[source, self.rank].get(timeout=5)
        except queue.Empty:
            raise RankLost(f"rank {source} says nothing") from None


def rounds(lead, own, world=3, rollout=(0, 1, 2), train=(0, 1, 2)):
    """What a round of `together` gives or raises on each rank, and then, on each, what the lead shares."""
    wires = {(a, b): queue.Queue() for a in range(world) for b in range(world)}
    found = [None] * world

    def run(rank):
        ranks = Wired(rank, world, wires, rollout=rollout, train=train)
        with asyncio.Runner() as runner:
            try:
                value = ranks.together(runner, lambda: lead(ranks), lambda work: own(rank, work))
            except BaseException as error:
                value = error
            if not isinstance(value, ValueError | SystemExit):
                found[rank] = value, ranks.share("and then" if rank == ranks.lead else None), ranks.any(rank == 2)
            else:
                found[rank] = (value,)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    [thread.start() for thread in threads]
    [thread.join(20) for thread in threads]
    assert not any(thread.is_alive() for thread in threads)
    return found


async def echo(rank, work):
    return rank, work


async def plays(ranks):
    return await ranks.play(["a", "b", "c"], lambda work: echo(0, work)) + await ranks.play(
        ["d", "e", "f"], lambda w: echo(0, w)
    )


def test_a_round_is_played_by_all_and_known_to_the_lead():
    lead, *others = rounds(plays, echo)
    assert lead == ([(0, "a"), (1, "b"), (2, "c"), (0, "d"), (1, "e"), (2, "f")], "and then", True)
    assert others == [(None, "and then", True)] * 2


def test_ranks_that_only_train_wait_for_the_end_of_a_round():
    async def one(ranks):
        return await ranks.play(["a", "b"], lambda work: echo(1, work))

    train, lead, other = rounds(one, echo, rollout=(1, 2), train=(0,))
    assert lead[0] == [(1, "a"), (2, "b")] and train == other == (None, "and then", True)


def test_what_stops_the_lead_stops_all():
    async def stops(ranks):
        await plays(ranks)
        raise RunStopped("nothing left")

    for value, *then in rounds(stops, echo):
        assert isinstance(value, RunStopped) and "nothing left" in str(value) and then == ["and then", True]


def test_a_lead_that_fails_takes_all_along():
    async def fails(ranks):
        await plays(ranks)
        raise ValueError("a bug")

    lead, *others = rounds(fails, echo)
    assert isinstance(lead[0], ValueError) and all(isinstance(value, SystemExit) for (value,) in others)


@pytest.mark.parametrize("interrupted", [{1}, {0}, {0, 1, 2}, {2}])
def test_an_interruption_of_one_rank_ends_the_round_of_all(interrupted):
    async def own(rank, work):
        if rank in interrupted and work in "def":
            raise KeyboardInterrupt
        return rank, work

    async def lead(ranks):
        await ranks.play(["a", "b", "c"], lambda work: own(0, work))
        return await ranks.play(["d", "e", "f"], lambda work: own(0, work))

    for value, *then in rounds(lead, own):
        assert isinstance(value, KeyboardInterrupt) and then == ["and then", True]


def test_an_interrupted_play_does_not_go_on_beside_what_comes_after_it():
    """Where others train meanwhile the run goes on to save that step: a play that still waited for the engine kept it from taking
    the weights."""
    ended = []

    def interrupt():
        raise KeyboardInterrupt

    async def play():
        asyncio.get_running_loop().call_later(0.01, interrupt)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    with asyncio.Runner() as runner:
        with pytest.raises(KeyboardInterrupt):
            Ranks(train=(1,)).together(runner, play, None)
        assert ended


def test_a_stop_among_ranks_interrupts_where_it_may_and_once(monkeypatch):
    """Elsewhere others wait for this rank. A second signal within two seconds is the first one, which the launcher passes on."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    told = []
    stop = Stop(60, lambda text: None, alone=False)
    stop.tell = told.append
    stop._ask(signal.SIGINT, None)
    stop._ask(signal.SIGTERM, None)
    assert stop.asked == signal.SIGINT and told == ["asked"]
    stop._since -= 3
    stop._ask(signal.SIGINT, None)  # it is held: nothing is raised
    assert told == ["asked", "now"]
    with pytest.raises(KeyboardInterrupt), stop.released():
        raise AssertionError("not reached")
    with stop.released():
        pass
    stop.in_time()

    other = Stop(60, lambda text: None, alone=False)
    other.hear("asked")
    assert other.asked == signal.SIGTERM
    with pytest.raises(KeyboardInterrupt), other.released():
        other.hear("now")
    with other.held():
        other.hear("now")
    other.in_time()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=0, max_size=40), st.integers(1, 5), st.sampled_from([None, 40, 90]))
def test_ranks_get_equally_many_micro_batches_and_every_sequence_once(lengths, ranks, tokens):
    rows = fill_rows(lengths, 40)
    shares = balance(rows, lengths, ranks)
    assert len(shares) == ranks and sorted(i for share in shares for row in share for i in row) == list(
        range(len(lengths))
    )
    assert max(map(len, shares)) <= -(-len(rows) // ranks)


def test_rows_are_dealt_by_tokens_and_attention():
    """One long sequence costs more than as many tokens in short ones."""
    long = LINEAR_LENGTH
    rows, lengths = [[0], [1], [2, 3], [4, 5]], [long, long, long // 2, long // 2, long // 2, long // 2]
    assert balance(rows, lengths, 2) == [[[0], [2, 3]], [[1], [4, 5]]]


def test_fillers_make_the_numbers_equal_and_hold_no_member():
    batches, counts = pack(mixed_batch(), 30, 30, ranks=4)
    assert len(batches) == 4 and counts.tokens == 42
    fillers = [batch for batch in batches if (batch.sequence_ids < 0).all()]
    assert len(fillers) == 2 and not any(batch.needed.any() for batch in fillers)


def test_buckets_hold_no_more_than_they_may(monkeypatch):
    monkeypatch.setattr("ranks.BUCKET_BYTES", 64)
    tensors = [(str(i), torch.ones(size)) for i, size in enumerate([4, 8, 40, 1, 1, 31])]
    found = list(buckets(iter(tensors), torch.bfloat16))
    assert [[name for name, _ in bucket] for bucket in found] == [["0", "1"], ["2"], ["3", "4"], ["5"]]
    assert all(tensor.dtype == torch.bfloat16 for bucket in found for _, tensor in bucket)


POLLS = """
import time
import torch.distributed as dist
from limits import Stop
from ranks import Ranks

class Busy:
    store = dist.TCPStore("127.0.0.1", 0, 1, True)

    def check(self, words):
        for _ in range(3000):
            self.store.check(words)

ranks = Ranks(0, 2, rollout=(0, 1), train=(0, 1))
ranks._store = Busy()
ranks.listen(Stop(60, print, alone=False))
time.sleep(0.4)
"""


def test_a_rank_can_end_while_it_asks_the_store():
    """Python would end the thread that asks inside of the store, which aborts the process: exit code 134 of a run that is done."""
    done = subprocess.run([sys.executable, "-c", POLLS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_can_not_travel_is_told():
    with pytest.raises(TypeError, match="--ranks 2: what a Task holds.*lambda"):
        Ranks(0, 2, rollout=(0, 1), train=(0, 1)).send(1, lambda: 1)


@pytest.mark.parametrize(
    ("world", "number", "rollout", "said"),
    [(1, None, "0", "--rollout-ranks 0: needs --ranks"), (2, None, "0,2", "there are ranks 0 to 1"),
     (2, None, "0,1", "none is left to train"), (2, 3, None, "--ranks 3: torchrun has started 2")],
)  # fmt: skip
def test_roles_that_can_not_be(world, number, rollout, said, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match=said.replace("(", "[(]")):
        join(number, rollout, "cpu")


SLOW = """
import asyncio, os
from config import Config, Source
from envs import ENVS
from envs.reverse_text import ReverseText

class Slow(ReverseText):
    async def play(self, task, agent):
        await super().play(task, agent)
        if agent.trace.branches[0].version >= {slow} and os.environ["RANK"] in "{ranks}":
            await asyncio.sleep(300)

ENVS["slow"] = Slow
config = Config(sources=[Source(env=Slow(), group_size=2)], batch_size=4, steps=5, eval_every=0, save_every=1, grace=1.0)
"""


def test_a_run_of_two_ranks_is_interrupted_lost_and_goes_on_with_one(tmp_path):
    """One rank is interrupted while both play what never ends: saved within the grace. One is killed: the lead ends, and says
    so. What is left goes on in one process."""
    for name, slow, ranks in (("slow.py", 1, "01"), ("slower.py", 2, "1"), ("quick.py", 100, "")):
        (tmp_path / name).write_text(SLOW.format(slow=slow, ranks=ranks))

    def begin(config, step, *flags):
        flags = [tmp_path / config, "--runs-dir", tmp_path, "--name", "run", *flags]
        processes = start(2, train_on_ranks, tmp_path / f"{config}.log", *flags)
        end = time.time() + 60
        while time.time() < end and not (tmp_path / "run" / "checkpoints" / f"step_{step}").exists():
            assert all(process.is_alive() for process in processes), (tmp_path / f"{config}.log").read_text()
            time.sleep(0.1)
        time.sleep(0.5)
        return processes

    processes = begin("slow.py", 1)
    os.kill(processes[1].pid, signal.SIGINT)
    assert ended(processes, 20) == [143, 130], (tmp_path / "slow.py.log").read_text()
    said = (tmp_path / "slow.py.log").read_text()
    assert "saved" in said and "--resume" in said and "Traceback" not in said, said
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == ["step_1"]

    processes = begin("slower.py", 2, "--resume")
    processes[1].kill()
    assert ended(processes, 20) == [1, -signal.SIGKILL]
    said = (tmp_path / "slower.py.log").read_text()
    assert "rank 1 is gone" in said and "Traceback" not in said, said

    arguments = [tmp_path / "quick.py", "--runs-dir", tmp_path, "--name", "run", "--resume", "--steps", "3"]
    assert run_train(*arguments) == 0
    rows = [json.loads(line) for line in open(tmp_path / "run" / "metrics.jsonl")]
    assert [row["step"] for row in rows] == [1, 2, 3]
