"""The golden cases: which there are, what kind each is, and how a result is held against one.

    from tests.golden_cases import cases, check

    @pytest.mark.parametrize(("file", "doc", "case"), cases("grpo", "max_rl"))
    def test_golden_advantages(file, doc, case):
        check(doc, case, lambda: {"advantages": ...})

Every case of every file in $NANOPOST_GOLDEN (default: tests/golden) is found, whatever the file is called: a case is told
by its `kind`, and where it has none by its fields. tests/golden/README.md describes the format.
"""

import importlib.util
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DEFAULT = Path(__file__).parent / "golden"
DIRECTORY = Path(os.environ.get("NANOPOST_GOLDEN", DEFAULT))
# Cases without a `kind`, by a field that no other kind has (first match). B1, B2 and B5 are all "losses".
BY_FIELD = {"W": "bigram", "vocab_size": "centering", "seq_len": "packing", "steps": "merge", "rl_loss": "losses"}
NEVER_COMPARED = ("informational", "diagnostic", "WRONG", "min_micro_batches", "first_fit_decreasing_bins")

_spec = importlib.util.spec_from_file_location("golden_loader", DEFAULT / "loader.py")
_loader = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_loader)
load, close = _loader.load, _loader.close

DOCS: dict[str, dict] = {path.stem: load(path) for path in sorted(DIRECTORY.glob("*.json"))}
claimed: set[str] = set()  # the kinds for which some test asked


def kind_of(case: dict) -> str:
    """A case's `kind`, or one of BY_FIELD's, or "unknown"."""
    return case.get("kind") or next((kind for field, kind in BY_FIELD.items() if field in case), "unknown")


def cases(*kinds: str) -> list:
    """All cases of these kinds as pytest parameters (file, doc, case), named "<file>-<case name>"."""
    claimed.update(kinds)
    return [
        pytest.param(file, doc, case, id=f"{file}-{case['name']}")
        for file, doc in DOCS.items()
        for case in doc["cases"]
        if kind_of(case) in kinds
    ]


def check(
    doc: dict,
    case: dict,
    run: Callable[[], dict | None],
    dtype: str = "float64",
    errors: tuple[type[Exception], ...] = (ValueError,),
) -> Any:
    """Hold what `run` returns against what the case expects, and return it.

    run: gives a dict in the form of `expected` (keys that it lacks fail, further ones are ignored), numbers as Python
    lists; None says "dropped and counted"; `advantages` that are all None say that the group was dropped. It may raise
    one of `errors` where the case allows an error. dtype: whose tolerance applies.
    """
    require, name = case.get("require", ""), case["name"]
    acceptable = case.get("acceptable", [])
    try:
        got = run()
    except errors as error:
        allowed = "error" in require or any(option.get("kind") == "error" for option in acceptable)
        assert allowed, f"{name}: raised {error!r}"
        assert str(error), f"{name}: the error explains nothing"
        return None
    assert require != "error", f"{name}: must raise, but gave {got}"
    if "drop" in require and (got is None or not any(value is not None for value in _leaves(got.get("advantages", 0)))):
        return got
    tolerance = {key: doc["tolerances"][dtype][key] for key in ("rtol", "atol")}
    if require.startswith("finite"):
        prefixes = ("grad",) if require.startswith("finite_grad") else ("grad", "loss")
        numbers = [n for key, value in got.items() if key.startswith(prefixes) for n in _leaves(value)]
        assert numbers and all(math.isfinite(number) for number in numbers), f"{name}: not finite: {got}"
        return got
    options = [case["expected"], *(value for key, value in case.items() if key.startswith("alt_expected"))]
    options += [case["also_acceptable"]] if "also_acceptable" in case else []
    options += [{key: value for key, value in option.items() if key != "kind"} for option in acceptable]
    options = [_compared(option, require) for option in options if option]  # an error or a drop leaves {} or None
    options = [option for option in options if option]
    assert options, f"{name}: gave {got} where the case expects {case['expected']} with require={require!r}"
    if not any(close(got, option, **tolerance) for option in options):
        pytest.fail(f"{name}: {difference(got, options[0], tolerance)}", pytrace=False)
    if case.get("exact_zero"):
        pairs = zip(_leaves(got["advantages"]), _leaves(case["expected"]["advantages"]), strict=True)
        assert all(mine == 0.0 for mine, want in pairs if want == 0.0), f"{name}: not exactly zero: {got['advantages']}"
    return got


def difference(got: Any, want: Any, tolerance: dict, path: str = "") -> str:
    """The first place where two nested values differ, in words."""
    if isinstance(want, dict) and isinstance(got, dict):
        for key, value in want.items():
            if key not in got:
                return f"{path}.{key} is missing"
            if not close(got[key], value, **tolerance):
                return difference(got[key], value, tolerance, f"{path}.{key}")
    if isinstance(want, list) and isinstance(got, list) and len(got) == len(want):
        for index, (mine, value) in enumerate(zip(got, want, strict=True)):
            if not close(mine, value, **tolerance):
                return difference(mine, value, tolerance, f"{path}[{index}]")
    return f"{path.lstrip('.')} is {got!r}, expected {want!r}"


def _compared(want: Any, require: str) -> Any:
    """The part of an expected value that is pinned."""
    if not isinstance(want, dict):
        return want
    if require == "values":
        want = {key: value for key, value in want.items() if key != "metrics"}
    elif require.startswith("loss_and_grad"):
        want = {key: value for key, value in want.items() if key in ("N", "loss") or key.startswith("grad")}
    return {key: _compared(value, "") for key, value in want.items() if not key.startswith(NEVER_COMPARED)}


def _leaves(value: Any) -> list:
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, list | tuple) else [value]
