"""Who has the device when: the engine sleeps while the trainer works, wakes with complete weights, and overlap is a schedule."""

import asyncio
import contextlib
import json
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import engines.vllm
from command_line import parse
from config import Config
from engines.base import Sampling
from engines.hf import HFEngine
from engines.vllm import VLLMEngine, memory_share
from policy import OptimizerConfig, Policy
from rollouts import Queue, Rollouts, RunStopped
from tests.conftest import ROOT, run_train
from tests.test_policy import sample as sample_branches
from tests.test_policy import train_step
from traces import Trace

NOISE = 200  # what a model samples whose weights were thrown away


class FakeLLM:
    """What a GPU's vLLM does with its memory, in words: it records calls, answers with a token that its weights decide, and
    with NOISE while any of them has not been loaded since a sleep of level 2. It keeps what it answered by prompt and salt
    until the cache is reset."""

    def __init__(self, path, **options):
        self.options, self.calls, self.lost, self.awake, self.cache = options, [], set(), {"weights", "kv_cache"}, {}
        self.names = {name for name, _ in HFEngine(path).model.named_parameters()} | {"lm_head.weight"}
        self.answer = 1
        self.llm_engine = SimpleNamespace(add_request=self.add_request, step=self.step, abort_request=lambda ids: None)
        self.queue = []

    def sleep(self, level):
        self.calls.append(f"sleep {level}")
        self.awake.clear()
        self.cache.clear()
        self.lost = set(self.names) if level == 2 else set()

    def wake_up(self, tags):
        self.calls.append(f"wake {' '.join(tags)}")
        self.awake |= set(tags)

    def collective_rpc(self, method, kwargs):
        assert (method == "reload_weights" and self.awake == {"weights"}) or not self.lost
        arrived = dict(kwargs["weights_iterator"])
        self.calls.append(f"load {len(arrived)}")
        self.lost -= set(arrived)
        self.answer = int(arrived["model.norm.weight"][0])

    def apply_model(self, function):
        """There is no model inside to be looked at."""

    def reset_prefix_cache(self):
        self.calls.append("reset")
        self.cache.clear()

    def add_request(self, request_id, prompt, params):
        assert self.awake == {"weights", "kv_cache"}, "a request while asleep"
        self.queue.append((request_id, prompt, params))

    def step(self):
        done, self.queue = self.queue, []
        self.calls.append("generate")
        outputs = []
        for request_id, prompt, _ in done:
            key = (tuple(prompt["prompt_token_ids"]), prompt["cache_salt"])
            token = self.cache.setdefault(key, NOISE if self.lost else self.answer)
            flat = SimpleNamespace(start_indices=[0], logprobs=[-1.0], token_ids=[token])
            answer = SimpleNamespace(token_ids=[token], finish_reason="stop", logprobs=flat)
            outputs.append(SimpleNamespace(finished=True, request_id=request_id, outputs=[answer]))
        return outputs


@pytest.fixture
def on_gpu(monkeypatch, tiny_path):
    """make(**options) -> a VLLMEngine that believes in a GPU, over a FakeLLM."""
    fake = ModuleType("vllm")
    fake.LLM, fake.SamplingParams, fake.__spec__ = FakeLLM, lambda **options: options, object()
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 * 2**30, 80 * 2**30))
    monkeypatch.setattr(VLLMEngine, "_as_guest", lambda self: contextlib.nullcontext())
    return lambda **options: VLLMEngine(tiny_path, "cuda", torch.bfloat16, 64, **options)


def answer(engine, prompt=(1, 2)):
    return asyncio.run(engine.generate(list(prompt), Sampling(1))).token_ids[0]


def weights(path, value):
    state = dict(HFEngine(path).model.state_dict())
    return (state | {"model.norm.weight": torch.full_like(state["model.norm.weight"], value)}).items()


