"""Served models: what is asked, what is made of every kind of answer, and what is found out before a run begins."""

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

import engines.remote
from engines.base import Sampling
from engines.remote import RemoteEngine
from frozen import FrozenModel
from make_tiny import make_tokenizer
from renderers import make_renderer

RENDERER = make_renderer("qwen3", make_tokenizer(), "qwen3")
END = RENDERER.stop_token_ids[0]


class Served:
    """A small server that answers as vLLM does, or as `answers` say: (path's end, number of the request) -> status and
    body, "reset", or "hang". It remembers what it was asked."""

    def __init__(self):
        self.answers, self.asked, self.headers, self.lock = {}, [], [], threading.Lock()
        self.busy, self.most_busy, self.delay, self.down = 0, 0, 0.0, threading.Event()
        served = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.answer({})

            def do_POST(self):
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def answer(self, body):
                with served.lock:
                    number = sum(path == self.path for path, _ in served.asked)
                    served.asked.append((self.path, body))
                    served.headers.append({name.lower(): value for name, value in self.headers.items()})
                    served.busy += 1
                    served.most_busy = max(served.most_busy, served.busy)
                time.sleep(served.delay)
                try:
                    ending = next((end for end in served.answers if self.path.endswith(end)), None)
                    found = served.answers[ending](body, number) if ending else None
                    self.send(*(found if isinstance(found, tuple) else (None, found)), body)
                finally:
                    with served.lock:
                        served.busy -= 1

            def send(self, status, found, body):
                if found == "reset":
                    self.close_connection = True
                    return self.connection.close()
                if found == "hang":
                    served.down.wait(20)
                    return None
                if found is None:
                    status, found = served.usual(self.path, body)
                content = found.encode() if isinstance(found, str) else json.dumps(found).encode()
                self.send_response(status or 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.root = f"http://127.0.0.1:{self.server.server_port}"
        self.url = f"{self.root}/v1"

    def usual(self, path, body):
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "teacher", "object": "model", "max_model_len": 129}]}
        if path == "/tokenize":
            return 200, {"tokens": make_tokenizer().encode(body["prompt"], add_special_tokens=False)}
        if path == "/v1/completions":
            choice = {"index": 0, "text": "", "finish_reason": "stop"}
            if "prompt_logprobs" in body:
                choice["prompt_logprobs"] = logprobs_of(body["prompt"])
            if body.get("return_token_ids"):
                choice["token_ids"] = [ord("h"), ord("i"), END]
            return 200, {"id": "1", "object": "text_completion", "created": 0, "model": "teacher", "choices": [choice]}
        if path == "/v1/chat/completions":
            return 200, chat_answer("hi")
        return 404, "<html>no such page</html>"

    def close(self):
        self.down.set()
        self.server.shutdown()
        self.server.server_close()


def logprobs_of(ids):
    return [None] + [{str(id_): {"logprob": -id_ / 100, "rank": 1}} for id_ in ids[1:]]


def completion(**choice):
    choice = {"index": 0, "text": "", "finish_reason": "stop"} | choice
    return {"id": "1", "object": "text_completion", "created": 0, "model": "teacher", "choices": [choice]}


def chat_answer(content, finish_reason="stop", **message):
    choice = {
        "index": 0,
        "finish_reason": finish_reason,
        "message": {"role": "assistant", "content": content} | message,
    }
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "teacher", "choices": [choice]}


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setattr(engines.remote, "FIRST_PAUSE", 0.01)
    server = Served()
    yield server
    server.close()


def client(*servers, option="teacher", **knobs):
    url = ",".join(getattr(server, "url", server) for server in servers)
    OPEN.append(RemoteEngine(FrozenModel("teacher", url, **{"timeout": 5.0} | knobs), option, RENDERER, 128))
    return OPEN[-1]


OPEN = []


def run(coroutine):
    async def and_leave():
        try:
            return await coroutine
        finally:
            for engine in OPEN:
                await engine.disconnect()
            OPEN.clear()

    return asyncio.run(and_leave())


# Scoring.


