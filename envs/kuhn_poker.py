"""Kuhn poker: the smallest poker, so small that a policy's distance from perfect play is computed and not estimated.

    player0    user       K: check/bet
               assistant  check
    player1    user       Q check: check/bet
               assistant  bet
    player0    user       bet: fold/call
               assistant  call                    2 for player0, -2 for player1

Three cards, J < Q < K. Each player antes 1 and is dealt one card. player0 checks or bets 1; a check may be answered by a check
or a bet; a bet is called or folded to. Two checks or a call show the cards: the higher one wins what the other has put in, 1
or 2. Who folds loses 1. The value of the game is -1/18 for player0 (Kuhn, 1950).

Every move is one reply, and it is legal only if it is one of the words that the prompt offers and nothing else (white space
around it does not count). Any other reply ends the game: its player loses ILLEGAL = 2, as much as the worst showdown, to
the other. So does a limit on turns or on the context that leaves a player no move: who filled the context must not get away
with 0. `env/kuhn-poker/illegal` is the share of games that end so. All rewards of a game sum to 0.

The tasks are the six deals, and both splits have the same six: a game that is held out would be half of poker. Nothing is lost
by it, because there is no answer to remember: what is learned is a strategy, and `evaluate` measures the strategy itself.
For held-out games the deals come one after the other without an end, so that --eval-samples counts games.

`evaluate` asks the policy for its probabilities at the twelve information sets (a card, and what was said), normalized over
the two legal words, and gives

    nash_conv   what a best response wins against it as player1, plus what one wins as player0; 0 at a Nash equilibrium
    value       what it wins as player0 against itself
    legal       probability of the two legal words, in the mean of the information sets

all exact, by walking the game tree. They are of the policy in both seats, also where one of them is somebody else's:
`--env.player1.script nash` lets perfect play take it, `--env.player1.model.name` a served model (which will want `--env.show-rules`).

Expect self-play by policy gradient to go round in circles, or to end where one side always bets: each player is right to
chase the other's last strategy, and nothing makes them meet. An anchor (`--reference.name`) does.
"""

import asyncio
import itertools
import math
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from envs.base import Agent, Cut, Env, Player, Script, user
from frozen import FrozenModel
from traces import Message, Task

CARDS = "JQK"  # by rank
DEALS = ["".join(cards) for cards in itertools.permutations(CARDS, 2)]  # player0's card first
ILLEGAL = 2
History = tuple[str, ...]
# The legal words after what was said before: first the one that puts no chip in, then the one that does. Any other history is an end.
MOVES: dict[History, tuple[str, str]] = {
    (): ("check", "bet"),
    ("check",): ("check", "bet"),
    ("bet",): ("fold", "call"),
    ("check", "bet"): ("fold", "call"),
}
# Who moves follows from the length of the history: player0 at the even ones.
INFORMATION_SETS = [(card, history) for history in MOVES for card in CARDS]
# Probability of the word that puts a chip in, at each information set.
Strategy = dict[tuple[str, History], float]

RULES = (
    "You play Kuhn poker: three cards, J < Q < K, one for each player, and an ante of 1. A bet is 1 more. "
    "The first player may check or bet, the second may check or bet after a check; a bet is answered by call or fold. "
    "I tell you your card, what was said, and your legal moves. Answer with one of those words, in lower case, and nothing else.\n"
)


@dataclass
class KuhnPlayer(Player):
    """Who plays a seat: the policy, unless a served model or a script is named."""

    script: Literal["", "nash", "uniform"] = ""
    """play by the book: nash (a perfect player), uniform (either legal move alike)"""


