"""
Makes the tiny chat models that ship in models/tiny: `python make_tiny.py` (about seven minutes on one core).

A tiny model has the Qwen3 architecture, 0.6M parameters in float32, and one token per byte plus Qwen3's control
tokens, so everything that handles a real Qwen3 (the renderer, vLLM, safetensors tools) handles it too. Nothing is
downloaded: tokenizer, data and weights all come out of this file and of --seed, bit for bit on one machine.

Two phases, both plain supervised learning with the loss on the assistant's turn:

1. base: all environments' formats, answered rightly, until the skill is there. Evaluate it, or start your own from it.
2. one model per environment: the base sees mostly wrong answers for some fifty steps, until its sampled reward
   falls to a chosen level. It now holds the right behaviour and the wrong one, and samples both.

So be clear about what a learning curve from such a start shows: RL re-weights a behaviour that the model was taught
before; it does not discover one. That is what makes a run of a minute on a CPU possible, and it is enough to tell a
correct gradient from a wrong one. It says little about which algorithm is better.

A new environment is one function that makes a chat, right or wrong, and one entry in RECIPES.
"""

import argparse
import asyncio
import copy
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from envs.arithmetic import Arithmetic
from envs.base import Env
from envs.reverse_text import ReverseText
from traces import Message, Task, Trace

# Ids follow the 256 bytes in this order. Qwen3 flags the first three as special and the rest as plain added tokens:
# both are atomic, but only the special ones vanish under skip_special_tokens.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
TOKEN_ID = {token: 256 + i for i, token in enumerate(SPECIAL + ADDED)}
PAD, EOS = TOKEN_ID["<|endoftext|>"], TOKEN_ID["<|im_end|>"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: the id of a byte is its value, control tokens follow from 256 on."""
    # Byte-level BPE writes each byte as one printable character: itself where it is printable, else one from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    core = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def make_model(seed: int) -> Qwen3ForCausalLM:
    """An untrained model of 0.6M parameters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=256 + len(TOKEN_ID),
        hidden_size=160,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=5,
        num_key_value_heads=5,
        head_dim=32,  # the smallest that vLLM's CPU attention takes
        max_position_embeddings=1024,
        initializer_range=0.08,  # at this width the usual 0.02 more than doubles the steps until reversal is learned
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


@dataclass
class Turn:
    """One message of a training chat; `weight` is that of its tokens in the loss (0: context only)."""

    role: str
    content: str
    weight: float = 0.0


Chat = list[Turn]


def reverse_text(task: Task, rng: random.Random, wrong: bool) -> Chat:
    """The text backwards; a wrong answer shuffles its characters."""
    answer = task.info["answer"]
    if wrong:
        answer = "".join(rng.sample(answer, len(answer)))
    return [Turn(**task.prompt[0]), Turn("assistant", answer, 1.0)]


def arithmetic(task: Task, rng: random.Random, wrong: bool) -> Chat:
    """The bare sum; a wrong answer is the sum of two other numbers below 100."""
    answer = rng.randrange(100) + rng.randrange(100) if wrong else task.info["answer"]
    return [Turn(**task.prompt[0]), Turn("assistant", str(answer), 1.0)]


@dataclass
class Recipe:
    """How the model of an environment is made."""

    env: Env
    chat: Callable[[Task, random.Random, bool], Chat]  # what the model is taught to say, rightly or wrongly
    base_rows: int  # chats of this environment in a step of phase one
    wrong_share: float  # of the answers in phase two
    stop_reward: float  # where the sampled reward must fall to
    max_new_tokens: int
    start_rows: int = 128  # chats in a step of phase two


RECIPES = {
    "reverse-text": Recipe(
        ReverseText(num_tasks=32_768), reverse_text, base_rows=48, wrong_share=0.75, stop_reward=0.52, max_new_tokens=24
    ),
    "arithmetic": Recipe(Arithmetic(), arithmetic, base_rows=80, wrong_share=0.7, stop_reward=0.2, max_new_tokens=8),
}


def encode(chat: Sequence[Turn]) -> tuple[list[int], list[float]]:
    """Token ids and loss weights [T] of a chat in ChatML; a turn's weight covers its content and its <|im_end|>."""
    ids, weights = [], []
    for turn in chat:
        head = [TOKEN_ID["<|im_start|>"], *f"{turn.role}\n".encode()]
        body = [*turn.content.encode(), EOS]
        ids += [*head, *body, ord("\n")]
        weights += [*[0.0] * len(head), *[turn.weight] * len(body), 0.0]
    return ids, weights


def chat_loss(model: Qwen3ForCausalLM, chats: Sequence[Chat]) -> torch.Tensor:
    """Weighted mean of the tokens' cross-entropies, a scalar."""
    rows = [encode(chat) for chat in chats]
    width = max(len(ids) for ids, _ in rows)
    ids_BT = torch.tensor([ids + [PAD] * (width - len(ids)) for ids, _ in rows])
    weights_BT = torch.tensor([weights + [0.0] * (width - len(weights)) for _, weights in rows])[:, 1:]
    # Padding stands on the right, where causal attention hides it from the tokens that count.
    logits_BTV = model(ids_BT, use_cache=False).logits[:, :-1]
    nll_BT = torch.nn.functional.cross_entropy(logits_BTV.transpose(1, 2), ids_BT[:, 1:], reduction="none")
    return (nll_BT * weights_BT).sum() / weights_BT.sum()


class Recorded:
    """An agent whose reply is already there, so that the environment grades it with its own code."""

    def __init__(self, reply: str) -> None:
        self.trace, self.reply = Trace(), reply

    async def say(self, *messages: Message, tools: list[dict] | None = None) -> Message:
        """The reply, whatever is asked."""
        return {"role": "assistant", "content": self.reply}


@torch.no_grad()
def sampled_reward(model: Qwen3ForCausalLM, recipe: Recipe, tasks: Sequence[Task], seed: int = 0) -> float:
    """Mean reward of one reply to each task, sampled at temperature 1."""
    prompts = [
        encode([Turn(**message) for message in task.prompt])[0] + [TOKEN_ID["<|im_start|>"], *b"assistant\n"]
        for task in tasks
    ]
    width = max(map(len, prompts))
    ids_BT = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    mask_BT = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        out_BT = model.generate(ids_BT, attention_mask=mask_BT, max_new_tokens=recipe.max_new_tokens, **sampling)
    rewards = []
    for task, row in zip(tasks, out_BT[:, width:].tolist(), strict=True):
        reply = row[: row.index(EOS)] if EOS in row else row
        agent = Recorded(bytes(token for token in reply if token < 256).decode(errors="replace"))
        asyncio.run(recipe.env.play(task, agent))
        rewards.append(agent.trace.reward)
    return fmean(rewards)


def some_tasks(recipe: Recipe, split: Literal["train", "eval"], count: int, seed: int = 0) -> list[Task]:
    """`count` tasks of a split, drawn without replacement."""
    return random.Random(seed).sample(list(recipe.env.tasks(split)), count)


def make_base(steps: int, seed: int, lr: float = 5e-3) -> Qwen3ForCausalLM:
    """Phase one: a new model on right answers of all environments."""
    model = make_model(seed)
    rng = random.Random(seed)
    tasks = {name: list(recipe.env.tasks("train")) for name, recipe in RECIPES.items()}
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / 20, 1 - 0.95 * step / steps)
        optimizer.zero_grad()
        losses = {}
        # One backward pass for each environment: their chats differ in length, and padding costs as much as text.
        for name, recipe in RECIPES.items():
            chats = [recipe.chat(rng.choice(tasks[name]), rng, False) for _ in range(recipe.base_rows)]
            loss = chat_loss(model, chats) / len(RECIPES)
            loss.backward()
            losses[name] = loss.item() * len(RECIPES)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"base step {step:3d}  loss", "  ".join(f"{name} {loss:.3f}" for name, loss in losses.items()))
    return model


