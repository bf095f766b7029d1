"""A frozen model behind an OpenAI-compatible server: a teacher that scores, or a model that samples what the policy imitates.

    score      token ids in, the log-prob of each out. Only vLLM's servers do that (`prompt_logprobs`).
    generate   token ids in, token ids out. vLLM's servers too, and only where the server's tokenizer is the policy's.
    chat       messages in, a message out: any server. The reply comes as text, so the policy's renderer writes it once, its
               end token included. That is the one declared exception to "nothing is tokenized again": the tokens that are
               trained on are the policy's way of writing what the model said.

`preflight` finds out which of these a server can do, before anything heavy is loaded; what is wrong then is one line that
names the option, the address and what to do. During the run a request is retried with growing pauses after a refusal (429),
a server error or a broken connection, on the next server where there are several, until its time is over. Then it raises,
which ends the episode that asked and no other. An answer that is not what was asked for raises at once: a log-prob that is
missing is never taken for 0.
"""

import asyncio
import json
import math
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import openai

from engines.base import Completion, Engine, Sampling

PREFLIGHT_SECONDS = (
    25.0  # for all questions together; whoever waits at a console learns within half a minute what is wrong
)
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0  # seconds between two tries; each doubles the one before
PROBE = "Grüße, 世界! 3 + 4 = 7.\n\n\tdef f(x):  return x"

JITTER = random.Random()  # of its own: pauses must not draw from what an environment draws from

T = TypeVar("T")
Message = dict[str, Any]


