"""GRPO over a main agent and its helpers, one tiny model in all roles: it learns to ask, for the right fruit, and to add up.

    python train.py configs/delegate_tiny.py

Shows sub-agents in the trace of the one who asks them, all of whom earn what its last answer earns. Costs some three minutes of one
CPU core, more beside other work. Expect (measured, seed 0, the first 24 of the 30 steps) a held-out reward from 0.33 at the start to
0.66 after 10 steps and 0.63 after 20, and eval/delegate/calls from 0.5 to 2.0: it asks both helpers where it often asked
nobody. That takes five to ten steps, and then the reward stays where it is, with noise of about 0.04 in each evaluation.
The commonest answer is right in 35 % of the held-out tasks.
"""

from algos.grpo import GRPOConfig
from config import Config, Source
from envs.delegate import Delegate

config = Config(
    # What the model was taught: two short lists, and a prompt that does not say how to ask.
    sources=[Source(env=Delegate(parts=2, max_items=6, max_turns=2, explain=False), algo=GRPOConfig())],
    steps=30,
    batch_size=64,
    max_new_tokens=48,
)