def make_start(
    base: Qwen3ForCausalLM, recipe: Recipe, seed: int, samples: int, lr: float = 1e-4, every: int = 4
) -> tuple[Qwen3ForCausalLM, int]:
    """Phase two: a copy of the base on mostly wrong answers of one environment, and the steps that it took.

    The sampled reward on training tasks is measured `every` so many steps and ends it. Steps to a given reward vary
    with the base and the machine; the reward is what a run that starts here depends on. Raises RuntimeError when it
    does not fall that far.
    """
    model = copy.deepcopy(base)
    rng = random.Random(seed + 1)
    tasks = list(recipe.env.tasks("train"))
    probe = some_tasks(recipe, "train", samples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, 401):
        chats = [
            recipe.chat(rng.choice(tasks), rng, rng.random() < recipe.wrong_share) for _ in range(recipe.start_rows)
        ]
        optimizer.zero_grad()
        chat_loss(model, chats).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % every == 0 and sampled_reward(model, recipe, probe, seed=step) <= recipe.stop_reward:
            return model, step
    raise RuntimeError(
        f"the reward stays above stop_reward {recipe.stop_reward}: raise wrong_share {recipe.wrong_share}"
    )


def save(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Weights, config and tokenizer in the layout of a Hugging Face checkpoint."""
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def make_tiny(out: Path, steps: int = 600, seed: int = 0, samples: int = 256) -> None:
    """Make base and one model per environment in `out`, and print their rewards from `samples` held-out tasks."""
    start = time.time()
    held_out = {name: some_tasks(recipe, "eval", samples) for name, recipe in RECIPES.items()}
    base = make_base(steps, seed)
    save(base, out / "base")
    for name, recipe in RECIPES.items():
        reward = sampled_reward(base, recipe, held_out[name])
        print(f"base on {name}: reward {reward:.3f}, {time.time() - start:.0f} s")
    for name, recipe in RECIPES.items():
        model, taken = make_start(base, recipe, seed, samples)
        save(model, out / name)
        reward = sampled_reward(model, recipe, held_out[name])
        print(f"{name}: reward {reward:.3f} after {taken} steps, {time.time() - start:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the tiny models.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "models" / "tiny", help="folder to write")
    parser.add_argument("--steps", type=int, default=600, help="training steps of the base")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and sampling")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; another number rounds differently")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    make_tiny(args.out, args.steps, args.seed)
