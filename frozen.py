"""A model that never changes and is served elsewhere: how it is declared.

Algorithms name the ones that they learn from (`--teacher.name`, `--sample-from.name`, `--reference.name`), environments the
ones that play against the policy (`--env.player1.model.name`). engines/remote.py asks them.
"""

import math
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass
class FrozenModel:
    """A model that never changes and is served elsewhere, by an OpenAI-compatible endpoint."""

    name: str = ""
    """as the endpoint calls it"""
    base_url: str = ""
    """of the endpoint, e.g. http://localhost:8001/v1; several, separated by commas, share the work"""
    api_key_env: str = "OPENAI_API_KEY"
    """environment variable that holds the API key"""
    timeout: float = 300.0
    """seconds for a request, with its retries; a try without an answer is given up after half of them"""
    retries: int = 5
    """tries again after a refusal (429), a server error, a broken connection or no answer"""
    max_concurrent: int = 64
    """requests at once"""


def require_frozen(algo: str, flag: str, role: str, model: Any, why_not_policy: str) -> None:
    """Raise ValueError unless `model` is a `FrozenModel` with a name and an address. role: what the model does for `algo`."""
    if model == "policy" or getattr(model, "name", None) == "policy":
        raise ValueError(f"--{flag} policy: {why_not_policy}")
    if not isinstance(model, FrozenModel) or not model.base_url:
        raise ValueError(f"{algo} needs --{flag}.base-url: {role} is served elsewhere")
    for url in model.base_url.split(","):
        if not url.strip().startswith(("http://", "https://")):
            raise ValueError(f"--{flag}.base-url {url}: must begin with http:// or https://")
        try:
            parts = urlsplit(url.strip())
            whole = bool(parts.hostname) and parts.port != 0  # a port that is no number up to 65535 raises
        except ValueError:
            whole = False
        if not whole:
            raise ValueError(f"--{flag}.base-url {url}: is no address of a server, like http://localhost:8001/v1")
    if not (math.isfinite(model.timeout) and model.timeout > 0):
        raise ValueError(f"--{flag}.timeout {model.timeout}: must be a positive number")
    for knob, least in (("retries", 0), ("max_concurrent", 1)):
        if getattr(model, knob) < least:
            raise ValueError(f"--{flag}.{knob.replace('_', '-')} {getattr(model, knob)}: must be at least {least}")
    if not model.name:
        raise ValueError(f"{algo} needs --{flag}.name: what the endpoint {model.base_url} calls {role}")