def test_scores_are_the_servers_at_every_token_but_the_first(served):
    ids = [5, 6, 300, 7]
    scores = run(client(served).score(ids))
    assert np.isnan(scores[0]) and np.allclose(scores[1:], [-0.06, -3.0, -0.07])
    path, body = served.asked[0]
    assert path == "/v1/completions" and body["prompt"] == ids and body["max_tokens"] == 1
    assert body["prompt_logprobs"] == 0 and "seed" not in body


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([None, {"6": {"logprob": -1.0}}, None, {"7": {"logprob": -1.0}}], "no log-prob for token 2 of 4"),
        (
            [None, {"6": {"logprob": None}}, {"9": {"logprob": -1.0}}, {"7": {"logprob": -1.0}}],
            "no log-prob for token 1",
        ),
        (
            [None, {"5": {"logprob": -1.0}}, {"9": {"logprob": -1.0}}, {"7": {"logprob": -1.0}}],
            "no log-prob for token 1",
        ),
        ([None, {"6": {"logprob": float("nan")}}, {"9": {"logprob": -1.0}}, {"7": {"logprob": -1.0}}], "token 1 of 4"),
        ([None, {"6": {"logprob": 2.5}}, {"9": {"logprob": -1.0}}, {"7": {"logprob": -1.0}}], "2.5 .* is no log-prob"),
        ([None, {"6": -1.0}, {"9": -1.0}, {"7": -1.0}], "no log-prob for token 1 of 4"),
        ([None, {"6": {"logprob": -1.0}}], "prompt_logprobs of 4 tokens and gave 2 entries"),
        (None, "prompt_logprobs of 4 tokens and gave none"),
        ("nonsense", "prompt_logprobs of 4 tokens and gave none"),
    ],
)
def test_a_missing_log_prob_is_an_error_and_never_0(served, entries, message):
    served.answers["completions"] = lambda body, number: completion(prompt_logprobs=entries)
    with pytest.raises(ValueError, match=message):
        run(client(served).score([5, 6, 9, 7]))
    assert len(served.asked) == 1, "an answer that was given is not asked for again"


def test_a_served_model_scores_at_temperature_1(served):
    with pytest.raises(ValueError, match="temperature 1"):
        run(client(served).score([5, 6], temperature=0.7))


# Failures that pass, and those that do not.

PASSING = {
    "429": lambda body, number: (429, {"error": "slow down"}) if number < 2 else None,
    "500": lambda body, number: (500, "oops") if number < 2 else None,
    "503": lambda body, number: (503, {"error": "loading"}) if number < 2 else None,
    "reset": lambda body, number: "reset" if number < 2 else None,
}


@pytest.mark.parametrize("answer", PASSING.values(), ids=PASSING)
def test_what_passes_is_tried_again(served, answer):
    served.answers["completions"] = answer
    assert np.isfinite(run(client(served).score([5, 6]))[1])
    assert len(served.asked) == 3


LASTING = {
    "500": ((500, "oops"), "after 3 tries"),
    "429": ((429, {"error": "slow down"}), "after 3 tries"),
    "reset": ("reset", "after 3 tries"),
    "400": ((400, {"error": {"message": "no such knob"}}), "no such knob"),
    "garbage": ((200, "{not json"), "teacher"),
    "a page": ((200, "<html>hello</html>"), "without a choice|teacher"),
    "no choice": ((200, {"choices": []}), "without a choice"),
    "a number": ((200, 7), "without a choice|teacher"),
}


@pytest.mark.parametrize(("answer", "message"), LASTING.values(), ids=LASTING)
def test_what_lasts_ends_this_request_alone(served, answer, message):
    served.answers["completions"] = lambda body, number: answer if body["prompt"] == [5, 6] else None

    async def both():
        engine = client(served, retries=2)
        return await asyncio.gather(engine.score([5, 6]), engine.score([7, 8]), return_exceptions=True)

    failed, fine = run(both())
    assert isinstance(failed, RuntimeError | ValueError), failed
    assert any(part in str(failed) for part in message.split("|")), failed
    assert np.isfinite(fine[1])


def test_a_server_that_hangs_costs_the_timeout_and_no_more(served):
    served.answers["completions"] = lambda body, number: "hang"
    start = time.perf_counter()
    with pytest.raises(RuntimeError, match=r"no answer in 0\.5 s \(--teacher\.timeout\)"):
        run(client(served, timeout=0.5).score([5, 6]))
    assert time.perf_counter() - start < 3


def test_a_request_that_hangs_is_sent_again_within_its_time(served):
    served.answers["completions"] = lambda body, number: "hang" if number == 0 else None
    start = time.perf_counter()
    assert np.isfinite(run(client(served, timeout=2.0).score([5, 6]))[1])
    assert 1.0 <= time.perf_counter() - start < 2.0 and len(served.asked) == 2
    served.answers["completions"] = lambda body, number: "hang"
    with pytest.raises(RuntimeError, match=r"after 1 tries: no answer in 0\.5 s"):
        run(client(served, timeout=0.5, retries=0).score([5, 6]))