@pytest.mark.parametrize("level", [1, 2])
def test_a_gpu_engine_wakes_in_the_order_that_works(on_gpu, tiny_path, level):
    """A3: wake(weights) -> load all -> wake(kv_cache) -> reset -> generate, at both levels; A2: no old prefix is used."""
    engine = on_gpu(sleep_level=level)
    assert engine.llm.options["enable_sleep_mode"] and "enforce_eager" not in engine.llm.options
    engine.load_weights(weights(tiny_path, 5), 0)
    assert answer(engine) == 5
    for version in (1, 2):
        engine.llm.calls.clear()
        engine.sleep()
        with pytest.raises(RuntimeError, match="sleeps"):
            answer(engine)
        engine.load_weights(weights(tiny_path, 10 + version), version)
        assert answer(engine) == 10 + version
        loaded = f"load {len(engine.llm.names)}"
        assert engine.llm.calls == [f"sleep {level}", "wake weights", loaded, "wake kv_cache", "reset", "generate"]
    engine.sleep()
    if level == 2:
        with pytest.raises(RuntimeError, match="threw the weights away"):
            engine.wake_up()
    else:
        engine.wake_up()
        assert answer(engine) == 12


def test_half_loaded_weights_are_never_sampled_from(on_gpu, tiny_path):
    """A3: one name that does not come, and the engine stays shut."""
    engine = on_gpu()
    engine.sleep()
    with pytest.raises(ValueError, match=r"did not arrive: model\.norm\.weight"):
        engine.load_weights([(name, t) for name, t in weights(tiny_path, 1) if name != "model.norm.weight"], 1)
    with pytest.raises(RuntimeError, match="load_weights"):
        answer(engine)


def test_the_salt_of_the_cache_is_the_version(on_gpu, tiny_path):
    """A2, once more: even a cache that is not reset has no answer of older weights for a request of now."""
    engine = on_gpu()
    engine.load_weights(weights(tiny_path, 3), 0)
    assert answer(engine) == 3
    engine.llm.reset_prefix_cache = lambda: None
    engine.load_weights(weights(tiny_path, 4), 1)
    assert answer(engine) == 4


def test_the_engine_is_asked_for_exactly_the_sampling(on_gpu):
    """A1 and A19: processed log-probs, nothing of the model folder's generation_config, no end token but ours."""
    engine, asked = on_gpu(top_logprobs=128), []
    options = engine.llm.options
    assert options["generation_config"] == "vllm" and options["logprobs_mode"] == "processed_logprobs"
    assert options["max_logprobs"] == 130 and options["max_model_len"] == 65 and options["dtype"] == "bfloat16"
    add = engine.llm.llm_engine.add_request
    engine.llm.llm_engine.add_request = lambda *request: (asked.append(request[2]), add(*request))
    asyncio.run(engine.generate([1, 2], Sampling(90, 0.7, 0.9, 20, stop_token_ids=(5, 6), key=(1,))))
    expected = {"max_tokens": 62, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "stop_token_ids": [5, 6]}
    assert expected.items() <= asked[0].items() and asked[0]["ignore_eos"] and asked[0]["logprobs"] == 0


def test_a_request_that_is_given_up_as_it_is_answered_takes_no_other_with_it(on_gpu):
    engine = on_gpu()

    async def both():
        given_up, other = [asyncio.create_task(engine.generate([1, i], Sampling(1))) for i in range(2)]
        await asyncio.sleep(0)
        given_up.cancel()  # the step that answers it runs before the task hears of that
        return (await asyncio.wait_for(other, 5)).token_ids

    assert asyncio.run(both()) == [1]


def test_an_episode_takes_its_requests_with_it(on_gpu, tiny_path):
    """One that ended with an error may have left a request behind; nobody waits for it, and it holds no engine."""
    for engine in (on_gpu(), HFEngine(tiny_path)):

        async def play(engine=engine):
            with engine.playing("other"):
                with engine.playing("episode"):
                    left = asyncio.create_task(engine.generate([1, 2], Sampling(3)))
                    await asyncio.sleep(0)
                engine.sleep()
                engine.load_weights(weights(tiny_path, 3), 1)
                with pytest.raises(asyncio.CancelledError):
                    await left
                return await engine.generate([1, 2], Sampling(3))

        assert asyncio.run(play()).version == 1


def test_a_failed_step_fails_its_requests_and_leaves_nothing_of_them(on_gpu):
    engine, aborted = on_gpu(), []
    vllm = engine.llm.llm_engine
    vllm.abort_request, step = lambda ids: (aborted.extend(ids), engine.llm.queue.clear()), vllm.step

    def fail():
        vllm.step = step
        raise RuntimeError("out of memory")

    vllm.step = fail
    with pytest.raises(RuntimeError, match="vLLM failed: out of memory"):
        answer(engine)
    assert len(aborted) == 1 and engine.llm.calls == ["reset"], "its blocks are in the cache, but were not computed"
    assert answer(engine) == 1


