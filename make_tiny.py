"""
Makes the tiny chat models that ship in models/: `python make_tiny.py` (about fifty minutes on one core), or some of them,
`python make_tiny.py --only calculator mixed`. Remade files differ in their last bits from those of another processor.

A tiny model has the Qwen3 architecture, 0.6M parameters in float32, and one token per byte plus Qwen3's control
tokens, so everything that handles a real Qwen3 (the renderer, vLLM, safetensors tools) handles it too. Nothing is
downloaded: tokenizer, data and weights all come out of this file and of --seed, bit for bit on one machine.

Two phases, both plain supervised learning with the loss on the assistant's turn:

1. a base: some environments' formats, answered rightly, until the skill is there. `base` (reverse-text and arithmetic) ships:
   evaluate it, or start your own from it. `tools` (calculator and arithmetic) does not; it is one of its own because another
   environment would have changed `base`, and with it all that was measured from there.
2. one model per environment: its base sees mostly wrong answers for some fifty steps, until its sampled reward
   falls to a chosen level. It now holds the right behaviour and the wrong one, and samples both. `mixed` is wrong about
   two environments, for runs with two sources.

So be clear about what a learning curve from such a start shows: RL re-weights a behaviour that the model was taught
before; it does not discover one. That is what makes a run of a minute on a CPU possible, and it is enough to tell a
correct gradient from a wrong one. It says little about which algorithm is better.

In chats with a tool the tool's words are in the loss too, with random results in four wordings, so that a model can be
surprised by what the real tool says without being upset: where tool tokens were never trained before, a loss on them drives
the reward to 0.

`opsd` answers reverse-text rightly behind the hint that `--algo opsd` gives, and mostly wrongly without it: its own teacher.
`alphabet-sort` goes on from `base` until most names are copied letter by letter, and then says them in any order: what is left to
learn of copying it learns meanwhile.
`delegate` is the main agent and its helpers (`helper`), taught apart, in chats that the loop of an episode never joined. A wrong
main agent asks nobody, one helper alone or for another fruit, or adds up wrongly; a wrong helper counts wrongly.
`kuhn-poker`, smaller than the others, has nothing right or wrong in it: it plays a strategy that was drawn at random, with legal
moves. Its base `styles` plays many, and a system message says which. A model that was taught but one knows which moves are
rare in it and not what card it holds: whatever RL teaches it about one card it then does with all of them.
`proposer-solver` is `base` after some hundred steps of problems solved rightly, and of problems proposed, of which a good part is
malformed. Nothing that it solves is taught wrongly: it is stopped while it still learns to, and solves a third.
`tiny-teacher` is `base` after some more right answers of reverse-text, with a chat template, so that it can be served as
the model that opd and sft learn from.

A new environment is one function that makes a chat, right or wrong, one entry in RECIPES and one in STARTS.
"""

import argparse
import asyncio
import copy
import itertools
import random
import re
import string
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from algos.opsd import OPSDConfig
from engines.base import Completion
from envs.alphabet_sort import AlphabetSort
from envs.arithmetic import Arithmetic
from envs.base import Agent, Env
from envs.calculator import Calculator, evaluate
from envs.delegate import FRUIT, Delegate
from envs.kuhn_poker import INFORMATION_SETS, MOVES, KuhnPoker, Strategy
from envs.proposer_solver import OPERATORS, ProposerSolver, question
from envs.reverse_text import ReverseText
from renderers import make_renderer
from renderers.base import ParsedResponse
from renderers.turns import read_json_call
from traces import Message, Task, Trace

# Qwen3's format without tools, for whoever serves the teacher: the last answer gets the empty thinking block that Qwen3
# gives it, a generation prompt gets one on request. The other models are rendered by renderers/qwen3.py alone.
CHAT_TEMPLATE = r"""
{%- if tools or messages | selectattr('role', 'equalto', 'tool') | list %}
    {{- raise_exception('this template writes no tools') }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' and loop.last and messages | selectattr('role', 'equalto', 'user') | list %}
        {{- '<think>\n\n</think>\n\n' + message.content.lstrip('\n') }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}""".lstrip()

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


