"""The trainable model agrees with the sampler, sees no neighbour in a packed row, and needs little memory."""

import asyncio
import sys
import threading
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engines.base import Sampling
from engines.hf import HFEngine
from losses import compute_loss, make_rl_loss
from packing import pack
from policy import OptimizerConfig, Policy, token_logprobs
from tests.conftest import save_model
from traces import Trace, assign_advantages

PROMPTS = [[7, 8, 9], [20, 21, 22, 23, 24, 25], [50], [7, 8, 9]]
RL = make_rl_loss("ipo", eps=0.3, adv_tau=1.0)


def make_policy(path, temperature=1.0, lr=1e-2, **options):
    return Policy(path, OptimizerConfig(lr), steps=10, temperature=temperature, **options)


def sample(engine, temperature=1.0, length=10, top_logprobs=0):
    async def everything():
        requests = [Sampling(length, temperature, key=(i,), top_logprobs=top_logprobs) for i in range(len(PROMPTS))]
        return await asyncio.gather(
            *[engine.generate(p, request) for p, request in zip(PROMPTS, requests, strict=True)]
        )

    branches = []
    for number, (prompt, completion) in enumerate(zip(PROMPTS, asyncio.run(everything()), strict=True)):
        trace = Trace()
        topk = (completion.topk_ids, completion.topk_logprobs) if top_logprobs else None
        trace.add_turn(prompt, completion.token_ids, completion.logprobs, topk=topk)
        assign_advantages(trace, number - 1.5)
        branches += trace.branches
    return branches


def train_step(policy, branches, step=1, **layout):
    micro_batches, counts = pack(branches, 64, **layout)
    for micro_batch in micro_batches:
        loss, _ = compute_loss(micro_batch, policy(micro_batch)[0], counts.denominators(), RL)
        loss.backward()
    return policy.step(step)


def largest_difference(policy, branches):
    (batch,), _ = pack(branches, 64)
    return (policy(batch)[0] - batch.inference_logprobs)[batch.loss_mask].abs().max().item()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("tied", [True, False])
def test_trainer_and_sampler_agree_before_and_after_an_update(temperature, tied, tiny_path, untied_path):
    """A1 and A4: every sampled token, at every temperature, tied head or not."""
    path = tiny_path if tied else untied_path
    policy, engine = make_policy(path, temperature), HFEngine(path)
    engine.load_weights(policy.weights(), 0)
    branches = sample(engine, temperature)
    assert largest_difference(policy, branches) < 1e-4
    stale = engine.model.state_dict()["model.norm.weight"].clone()
    train_step(policy, branches)
    engine.load_weights(policy.weights(), 1)
    assert not torch.equal(stale, engine.model.state_dict()["model.norm.weight"])
    branches = sample(engine, temperature)
    assert largest_difference(policy, branches) < 1e-4
    for branch in branches:  # each alone as well
        assert largest_difference(policy, [branch]) < 1e-4


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_stay_tied(tied, tiny_path, untied_path, tmp_path):
    """A4: after wrapping, a step and an export, embedding and head are one tensor where they were, and two where not."""
    path = tiny_path if tied else untied_path
    policy = make_policy(path)
    plain = AutoModelForCausalLM.from_pretrained(path)
    count = sum(parameter.numel() for parameter in plain.parameters())
    assert sum(parameter.numel() for parameter in policy.model.parameters()) == count
    train_step(policy, sample(HFEngine(path)))
    weights = {name: value.clone() for name, value in policy.weights()}
    assert set(weights) == set(plain.state_dict())
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"]) == tied
    plain.load_state_dict(weights)
    plain.save_pretrained(tmp_path)
    (batch,), _ = pack(sample(HFEngine(tmp_path)), 64)
    assert (policy(batch)[0] - batch.inference_logprobs)[batch.loss_mask].abs().max() < 1e-5


