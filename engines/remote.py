"""A frozen model behind an OpenAI-compatible server: a teacher that scores, or a model that samples what the policy imitates.

    score      token ids in, the log-prob of each out. Only vLLM's servers do that (`prompt_logprobs`).
    generate   token ids in, token ids out. vLLM's servers too, and only where the server's tokenizer is the policy's.
    chat       messages in, a message out: any server. The reply comes as text, so the policy's renderer writes it once, its
               end token included. That is the one declared exception to "nothing is tokenized again": the tokens that are
               trained on are the policy's way of writing what the model said.

`preflight` finds out which of these a server can do, before anything heavy is loaded; what is wrong then is one line that
names the option, the address and what to do. During the run a request is retried with growing pauses after a refusal (429),
a server error, a broken connection, or half of its time without an answer, on the next server where there are several,
until its tries or its time are over. Then it raises, which ends the episode that asked and no other. A server that failed
rests, and one request finds out whether it is back. An answer that is not what was asked for raises at once: a log-prob
that is missing is never taken for 0.
"""

import asyncio
import contextvars
import json
import math
import os
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import openai

from engines.base import Completion, Engine, Sampling

# For all questions to a server, and all servers are asked at once: whoever waits at a console learns within half a minute
# what is wrong.
PREFLIGHT_SECONDS = 25.0
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
        self.seq_len = max_context  # what the run asks for; a server may have less
        self.model, self.option, self.renderer, self.exact = model, option, renderer, exact
        self.speaks_tokens = True  # else it is asked by messages
        key = os.environ.get(model.api_key_env, "").strip() or "none"
        if not (key.isascii() and key.isprintable()):  # the error of a client that refuses a header would show it
            raise ValueError(
                f"--{option}.api-key-env {model.api_key_env}: its value can not be a key, no header can carry it"
            )
        self._servers = [  # without a timeout of the client's: `within` counts better, and the preflight has its own
            Server(openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=None), url)
            for url in (part.strip().rstrip("/") for part in model.base_url.split(","))
        ]
        self._free = asyncio.Semaphore(model.max_concurrent)
        # The model is frozen: who asks for the same tokens while they are scored shares the answer (games have few endings).
        self._scoring: dict[tuple[int, ...], Shared] = {}

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """Log-probability of each token given those before it, [T] float32; NaN at position 0. Raises ValueError for a
        temperature other than 1, and where the server's answer is not one log-prob for each other token."""
        if temperature != 1:
            raise ValueError(f"{self.model.name} is served: it scores at temperature 1, not {temperature:g}")
        key = tuple(token_ids)
        if key not in self._scoring:
            # A task that belongs to no episode: if the one that asked first is given up, the others still get their answer.
            task = asyncio.create_task(self._score(list(key)), context=contextvars.Context())
            self._scoring[key] = Shared(task)
        shared = self._scoring[key]
        shared.waiting += 1
        try:
            return await asyncio.shield(shared.task)
        finally:
            shared.waiting -= 1
            if not shared.waiting:
                del self._scoring[key]
                if not shared.task.done():
                    shared.task.cancel()
                    await asyncio.wait([shared.task])

    async def _score(self, ids: list[int]) -> np.ndarray:
        answer = await self._ask(
            lambda server: server.client.completions.create(
                model=self.model.name, prompt=ids, max_tokens=1, temperature=0, extra_body={"prompt_logprobs": 0}
            )
        )
        return self._read_scores(answer, ids)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion by token ids. Its log-probs are NaN: what is learnt from a frozen model needs none."""
        ids = list(prompt_ids)
        if not 0 < len(ids) < self.max_context:
            if self.max_context < self.seq_len:
                limit = f"the context of {self.max_context} that {self.model.name} is served with: raise its server's --max-model-len"
            else:
                limit = f"--seq-len {self.seq_len}: raise it"
            raise ValueError(f"a prompt of {len(ids)} tokens does not fit {limit}, or shorten the prompt")
        answer = await self._ask(
            lambda server: server.client.completions.create(
                model=self.model.name,
                prompt=ids,
                max_tokens=min(sampling.max_new_tokens, self.max_context - len(ids)),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                extra_body={
                    **_beyond_openai(sampling.top_k),
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
        return Completion(token_ids, [math.nan] * len(token_ids), self._finish_reason(choice), -1)

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
        """(the reply as an assistant message, finish reason). Raises ValueError for a reply that a filter withheld and, if `exact`,
        for one that was cut inside a character or inside its reasoning: its tokens could not be told."""
        options = {"tools": tools} if tools else {}
        answer = await self._ask(
            lambda server: server.client.chat.completions.create(
                model=self.model.name,
                messages=list(messages),
                max_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                extra_body=_beyond_openai(sampling.top_k) if server.takes_more else None,
                **options,
            )
        )
        choice = self._choice(answer)
        said, finish_reason = choice.message, self._finish_reason(choice)
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

        Raises ValueError with one line that names option, address and remedy, of the first server with a fault: no answer,
        another model, another tokenizer, no or wrong log-probs for a probe of seq_len tokens.
        """
        found = await asyncio.gather(
            *[self._preflight_in_time(server, needs, seq_len) for server in self._servers], return_exceptions=True
        )
        for answer in found:
            if isinstance(answer, BaseException):
                raise answer
        lengths = [length for length, _ in found if length]
        # A server samples one token after what it scores.
        self.max_context = min([self.max_context, *(length - 1 if needs == "score" else length for length in lengths)])
        where = f"{self.model.name} at {', '.join(server.url for server in self._servers)}"
        if needs == "score":
            return f"{where} scores token ids"
        self.speaks_tokens = all(speaks for _, speaks in found)
        if self.speaks_tokens:
            return f"{where} samples by token ids"
        words = f"{where} samples by messages, and each reply is rendered once"
        strict = [server.url for server in self._servers if not server.takes_more]
        if strict:
            words += f"; {', '.join(strict)} takes no top_k, min_p or repetition_penalty: what it holds for these by itself applies"
        return words

    async def disconnect(self) -> None:
        """Close the connections. `close` leaves them, since several algorithms may share them."""
        for server in self._servers:
            await server.client.close()

    async def _preflight_in_time(self, server: "Server", needs: str, seq_len: int) -> tuple[int | None, bool]:
        try:
            async with asyncio.timeout(PREFLIGHT_SECONDS):
                return await self._preflight_one(server, needs, seq_len)
        except TimeoutError:
            raise self._error(
                "base-url", server.url, f"no answer in {PREFLIGHT_SECONDS:g} s; is it still loading its model?"
            ) from None
        except (AttributeError, LookupError, TypeError) as error:  # what an answer of another shape ends in
            raise self._error(
                "base-url", server.url, f"its answers make no sense ({error}); is that an OpenAI-compatible server?"
            ) from None

    async def _preflight_one(self, server: "Server", needs: str, seq_len: int) -> tuple[int | None, bool]:
        """(the server's context in tokens or None, whether it can be asked by token ids)."""
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
            return length, True
        speaks_tokens = difference == "" and await self._gives_token_ids(server)
        if not speaks_tokens:
            server.takes_more = await self._takes_more(server)
        return length, speaks_tokens

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
                raise self._error("base-url", url, self._wrong_key()) from None
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
        same, None where it has no /tokenize or one of another kind. Raises ValueError where it fails to answer."""
        tokenizer = self.renderer.tokenizer
        conversation = [{"role": "user", "content": PROBE}]
        text = PROBE + tokenizer.decode(self.renderer.render_ids(conversation, add_generation_prompt=True))
        root = server.client.with_options(base_url=server.url.removesuffix("/v1"))
        body = {"model": self.model.name, "prompt": text, "add_special_tokens": False}
        try:
            theirs = (await root.post("/tokenize", body=body, cast_to=object))["tokens"]
        except openai.OpenAIError as error:
            self._require_service(server, "/tokenize", error)
            return None
        except (ValueError, KeyError, TypeError):
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
            self._require_service(server, f"a request to score {seq_len} tokens", error)
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
        except openai.OpenAIError as error:
            self._require_service(server, "a request by token ids", error)
            return False
        except ValueError:
            return False

    async def _takes_more(self, server: "Server") -> bool:
        """Whether a chat may carry fields that OpenAI's own servers refuse. Raises ValueError where there is no chat at all."""
        message: Any = {"role": "user", "content": "?"}
        for takes_more in (True, False):
            try:
                answer = await server.client.chat.completions.create(
                    model=self.model.name,
                    messages=[message],
                    max_tokens=16,
                    extra_body=_beyond_openai(-1) if takes_more else None,
                )
                self._choice(answer)
                return takes_more
            except (openai.OpenAIError, ValueError) as error:
                self._require_service(server, "a chat", error)
                why = _short(error)
        raise self._error("base-url", server.url, f"it can not be asked by messages: {why}")

    def _require_service(self, server: "Server", what: str, error: Exception) -> None:
        """Raise ValueError unless an error is the answer of a server that does not offer what it was asked for: one that
        refuses the key or fails says nothing about that."""
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            raise self._error(
                "base-url", server.url, f"{self._wrong_key()} (it answered {error.status_code} to {what})"
            )
        if isinstance(error, openai.APIConnectionError):
            raise self._error("base-url", server.url, f"the connection broke at {what}: {_short(error)}")
        status = getattr(error, "status_code", 0)
        if status == 429 or (status >= 500 and status != 501):
            raise self._error(
                "base-url", server.url, f"it failed or is overloaded: it answered {status} to {what}; look at its log"
            )

    def _wrong_key(self) -> str:
        return f"it refuses the API key: set {self.model.api_key_env}, or name another variable by --{self.option}.api-key-env"

    def _error(self, field: str, value: str, what: str) -> ValueError:
        return ValueError(f"--{self.option}.{field} {value}: {what}")

    async def _ask(self, request: Callable[["Server"], Coroutine[Any, Any, T]]) -> T:
        """Send a request, again where that may help. Raises RuntimeError when its tries or its time are over, or it is refused."""
        async with self._free:
            return await self._try(request)

    async def _try(self, request: Callable[["Server"], Coroutine[Any, Any, T]]) -> T:
        time, left = asyncio.get_running_loop().time, self.model.timeout
        # A try that hangs is given up after half of the time, and the other half is for the next server, or for this one again.
        longest = left / 2 if self.model.retries else left
        for attempt in range(self.model.retries + 1):
            server, started, allowed = self._choose(longest), time(), min(longest, left)
            server.busy += 1
            try:
                answer = await within(allowed, request(server))
            except (
                TimeoutError,
                openai.APIConnectionError,
                openai.RateLimitError,
                openai.InternalServerError,
            ) as found:
                error: Exception = found
                server.failed_at = time()
                server.rests_until = server.failed_at + LONGEST_PAUSE
            except (openai.AuthenticationError, openai.PermissionDeniedError):
                raise RuntimeError(f"{self.model.name} at {server.url}: {self._wrong_key()}") from None
            except (openai.OpenAIError, json.JSONDecodeError) as error:
                raise RuntimeError(f"{self.model.name} at {server.url}: {_short(error)}") from error
            else:
                if server.failed_at is not None and server.failed_at <= started:
                    server.failed_at, server.rests_until = None, 0.0
                return answer
            finally:
                server.busy -= 1
            # Half of the pause is chance, so that those who failed together do not come back together.
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt) * (0.5 + JITTER.random() / 2)
            left -= min(time() - started, allowed) + pause
            if left <= 0 or attempt == self.model.retries:
                break
            await asyncio.sleep(pause)
        if isinstance(error, TimeoutError):
            why = f"no answer in {self.model.timeout:g} s (--{self.option}.timeout)"
        else:
            why = _short(error)
        raise RuntimeError(f"{self.model.name} at {server.url}, after {attempt + 1} tries: {why}") from error

    def _choose(self, longest: float) -> "Server":
        """The least busy server that rests from no failure; where all rest, the one whose rest ends first. One that failed
        is asked by a single request, and gets more when it has answered that. longest: a try's time in seconds."""
        now = asyncio.get_running_loop().time()
        server = min(self._servers, key=lambda server: (max(now, server.rests_until), server.busy))
        if server.failed_at is not None:
            server.rests_until = now + longest
        return server

    def _choice(self, answer: Any) -> Any:
        choices = getattr(answer, "choices", None)
        if not isinstance(choices, list) or not choices:
            raise ValueError(f"{self.model.name} answered without a choice")
        return choices[0]

    def _finish_reason(self, choice: Any) -> str:
        """ "stop" or "length". Raises ValueError for any other end: the server broke off what nobody may learn as an answer."""
        if choice.finish_reason == "length":
            return "length"
        if choice.finish_reason in ("stop", "tool_calls", "function_call"):
            return "stop"
        raise ValueError(
            f'{self.model.name} gave no finished answer: its server broke off with finish_reason "{choice.finish_reason}"'
        )

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