class RemoteEngine(Engine):
    """A client of one frozen model on one server or several.

    model: a `frozen.FrozenModel`. option: the flag that declares it, for messages (`teacher`). renderer: the policy's. The API key is taken from the
    environment variable that the model names, and sent to the servers alone. Nothing is connected before `preflight`.
    exact: refuse a reply that was cut where its tokens can not be told; who only reads what it says can do with such a one.
    No seed is sent: a server that batches would not repeat itself anyway, and vLLM's CPU build dies of one now and then.
    """

    def __init__(self, model: Any, option: str, renderer: Any, max_context: int, exact: bool = True) -> None:
        super().__init__(max_context)
        self.model, self.option, self.renderer, self.exact = model, option, renderer, exact
        self.speaks_tokens = True  # else it is asked by messages
        key = os.environ.get(model.api_key_env, "").strip() or "none"
        if not (key.isascii() and key.isprintable()):  # the error of a client that refuses a header would show it
            raise ValueError(
                f"--{option}.api-key-env {model.api_key_env}: its value can not be a key, no header can carry it"
            )
        self._servers = [
            Server(openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=model.timeout), url)
            for url in (part.strip().rstrip("/") for part in model.base_url.split(","))
        ]
        self._free = asyncio.Semaphore(model.max_concurrent)

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """Log-probability of each token given those before it, [T] float32; NaN at position 0. Raises ValueError for a
        temperature other than 1, and where the server's answer is not one log-prob for each other token."""
        if temperature != 1:
            raise ValueError(f"{self.model.name} is served: it scores at temperature 1, not {temperature:g}")
        ids = list(token_ids)
        answer = await self._ask(
            lambda client: client.completions.create(
                model=self.model.name, prompt=ids, max_tokens=1, temperature=0, extra_body={"prompt_logprobs": 0}
            )
        )
        return self._read_scores(answer, ids)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion by token ids. Its log-probs are NaN: what is learnt from a frozen model needs none."""
        ids = list(prompt_ids)
        if not 0 < len(ids) < self.max_context:
            raise ValueError(
                f"a prompt of {len(ids)} tokens does not fit the context of {self.max_context} that {self.model.name} has"
            )
        answer = await self._ask(
            lambda client: client.completions.create(
                model=self.model.name,
                prompt=ids,
                max_tokens=min(sampling.max_new_tokens, self.max_context - len(ids)),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                extra_body={
                    "top_k": sampling.top_k,
                    "min_p": 0.0,
                    "repetition_penalty": 1.0,
                    "stop_token_ids": list(sampling.stop_token_ids),
                    "ignore_eos": True,
                    "return_token_ids": True,
                },
            )
        )
        choice = self._choice(answer)
        token_ids = (choice.model_extra or {}).get("token_ids")
        if not token_ids or not all(isinstance(id_, int) for id_ in token_ids):
            raise ValueError(f"{self.model.name} answered without token ids")
        return Completion(token_ids, [math.nan] * len(token_ids), _finish_reason(choice), -1)

    async def complete(
        self, prompt_ids: Sequence[int], sampling: Sampling, messages: Sequence[Message], tools: list[dict] | None
    ) -> Completion:
        """The model's turn, by token ids where server and tokenizer allow it, else by messages."""
        if self.speaks_tokens:
            return await self.generate(prompt_ids, sampling)
        reply, finish_reason = await self.chat(messages, sampling, tools)
        token_ids = self.renderer.render_reply(messages, reply, tools, ended=finish_reason == "stop")
        return Completion(token_ids, [math.nan] * len(token_ids), finish_reason, -1)

    async def chat(
        self, messages: Sequence[Message], sampling: Sampling, tools: list[dict] | None = None
    ) -> tuple[Message, str]:
        """(the reply as an assistant message, finish reason). If `exact`, raises ValueError for a reply that was cut inside a
        character or inside its reasoning: its tokens could not be told."""
        options = {"tools": tools} if tools else {}
        answer = await self._ask(
            lambda client: client.chat.completions.create(
                model=self.model.name,
                messages=list(messages),
                max_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                **options,
            )
        )
        choice = self._choice(answer)
        said, finish_reason = choice.message, _finish_reason(choice)
        extra = said.model_extra or {}
        reasoning = extra.get("reasoning_content") or extra.get("reasoning")
        reply: Message = {"role": "assistant", "content": said.content or ""}
        if reasoning:
            reply["reasoning_content"] = reasoning
        if said.tool_calls:
            reply["tool_calls"] = [_plain_call(call) for call in said.tool_calls]
        if self.exact and "\ufffd" in reply["content"] + (reasoning or ""):
            raise ValueError(f"{self.model.name}'s reply was cut inside of a character")
        if self.exact and finish_reason == "length" and reasoning and not reply["content"]:
            raise ValueError(f"{self.model.name}'s reply was cut inside its reasoning: raise --max-new-tokens")
        return reply, finish_reason

    async def preflight(self, needs: str, seq_len: int) -> str:
        """Find out what the servers can do, for `needs` "score" or "sample"; return it in words.

        Raises ValueError with one line that names option, address and remedy: no answer, another model, another tokenizer, no
        or wrong log-probs for a probe of seq_len tokens.
        """
        lengths, words = [], ""
        for server in self._servers:
            try:
                async with asyncio.timeout(PREFLIGHT_SECONDS):
                    words, length = await self._preflight_one(server, needs, seq_len)
            except TimeoutError:
                raise self._error(
                    "base-url", server.url, f"no answer in {PREFLIGHT_SECONDS:g} s; is it still loading its model?"
                ) from None
            except (AttributeError, LookupError, TypeError) as error:  # what an answer of another shape ends in
                raise self._error(
                    "base-url", server.url, f"its answers make no sense ({error}); is that an OpenAI-compatible server?"
                ) from None
            lengths += [length] if length else []
        # A server samples one token after what it scores.
        self.max_context = min([self.max_context, *(length - 1 if needs == "score" else length for length in lengths)])
        return words

    async def disconnect(self) -> None:
        """Close the connections. `close` leaves them, since several algorithms may share them."""
        for server in self._servers:
            await server.client.close()

    async def _preflight_one(self, server: "Server", needs: str, seq_len: int) -> tuple[str, int | None]:
        """(what the server will be used for, its context in tokens or None)."""
        listed = await self._models(server)
        served = {model.id: getattr(model, "max_model_len", None) for model in listed}
        if self.model.name not in served:
            raise self._error("name", self.model.name, f"{server.url} serves {', '.join(served) or 'no model'}")
        length = served[self.model.name]
        if needs == "score" and length is not None and length <= seq_len:
            remedy = f"serve it with --max-model-len {seq_len + 1} or more, or lower --seq-len"
            raise self._error(
                "base-url",
                server.url,
                f"its context is {length} tokens, too short to score --seq-len {seq_len}: {remedy}",
            )
        difference = await self._tokenizer_difference(server)
        if needs == "score":
            if difference is None:
                raise self._error(
                    "base-url",
                    server.url,
                    "only a vLLM server gives log-probs of a prompt, and this one has no /tokenize",
                )
            if difference:
                raise self._error(
                    "name",
                    self.model.name,
                    f"its tokenizer at {server.url} is not the policy's ({difference}); choose a model of the same family",
                )
            await self._probe_scores(server, seq_len)
            return f"{self.model.name} at {server.url} scores token ids", length
        self.speaks_tokens = self.speaks_tokens and difference == "" and await self._gives_token_ids(server)
        how = "by token ids" if self.speaks_tokens else "by messages, and each reply is rendered once"
        return f"{self.model.name} at {server.url} samples {how}", length

    async def _models(self, server: "Server") -> list[Any]:
        """The models that a server lists, at its address or below /v1."""
        error: Exception | None = None
        urls = [server.url] if server.url.endswith("/v1") else [f"{server.url}/v1", server.url]
        for url in urls:
            client = server.client.with_options(base_url=url)
            try:
                listed = (await client.models.list()).data
                if not isinstance(listed, list):
                    raise ValueError("no list of models")
            except (openai.AuthenticationError, openai.PermissionDeniedError):
                raise self._error("base-url", url, f"it refuses the API key: set {self.model.api_key_env}") from None
            except (openai.OpenAIError, ValueError, AttributeError, TypeError) as found:
                error = found
                continue
            server.client, server.url = client, url
            return listed
        if isinstance(error, openai.APIStatusError):
            why = f"it answered {error.status_code} to a question for its models; is that an OpenAI-compatible server?"
        elif isinstance(error, openai.APIConnectionError):
            why = f"no server answers there ({error.__cause__ or error}); start it, or correct the address"
        else:
            why = "its answer is no list of models; is that an OpenAI-compatible server?"
        raise self._error("base-url", server.url, why) from None

    async def _tokenizer_difference(self, server: "Server") -> str | None:
        """Where the server's tokenizer gives other ids than ours for a text with all that a format has; "" where it gives the
        same, None where it does not say."""
        tokenizer = self.renderer.tokenizer
        conversation = [{"role": "user", "content": PROBE}]
        text = PROBE + tokenizer.decode(self.renderer.render_ids(conversation, add_generation_prompt=True))
        root = server.client.with_options(base_url=server.url.removesuffix("/v1"))
        body = {"model": self.model.name, "prompt": text, "add_special_tokens": False}
        try:
            theirs = (await root.post("/tokenize", body=body, cast_to=object))["tokens"]
        except (openai.OpenAIError, ValueError, KeyError, TypeError):
            return None
        ours = tokenizer.encode(text, add_special_tokens=False)
        if theirs == ours:
            return ""
        at = next(
            (i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours))
        )
        return f"token {at} of a probe is {theirs[at : at + 1]} there and {ours[at : at + 1]} here"

    async def _probe_scores(self, server: "Server", seq_len: int) -> None:
        """Ask once for what the run will ask for all the time."""
        pattern = self.renderer.tokenizer.encode(PROBE, add_special_tokens=False)
        ids = (pattern * (seq_len // len(pattern) + 1))[:seq_len]
        try:
            answer = await server.client.completions.create(
                model=self.model.name, prompt=ids, max_tokens=1, temperature=0, extra_body={"prompt_logprobs": 0}
            )
            self._read_scores(answer, ids)
        except openai.OpenAIError as error:
            raise self._error(
                "base-url",
                server.url,
                f"it can not score {seq_len} tokens: {_short(error)}; serve with vLLM and --max-model-len {seq_len + 1} or more",
            ) from None
        except ValueError as error:
            raise self._error("base-url", server.url, f"{error}; serve the teacher with vLLM") from None

    async def _gives_token_ids(self, server: "Server") -> bool:
        ids = self.renderer.render_ids([{"role": "user", "content": "?"}], add_generation_prompt=True)
        try:
            answer = await server.client.completions.create(
                model=self.model.name, prompt=ids, max_tokens=1, extra_body={"return_token_ids": True}
            )
            return bool((self._choice(answer).model_extra or {}).get("token_ids"))
        except (openai.OpenAIError, ValueError):
            return False

    def _error(self, field: str, value: str, what: str) -> ValueError:
        return ValueError(f"--{self.option}.{field} {value}: {what}")

    async def _ask(self, request: Callable[[openai.AsyncOpenAI], Awaitable[T]]) -> T:
        """Send a request to the least busy server that rests from no failure. Raises RuntimeError when its time is over or it is refused."""
        async with self._free:
            try:
                async with asyncio.timeout(self.model.timeout):
                    return await self._try(request)
            except TimeoutError:
                raise RuntimeError(
                    f"{self.model.name}: no answer in {self.model.timeout:g} s (--{self.option}.timeout)"
                ) from None

    async def _try(self, request: Callable[[openai.AsyncOpenAI], Awaitable[T]]) -> T:
        for attempt in range(self.model.retries + 1):
            now = asyncio.get_running_loop().time()
            server = min(self._servers, key=lambda server: (max(now, server.rests_until), server.busy))
            server.busy += 1
            try:
                answer = await request(server.client)
            except (openai.APIConnectionError, openai.RateLimitError, openai.InternalServerError) as error:
                server.rests_until = now + LONGEST_PAUSE
                if attempt == self.model.retries:
                    raise RuntimeError(
                        f"{self.model.name} at {server.url}, after {attempt + 1} tries: {_short(error)}"
                    ) from error
            except (openai.AuthenticationError, openai.PermissionDeniedError):
                raise RuntimeError(
                    f"{self.model.name} at {server.url} refuses the API key: set {self.model.api_key_env}"
                ) from None
            except (openai.OpenAIError, json.JSONDecodeError) as error:
                raise RuntimeError(f"{self.model.name} at {server.url}: {_short(error)}") from error
            else:
                return answer
            finally:
                server.busy -= 1
            # Half of the pause is chance, so that those who failed together do not come back together.
            await asyncio.sleep(min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt) * (0.5 + JITTER.random() / 2))
        raise AssertionError("the last attempt returns or raises")

    def _choice(self, answer: Any) -> Any:
        choices = getattr(answer, "choices", None)
        if not isinstance(choices, list) or not choices:
            raise ValueError(f"{self.model.name} answered without a choice")
        return choices[0]

    def _read_scores(self, answer: Any, ids: list[int]) -> np.ndarray:
        """Log-probs [T] out of `prompt_logprobs`: a null for the first token, and for each other one an entry under its id."""
        entries = (self._choice(answer).model_extra or {}).get("prompt_logprobs")
        if not isinstance(entries, list) or len(entries) != len(ids):
            found = f"{len(entries)} entries" if isinstance(entries, list) else "none"
            raise ValueError(f"{self.model.name} was asked for prompt_logprobs of {len(ids)} tokens and gave {found}")
        scores = np.full(len(ids), np.nan, np.float32)
        for at, (id_, entry) in enumerate(zip(ids, entries, strict=True)):
            if at == 0:
                continue
            value = entry.get(str(id_)) if isinstance(entry, dict) else None
            logprob = value.get("logprob") if isinstance(value, dict) else None
            if not isinstance(logprob, int | float) or not math.isfinite(logprob):
                raise ValueError(f"{self.model.name} gave no log-prob for token {at} of {len(ids)}")
            if logprob > 1e-3:
                raise ValueError(
                    f"{self.model.name} gave {logprob:g} for token {at}, which is no log-prob; its server needs --logprobs-mode raw_logprobs"
                )
            scores[at] = logprob
        return scores


class Server:
    """One address of a model: its client, how many requests it has, and until when others are asked instead, because one
    failed (in the event loop's seconds)."""

    def __init__(self, client: openai.AsyncOpenAI, url: str) -> None:
        self.client, self.url, self.busy, self.rests_until = client, url, 0, 0.0


def _finish_reason(choice: Any) -> str:
    return "length" if choice.finish_reason == "length" else "stop"


def _plain_call(call: Any) -> dict[str, Any]:
    """A tool call whose arguments are an object where they are one, as renderers want it."""
    arguments = call.function.arguments
    try:
        parsed = json.loads(arguments)
    except (json.JSONDecodeError, TypeError):
        parsed = None
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": parsed if isinstance(parsed, dict) else arguments},
    }


def _short(error: Exception) -> str:
    """The first line of an error, cut: a server may answer with a page."""
    cause = f" ({error.__cause__})" if str(error.__cause__ or "") else ""
    return ((str(error).strip() or type(error).__name__).splitlines()[0] + cause)[:300]
