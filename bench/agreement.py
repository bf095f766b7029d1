"""How far apart are the log-probs of sampler and trainer? python bench/agreement.py [tiny smollm2 ...]

Largest difference over every sampled token, float32, at three temperatures, before and after an optimizer step, with
sequences packed into shared rows and each alone. Anything above 1e-4 is a bug in one of the two.
"""

import asyncio
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from transformers import AutoConfig, AutoTokenizer

from engines.base import Sampling
from engines.hf import HFEngine
from envs.arithmetic import Arithmetic
from losses import compute_loss, make_rl_loss
from packing import pack
from policy import OptimizerConfig, Policy, model_path
from renderers import make_renderer
from traces import Branch, Trace, assign_advantages

RL_LOSS = make_rl_loss("ipo")


def sample(engine: HFEngine, prompts: list[list[int]], sampling: Sampling) -> list[Branch]:
    """One branch a prompt, with random advantages."""

    async def everything() -> list:
        requests = [Sampling(**vars(sampling) | {"key": (i,)}) for i in range(len(prompts))]
        return await asyncio.gather(*[engine.generate(p, request) for p, request in zip(prompts, requests)])

    rng, branches = random.Random(0), []
    for prompt, completion in zip(prompts, asyncio.run(everything())):
        trace = Trace()
        trace.add_turn(prompt, completion.token_ids, completion.logprobs)
        assign_advantages(trace, rng.choice([-1.0, 1.0]))
        branches += trace.branches
    return branches


def difference(policy: Policy, branches: list[Branch]) -> float:
    """Largest |log pi - log mu| over the sampled tokens."""
    worst = 0.0
    for batch in pack(branches, 1024)[0]:
        gap = (policy(batch)[0].detach() - batch.inference_logprobs)[batch.loss_mask].abs()
        worst = max(worst, gap.max().item())
    return worst


for name in sys.argv[1:] or ["tiny", "smollm2"]:
    path = model_path(name, "arithmetic")
    renderer = make_renderer("auto", AutoTokenizer.from_pretrained(path), AutoConfig.from_pretrained(path).model_type)
    prompts = [
        renderer.render_ids(task.prompt, add_generation_prompt=True) for task in Arithmetic().tasks("train")[:16]
    ]
    for temperature in (0.6, 1.0, 1.3):
        engine = HFEngine(path)
        policy = Policy(path, OptimizerConfig(lr=1e-4 if name == "tiny" else 1e-5), 10, temperature)
        sampling = Sampling(24, temperature, stop_token_ids=tuple(renderer.stop_token_ids))
        for when in ("before", "after"):
            branches = sample(engine, prompts, sampling)
            alone = max(difference(policy, [branch]) for branch in branches)
            print(
                f"{name} temperature {temperature} {when} an update: packed {difference(policy, branches):.1e} alone {alone:.1e}",
                flush=True,
            )
            if when == "before":
                micro_batches, counts = pack(branches, 1024)
                for batch in micro_batches:
                    compute_loss(batch, policy(batch)[0], counts.denominators(), RL_LOSS)[0].backward()
                policy.step(1)
                engine.load_weights(policy.weights(), 1)
