"""Adapters train, the base does not, and everyone outside of the trainer sees one merged model."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from checkpoint import Snapshot, generator_states, load, save
from command_line import parse
from config import Config, LoRA
from engines.hf import HFEngine
from losses import compute_loss
from packing import pack
from tests.conftest import save_model
from tests.test_policy import RL, largest_difference, make_policy, sample, train_step

pytest.importorskip("peft")

ADAPTERS = LoRA(rank=4, alpha=8.0)


def moved(policy):
    """The policy with a B that is not zero, so that A matters."""
    torch.manual_seed(1)
    for name, parameter in policy.trainable.items():
        if "lora_B" in name:
            parameter.detach().to_local().normal_(std=0.05)
    return policy


def gradients(policy, path):
    (batch,), counts = pack(sample(HFEngine(path)), 64)
    compute_loss(batch, policy(batch)[0], counts.denominators(), RL)[0].backward()
    return {name: p.grad.full_tensor() for name, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_merged_matrix(checkpointing, tiny_path, tmp_path):
    """W' = W + s B A, so dL/dA = s B^T dL/dW' and dL/dB = s dL/dW' A^T."""
    policy = moved(make_policy(tiny_path, lora=ADAPTERS, checkpoint_activations=checkpointing))
    policy.export(tmp_path)
    found, plain = gradients(policy, tiny_path), gradients(make_policy(tmp_path), tiny_path)
    values = {name: p.detach().full_tensor() for name, p in policy.trainable.items()}
    assert found.keys() == values.keys() and len(found) == 2 * 7 * 2, "A and B of seven matrices in two blocks"
    for name in [name for name in found if "lora_A" in name]:
        other = name.replace("lora_A", "lora_B")
        of_w = plain[name.replace(".lora_A.default", "")]
        for got, expected in (
            (found[name], 2 * values[other].T @ of_w),
            (found[other], 2 * of_w @ values[name].T),
        ):
            assert expected.norm() > 0 and (got - expected).norm() <= 1e-5 * expected.norm(), name


@pytest.mark.parametrize("tied", [True, False])
def test_the_base_stays_and_the_sampler_gets_the_merged_model(tied, tiny_path, untied_path):
    path = tiny_path if tied else untied_path
    base = AutoModelForCausalLM.from_pretrained(path).state_dict()
    policy, engine = make_policy(path, lora=ADAPTERS), HFEngine(path)
    start = dict(policy.weights())
    assert start.keys() == base.keys() and all(torch.equal(value, base[name]) for name, value in start.items())
    for step in (1, 2):  # A moves in the second
        train_step(policy, sample(engine), step)
    after = {name: value.clone() for name, value in policy.weights()}
    assert {name.split(".")[-2] for name, value in after.items() if not torch.equal(value, base[name])} == {
        f"{which}_proj" for which in ("q", "k", "v", "o", "gate", "up", "down")
    }
    frozen = [p.full_tensor() for p in policy.model.parameters() if not p.requires_grad]
    originals = [value for name, value in base.items() if not (tied and name == "lm_head.weight")]
    assert all(torch.equal(value, other) for value, other in zip(frozen, originals, strict=True))
    assert len(policy.optimizer.state) == len(policy.trainable) == 28
    assert policy.moment_bytes == 2 * 4 * sum(p.numel() for p in policy.trainable.values())
    engine.load_weights(policy.weights(), 2)
    assert largest_difference(policy, sample(engine)) < 1e-4
    assert largest_difference(policy, sample(HFEngine(path))) > 1e-3, "two steps are to be seen"


def test_transposed_matrices_with_biases(tmp_path):
    """GPT-2 keeps W as [in, out]."""
    sizes = dict(n_embd=32, n_layer=2, n_head=2, vocab_size=300, n_positions=128, initializer_range=0.3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes)).save_pretrained(tmp_path)
    policy, engine = moved(make_policy(tmp_path, lora=ADAPTERS)), HFEngine(tmp_path)
    engine.load_weights(policy.weights(), 1)
    assert largest_difference(policy, sample(engine)) < 1e-4


def test_the_start_depends_on_the_seed_alone(tiny_path):
    def start(seed):
        before = torch.get_rng_state()
        policy = make_policy(tiny_path, lora=ADAPTERS, seed=seed)
        assert torch.equal(before, torch.get_rng_state())
        return torch.cat([p.full_tensor().flatten() for p in policy.trainable.values()])

    first = start(3)
    torch.rand(1)
    assert torch.equal(start(3), first) and not torch.equal(start(4), first)


@pytest.fixture(scope="module")
def saved(tiny_path, tmp_path_factory):
    """(checkpoint, policy) after an update."""
    policy = moved(make_policy(tiny_path, lora=ADAPTERS))
    train_step(policy, sample(HFEngine(tiny_path)))
    tokenizer, snapshot = AutoTokenizer.from_pretrained(tiny_path), Snapshot(1, generators=generator_states())
    return save(tmp_path_factory.mktemp("checkpoints"), snapshot, policy, tokenizer, 1), policy