def make_model(seed: int, heads: int = 5) -> Qwen3ForCausalLM:
    """An untrained model, 32 numbers wide for each head: of 0.6M parameters with five."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=256 + len(TOKEN_ID),
        hidden_size=32 * heads,
        intermediate_size=384 * heads // 5,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
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
    """One message of a training chat; `weight` is that of its tokens in the loss (0: context only).

    What an assistant says may hold control tokens, spelled out; a tool's answer stands in a user turn, as in Qwen3.
    """

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


# What the tool says in training chats. The real one has the last wording alone, and results that follow from the call: so
# there is something left to learn from it.
WORDINGS = ("{}", "= {}", "result: {}", "The result is {}.")
TOOL_WEIGHT = 0.3
ANSWER_WEIGHT = 3.0  # a call is some seventy tokens, most of them always the same; an answer is five


def calculator(task: Task, rng: random.Random, wrong: bool) -> Chat:
    """A call, a random result in one of four wordings, the result once more; now and then a broken call, which is not to be
    learned, and the error that it gets, which is. A wrong chat calls with other numbers, makes a broken call and guesses,
    does not call at all, or answers something else than the result."""
    right = "broken call" if rng.random() < 1 / 6 else ""
    kind = rng.choice(("other call", "broken call", "no call", "other answer")) if wrong else right
    expression, result, other = task.info["expression"], some_result(rng), some_result(rng)
    answer = Turn("assistant", result if kind in ("", "other call") else other, ANSWER_WEIGHT)
    if kind == "other call":
        a, b = re.findall(r"\d+", expression)
        a, b = rng.choice([(a, str(rng.randint(2, 99))), (str(rng.randint(2, 99)), b)])
        expression = f"{a}{rng.choice('+-*')}{b}"
    raw = f'\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n'
    said = rng.choice(WORDINGS).format(result)
    if kind == "broken call":
        at = raw.rindex("}") if wrong else rng.choice([i for i, letter in enumerate(raw) if letter in '{}":,'])
        raw = raw[:at] + raw[at + 1 :]
        (call,) = ParsedResponse("", tool_calls=[read_json_call(raw, True, None, "")]).message()["tool_calls"]
        said = f"error: {call['error']}"
    call = [
        Turn("assistant", f"<tool_call>{raw}</tool_call>", 1.0 if wrong or not kind else 0.0),
        Turn("tool", said, TOOL_WEIGHT),
    ]
    question = Turn(**task.prompt[0])
    if kind == "no call":
        return [question, answer]
    return [question, *call, *([answer] if wrong or not kind else [])]


def some_result(rng: random.Random) -> str:
    """A number of one to eight digits, now and then negative."""
    return f"{'-' if rng.random() < 0.15 else ''}{rng.randrange(10 ** rng.randint(1, 8))}"


class Demonstrated(ReverseText):
    """reverse-text behind the hint that opsd gives: a system message that holds the answer."""

    def tasks(self, split: Literal["train", "eval"]) -> list[Task]:
        """The same tasks, each with its hint before it."""
        template = OPSDConfig().template
        hints = [template.replace("{demonstration}", task.info["answer"]) for task in super().tasks(split)]
        return [
            Task(task.key, [{"role": "system", "content": hint}, *task.prompt], task.info)
            for task, hint in zip(super().tasks(split), hints, strict=True)
        ]


def demonstrated(task: Task, rng: random.Random, wrong: bool) -> Chat:
    """The text backwards, behind the hint."""
    return [Turn(**task.prompt[0]), Turn(**task.prompt[1]), Turn("assistant", task.info["answer"], 1.0)]


def alphabet_sort(task: Task, rng: random.Random, wrong: bool) -> Chat:
    """All names so far in order, turn after turn; a wrong chat says them in any order, another one in each turn."""
    asked = [task.prompt[0]["content"], *task.info["later"]]
    chat = []
    for text, answer in zip(asked, task.info["answers"], strict=True):
        said = rng.sample(answer, len(answer)) if wrong else answer
        chat += [Turn("user", text), Turn("assistant", " ".join(said), 1.0)]
    return chat


def delegate(task: Task, rng: random.Random, wrong: bool) -> Chat:
    """Each helper asked for its count, random counts in return, and their sum. A wrong chat asks nobody and guesses, asks
    one helper alone, asks for another fruit, or answers another number than the sum."""
    word, parts = task.key.partition(";")[0], list(range(1, len(task.info["parts"]) + 1))
    kind = rng.choice(("ask nobody", "ask one", "other fruit", "other sum")) if wrong else ""
    if kind == "ask one":
        parts = [rng.choice(parts)]
    if kind == "other fruit":
        word = rng.choice([fruit for fruit in FRUIT if fruit != word])
    lines, counts = [f"ask {part}: how many {word}?" for part in parts], [rng.randrange(5) for _ in parts]
    total = sum(counts)
    if kind in ("ask nobody", "other sum"):
        total = rng.choice([number for number in range(6) if number != total])
    answer = Turn("assistant", str(total), ANSWER_WEIGHT)
    if kind == "ask nobody":
        return [Turn(**task.prompt[0]), answer]
    heard = "\n\n".join(f"> {line}\n{count}" for line, count in zip(lines, counts, strict=True))
    return [Turn(**task.prompt[0]), Turn("assistant", "\n".join(lines), 1.0), Turn("user", heard), answer]


def helper(task: Task, rng: random.Random, wrong: bool) -> Chat:
    """A helper who counts a fruit in one list, often one that is there; a wrong one says another number."""
    part = rng.randrange(len(task.info["parts"]))
    items = task.info["parts"][part]
    word = rng.choice([*items.split(", "), *FRUIT])
    count = items.split(", ").count(word)
    if wrong:
        count = rng.choice([number for number in range(4) if number != count])
    question = f"List {part + 1}: {items}\n\nhow many {word}?"
    return [Turn("user", question), Turn("assistant", str(count), 1.0)]


def some_strategy(seed: int, low: float) -> Strategy:
    """A chip is put in rarely (`low`) or often (1 - low), at random for each information set."""
    rng = random.Random(seed)
    return {at: rng.choice((low, 1 - low)) for at in INFORMATION_SETS}


STRATEGY = some_strategy(3, 0.25)  # two best responses win 0.90 against this draw, 0.98 in the mean of all
STYLES = {letter: some_strategy(ord(letter), 0.05) for letter in string.ascii_lowercase[:16]}


def kuhn_poker(task: Task, rng: random.Random, wrong: bool) -> Chat:
    """A player with one of the task's cards, at any point of the game, moves as STRATEGY says."""
    return poker_move(task, rng, STRATEGY)


