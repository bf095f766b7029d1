"""A user's function that says which tokens of a rollout may be trained on.

    def drop_warnings(trace, *, patterns): ...    # the raw trace: message texts, token ids, the sampler's log-probs

It returns one keep-mask for each training branch, as long as that branch's token_ids. It can only narrow a choice. One with a
parameter `renderer` is given the run's, whose `decode` tells which text a token stands for.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from traces import Trace


def load_filter(path: str | None) -> Callable[..., Any] | None:
    """The function at `module.function`. Raises ValueError where there is none."""
    if path is None:
        return None
    module, _, function = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--filter {path}: {error}") from error


def keep_masks(
    function: Callable[..., Any] | None, trace: Trace, kwargs: dict[str, Any], renderer: Any = None
) -> list[np.ndarray]:
    """What a filter keeps of each training branch, [T] bool; everything without one. Raises ValueError where it returns
    anything but one mask of T truth values for each branch."""
    lengths = [len(branch) for branch in trace.training_branches()]
    if function is None:
        return [np.ones(length, bool) for length in lengths]
    if "renderer" in inspect.signature(function).parameters:
        kwargs = {"renderer": renderer} | kwargs
    masks = [np.asarray(mask) for mask in function(trace, **kwargs)]
    shapes = [mask.shape for mask in masks]
    if shapes != [(length,) for length in lengths]:
        raise ValueError(f"--filter: {function.__name__} gave masks of shape {shapes} for branches of {lengths} tokens")
    if not all(np.isin(mask, (0, 1)).all() for mask in masks):
        raise ValueError(f"--filter: {function.__name__} gave a mask that holds something else than keep and drop")
    return [mask.astype(bool) for mask in masks]