@pytest.mark.parametrize("retries", [0, 3])
def test_time_in_which_the_event_loop_stands_still_is_not_the_servers(served, retries):
    """An engine decodes in the loop for longer than the timeout: what was answered meanwhile is an answer, for each request."""
    served.delay = 0.3

    async def both():
        engine = client(served, timeout=1.0, retries=retries)
        waiting = asyncio.gather(*[engine.score([5, i]) for i in range(4)])
        await asyncio.sleep(0.1)
        time.sleep(1.5)
        return await waiting

    assert all(np.isfinite(scores[1]) for scores in run(both()))
    assert len(served.asked) == 4, "nothing was asked twice"


def test_a_request_that_is_given_up_leaves_no_task_behind(served):
    served.answers["completions"] = lambda body, number: "hang"

    async def give_up():
        engine = client(served)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.score([5, 6]), 0.2)
        assert len(asyncio.all_tasks()) == 1 and engine._servers[0].busy == 0
        assert engine._servers[0].failed_at is None, "it is not the server's fault"

    run(give_up())


def test_a_server_that_hangs_loses_its_share_and_no_request_is_lost(served, monkeypatch):
    monkeypatch.setattr(engines.remote, "LONGEST_PAUSE", 0.1)
    other = Served()
    other.answers["completions"] = lambda body, number: "hang"

    async def batches():
        engine, shares, found = client(served, other, timeout=4.0), [], []
        for _ in range(3):
            before = len(other.asked)
            found += await asyncio.gather(*[engine.score([5, i]) for i in range(8)])
            shares.append(len(other.asked) - before)
            await asyncio.sleep(0.1)  # its rest is over, and it hangs as before
        return shares, found

    try:
        shares, found = run(batches())
        assert shares == [4, 1, 1] and all(np.isfinite(scores[1]) for scores in found)
        served.answers["completions"] = other.answers["completions"]
        with pytest.raises(RuntimeError, match="no answer in 0.5 s"):
            run(client(served, other, timeout=0.5).score([5, 6]))
        served.answers.clear(), other.answers.clear()

        async def all_failed():
            engine = client(served, other)
            for server in engine._servers:
                server.failed_at, server.rests_until = 0.0, asyncio.get_running_loop().time() + 60
            return await asyncio.gather(*[engine.score([5, i]) for i in range(8)])

        assert len(run(all_failed())) == 8, "servers that all rest are asked all the same"
    finally:
        other.close()


def test_no_more_requests_at_once_than_asked_for(served):
    served.delay = 0.05

    async def many():
        engine = client(served, max_concurrent=3)
        await asyncio.gather(*[engine.score([5, i]) for i in range(12)])

    run(many())
    assert served.most_busy == 3 and len(served.asked) == 12


def test_the_same_tokens_are_scored_once_for_all_who_wait(served):
    served.delay = 0.1

    async def many():
        engine = client(served)
        first = asyncio.create_task(engine.score([5, 6, 7]))
        others = [asyncio.create_task(engine.score(ids)) for ids in ([5, 6, 7], [5, 6, 8], [5, 6, 7])]
        await asyncio.sleep(0.02)
        first.cancel()
        found = await asyncio.gather(first, *others, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError) and len(served.asked) == 2
        assert np.array_equal(found[1], found[3], equal_nan=True) and len(found[2]) == 3
        served.answers["completions"] = lambda body, number: (400, {"error": {"message": "no"}})
        failed = await asyncio.gather(*[engine.score([5, 6, 7]) for _ in range(3)], return_exceptions=True)
        assert len(served.asked) == 3 and all(isinstance(error, RuntimeError) for error in failed)
        served.answers.clear()
        await engine.score([5, 6, 7])
        assert len(served.asked) == 4, "what was answered is forgotten"

    run(many())