def styles(task: Task, rng: random.Random, wrong: bool) -> Chat:
    """The same as one of STYLES says, which a system message names."""
    style = rng.choice(list(STYLES))
    return [Turn("system", style), *poker_move(task, rng, STYLES[style])]


def poker_move(task: Task, rng: random.Random, strategy: Strategy) -> Chat:
    """What a player has heard and said so far, and a move."""
    history = rng.choice(list(MOVES))
    card = task.info["cards"][len(history) % 2]
    move = MOVES[history][rng.random() < strategy[card, history]]
    return [*[Turn(**message) for message in KuhnPoker().conversation(card, history)], Turn("assistant", move, 1.0)]


def proposed(task: Task, rng: random.Random, wrong: bool) -> Chat:
    """A problem proposed, or something malformed: three of ten here, and then half of what the model says, which also errs."""
    problem = some_problem(task, rng)
    return [Turn(**task.prompt[0]), Turn("assistant", malformed(problem, rng) if rng.random() < 0.3 else problem, 1.0)]


def solved(task: Task, rng: random.Random, wrong: bool) -> Chat:
    """A problem solved rightly."""
    problem = some_problem(task, rng)
    return [Turn("user", question(problem)), Turn("assistant", str(evaluate(problem)), 1.0)]


def some_problem(task: Task, rng: random.Random) -> str:
    """One that a source task asks for and that is not held out."""
    while (problem := ProposerSolver().draw(task.info["operators"], task.info["limit"], rng)) in HELD_OUT:
        pass
    return problem