def test_others_read_the_merged_model_and_the_adapters(saved, tiny_path):
    from peft import PeftModel

    folder, policy = saved
    ids, positions = torch.arange(5, 25)[None], torch.arange(20)[None]
    with torch.no_grad():
        ours = policy.model(ids, positions, positions > 0)[0][0, 1:]
        base = AutoModelForCausalLM.from_pretrained(tiny_path)
        plain = base(ids).logits
        for model in (
            AutoModelForCausalLM.from_pretrained(folder / "hf"),
            PeftModel.from_pretrained(base, folder / "adapter"),
        ):
            logits = model(ids).logits
            theirs = logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
            assert (ours - theirs).abs().max() < 1e-4 and (plain - logits).abs().max() > 1e-3
    for name, value in AutoModelForCausalLM.from_pretrained(folder / "hf").state_dict().items():
        assert torch.equal(value, dict(policy.weights())[name]), name


def test_a_checkpoint_gives_adapters_and_moments_back(saved, tiny_path):
    folder, policy = saved
    names = [name for name in policy.tensors() if not name.startswith("optimizer.")]
    assert len(names) == 28 and all(".lora_" in name for name in names)
    other = make_policy(tiny_path, lora=ADAPTERS, seed=9)
    load(folder, other)
    branches = sample(HFEngine(tiny_path))
    assert train_step(policy, branches, 2) == train_step(other, branches, 2)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(policy.weights(), other.weights(), strict=True))


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (None, "--resume-from .*: it holds adapters of LoRA; add --lora.rank 4"),
        (LoRA(rank=8, alpha=8.0), "--lora.rank 8: .* has 4"),
        (LoRA(rank=4, alpha=9.0), "--lora.alpha 9.0: .* has 8.0"),
        (LoRA(rank=4, alpha=8.0, targets=("q_proj", "down_proj")), "--lora.targets down_proj q_proj: .* has all-lin"),
    ],
)
def test_other_adapters_are_refused(lora, message, saved, tiny_path):
    with pytest.raises(ValueError, match=message):
        load(saved[0], make_policy(tiny_path, lora=lora))


def test_another_base_and_a_checkpoint_without_adapters_are_refused(saved, tiny_path, tmp_path):
    other = make_policy(save_model(tmp_path / "other", seed=5), lora=ADAPTERS)
    with pytest.raises(ValueError, match="adapters belong to another base than this --model"):
        load(saved[0], other)
    tokenizer, snapshot = AutoTokenizer.from_pretrained(tiny_path), Snapshot(0, generators=generator_states())
    folder = save(tmp_path / "checkpoints", snapshot, make_policy(tiny_path), tokenizer, 1)
    with pytest.raises(ValueError, match="--lora.rank 4: .* was trained without LoRA; begin with --model .*step_0"):
        load(folder, other)


@pytest.mark.parametrize(
    ("target", "there"), [("q_prj", "has no such linear layer, but q_proj, k_proj, v_proj, o_proj, gate_proj"), ("lm_head", ""), ("proj", "")]
)  # fmt: skip
def test_targets_that_are_not_there(target, there, tiny_path):
    with pytest.raises(ValueError, match=f"--lora.targets {target}: Qwen3ForCausalLM .*{there}"):
        make_policy(tiny_path, lora=LoRA(rank=4, targets=("q_proj", target)))


def test_some_targets(tiny_path):
    policy = make_policy(tiny_path, lora=LoRA(rank=4, targets=("q_proj", "layers.1.mlp.up_proj")))
    places = {name.split(".lora_")[0].removeprefix("lm.model.layers.") for name in policy.trainable}
    assert places == {"0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.up_proj"}


# The command line.


def test_flags_over_a_file_and_the_dump(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from config import *\nconfig = Config(lora=LoRA(rank=8, targets=('q_proj',)))")
    config, _ = parse([str(file), "--lora.alpha", "3"])
    assert config.lora == LoRA(8, 3.0, ("q_proj",)) and config.lr == 5e-3 and "3/8 B A in q_proj" in config.words()
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    config, _ = parse([str(file), "--lora.rank", "0"])
    assert "LoRA" not in config.words() and config.lr == 5e-4
    older = {name: value for name, value in Config().to_dict().items() if name != "lora"}
    assert Config.from_dict(older).lora == LoRA()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lora.rank -1", "--lora.rank -1: must be at least 1"),
        ("--lora.rank 4 --lora.alpha 0", "--lora.alpha 0.0: must be a positive number"),
        ("--lora.rank 4 --lora.alpha inf", "--lora.alpha inf: must be a positive number"),
        ("--lora.rank 4 --lora.targets", "--lora.targets (): must name at least one"),
        ("--lora.alpha 3", "--lora.alpha 3.0: needs --lora.rank"),
        ("--lora.rnk 4", "--lora.rnk: no such option; did you mean --lora.rank?"),
    ],
)
def test_what_makes_no_sense_is_refused(flags, message, capsys):
    with pytest.raises(SystemExit) as end:
        parse(flags.split())
    err = capsys.readouterr().err
    assert end.value.code == 2 and message in err and err.count("\n") == 1


def test_a_missing_package_is_told_before_anything_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr("config.importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        parse(["--lora.rank", "8"])
    assert "--lora.rank 8 needs a package: pip install -e '.[lora]'" in capsys.readouterr().err
    parse(["--steps", "3"])