def test_several_servers_share_the_work_and_stand_in_for_each_other(served, monkeypatch):
    monkeypatch.setattr(engines.remote, "LONGEST_PAUSE", 60.0)  # no rest ends by itself on a slow machine
    other, served.delay = Served(), 0.02
    other.delay = 0.02

    async def many(engine):
        return await asyncio.gather(*[engine.score([5, i]) for i in range(16)])

    try:
        engine = client(served, other)
        run(many(engine))
        assert len(served.asked) == len(other.asked) == 8
        other.answers["completions"] = lambda body, number: "reset"

        async def while_one_is_away():
            engine = client(served, other)
            found = await many(engine)
            tried = len(other.asked)
            found += await many(engine)
            assert len(other.asked) == tried, "nobody asks it again at once"
            other.answers.clear()
            for server in engine._servers:
                server.rests_until = 0.0  # the rest is over
            found += await many(engine)
            assert len(other.asked) == tried + 1, "one request finds out whether it is back"
            found += await many(engine)
            assert len(other.asked) == tried + 9, "it is back, and has its share of the work again"
            return found

        assert all(np.isfinite(scores[1]) for scores in run(while_one_is_away()))
    finally:
        other.close()


# Sampling.


def test_sampling_by_token_ids_asks_for_exactly_the_sampling(served):
    sampling = Sampling(50, 0.7, top_p=0.9, stop_token_ids=(END, 256), key=(1, 2))
    answer = run(client(served).generate([1, 2, 3], sampling))
    assert answer.token_ids == [ord("h"), ord("i"), END] and answer.finish_reason == "stop" and answer.version == -1
    assert np.isnan(answer.logprobs).all(), "nobody may take them for the policy's"
    body = served.asked[0][1]
    asked = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 50, "stop_token_ids": [END, 256], "ignore_eos": True}
    assert asked.items() <= body.items() and body["prompt"] == [1, 2, 3]
    assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (-1, 0.0, 1.0), "not the model folder's"


def test_a_completion_that_was_cut_is_told_from_one_that_ended(served):
    served.answers["completions"] = lambda body, number: completion(token_ids=[104, 105], finish_reason="length")
    assert run(client(served).generate([1, 2], Sampling(2))).finish_reason == "length"


def test_an_answer_without_token_ids_is_an_error(served):
    served.answers["completions"] = lambda body, number: completion(token_ids=None)
    with pytest.raises(ValueError, match="without token ids"):
        run(client(served).generate([1, 2], Sampling(5)))


def test_a_prompt_that_does_not_fit_names_the_option_at_fault(served):
    engine = client(served)
    with pytest.raises(ValueError, match=r"a prompt of 128 tokens does not fit --seq-len 128: raise it"):
        run(engine.generate([1] * 128, Sampling(5)))
    served.answers["/models"] = lambda *_: {"data": [{"id": "teacher", "max_model_len": 64}]}
    engine = client(served, option="sample-from")

    async def ask():
        await engine.preflight("sample", 128)
        await engine.generate([1] * 64, Sampling(5))

    with pytest.raises(
        ValueError, match="64 tokens does not fit the context of 64 that teacher is served with: .*--max-model-len"
    ):
        run(ask())


QUESTION = [{"role": "user", "content": "Hi?"}]


def chat(served, messages=QUESTION, tools=None):
    engine = client(served, option="sample-from")
    engine.speaks_tokens = False
    prompt = RENDERER.render_ids(messages, tools, add_generation_prompt=True)
    return run(engine.complete(prompt, Sampling(20, stop_token_ids=(END,)), messages, tools))


def text_of(ids):
    return make_tokenizer().decode(ids)


def test_a_reply_in_text_is_rendered_once_with_its_end_token(served):
    answer = chat(served)
    assert answer.token_ids[-1] == END and answer.token_ids.count(END) == 1
    assert text_of(answer.token_ids) == "<think>\n\n</think>\n\nhi<|im_end|>" and answer.finish_reason == "stop"
    assert served.asked[0][1]["messages"] == QUESTION


def test_a_reply_that_was_cut_has_no_end_token(served):
    served.answers["chat/completions"] = lambda body, number: chat_answer("hello wor", "length")
    answer = chat(served)
    assert END not in answer.token_ids and answer.finish_reason == "length"
    assert text_of(answer.token_ids).endswith("hello wor")