@dataclass
class Shared:
    """A request for scores, and how many wait for it."""

    task: asyncio.Task
    waiting: int = 0


class Server:
    """One address of a model: its client, how many requests it has, when it failed if it did not answer since, and until when
    others are asked instead (both in the event loop's seconds). takes_more: it knows sampling fields that OpenAI's own
    servers refuse."""

    def __init__(self, client: openai.AsyncOpenAI, url: str) -> None:
        self.client, self.url, self.busy, self.takes_more = client, url, 0, True
        self.failed_at: float | None = None
        self.rests_until = 0.0


async def within(seconds: float, request: Coroutine[Any, Any, T]) -> T:
    """A request's answer. Raises TimeoutError when there is none after so many seconds in which the event loop ran.

    An engine that decodes in this process holds the loop up, for longer than the whole timeout maybe. When the loop goes on,
    a timer that expired meanwhile would come before answers that had arrived meanwhile too. So time is counted in ticks of a
    second or less, and one that comes late by more than half of that is not counted.
    """
    task, time = asyncio.ensure_future(request), asyncio.get_running_loop().time
    tick = min(1.0, seconds / 10)
    try:
        while seconds > 0:
            length = min(tick, seconds)
            due = time() + length
            if (await asyncio.wait([task], timeout=length))[0]:
                return task.result()
            if time() - due < tick / 2:
                seconds -= length
        raise TimeoutError
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])  # the connection is closed


def _beyond_openai(top_k: int) -> dict[str, Any]:
    """Sampling fields that OpenAI does not have. A server that knows them takes them from the model folder's
    generation_config unless they are sent."""
    return {"top_k": top_k, "min_p": 0.0, "repetition_penalty": 1.0}


def _plain_call(call: Any) -> dict[str, Any]:
    """A tool call whose arguments are an object where they are one, as renderers want it."""
    arguments = call.function.arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, TypeError, RecursionError):
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