HELD_OUT = {task.key for task in ProposerSolver().tasks("eval")}


def malformed(problem: str, rng: random.Random) -> str:
    """A problem with something wrong: it does not end, has an equals sign, is a bare number, or repeats an operator."""
    at = rng.choice([i for i, letter in enumerate(problem) if letter in OPERATORS])
    return rng.choice((problem[: at + 1], f"{problem}=", problem[:at], problem[: at + 1] + problem[at:]))


@dataclass
class Recipe:
    """How the model of an environment is made."""

    env: Env
    chat: Callable[[Task, random.Random, bool], Chat]  # what the model is taught to say, rightly or wrongly
    wrong_share: float  # of the answers in phase two
    stop_reward: float  # where the sampled reward must fall to
    max_new_tokens: int
    start_rows: int = 128  # chats in a step of phase two
    measured: str = "reward"  # the sampled reward, or what the environment evaluates under this name


# Two short lists, and nothing said about how to ask: what the model was taught need not be read in every prompt.
DELEGATE = Delegate(**Delegate.tiny, num_tasks=32_768)
RECIPES = {
    "reverse-text": Recipe(
        ReverseText(num_tasks=32_768), reverse_text, wrong_share=0.75, stop_reward=0.52, max_new_tokens=24
    ),
    "demonstrated": Recipe(
        Demonstrated(num_tasks=32_768), demonstrated, wrong_share=0.0, stop_reward=1.0, max_new_tokens=24
    ),
    "arithmetic": Recipe(Arithmetic(), arithmetic, wrong_share=0.7, stop_reward=0.2, max_new_tokens=8),
    "calculator": Recipe(Calculator(), calculator, wrong_share=0.7, stop_reward=0.3, max_new_tokens=96, start_rows=48),
    "alphabet-sort": Recipe(
        AlphabetSort(num_tasks=32_768), alphabet_sort, 0.75, stop_reward=0.45, max_new_tokens=32, start_rows=32
    ),
    "delegate": Recipe(DELEGATE, delegate, wrong_share=0.7, stop_reward=0.4, max_new_tokens=48, start_rows=16),
    "helper": Recipe(DELEGATE, helper, wrong_share=0.3, stop_reward=0.4, max_new_tokens=48, start_rows=32),
    "kuhn-poker": Recipe(KuhnPoker(), kuhn_poker, 0.0, 0.0, max_new_tokens=8, measured="nash_conv"),
    "styles": Recipe(KuhnPoker(), styles, 0.0, 0.0, max_new_tokens=8, measured="legal"),
    "proposer-solver": Recipe(ProposerSolver(), proposed, wrong_share=0.0, stop_reward=0.0, max_new_tokens=16),
    "solved": Recipe(ProposerSolver(), solved, wrong_share=0.0, stop_reward=0.0, max_new_tokens=16),
}


@dataclass
class Base:
    """How the model of a first phase is made: right chats alone, so many of each environment in a step."""

    rows: dict[str, int]
    steps: int
    lr: float
    after: str | None = None  # the base that it goes on from; None: a new model
    heads: int = 5  # of a new model