def test_reasoning_and_tool_calls_are_rendered_too(served):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    served.answers["chat/completions"] = lambda body, number: chat_answer(
        None, "tool_calls", tool_calls=[call], reasoning_content="One."
    )
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    answer = chat(served, tools=tools)
    assert served.asked[0][1]["tools"] == tools
    reply = RENDERER.parse_response(answer.token_ids, tools=tools)
    assert (
        reply.reasoning_content == "One."
        and reply.tool_calls[0].arguments == {"a": 1}
        and not reply.tool_calls[0].error
    )


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (chat_answer("caf\ufffd", "length"), "inside of a character"),
        (chat_answer("", "length", reasoning_content="Let me see"), "inside its reasoning"),
    ],
)
def test_a_reply_whose_tokens_can_not_be_told_is_an_error(served, reply, message):
    served.answers["chat/completions"] = lambda body, number: reply
    with pytest.raises(ValueError, match=message):
        chat(served)


@pytest.mark.parametrize("reason", ["content_filter", "abort", None])
def test_a_reply_that_its_server_broke_off_is_an_error_and_no_answer(served, reason):
    served.answers["chat/completions"] = lambda body, number: chat_answer("I can", reason)
    with pytest.raises(ValueError, match=f'no finished answer: .*"{reason}"'):
        chat(served)
    served.answers["completions"] = lambda body, number: completion(token_ids=[104, 105], finish_reason=reason)
    with pytest.raises(ValueError, match=f'no finished answer: .*"{reason}"'):
        run(client(served).generate([1, 2], Sampling(5)))


# Before the run.


@pytest.mark.parametrize("ending", ["/v1", "/v1/", "", "/"])
def test_the_address_may_be_written_in_four_ways(served, ending):
    engine = client(served.root + ending)
    assert "scores token ids" in run(engine.preflight("score", 128))
    assert np.isfinite(run(client(served).score([5, 6]))[1])
    assert engine._servers[0].url == served.url and engine.max_context == 128


def other_tokens(body, number):
    return {"tokens": [1, 2, 3]}


def scored_with(change):
    return lambda body, number: completion(prompt_logprobs=change(logprobs_of(body["prompt"])))


PREFLIGHTS = {
    "other model": ("/models", lambda *_: {"data": [{"id": "qwen"}, {"id": "llama"}]}, "--teacher.name teacher: .* serves qwen, llama"),
    "no models": ("/models", lambda *_: {"data": []}, "serves no model"),
    "401": ("/models", lambda *_: (401, {"error": "who are you"}), "--teacher.base-url .*refuses the API key: set OPENAI_API_KEY"),
    "404": ("/models", lambda *_: (404, "<html>"), "answered 404 .* OpenAI-compatible server"),
    "500": ("/models", lambda *_: (500, "oops"), "answered 500"),
    "a page": ("/models", lambda *_: (200, "<html>"), "no list of models"),
    "reset": ("/models", lambda *_: "reset", "no server answers there"),
    "hang": ("/models", lambda *_: "hang", "--teacher.base-url .*no answer in 1 s"),
    "short": ("/models", lambda *_: {"data": [{"id": "teacher", "max_model_len": 128}]}, "128 tokens, too short .*--max-model-len 129"),
    "tokenizer": ("/tokenize", other_tokens, r"--teacher.name teacher: its tokenizer .*token 0 of a probe is \[1\] there"),
    "no tokenizer": ("/tokenize", lambda *_: (404, "no"), "only a vLLM server gives log-probs"),
    "wrong method": ("/tokenize", lambda *_: (405, "no"), "only a vLLM server gives log-probs"),
    "tokenize 401": ("/tokenize", lambda *_: (401, "who"), "refuses the API key: .*--teacher.api-key-env .*401 to /tokenize"),
    "tokenize 403": ("/tokenize", lambda *_: (403, "no"), "refuses the API key: .*--teacher.api-key-env .*403 to /tokenize"),
    "tokenize 500": ("/tokenize", lambda *_: (500, "oops"), "it failed or is overloaded: it answered 500 to /tokenize"),
    "tokenize reset": ("/tokenize", lambda *_: "reset", "the connection broke at /tokenize"),
    "scoring 500": ("completions", lambda *_: (500, "oops"), "it answered 500 to a request to score 128 tokens"),
    "no log-probs": ("completions", lambda *_: completion(), "gave none; serve the teacher with vLLM"),
    "wrong length": ("completions", scored_with(lambda entries: entries[:-1]), "128 tokens and gave 127 entries"),
    "null": ("completions", scored_with(lambda entries: [*entries[:60], None, *entries[61:]]), "no log-prob for token 60"),
    "refused": ("completions", lambda *_: (400, {"message": "too long"}), "can not score 128 tokens"),
    "models without a name": ("/models", lambda *_: {"data": ["teacher"]}, "its answers make no sense"),
    "length in words": ("/models", lambda *_: {"data": [{"id": "teacher", "max_model_len": "129"}]}, "make no sense"),
    "no tokens": ("/tokenize", lambda *_: {"tokens": None}, "its answers make no sense"),
    "choice of nothing": ("completions", lambda *_: {"choices": [None]}, "its answers make no sense"),
    "probe hangs": ("completions", lambda *_: "hang", "no answer in 1 s"),
}  # fmt: skip