def test_a_closed_engine_is_asked_for_nothing(on_gpu):
    engine = on_gpu()

    async def close():
        task = asyncio.create_task(engine.generate([1, 2], Sampling(1)))
        await asyncio.sleep(0)
        engine.close()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(close())


def test_the_share_of_memory_is_what_the_trainer_leaves(on_gpu):
    gib = 2**30
    assert memory_share(70 * gib, 80 * gib, 8 * gib) == pytest.approx(60 / 80)
    assert on_gpu(reserved_bytes=8 * gib).llm.options["gpu_memory_utilization"] == pytest.approx(60 / 80)
    with pytest.raises(ValueError, match=r"of 80 GiB on the GPU 10\.0 are free .* 7\.0 more.*--offload-optimizer"):
        memory_share(10 * gib, 80 * gib, 7 * gib)


def test_offloaded_moments_change_nothing_but_their_place(tiny_path):
    branches = sample_branches(HFEngine(tiny_path))
    plain, offloaded = (Policy(tiny_path, OptimizerConfig(1e-2), 3, offload_optimizer=off) for off in (False, True))
    for step in (1, 2):
        assert train_step(plain, branches, step) == train_step(offloaded, branches, step)
    for (name, a), (_, b) in zip(plain.weights(), offloaded.weights(), strict=True):
        assert torch.equal(a, b), name
    parameters = sum(p.numel() for p in plain.model.parameters())
    assert plain.moment_bytes == 8 * parameters and offloaded.moment_bytes == 0


def test_moments_leave_after_an_update_and_are_back_for_the_next(tiny_path, monkeypatch):
    branches, moved = sample_branches(HFEngine(tiny_path)), []
    policy = Policy(tiny_path, OptimizerConfig(1e-2), 3, offload_optimizer=True)
    monkeypatch.setattr(policy, "_move_moments", moved.append)
    step = policy.optimizer.step
    monkeypatch.setattr(policy.optimizer, "step", lambda: (moved.append("update"), step()))
    train_step(policy, branches)
    assert moved == ["cpu", "update", "cpu"] == [policy.device, "update", "cpu"]


# The whole script, watched.


def run_script(monkeypatch, tmp_path, *flags, code=0):
    """Run train.py in this process. Returns (events in order, the run's folder)."""
    events = []

    def watch(owner, name, note):
        plain = getattr(owner, name)

        def watched(self, *args, **options):
            events.append(note(self, *args))
            return plain(self, *args, **options)

        monkeypatch.setattr(owner, name, watched)

    last = {}
    watch(HFEngine, "sleep", lambda engine: last.update(engine=engine) or "sleep")
    watch(HFEngine, "load_weights", lambda engine, weights, version=None: "load")
    watch(Policy, "step", lambda policy, step: f"step {step}{'' if last['engine'].asleep else ' AWAKE'}")
    watch(Rollouts, "collect", lambda rollouts, step: f"sample {step} from {rollouts.engine.version}")
    watch(Rollouts, "evaluate", lambda rollouts, step: f"eval {step}")
    arguments = ["--batch-size", "16", "--max-new-tokens", "8", "--runs-dir", tmp_path, "--name", "run", *flags]
    assert run_train(*arguments) == code
    return events, tmp_path / "run"


def test_the_order_of_a_step(monkeypatch, tmp_path):
    """A3: the optimizer's step is made while the engine sleeps, and nothing is sampled before the new weights are in."""
    events, _ = run_script(monkeypatch, tmp_path, "--steps", 2, "--eval-every", 2, "--eval-samples", 4)
    one = ["sample 1 from 0", "sleep", "step 1", "load"]
    two = ["sample 2 from 1", "sleep", "step 2", "load"]
    assert events == ["sleep", "load", "eval 0", *one, *two, "eval 2"]