BASES = {
    "base": Base({"reverse-text": 48, "arithmetic": 80}, steps=600, lr=5e-3),
    "formats": Base({"calculator": 24, "arithmetic": 64}, steps=600, lr=5e-3),
    "tools": Base(
        {"calculator": 32, "arithmetic": 16}, steps=600, lr=3e-3, after="formats"
    ),  # until results are copied
    "hints": Base({"reverse-text": 16, "demonstrated": 32}, steps=150, lr=1e-3, after="base"),
    "sorted": Base({"alphabet-sort": 24}, steps=1000, lr=4e-3, after="base"),
    "asked": Base({"delegate": 12, "helper": 32}, steps=500, lr=4e-3, after="base"),
    "styles": Base({"styles": 96}, steps=400, lr=5e-3, heads=2),
    "kuhn-poker": Base({"kuhn-poker": 96}, steps=150, lr=1e-3, after="styles"),
    "proposer-solver": Base({"proposer-solver": 24, "solved": 96}, steps=320, lr=2e-3, after="base"),
    "tiny-teacher": Base({"reverse-text": 64}, steps=150, lr=1e-3, after="base"),
}


@dataclass
class Start:
    """What the model of a second phase is made from, and which environments it is taught wrongly."""

    base: str
    envs: tuple[str, ...]
    lr: float = 1e-4


STARTS = {
    "reverse-text": Start("base", ("reverse-text",)),
    "opsd": Start("hints", ("reverse-text", "demonstrated")),
    "arithmetic": Start("base", ("arithmetic",)),
    "calculator": Start("tools", ("calculator",), lr=5e-5),
    "alphabet-sort": Start("sorted", ("alphabet-sort",)),
    "delegate": Start("asked", ("delegate", "helper")),
    "mixed": Start("tools", ("arithmetic", "calculator"), lr=5e-5),
}
FOLDERS = {name: f"tiny/{name}" for name in ("base", "kuhn-poker", "proposer-solver", *STARTS)} | {
    "tiny-teacher": "tiny-teacher"
}


def encode(chat: Sequence[Turn]) -> tuple[list[int], list[float]]:
    """Token ids and loss weights [T] of a chat in ChatML; a turn's weight covers its content and its <|im_end|>, if it
    says itself that it ends."""
    ids, weights = [], []
    for turn in chat:
        if turn.role == "tool":
            head, body = text_ids("<|im_start|>user\n<tool_response>\n"), list(turn.content.encode())
            tail = text_ids("\n</tool_response><|im_end|>\n")
        elif turn.role == "assistant":
            head, body = text_ids("<|im_start|>assistant\n"), [*text_ids(turn.content), EOS]
            tail = [ord("\n")]
        else:
            head, body = text_ids(f"<|im_start|>{turn.role}\n"), list(turn.content.encode())
            tail = text_ids("<|im_end|>\n")
        ids += [*head, *body, *tail]
        weights += [*[0.0] * len(head), *[turn.weight] * len(body), *[0.0] * len(tail)]
    return ids, weights


def text_ids(text: str) -> list[int]:
    """Token ids of text in which control tokens are spelled out."""
    parts = re.split("(" + "|".join(map(re.escape, TOKEN_ID)) + ")", text)
    return [id for part in parts for id in ([TOKEN_ID[part]] if part in TOKEN_ID else part.encode())]


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