@pytest.mark.parametrize(("path", "answer", "message"), PREFLIGHTS.values(), ids=PREFLIGHTS)
def test_what_is_wrong_is_one_line_before_the_run(served, monkeypatch, path, answer, message):
    monkeypatch.setattr(engines.remote, "PREFLIGHT_SECONDS", 1)
    served.answers[path] = answer
    with pytest.raises(ValueError, match=message) as error:
        run(client(served).preflight("score", 128))
    assert "\n" not in str(error.value) and "127.0.0.1" in str(error.value)


def test_nobody_there(served):
    served.close()
    with pytest.raises(ValueError, match=r"--teacher.base-url http://127.*: no server answers there"):
        run(client(served).preflight("score", 128))


def test_all_servers_are_asked_at_once_and_the_first_with_a_fault_is_named(served, monkeypatch):
    monkeypatch.setattr(engines.remote, "PREFLIGHT_SECONDS", 1)
    others = [Served() for _ in range(4)]
    try:
        others[0].delay = 0.2  # it fails later than the next one
        others[0].answers["/models"] = lambda *_: (500, "oops")
        for other in others[1:]:
            other.answers["/models"] = lambda *_: "hang"
        with pytest.raises(ValueError, match=f"--teacher.base-url {others[0].url}: it answered 500"):
            run(client(served, *others).preflight("score", 128))
        monkeypatch.setattr(engines.remote, "PREFLIGHT_SECONDS", 20)
        for other in others:
            other.answers.clear()
            other.delay = 0.4  # for each of its three answers
        start = time.perf_counter()
        words = run(client(served, *others).preflight("score", 128))
        assert time.perf_counter() - start < 4, "less than four servers would take one after another"
        assert all(server.url in words for server in (served, *others))
    finally:
        for other in others:
            other.close()


def test_one_server_that_takes_no_token_ids_means_messages_for_all(served):
    other = Served()
    try:
        other.delay = 0.05
        for one in (served, other):
            one.answers = {"/tokenize": other_tokens}
            engine = client(served, other, option="sample-from")
            assert "by messages" in run(engine.preflight("sample", 128)) and not engine.speaks_tokens
            one.answers = {}
    finally:
        other.close()


def test_a_chat_names_every_sampling_field_that_its_server_knows(served):
    def strictly(body, number):
        unknown = {"top_k", "min_p", "repetition_penalty"} & body.keys()
        return (400, {"error": {"message": "Unrecognized request arguments supplied"}}) if unknown else None

    async def ask():
        engine = client(served, option="sample-from")
        words = await engine.preflight("sample", 128)
        await engine.chat(QUESTION, Sampling(20, 0.7))
        return words, served.asked[-1][1]

    neutral = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    served.answers = {"/tokenize": other_tokens}
    words, body = run(ask())
    assert neutral.items() <= body.items() and "takes no top_k" not in words, "not the model folder's"
    served.answers["chat/completions"] = strictly
    words, body = run(ask())
    assert not neutral.keys() & body.keys() and body["temperature"] == 0.7 and body["top_p"] == 1
    assert f"{served.url} takes no top_k, min_p or repetition_penalty" in words


def test_a_model_to_imitate_that_can_not_be_asked_at_all_is_told_before_the_run(served):
    served.answers = {"/tokenize": other_tokens, "chat/completions": lambda *_: (400, {"message": "no chat template"})}
    with pytest.raises(ValueError, match="--sample-from.base-url .*by messages: .*no chat template"):
        run(client(served, option="sample-from").preflight("sample", 128))


@pytest.mark.parametrize(("path", "what"), [("/tokenize", "/tokenize"), ("completions", "a request by token ids")])
def test_a_server_that_fails_is_not_taken_for_one_that_speaks_messages_only(served, path, what):
    for status, message in ((401, "--sample-from.api-key-env"), (503, f"it answered 503 to {what}")):
        served.answers = {path: lambda *_, status=status: (status, "no")}
        with pytest.raises(ValueError, match=message):
            run(client(served, option="sample-from").preflight("sample", 128))


