"""Wordle: marks against an independent rule, guesses that are none, and what a game earns."""

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import parse
from envs.wordle import CONSONANTS, VOWELS, Wordle, feedback, read_guess
from tests.speaker import play
from traces import Task


def by_elimination(guess, word):
    """Marks in two passes that cross letters of the word out: first those in their place, then from the left."""
    marks, left = ["-"] * len(word), list(word)
    for i in range(len(word)):
        if guess[i] == word[i]:
            marks[i], left[i] = "G", None
    for i in range(len(word)):
        if marks[i] == "-" and guess[i] in left:
            marks[i], left[left.index(guess[i])] = "Y", None
    return "".join(marks)


def test_marks_of_every_pair_of_words_from_three_letters():
    words = ["".join(letters) for letters in itertools.product("abc", repeat=4)]
    for guess, word in itertools.product(words, words):
        marks = feedback(guess, word)
        assert marks == by_elimination(guess, word)
        for letter in "abc":  # what the marks mean: a letter is marked as often as both have it
            marked = sum(g == letter and mark != "-" for g, mark in zip(guess, marks, strict=True))
            assert marked == min(guess.count(letter), word.count(letter))
            fates = [mark for g, mark in zip(guess, marks, strict=True) if g == letter and mark != "G"]
            assert "-Y" not in "".join(fates), "the first ones get the Y"
        assert all((mark == "G") == (g == w) for g, w, mark in zip(guess, word, marks, strict=True))


@pytest.mark.parametrize(
    ("guess", "word", "marks"),
    [("eerie", "there", "Y-Y-G"), ("allee", "apple", "GY--G"), ("babab", "abbba", "YYGYY"), ("crane", "crane", "GGGGG"),
     ("geese", "these", "--GGG"), ("xxxxx", "crane", "-----"), ("speed", "abide", "--Y-Y"), ("speed", "erase", "Y-YY-")],
)  # fmt: skip
def test_marks(guess, word, marks):
    assert feedback(guess, word) == marks


@pytest.mark.parametrize(
    ("text", "guess"),
    [("<guess>crane</guess>", "crane"), ("crane", "crane"), (" CRANE\n", "crane"), ("<guess> Crane </guess> ok", "crane"),
     ("<guess>crane</guess> no, <guess>slate</guess>", "slate"), ("<guess>crane</guess> <guess>no</guess>", None), ("I say crane", None),
     ("crane.", None), ("", None), ("cranes", None), ("cran", None), ("cr4ne", None), ("<guess>crane", None), ("<guess></guess>", None),
     ("c r a n e", None), ("crané", None), ("сrane", None), ("\u212arane", None), ("crane\x00", None), ("\ufffd" * 5, None)],
)  # fmt: skip
def test_what_a_guess_is(text, guess):
    assert read_guess(text, 5) == guess


@given(st.text(max_size=50))
@settings(max_examples=200, deadline=None)
def test_no_reply_raises(text):
    guess = read_guess(text, 5)
    assert guess is None or (len(guess) == 5 and guess.isascii() and feedback(guess, "crane"))


def game(*guesses, word="crane", **options):
    return play(
        Wordle(**options), Task(word, [{"role": "user", "content": "Guess 1 of 6."}], {"answer": word}), *guesses
    )


def test_a_game_that_is_won():
    trace = game("<guess>nacre</guess>", "what?", "Well: <guess>crane</guess>")
    assert trace.reward == 1.0 and trace.metrics == {"found": 1, "guesses": 3, "invalid_guesses": 1}
    assert [message["role"] for message in trace.messages] == ["user", "assistant"] * 3
    assert trace.messages[2]["content"] == "n a c r e\nY Y Y Y G\nGuess 2 of 6."
    assert trace.messages[4]["content"].startswith("That is no guess.") and trace.messages[4]["content"].endswith(
        "Guess 3 of 6."
    )
    assert len(trace.branches) == 1 and trace.num_turns == 3


def test_a_game_that_is_lost():
    trace = game("crank")
    assert (
        trace.reward == 0 and trace.metrics == {"found": 0, "guesses": 6, "invalid_guesses": 0} and trace.num_turns == 6
    )
    assert game("").metrics == {"found": 0, "guesses": 6, "invalid_guesses": 6}
    assert game("slate", "slate", "slate", "slate", "slate", "crane").reward == 1


def test_credit_for_letters():
    assert game("crank", partial_credit=0.5).reward == pytest.approx(0.5 * 4 / 5)
    assert game("crank", "zzzzz", partial_credit=0.5).reward == pytest.approx(0.5 * 4 / 5), "the best guess counts"
    assert game("nacre", partial_credit=0.5).reward == pytest.approx(0.5 * (1 + 4 / 2) / 5)
    assert game("", partial_credit=0.5).reward == 0 and game("crane", partial_credit=0.5).reward == 1


def test_made_up_words():
    env = Wordle()
    env.check()
    train, held_out = env.tasks("train"), env.tasks("eval")
    assert (len(train), len(held_out)) == (1800, 200) and env.tasks("train") == train
    words = {task.key for task in train + held_out}
    assert len(words) == 2000 and all(
        len(word) == 5 and set(word[::2]) <= set(CONSONANTS) and set(word[1::2]) <= set(VOWELS) for word in words
    )
    assert not any(task.key in task.prompt[0]["content"] for task in train), "the prompt does not give the word away"
    assert "consonant, vowel" in train[0].prompt[0]["content"] and train[0].prompt[0]["content"].endswith(
        "Guess 1 of 6."
    )


def test_words_of_a_file(tmp_path):
    words = ["".join(random.Random(i).choices("abcdefg", k=7)) for i in range(40)]
    path = tmp_path / "words.txt"
    path.write_text("\n".join([words[0].upper(), *words, "", *words]))
    env = Wordle(words=str(path))
    env.check()
    train, held_out = ({task.key for task in env.tasks(split)} for split in ("train", "eval"))
    assert train | held_out == set(words) and not train & held_out and len(held_out) == 4
    task = env.tasks("eval")[0]
    assert "7 letters." in task.prompt[0]["content"] and play(env, task, task.key).reward == 1


@pytest.mark.parametrize(
    ("flags", "error"),
    [("--env.words /no/such", "--env.words /no/such: No such file"), ("--env.words {file}", "--env.words {file}: line 2 is 'sl8te'"),
     ("--env.num-words 1", "--env.num-words 1: must be at least 2"), ("--env.num-words 200000", "--env.num-words 200000: must be at most"),
     ("--env.partial-credit 1", "--env.partial-credit 1: must lie in"), ("--env.partial-credit nan", "--env.partial-credit nan: must lie in")],
)  # fmt: skip
def test_one_line_names_the_option(flags, error, tmp_path, capsys):
    file = tmp_path / "words"
    file.write_text("crane\nsl8te\n")
    with pytest.raises(SystemExit):
        parse(["--env", "wordle", *flags.format(file=file).split()])
    said = capsys.readouterr().err
    assert error.format(file=file) in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "0 words"),
        ("crane\n", "1 words"),
        ("crane\nslates\n", "must be 5 letters"),
        ("crané\nslate", "line 1"),
        ("\x00\n", "line 1"),
    ],
)
def test_files_without_words(text, error, tmp_path):
    file = tmp_path / "words"
    file.write_text(text)
    with pytest.raises(ValueError, match=error):
        Wordle(words=str(file)).check()
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="UTF-8"):
        Wordle(words=str(file)).check()


def test_the_configuration_is_json():
    config, _ = parse("--env wordle --env.partial-credit 0.2".split())
    json.dumps(config.to_dict())