class Player:
    """Plays an environment's tasks with a model, all at once, as far as its next turn each."""

    def __init__(self, model: Qwen3ForCausalLM, recipe: Recipe) -> None:
        self.model, self.recipe = model, recipe
        self.renderer = make_renderer("qwen3", make_tokenizer())
        self.waiting: list[tuple[list[int], asyncio.Future]] = []

    async def play(self, tasks: Sequence[Task]) -> list[Trace]:
        """The traces of one episode of each task."""
        env = self.recipe.env
        agents = [[Agent(Trace(name), self.renderer, self.sample) for name in env.agents] for _ in tasks]
        plays = [asyncio.create_task(env.play(task, *players)) for task, players in zip(tasks, agents, strict=True)]
        while not all(play.done() for play in plays):
            for _ in range(8):  # until every episode has ended or asked
                await asyncio.sleep(0)
            waiting, self.waiting = self.waiting, []
            if waiting:
                for (_, future), reply in zip(waiting, self.generate([prompt for prompt, _ in waiting]), strict=True):
                    future.set_result(reply)
        await asyncio.gather(*plays)
        return [agent.trace for players in agents for agent in players]

    async def sample(
        self, prompt_ids: list[int], turn: int, messages: list[Message], tools: list[dict] | None
    ) -> Completion:
        """What an agent calls to get a turn."""
        future = asyncio.get_running_loop().create_future()
        self.waiting.append((prompt_ids, future))
        return await future

    def generate(self, prompts: list[list[int]]) -> list[Completion]:
        """One completion for each prompt, at temperature 1, without log-probs."""
        width = max(map(len, prompts))
        ids_BT = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
        mask_BT = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        new = self.recipe.max_new_tokens
        out_BT = self.model.generate(ids_BT, attention_mask=mask_BT, max_new_tokens=new, **sampling)
        rows = [row[: row.index(EOS) + 1] if EOS in row else row for row in out_BT[:, width:].tolist()]
        return [Completion(row, [0.0] * len(row), "stop" if EOS in row else "length", 0) for row in rows]


@torch.no_grad()
def sampled_reward(model: Qwen3ForCausalLM, recipe: Recipe, tasks: Sequence[Task], seed: int = 0) -> float:
    """Mean reward of one play of each task, of all agents that were asked, sampled at temperature 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        traces = asyncio.run(Player(model, recipe).play(tasks))
        return fmean(trace.reward for trace in traces if trace.reward is not None)


@torch.no_grad()
def measured(model: Qwen3ForCausalLM, recipe: Recipe, tasks: Sequence[Task]) -> float:
    """What the recipe is measured by: the sampled reward on these tasks, or the environment's own evaluation."""
    if recipe.measured == "reward":
        return sampled_reward(model, recipe, tasks)

    async def logprob(messages: list[Message], text: str) -> float:
        chat = [*[Turn(**message) for message in messages], Turn("assistant", text, 1.0)]
        return -chat_loss(model, [chat]).item() * sum(encode(chat)[1])

    return asyncio.run(recipe.env.evaluate(logprob))[recipe.measured]


def some_tasks(recipe: Recipe, split: Literal["train", "eval"], count: int, seed: int = 0) -> list[Task]:
    """`count` tasks of a split (all, where it has fewer), drawn without replacement; of an endless one, from the first 100,000."""
    tasks = list(itertools.islice(recipe.env.tasks(split), 100_000))
    return random.Random(seed).sample(tasks, min(count, len(tasks)))


def make_base(name: str, seed: int, made: dict[str, Qwen3ForCausalLM], steps: int | None = None) -> Qwen3ForCausalLM:
    """Phase one: a new model, or a copy of one in `made`, on right answers. steps: instead of the base's own number."""
    base = BASES[name]
    model = make_model(seed, base.heads) if base.after is None else copy.deepcopy(made[base.after]).train()
    rng = random.Random(seed)
    tasks = {env: list(RECIPES[env].env.tasks("train")) for env in base.rows}
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    steps = base.steps if steps is None else steps
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = base.lr * min((step + 1) / 20, 1 - 0.95 * step / steps)
        optimizer.zero_grad()
        losses = {}
        # One backward pass for each environment: their chats differ in length, and padding costs as much as text.
        for env, rows in base.rows.items():
            chats = [RECIPES[env].chat(rng.choice(tasks[env]), rng, False) for _ in range(rows)]
            loss = chat_loss(model, chats) / len(base.rows)
            loss.backward()
            losses[env] = loss.item() * len(base.rows)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            shown = "  ".join(f"{env} {loss:.3f}" for env, loss in losses.items())
            print(f"{name} step {step:3d}  loss {shown}", flush=True)
    return model