def test_a_model_to_imitate_is_asked_by_messages_where_ids_would_mean_other_tokens(served):
    engine = client(served, option="sample-from")
    assert "by token ids" in run(engine.preflight("sample", 128)) and engine.speaks_tokens
    for path, answer in (
        ("/tokenize", other_tokens),
        ("/tokenize", lambda *_: (404, "no")),
        ("completions", lambda *_: completion()),
    ):
        served.answers = {path: answer}
        engine = client(served, option="sample-from")
        assert "by messages" in run(engine.preflight("sample", 128)) and not engine.speaks_tokens


def test_the_key_goes_to_the_server_and_nowhere_else(served, monkeypatch, capsys):
    monkeypatch.setenv("MY_KEY", "sk-secret")
    served.answers["/models"] = lambda *_: (401, {"error": "bad key sk-secret"})
    engine = client(served, api_key_env="MY_KEY")
    with pytest.raises(ValueError, match="set MY_KEY") as error:
        run(engine.preflight("score", 128))
    assert served.headers[0]["authorization"] == "Bearer sk-secret"
    served.answers["completions"] = served.answers["/models"]
    with pytest.raises(RuntimeError, match="set MY_KEY") as later:
        run(client(served, api_key_env="MY_KEY").score([5, 6]))
    assert "sk-secret" not in str(error.value) + str(later.value) + repr(engine.model) + "".join(capsys.readouterr())


def test_a_key_with_a_line_end_is_sent_without_and_one_that_no_header_carries_is_not_shown(served, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-secret\n")
    assert "scores token ids" in run(client(served, api_key_env="MY_KEY").preflight("score", 128))
    assert served.headers[0]["authorization"] == "Bearer sk-secret"
    for key in ("sk-secret\nsk-other", "sk-secr\u00e9t"):
        monkeypatch.setenv("MY_KEY", key)
        with pytest.raises(ValueError, match="--teacher.api-key-env MY_KEY: ") as error:
            client(served, api_key_env="MY_KEY")
        assert "sk-secr" not in str(error.value)


# In a run.


def train_opd(train, served, folder, *flags):
    arguments = ["--algo", "opd", "--teacher.name", "teacher", "--teacher.base-url", served.url, "--seq-len", 128]
    sizes = ["--batch-size", 16, "--max-new-tokens", 8, "--eval-every", 0, "--runs-dir", folder, "--name", "run"]
    return train(*arguments, *sizes, "--teacher.retries", 0, *flags)


def rows(folder):
    return [json.loads(line) for line in open(folder / "run" / "metrics.jsonl")]


def test_a_run_outlives_its_teacher_and_goes_on_when_it_is_back(served, train, tmp_path):
    """It is away from the 40th request to the 80th: from the third step, for longer than a step."""
    served.answers["completions"] = lambda body, number: "reset" if 40 <= number < 80 else None
    code, out, err = train_opd(train, served, tmp_path, "--steps", 4, "--max-empty-steps", 1000)
    assert code == 0, out + err
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    errored = [row["rollouts/errored"] for row in found]
    assert errored[:2] == [0, 0] and sum(errored) >= 40
    surplus = 0.0  # what was left over from the step before
    for row in found:
        usable = row["rollouts/finished"] - row["rollouts/errored"] - row["rollouts/no_signal"]
        assert surplus + usable == 16 + row["rollouts/waiting"], "every batch is full, and nothing is lost"
        surplus = row["rollouts/waiting"]
    assert "after 1 tries: Connection error" in out + err


def test_a_teacher_that_stays_away_stops_the_run_with_a_clear_message(served, train, tmp_path):
    served.answers["completions"] = lambda body, number: (500, "oops") if number >= 20 else None
    code, out, err = train_opd(train, served, tmp_path, "--steps", 50, "--max-empty-steps", 3)
    assert code == 1 and len(rows(tmp_path)) == 1
    assert (
        "--max-empty-steps 3" in out + err and "16 errored" in out + err and "teacher at http://127.0.0.1" in out + err
    )


def test_a_wrong_teacher_is_told_before_the_student_loads(served, train, tmp_path):
    served.answers["/tokenize"] = other_tokens
    code, _, err = train_opd(train, served, tmp_path)
    assert code == 2 and err.startswith("train.py: --teacher.name teacher: its tokenizer")
    assert not (tmp_path / "run").exists()