def test_overlap_samples_one_step_ahead(monkeypatch, tmp_path):
    """Batch n+1 comes from the policy of step n-1, and batches 1 and 2 from the base model."""
    events, folder = run_script(monkeypatch, tmp_path, "--steps", 4, "--overlap", "--eval-every", 0)
    trained = [["sleep", f"step {step}", "load"] for step in (1, 2, 3, 4)]
    assert events == [
        *("sleep", "load", "sample 1 from 0", "sample 2 from 0"), *trained[0], "sample 3 from 1", *trained[1],
        "sample 4 from 2", *trained[2], *trained[3],
    ]  # fmt: skip
    rows = [json.loads(line) for line in open(folder / "rollouts.jsonl")]
    versions = {
        (row["step"], turn["version"]) for row in rows for branch in row["branches"] for turn in branch["turns"]
    }
    assert versions == {(1, 0), (2, 0), (3, 1), (4, 2)}
    metrics = [json.loads(line) for line in open(folder / "metrics.jsonl")]
    assert [row["off_policy/mean"] >= float(row["step"] > 1) for row in metrics] == [True] * 4
    assert metrics[0]["mismatch_kl/mean"] < 1e-9 < metrics[-1]["mismatch_kl/mean"], "one step off the policy shows"


def test_a_batch_at_hand_is_trained_on_when_the_next_can_not_be_sampled(monkeypatch, tmp_path):
    """Under --overlap the run ends after the step that was complete."""
    collect = Rollouts.collect

    async def fruitless(self, step):
        if step == 3:
            raise RunStopped("nothing to train on")
        return await collect(self, step)

    monkeypatch.setattr(Rollouts, "collect", fruitless)
    events, folder = run_script(monkeypatch, tmp_path, "--steps", 4, "--overlap", "--eval-every", 0, code=1)
    assert [event for event in events if event.startswith("step")] == ["step 1", "step 2"]
    assert [json.loads(line)["step"] for line in open(folder / "metrics.jsonl")] == [1, 2]


def trace(version):
    made = Trace("agent", True)
    made.add_turn([1, 2], [3, 4], [-1.0, -1.0], version=version)
    made.branches[0].advantages = np.ones(4)
    return made


def test_what_is_too_old_is_dropped_and_counted_and_frozen_models_never_age():
    queue = Queue(8, constant=True)
    queue.add([trace(version) for version in (0, 3, -1, 2)])
    assert queue.drop_older(2) == 1
    assert [branches[0].version for branches in queue.waiting] == [3, -1, 2]
    assert queue.drop_older(0) == 0 and queue.missing() == 5


@pytest.mark.parametrize(("steps", "kept"), [(None, 2), (1, 2), (0, 0)])
def test_a_bound_on_staleness_drops_what_waited(monkeypatch, tmp_path, steps, kept):
    flags = [] if steps is None else ["--max-off-policy-steps", steps]
    _, folder = run_script(
        monkeypatch,
        tmp_path,
        "--steps",
        2,
        "--eval-every",
        0,
        "--group-size",
        9,
        "--no-constant-batch-size",
        *flags,
    )
    first, second = [json.loads(line) for line in open(folder / "metrics.jsonl")]
    assert first["rollouts/waiting"] == 2, "two groups of nine for a batch of sixteen"
    assert second["off_policy/dropped"] == 2 - kept and first["off_policy/dropped"] == 0
    assert second["off_policy/max"] == float(kept > 0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-off-policy-steps", "-1"], "--max-off-policy-steps -1: must be at least 0"),
        (["--max-off-policy-steps", "0", "--overlap"], "--max-off-policy-steps 0: must be at least 1 with --overlap"),
        (["--tensor-parallel-size", "2"], "one engine runs on one device; --ranks"),
        (["--sleep-level", "3"], "--sleep-level"),
    ],
)
def test_what_can_not_be_is_refused(flags, message, capsys):
    with pytest.raises(SystemExit) as end:
        parse(flags)
    assert end.value.code == 2 and message in "".join(capsys.readouterr())


def test_auto_takes_vllm_on_cuda_and_says_why(monkeypatch):
    from engines import choose_engine

    assert choose_engine("auto", "cpu", 1.0) == ("hf", "auto on a CPU")
    assert choose_engine("hf", "cuda", 5.0) == ("hf", "chosen by name")
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: object())
    assert choose_engine("auto", "cuda:0", 1.0) == ("vllm", "auto on CUDA")
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    name, why = choose_engine("auto", "cuda", 5.0)
    assert name == "hf" and "not installed" in why
    assert Config().engine == "auto"


def test_a_temperature_that_vllm_refuses_is_told_before_anything_is_loaded(tmp_path):
    command = [sys.executable, "train.py", "--engine", "vllm", "--temperature", "3", "--runs-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    assert (
        done.stderr.strip().splitlines()[-1] == "train.py: --temperature 3: vLLM takes 0.01 to 2; --engine hf takes any"
    )