@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_sequences_do_not_see_each_other(tiny_path, checkpointing):
    """A5, A6: a packed row gives each sequence what it gets alone, and a neighbour's change changes nothing."""
    policy = make_policy(tiny_path, checkpoint_activations=checkpointing)
    generator = np.random.default_rng(0)
    lengths = (5, 9, 3, 12, 4)

    def logprobs(sequences):
        branches = []
        for tokens in sequences:
            trace = Trace()
            trace.add_turn(tokens[:1], tokens[1:], [-1.0] * (len(tokens) - 1))
            assign_advantages(trace, 1.0)
            branches += trace.branches
        micro_batches, _ = pack(branches, 64)
        values = torch.cat([policy(batch)[0].flatten() for batch in micro_batches])
        owners = torch.cat([batch.sequence_ids.flatten() for batch in micro_batches])
        return [values[owners == i] for i in range(len(sequences))]

    sequences = [generator.integers(0, 256, n).tolist() for n in lengths]
    packed = logprobs(sequences)
    for together, alone in zip(packed, [logprobs([tokens])[0] for tokens in sequences], strict=True):
        assert torch.allclose(together, alone, atol=1e-5)
    for together, shuffled in zip(packed, logprobs(sequences[::-1])[::-1], strict=True):
        assert torch.allclose(together, shuffled, atol=1e-5)
    changed = [[*tokens] for tokens in sequences]
    changed[2][0] = (changed[2][0] + 1) % 256  # the first token of a sequence that shares a row
    for i, (before, after) in enumerate(zip(packed, logprobs(changed), strict=True)):
        assert torch.equal(before, after) == (i != 2)
    assert all(values[0] == 0 for values in packed), "nothing predicts a first token"


def test_activations_are_computed_again_in_the_backward_pass(tiny_path):
    """And the gradient is the same. (In evaluation mode, which keeps dropout out, transformers' own switch does nothing.)"""
    branches, passes, gradients = sample(HFEngine(tiny_path)), [], []
    for checkpointing in (False, True):
        policy = make_policy(tiny_path, checkpoint_activations=checkpointing)
        calls = []
        policy.model.lm.get_decoder().layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        (batch,), counts = pack(branches, 64)
        compute_loss(batch, policy(batch)[0], counts.denominators(), RL)[0].backward()
        passes.append(len(calls))
        gradients.append(torch.cat([parameter.grad.full_tensor().flatten() for parameter in policy.model.parameters()]))
    assert passes == [1, 2] and torch.allclose(*gradients, atol=1e-6)


def test_compiled_blocks_give_the_same_gradient(tiny_path, monkeypatch):
    """Also where activations are recomputed, and for another width of rows. (Traced as for any compiler; the code that one would write
    takes minutes.)"""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    traced = torch._dynamo.utils.counters
    traced.clear()
    branches, gradients = sample(HFEngine(tiny_path)), []
    for options in ({}, {"compile_blocks": True, "checkpoint_activations": True}):
        policy = make_policy(tiny_path, **options)
        for few in (branches[:2], branches):
            policy.optimizer.zero_grad()
            (batch,), counts = pack(few, 64)
            compute_loss(batch, policy(batch)[0], counts.denominators(), RL)[0].backward()
        gradients.append(torch.cat([parameter.grad.full_tensor().flatten() for parameter in policy.model.parameters()]))
        assert bool(traced["stats"]["unique_graphs"]) == bool(options)
    assert torch.allclose(*gradients, atol=1e-6)


def test_a_model_that_mixes_packed_sequences_is_refused(tiny_path, monkeypatch):
    """A6: the check at load time notices when the borders are not seen (here: positions that run on)."""
    from policy import TokenLogprobs

    plain = TokenLogprobs.forward

    def runs_on(self, token_ids, position_ids, needed, topk_ids=None):
        return plain(self, token_ids, torch.arange(token_ids.shape[1]).expand_as(position_ids), needed, topk_ids)

    monkeypatch.setattr(TokenLogprobs, "forward", runs_on)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM: log-probs of packed sequences differ"):
        make_policy(tiny_path)