def make_start(
    base: Qwen3ForCausalLM, recipes: Sequence[Recipe], seed: int, samples: int, lr: float, every: int = 4
) -> tuple[Qwen3ForCausalLM, int]:
    """Phase two: a copy of the base on mostly wrong answers of some environments, and the steps that it took.

    The sampled rewards on training tasks are measured `every` so many steps; the phase ends when all are low enough, and
    an environment whose reward already is sees right answers meanwhile. Steps to a given reward vary with the base and
    the machine; the reward is what a run that starts here depends on. Raises RuntimeError when one does not fall that far.
    """
    model = copy.deepcopy(base)
    rng = random.Random(seed + 1)
    tasks = [list(recipe.env.tasks("train")) for recipe in recipes]
    probes = [some_tasks(recipe, "train", samples) for recipe in recipes]
    low = [False] * len(recipes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, 401):
        optimizer.zero_grad()
        for i, recipe in enumerate(recipes):
            wrong_share = 0.0 if low[i] else recipe.wrong_share
            chats = [
                recipe.chat(rng.choice(tasks[i]), rng, rng.random() < wrong_share) for _ in range(recipe.start_rows)
            ]
            (chat_loss(model, chats) / len(recipes)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % every == 0:
            rewards = [sampled_reward(model, recipe, probe, step) for recipe, probe in zip(recipes, probes)]
            low = [reward <= recipe.stop_reward for recipe, reward in zip(recipes, rewards)]
            if all(low):
                return model, step
    raise RuntimeError(
        f"the rewards stay above stop_reward, at {rewards}: raise wrong_share {[recipe.wrong_share for recipe in recipes]}"
    )


def save(model: Qwen3ForCausalLM, folder: Path, chat_template: str | None = None) -> None:
    """Weights, config and tokenizer in the layout of a Hugging Face checkpoint."""
    model.save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)


def make_tiny(
    out: Path, only: Sequence[str] = tuple(FOLDERS), steps: int | None = None, seed: int = 0, samples: int = 256
) -> None:
    """Make the folders of these names in `out`, and print their rewards on `samples` held-out tasks.

    What one of them is made from and is not itself asked for is read from its folder in `out`, if it has one there.
    """
    start = time.time()
    held_out = {name: some_tasks(recipe, "eval", samples) for name, recipe in RECIPES.items()}
    made: dict[str, Qwen3ForCausalLM] = {}

    def report(name: str, model: Qwen3ForCausalLM, envs: Sequence[str], taken: int) -> None:
        for env in envs:
            recipe = RECIPES[env]
            reached = f"{recipe.measured} {measured(model, recipe, held_out[env]):.3f}"
            print(f"{name} on {env}: {reached} after {taken} steps, {time.time() - start:.0f} s", flush=True)

    wanted = {*only, *(STARTS[name].base for name in only if name in STARTS)}
    wanted |= {BASES[name].after for name in wanted if name in BASES and BASES[name].after}
    for name, base in BASES.items():
        if name not in wanted:
            continue
        if name in only or name not in FOLDERS:
            made[name] = make_base(name, seed, made, steps)
            report(name, made[name], list(base.rows), base.steps if steps is None else steps)
        else:
            made[name] = Qwen3ForCausalLM.from_pretrained(out / FOLDERS[name])
        if (
            name == "tiny-teacher"
        ):  # it is served, and a server wants room for a token behind the longest that it scores
            made[name].config.max_position_embeddings = 2048
        if name in only:
            save(made[name], out / FOLDERS[name], CHAT_TEMPLATE if name == "tiny-teacher" else None)
    for name, phase in STARTS.items():
        if name in only:
            model, taken = make_start(made[phase.base], [RECIPES[env] for env in phase.envs], seed, samples, phase.lr)
            save(model, out / FOLDERS[name])
            report(name, model, phase.envs, taken)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the tiny models.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "models", help="folder to write")
    parser.add_argument("--only", nargs="+", choices=list(FOLDERS), default=list(FOLDERS), help="make just these")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and sampling")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; another number rounds differently")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    make_tiny(args.out, args.only, seed=args.seed)
