"""What does a bridge save? python bench/bridge.py [MODEL_OR_PATH ...]

A conversation of 20 turns, its prompts made once by bridging and once by rendering everything anew, for each model (default:
the tiny one, and every family that has a tokenizer in NANOPOST_RENDERER_DATA). Counted are the characters that went through
the tokenizer's encoder, and the seconds of the fastest of three rounds. Rendering anew is O(T^2) in the turns.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from renderers import RENDERERS
from renderers.base import Message, Renderer
from renderers.check import Options, load, said, sampled, user

TURNS = 20
QUESTION = "Here is what I saw today, and there is a question in it: " + "the quick brown fox jumps over the dog. " * 5
ANSWER = "This is how I would see it, step by step, as asked: " + "a lazy dog is what the fox jumps over. " * 5


def first_turn(renderer: Renderer) -> tuple[list[int], list[int], Message]:
    """(prompt, completion, the message that it is) of the conversation's first turn."""
    prompt = renderer.render_ids([user(QUESTION)], add_generation_prompt=True)
    for reply in (said(ANSWER), said(ANSWER, "Let me think.")):
        completion = sampled(renderer, prompt, [user(QUESTION)], reply, tools=None)
        if completion is not None:
            return prompt, completion, reply
    raise ValueError(f"renderer {renderer.name} writes no turn that begins with its generation prompt")


def bridged(renderer: Renderer) -> list[list[int]] | None:
    """The prompts of all turns, each made from the one before; None where a bridge is refused."""
    prompt, completion, _ = first_turn(renderer)
    prompts = [prompt]
    for _ in range(1, TURNS):
        prompt = renderer.bridge_to_next_turn(prompt, completion, [user(QUESTION)])
        if prompt is None:
            return None
        prompts.append(prompt)
    return prompts


def rendered(renderer: Renderer) -> list[list[int]]:
    """The prompts of all turns, each rendered from all messages."""
    _, _, reply = first_turn(renderer)
    return [
        renderer.render_ids([user(QUESTION), *[reply, user(QUESTION)] * turn], add_generation_prompt=True)
        for turn in range(TURNS)
    ]


@contextmanager
def counting(renderer: Renderer) -> Iterator[list[int]]:
    """A list of the lengths of all texts that are encoded inside."""
    lengths, encode = [], renderer._encode
    renderer._encode = lambda text: (lengths.append(len(text)), encode(text))[1]
    try:
        yield lengths
    finally:
        del renderer._encode


def main() -> None:
    """Print a line for each model: characters encoded and seconds, bridged and rendered anew."""
    data = Path(os.environ.get("NANOPOST_RENDERER_DATA", "."))
    models = [(path, "auto") for path in sys.argv[1:] or ["models/tiny/base"]]
    if not sys.argv[1:]:
        models += [
            (str(data / "tokenizers" / name), name) for name in RENDERERS if (data / "tokenizers" / name).is_dir()
        ]
    print("renderer       tokens  characters: anew  bridged  ratio   seconds: anew  bridged  ratio")
    for path, name in models:
        renderer, _ = load(Options(path, name))
        characters, seconds = [], []
        for way in (rendered, bridged):
            with counting(renderer) as lengths:
                prompts = way(renderer)
            characters.append(sum(lengths))
            times = []
            for _ in range(3):
                start = time.perf_counter()
                way(renderer)
                times.append(time.perf_counter() - start)
            seconds.append(min(times))
        if prompts is None:
            print(f"{renderer.name:14} refuses to bridge")
            continue
        print(
            f"{renderer.name:14} {len(prompts[-1]):6}  {characters[0]:16}  {characters[1]:7}  {characters[0] / characters[1]:5.1f}"
            f"   {seconds[0]:13.4f}  {seconds[1]:7.4f}  {seconds[0] / seconds[1]:5.1f}"
        )


if __name__ == "__main__":
    main()
