"""The embedded engine samples exactly what was asked, whatever else is in the batch."""

import asyncio
import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engines.base import Sampling
from engines.hf import HFEngine, inverse_cdf, processed_logprobs


@pytest.fixture(scope="module")
def engine(tiny_path):
    return HFEngine(tiny_path)


def run(engine, requests):
    """All requests at once: (prompt, sampling) -> completion."""

    async def everything():
        return await asyncio.gather(*[engine.generate(prompt, sampling) for prompt, sampling in requests])

    return asyncio.run(everything())


def reference_logprobs(path, prompt, completion, temperature):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


PROMPTS = [[7, 8, 9], [20, 21, 22, 23, 24, 25], [7, 8, 9], [50]]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_are_those_of_the_sampling_temperature(engine, tiny_path, temperature):
    """A1, on the sampler's side: of the distribution after temperature, in a batch of unequal prompts."""
    completions = run(engine, [(prompt, Sampling(12, temperature, key=(i,))) for i, prompt in enumerate(PROMPTS)])
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        expected = reference_logprobs(tiny_path, prompt, completion.token_ids, temperature)
        chosen = expected.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert np.allclose(completion.logprobs, chosen, atol=1e-5)
        assert len(completion.token_ids) == 12 and completion.finish_reason == "length"


def test_a_request_gets_the_same_tokens_in_any_company(engine):
    requests = [(prompt, Sampling(16, key=(0, i))) for i, prompt in enumerate(PROMPTS)]
    together = run(engine, requests)
    assert [c.token_ids for c in run(engine, requests[::-1])[::-1]] == [c.token_ids for c in together]
    assert [run(engine, [request])[0].token_ids for request in requests] == [c.token_ids for c in together]
    assert together[0].token_ids != together[2].token_ids, "same prompt, other key"


def test_a_batch_waits_for_every_live_episode(engine):
    """Whatever the timing inside of episodes, the same batches run: here one episode is late to its second turn."""
    sizes = []
    plain = engine._generate

    def recorded(requests):
        sizes.append([request.sampling.key for request in requests])
        return plain(requests)

    async def episode(number, delay):
        with engine.playing(number):
            for turn in range(3):
                await asyncio.sleep(delay if turn == 1 else 0)
                await engine.generate([5 + number], Sampling(3, key=(number, turn)))

    async def play():
        await asyncio.gather(*[episode(number, 0.05 * number) for number in range(3)])

    engine._generate = recorded
    try:
        asyncio.run(play())
    finally:
        del engine._generate
    assert sizes == [[(0, t), (1, t), (2, t)] for t in range(3)]


def test_nobody_waits_for_an_episode_that_is_outside(engine):
    async def slow(release):
        with engine.playing("slow"), engine.outside():
            await release.wait()

    async def play():
        release = asyncio.Event()
        waiting = asyncio.create_task(slow(release))
        await asyncio.sleep(0)
        with engine.playing("quick"):
            await asyncio.wait_for(engine.generate([5], Sampling(2, key=(1,))), 10)
        release.set()
        await waiting

    asyncio.run(play())


def test_several_stop_tokens_end_a_completion_and_are_kept(engine):
    free = run(engine, [([9], Sampling(20, key=(3,)))])[0].token_ids
    stops = (free[7], free[4])
    first = min(free.index(stop) for stop in stops)
    completion = run(engine, [([9], Sampling(20, key=(3,), stop_token_ids=stops))])[0]
    assert completion.token_ids == free[: first + 1] and completion.finish_reason == "stop"


def test_temperature_zero_is_greedy(engine, tiny_path):
    completion = run(engine, [([9, 10], Sampling(8, temperature=0.0, key=(1,)))])[0]
    assert completion.token_ids == reference_logprobs(tiny_path, [9, 10], completion.token_ids, 1.0).argmax(-1).tolist()


def test_generation_config_is_ignored(tiny_path, tmp_path):
    """A19: a folder whose generation_config asks for top_k 1 is still sampled from in full."""
    folder = shutil.copytree(tiny_path, tmp_path / "model")
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "top_k": 1, "top_p": 0.1, "temperature": 0.01, "repetition_penalty": 2.0})
    )
    requests = [([9], Sampling(8, key=(i,))) for i in range(8)]
    plain = run(HFEngine(tiny_path), requests)
    assert [c.token_ids for c in run(HFEngine(folder), requests)] == [c.token_ids for c in plain]
    assert len({tuple(c.token_ids) for c in plain}) > 1


def test_head_candidates_come_best_first(engine, tiny_path):
    completion = run(engine, [([9], Sampling(5, key=(1,), top_logprobs=4)), ([9], Sampling(5, key=(2,)))])[0]
    expected = reference_logprobs(tiny_path, [9], completion.token_ids, 1.0).topk(4)
    assert completion.topk_ids.tolist() == expected.indices.tolist()
    assert np.allclose(completion.topk_logprobs, expected.values, atol=1e-5)