def test_micro_batches_do_not_change_the_step(tiny_path):
    """A7: 1, 2 or 4 micro batches give one gradient."""
    branches = sample(HFEngine(tiny_path))
    norms, weights = [], []
    for tokens in (10_000, 40, 20):
        policy = make_policy(tiny_path)
        norms.append(train_step(policy, branches, micro_batch_tokens=tokens)["optim/grad_norm"])
        weights.append(torch.cat([value.flatten() for _, value in policy.weights()]))
    assert np.allclose(norms, norms[0], rtol=1e-5)
    assert all(torch.allclose(other, weights[0], atol=1e-4) for other in weights)


def test_a_batch_without_a_member_changes_nothing(tiny_path):
    """A14: zero weights everywhere; the loss can still be backpropagated and no number is NaN."""
    policy = make_policy(tiny_path)
    branches = sample(HFEngine(tiny_path))
    for branch in branches:
        branch.rl_weights = np.zeros(len(branch))
    before = {name: value.clone() for name, value in policy.weights()}
    report = train_step(policy, branches)
    assert report["optim/grad_norm"] == 0.0
    assert all(torch.equal(value, before[name]) for name, value in policy.weights())


def test_a_gradient_that_is_not_finite_is_thrown_away(tiny_path):
    policy = make_policy(tiny_path)
    before = {name: value.clone() for name, value in policy.weights()}
    (batch,), _ = pack(sample(HFEngine(tiny_path)), 64)
    (policy(batch)[0].sum() * torch.inf).backward()
    assert policy.step(1)["optim/skipped"] == 1.0
    assert all(torch.equal(value, before[name]) for name, value in policy.weights())
    assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_entropy_and_gradient_of_the_chunked_head_equal_the_plain_ones(monkeypatch):
    """A20: same values and gradients as the [T, V] computation, whatever the chunk."""
    torch.manual_seed(0)
    hidden, labels = torch.randn(37, 16, requires_grad=True), torch.randint(100, (37,))
    head = torch.nn.Linear(16, 100, bias=False)
    monkeypatch.setattr("policy.CHUNK_ROWS", 7)
    monkeypatch.setattr("policy.CHUNK_ELEMENTS", 700)
    logprobs, entropy = token_logprobs(hidden, head, labels[:, None], 0.7)
    logprobs = logprobs[:, 0]
    upstream = torch.randn(37)
    chunked = torch.autograd.grad((logprobs * upstream).sum(), [hidden, head.weight])
    plain = (head(hidden).float() / 0.7).log_softmax(-1)
    assert torch.allclose(logprobs, plain.gather(-1, labels[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(entropy, -(plain.exp() * plain).sum(-1), atol=1e-5)
    expected = torch.autograd.grad((plain.gather(-1, labels[:, None])[:, 0] * upstream).sum(), [hidden, head.weight])
    for ours, theirs in zip(chunked, expected, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def test_the_head_never_holds_all_logits():
    """A20: T = 2048, V = 32768, hidden 64. The [T, V] float32 matrix alone is 256 MiB; the plain computation needs two."""
    if not sys.platform.startswith("linux"):
        pytest.skip("resident memory is read from /proc")
    torch.manual_seed(0)
    hidden, head = torch.randn(2048, 64, requires_grad=True), torch.nn.Linear(64, 32768, bias=False)
    labels = torch.randint(32768, (2048,))
    token_logprobs(hidden[:2], head, labels[:2, None], 1.0)[0].sum().backward()  # threads and buffers exist now

    def resident():
        return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) / 1024

    before, peak, done = resident(), 0.0, threading.Event()

    def watch():
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    token_logprobs(hidden, head, labels[:, None], 1.0)[0].sum().backward()
    done.set()
    watcher.join()
    assert peak - before < 128, "MiB"


def test_the_training_path_uses_the_chunked_head(tiny_path, monkeypatch):
    """A20: and only for the tokens that are needed."""
    import policy as module

    rows, plain = [], module.token_logprobs
    monkeypatch.setattr(
        module, "token_logprobs", lambda hidden, *rest: (rows.append(len(hidden)), plain(hidden, *rest))[1]
    )
    policy = make_policy(tiny_path)
    rows.clear()
    (batch,), _ = pack(sample(HFEngine(tiny_path)), 64)
    logprobs, _, _ = policy(batch)
    assert rows == [int(batch.needed.sum())] and "ChunkedHead" in str(_graph(logprobs.grad_fn))


def _graph(node) -> set[str]:
    seen = set()
    while node is not None and len(seen) < 50:
        seen.add(type(node).__name__)
        node = next((parent for parent, _ in node.next_functions if parent is not None), None)
    return seen


def test_score_centering_through_engine_packing_and_loss(tiny_path):
    """On-policy nothing is rejected, so centering changes no gradient; after an update, with a narrow band, it does."""
    branches = sample(HFEngine(tiny_path), top_logprobs=6)
    assert branches[0].topk_ids.shape == (len(branches[0]), 6) and (branches[0].topk_ids[: len(PROMPTS[0])] == -1).all()
    (batch,), counts = pack(branches, 64)
    policy = make_policy(tiny_path, lr=1e-3)

    def gradient(centering):
        rl_loss = make_rl_loss(
            "icepop", ratio_low=0.99, ratio_high=1.01, score_centering=centering, score_centering_topk=6
        )
        logprobs, _, head = policy(batch)
        sampled = batch.topk_ids == batch.token_ids[..., None]  # a sampled token that is in its head has one log-prob
        assert torch.equal(head[sampled], logprobs[..., None].expand_as(head)[sampled]) and sampled.any()
        loss, metrics = compute_loss(batch, logprobs, counts.denominators(), rl_loss, head)
        loss.backward()
        found = torch.cat([parameter.grad.full_tensor().flatten() for parameter in policy.model.parameters()])
        policy.optimizer.zero_grad()
        return found, metrics

    (plain, _), (centered, metrics) = gradient(False), gradient(True)
    assert torch.allclose(plain, centered, atol=1e-6) and plain.norm() > 0
    assert {"score_centering/head_mass", "score_centering/tail_scale", "score_centering/logit_correction_l1"} <= set(
        metrics
    )
    train_step(policy, sample(HFEngine(tiny_path)))
    assert (gradient(True)[0] - gradient(False)[0]).norm() > 1e-3


def test_the_learning_rate_warms_up_and_falls():
    optimizer = OptimizerConfig(1.0, warmup_steps=2, schedule="linear", final_lr=0.1)
    assert [round(optimizer.lr_at(step, 6), 3) for step in range(1, 7)] == [0.5, 1.0, 0.775, 0.55, 0.325, 0.1]
    assert OptimizerConfig(1.0, schedule="constant").lr_at(6, 6) == 1.0
    assert OptimizerConfig(1.0, schedule="cosine", final_lr=0.0).lr_at(6, 6) == pytest.approx(0)


@pytest.mark.parametrize("model_type", ["llama", "gpt_neox"])
def test_other_architectures_load_or_are_refused_loudly(model_type, tmp_path):
    """Packing relies on the architecture; what does not pass the check at load time must not train."""
    from transformers import AutoConfig

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 300,
        "max_position_embeddings": 128,
    }
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes)).save_pretrained(tmp_path)
    policy, engine = make_policy(tmp_path), HFEngine(tmp_path)
    assert largest_difference(policy, sample(engine)) < 1e-4


def test_sizes_in_this_file_are_real(tmp_path):
    """The spread of the random models makes sampling far from uniform, so that the comparisons above mean something."""
    engine = HFEngine(save_model(tmp_path))
    logprobs = np.concatenate([branch.logprobs[branch.sampled] for branch in sample(engine)])
    assert logprobs.std() > 0.3
