"""Wordle: find a word in six guesses, from what each guess says about its letters.

    user       ... Guess 1 of 6.
    assistant  <guess>tares</guess>
    user       t a r e s
               - Y - - G
               Guess 2 of 6.

The home of algorithms that give credit over several turns, and of echo: what the environment answers follows from what was said.
It takes an instruction-tuned model that can spell (a tokenizer hides the letters of a word), about a billion parameters or more, with
room for thinking in every turn. Watch `found`, `guesses` and `invalid_guesses`.

Made-up words (consonant, vowel, consonant, vowel, consonant) are the default: no model knows the list, so what it finds it has
worked out. A file of real words makes it the known game.
"""

import random
import re
import string
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from envs.base import Agent, Env, require_at_least, user
from traces import Task

GUESSES = 6
VOWELS = "aeiou"
CONSONANTS = "".join(letter for letter in string.ascii_lowercase if letter not in VOWELS)


@dataclass
class Wordle(Env):
    """Reward 1 if the word is found within six guesses, else partial_credit * the best guess's share of letters, where one in its
    place counts 1 and one elsewhere in the word 1/2.

    A guess is as many letters as the word has, any of a to z, in the last <guess> tags or all of the reply. What is no guess is
    answered and uses up one of the six.
    """

    words: str | None = None
    """file of words, one a line, all of the same length; default: made-up words of five letters"""
    num_words: int = 2000
    """made-up words, both splits together"""
    partial_credit: float = 0.0
    """what the letters of the best guess are worth where the word is not found; 0: nothing"""

    def check(self) -> None:
        """Refuse a file without words, and a credit for letters that is worth as much as the word."""
        require_at_least(self, num_words=2)
        most = len(CONSONANTS) ** 3 * len(VOWELS) ** 2
        if self.num_words > most // 2:
            raise ValueError(f"--env.num-words {self.num_words}: must be at most {most // 2}")
        if not 0 <= self.partial_credit < 1:
            raise ValueError(f"--env.partial-credit {self.partial_credit:g}: must lie in [0, 1)")
        self.word_list()

    def word_list(self) -> list[str]:
        """All words, each once, in the order of the file or of the generator."""
        return list(made_up_words(self.num_words) if self.words is None else read_words(self.words))

    def tasks(self, split: Literal["train", "eval"]) -> list[Task]:
        """The words in a fixed random order, by a checksum: every tenth is held out."""
        words = sorted(self.word_list(), key=lambda word: (zlib.crc32(word.encode()), word))
        chosen = [word for i, word in enumerate(words) if (i % 10 == 0) == (split == "eval")]
        made_up = self.words is None
        return [
            Task(word, [user(f"{rules(len(word), made_up)}\n\nGuess 1 of {GUESSES}.")], {"answer": word})
            for word in chosen
        ]

    async def play(self, task: Task, agent: Agent) -> None:
        """Answer every guess, until the word is found or six are used up."""
        word, messages = task.info["answer"], task.prompt
        metrics = agent.trace.metrics
        metrics |= {"found": 0.0, "guesses": 0.0, "invalid_guesses": 0.0}
        agent.trace.reward = 0.0
        for number in range(1, GUESSES + 1):
            reply = await agent.say(*messages)
            guess = read_guess(reply["content"], len(word))
            metrics["guesses"] += 1
            if guess == word:
                metrics["found"] = agent.trace.reward = 1.0
                return
            if guess is None:
                metrics["invalid_guesses"] += 1
                told = f"That is no guess. Write {len(word)} letters from a to z, like this: <guess>{example(len(word))}</guess>"
            else:
                marks = feedback(guess, word)
                share = (marks.count("G") + marks.count("Y") / 2) / len(word)
                agent.trace.reward = max(agent.trace.reward, self.partial_credit * share)
                told = f"{' '.join(guess)}\n{' '.join(marks)}"
            messages = [user(f"{told}\nGuess {number + 1} of {GUESSES}.")]


def feedback(guess: str, word: str) -> str:
    """One mark for each letter of a guess: G in its place, Y elsewhere in the word, - not in it.

    A letter gets as many G and Y together as it stands in the word: first G, then Y from the left. feedback("eerie", "there") =
    "Y-Y-G": the word has two e, one of which is the last letter, so that the second e of the guess is one too many.
    """
    left = Counter(b for a, b in zip(guess, word, strict=True) if a != b)
    marks = ""
    for a, b in zip(guess, word, strict=True):
        if a == b:
            marks += "G"
        elif left[a] > 0:
            left[a] -= 1
            marks += "Y"
        else:
            marks += "-"
    return marks


def read_guess(text: str, length: int) -> str | None:
    """The guess in a reply, lower case; None where there is none of that length."""
    tagged = re.findall(r"<guess>(.*?)</guess>", text, re.DOTALL)
    guess = (tagged[-1] if tagged else text).strip()
    return guess.lower() if re.fullmatch(f"[a-zA-Z]{{{length}}}", guess) else None


def rules(length: int, made_up: bool) -> str:
    """The game in words."""
    which = ": consonant, vowel, consonant, vowel, consonant; it need not mean anything" if made_up else ""
    return (
        f"Find the secret word of {length} letters{which}. You have {GUESSES} guesses. After each, every letter gets a mark: G = in its "
        "place, Y = elsewhere in the word, - = not in the word (or not once more). Think as you like, and end every reply with a "
        f"guess like this: <guess>{example(length)}</guess>"
    )


def example(length: int) -> str:
    """No word, but of the right length."""
    return string.ascii_lowercase[:length] if length <= 26 else "a" * length


def made_up_words(count: int) -> list[str]:
    """So many distinct words of the pattern, always the same ones."""
    rng, words = random.Random(0), {}
    while len(words) < count:
        words["".join(rng.choice(letters) for letters in (CONSONANTS, VOWELS) * 2 + (CONSONANTS,))] = None
    return list(words)


def read_words(path: str) -> list[str]:
    """The words of a file, lower case, each once. Raises ValueError that names option, file and line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ValueError(f"--env.words {path}: {reason}") from error
    words = {}
    for number, line in enumerate(lines, 1):
        word = line.strip().lower()
        if not word:
            continue
        if not (word.isascii() and word.isalpha()) or len(word) != len(next(iter(words), word)):
            length = len(next(iter(words), ""))
            rule = f"{length} letters from a to z, as the first word has" if length else "letters from a to z"
            raise ValueError(f"--env.words {path}: line {number} is {line.strip()[:20]!r}; must be {rule}")
        words[word] = None
    if len(words) < 2:
        raise ValueError(f"--env.words {path}: {len(words)} words; must be at least 2, one of them held out")
    return list(words)