def test_top_k_and_top_p_cut_and_renormalize():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    kept = [
        processed_logprobs(logits, [sampling]).exp()[0]
        for sampling in (Sampling(1, top_k=2), Sampling(1, top_p=0.6), Sampling(1, top_p=0.45), Sampling(1, 0.5))
    ]
    assert torch.allclose(kept[0], torch.tensor([0.625, 0.375, 0, 0]))
    assert torch.allclose(kept[1], torch.tensor([0.625, 0.375, 0, 0])), "the smallest set with at least that mass"
    assert torch.allclose(kept[2], torch.tensor([1.0, 0, 0, 0]))
    assert torch.allclose(kept[3], torch.tensor([0.25, 0.09, 0.0225, 0.0025]) / 0.365)


def test_sampling_follows_the_distribution():
    probs = torch.tensor([0.1, 0.0, 0.6, 0.3])
    uniforms = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = inverse_cdf(probs.log().expand(20_000, 4), uniforms)
    assert torch.allclose(tokens.bincount(minlength=4) / 20_000, probs, atol=0.02)
    assert (tokens != 1).all()
    assert inverse_cdf(torch.tensor([[-torch.inf, 0.0]]), torch.zeros(1, dtype=torch.float64)).tolist() == [1]


def test_score_gives_every_token_but_the_first(engine, tiny_path):
    async def both():
        return await asyncio.gather(engine.score([5, 6, 7, 8]), engine.score([9, 4], temperature=0.6))

    scores = asyncio.run(both())
    for tokens, temperature, score in (([5, 6, 7, 8], 1.0, scores[0]), ([9, 4], 0.6, scores[1])):
        expected = reference_logprobs(tiny_path, tokens[:1], tokens[1:], temperature).gather(
            -1, torch.tensor(tokens[1:])[:, None]
        )[:, 0]
        assert np.isnan(score[0]) and np.allclose(score[1:], expected, atol=1e-5)


def test_new_weights_must_be_complete_and_known(tiny_path):
    engine = HFEngine(tiny_path)
    state = {name: value.clone() for name, value in engine.model.state_dict().items()}
    before = run(engine, [([9], Sampling(8, key=(1,)))])[0]
    engine.load_weights(((name, value * 1.5) for name, value in state.items()), version=3)
    after = run(engine, [([9], Sampling(8, key=(1,)))])[0]
    assert (before.version, after.version) == (0, 3) and before.logprobs != after.logprobs
    with pytest.raises(ValueError, match=r"did not arrive: model\.norm\.weight"):
        engine.load_weights(((name, value) for name, value in state.items() if name != "model.norm.weight"), 4)
    with pytest.raises(ValueError, match="weight nonsense is unknown"):
        engine.load_weights([("nonsense", torch.zeros(1))], 4)


def test_no_request_while_asleep(tiny_path):
    engine = HFEngine(tiny_path)
    engine.sleep()
    with pytest.raises(RuntimeError, match="the engine sleeps"):
        run(engine, [([9], Sampling(2))])
    engine.wake_up()
    assert len(run(engine, [([9], Sampling(2))])[0].token_ids) == 2


def test_the_context_bounds_a_completion(tiny_path):
    engine = HFEngine(tiny_path, max_context=10)
    assert len(run(engine, [([9] * 7, Sampling(50))])[0].token_ids) == 3
    with pytest.raises(ValueError, match="a prompt of 10 tokens does not fit a context of 10"):
        run(engine, [([9] * 10, Sampling(50))])


def test_an_error_reaches_every_request_of_the_batch_and_the_engine_goes_on(engine):
    async def ask():
        with pytest.raises(IndexError):
            await engine.generate([10**6], Sampling(2))
        return await engine.generate([9], Sampling(2))

    assert len(asyncio.run(ask()).token_ids) == 2


def test_weights_that_are_no_numbers_give_an_error_and_no_tokens(tiny_path):
    """Else a damaged checkpoint is evaluated as a model that knows nothing."""
    engine = HFEngine(tiny_path)
    with torch.no_grad():
        next(engine.model.parameters()).fill_(torch.nan)
    with pytest.raises(ValueError, match="gives NaN for a probability"):
        run(engine, [([9], Sampling(2))])


def test_a_request_that_is_cancelled_in_the_middle_of_a_batch_takes_no_other_with_it(engine, monkeypatch):
    """As Ctrl-C does it: from a signal's handler, while the batch is decoded."""
    generate = engine._generate

    async def both():
        first, second = [asyncio.create_task(engine.generate([7, i], Sampling(2, key=(i,)))) for i in (1, 2)]

        def interrupted(requests):
            first.cancel()
            return generate(requests)

        monkeypatch.setattr(engine, "_generate", interrupted)
        return await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), 10)

    cancelled, completion = asyncio.run(both())
    assert isinstance(cancelled, asyncio.CancelledError) and len(completion.token_ids) == 2