@dataclass
class KuhnPoker(Env):
    """Poker with three cards for two players; reward = chips won."""

    agents: ClassVar = ("player0", "player1")

    player0: KuhnPlayer = field(default_factory=KuhnPlayer)
    player1: KuhnPlayer = field(default_factory=KuhnPlayer)
    show_rules: bool = False
    """say the rules first, for a model that was not taught the game (the tiny one was)"""

    def check(self) -> None:
        """Refuse a seat for two."""
        for agent in self.agents:
            player = getattr(self, agent)
            if player.script and player.model != FrozenModel():
                raise ValueError(f"--env.{agent}.script {player.script}: --env.{agent}.model has that seat already")

    def tasks(self, split: Literal["train", "eval"]) -> Iterable[Task]:
        """The six deals: once for training, again and again for evaluation."""
        if split == "train":
            return [Task(deal, [], {"cards": deal}) for deal in DEALS]
        return (Task(f"{deal}-{i}", [], {"cards": deal}) for i, deal in enumerate(itertools.cycle(DEALS)))

    def player(self, agent: str) -> FrozenModel | Script | None:
        """A script where one is named."""
        script = getattr(self, agent).script
        return self._script({"nash": nash(), "uniform": uniform()}[script]) if script else super().player(agent)

    async def play(self, task: Task, *players: Agent) -> None:
        """One game."""
        cards, history = task.info["cards"], ()

        def pay(winnings: int, illegal: bool = False) -> None:
            for player, reward in zip(players, (winnings, -winnings), strict=True):
                player.trace.reward, player.trace.metrics["illegal"] = float(reward), float(illegal)

        while history in MOVES:
            mover = len(history) % 2
            try:
                move = (await players[mover].say(self._question(cards[mover], history)))["content"].strip()
            except Cut:
                pay(-ILLEGAL if mover == 0 else ILLEGAL, illegal=True)
                raise
            if move not in MOVES[history]:
                return pay(-ILLEGAL if mover == 0 else ILLEGAL, illegal=True)
            history += (move,)
        pay(payoff(cards, history))

    def conversation(self, card: str, history: History) -> list[Message]:
        """What the player who is to move has heard and said so far: one conversation for each information set."""
        messages = []
        for length in range(len(history) % 2, len(history) + 1, 2):
            messages.append(self._question(card, history[:length]))
            if length < len(history):
                messages.append({"role": "assistant", "content": history[length]})
        return messages

    def _question(self, card: str, history: History) -> Message:
        """The card at a player's first move, what the other has just said, the legal words."""
        known = [card] * (len(history) < 2) + list(history[-1:])
        rules = RULES if self.show_rules and len(history) < 2 else ""
        return user(f"{rules}{' '.join(known)}: {'/'.join(MOVES[history])}")

    def _script(self, strategy: Strategy) -> Script:
        def script(messages: list[Message], rng: random.Random) -> str:
            at = next(at for at in INFORMATION_SETS if self.conversation(*at) == messages)
            return MOVES[at[1]][rng.random() < strategy[at]]

        return script

    async def evaluate(self, logprob: Callable[[list[Message], str], Awaitable[float]]) -> dict[str, float]:
        """Exploitability and value of the policy's strategy, and how much of it is legal."""
        words = [(at, word) for at in INFORMATION_SETS for word in MOVES[at[1]]]
        asked = await asyncio.gather(*[logprob(self.conversation(*at), word) for at, word in words])
        strategy, legal = {}, 0.0
        for i, at in enumerate(INFORMATION_SETS):
            passive, active = asked[2 * i : 2 * i + 2]
            top = max(passive, active)
            mass = math.exp(passive - top) + math.exp(active - top)
            strategy[at] = math.exp(active - top) / mass
            legal += mass * math.exp(top) / len(INFORMATION_SETS)
        return {"nash_conv": nash_conv(strategy), "value": value(strategy), "legal": legal}


def payoff(cards: str, history: History) -> int:
    """What player0 wins at the end of a game, in chips."""
    if history[-1] == "fold":
        return 1 if history == ("bet", "fold") else -1
    stake = 2 if history[-1] == "call" else 1
    return stake if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -stake


def value(strategy: Strategy) -> float:
    """What a strategy wins as player0 against itself."""

    def play(cards: str, history: History) -> float:
        if history not in MOVES:
            return payoff(cards, history)
        passive, active = MOVES[history]
        p = strategy[cards[len(history) % 2], history]
        return (1 - p) * play(cards, (*history, passive)) + p * play(cards, (*history, active))

    return math.fsum(play(cards, ()) for cards in DEALS) / len(DEALS)


def best_response(strategy: Strategy, seat: int) -> float:
    """What the best answer to a strategy wins in a seat (0 or 1).

    It knows its own card and what was said, so it chooses once for all cards that the other may hold: at its own moves the
    larger sum over them, each weighted by how likely its holder is to have come here.
    """

    def play(card: str, history: History, reach: dict[str, float]) -> float:
        if history not in MOVES:
            won = {other: payoff(card + other if seat == 0 else other + card, history) for other in reach}
            return sum(reach[other] * won[other] for other in reach) * (1 if seat == 0 else -1)
        passive, active = MOVES[history]
        if len(history) % 2 == seat:
            return max(play(card, (*history, word), reach) for word in (passive, active))
        bets = {other: reach[other] * strategy[other, history] for other in reach}
        checks = {other: reach[other] - bets[other] for other in reach}
        return play(card, (*history, passive), checks) + play(card, (*history, active), bets)

    return sum(play(card, (), {other: 1 / len(DEALS) for other in CARDS if other != card}) for card in CARDS)


def nash_conv(strategy: Strategy) -> float:
    """What two best responses, one in each seat, win together against a strategy: 0 at a Nash equilibrium, else more."""
    return best_response(strategy, 0) + best_response(strategy, 1)


def uniform() -> Strategy:
    """Either move alike."""
    return dict.fromkeys(INFORMATION_SETS, 0.5)


def nash(alpha: float = 1 / 3) -> Strategy:
    """An equilibrium for each alpha in [0, 1/3]: how often player0 bluffs with the jack. player1 has but one."""
    for_cards = {  # J, Q, K
        (): (alpha, 0.0, 3 * alpha),
        ("check",): (1 / 3, 0.0, 1.0),
        ("bet",): (0.0, 1 / 3, 1.0),
        ("check", "bet"): (0.0, alpha + 1 / 3, 1.0),
    }
    return {(card, history): for_cards[history][CARDS.index(card)] for card, history in INFORMATION_SETS}
