"""The walls of the house, read from the source."""

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT

OURS = {
    path.stem if path.suffix == ".py" else path.name
    for path in ROOT.iterdir()
    if (path.suffix == ".py" or (path / "__init__.py").is_file()) and path.name != "tests"
}
FILES = [
    path.relative_to(ROOT)
    for path in sorted(ROOT.rglob("*.py"))
    if path.relative_to(ROOT).parts[0] in OURS | {f"{name}.py" for name in OURS}
]


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Modules that a file imports; with top_level_only, those that importing the file imports."""
    tree = ast.parse((ROOT / path).read_text())
    nodes = []

    def visit(node):
        for child in ast.iter_child_nodes(node):
            if top_level_only and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            nodes.append(child)
            visit(child)

    visit(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def ours(path: Path) -> set[str]:
    """Our top-level modules and folders that a file imports, its own folder left out."""
    return {name.split(".")[0] for name in imports(path)} & OURS - {path.parts[0]}


def test_losses_know_torch_alone():
    used = {name.split(".")[0] for name in imports(Path("losses.py"))} - set(sys.stdlib_module_names)
    assert used == {"torch"}


def test_traces_and_packing():
    assert ours(Path("traces.py")) == set()
    assert ours(Path("packing.py")) == {"traces"}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_rooms_know_what_they_may(path):
    allowed = {
        "algos": {"traces", "engines", "renderers", "frozen"},
        "envs": {"traces", "frozen"},
        "renderers": set(),
        "engines": set(),
    }
    if path.parts[0] in allowed:
        assert ours(path) <= allowed[path.parts[0]]
        if path.parts[0] == "algos":
            assert "engines" not in ours(path) or {name for name in imports(path) if name.startswith("engines")} <= {
                "engines.base"
            } | {name for name in imports(path) if name.startswith("engines.base.")}
    elif path.name != "train.py":
        assert "train" not in ours(path)


def test_no_circles():
    graph = {module_name(path): {name for name in imports(path)} for path in FILES}
    state: dict[str, int] = {}

    def walk(module: str, trail: tuple[str, ...]) -> None:
        assert state.get(module) != 1, f"circle: {' -> '.join((*trail, module))}"
        if state.get(module) == 2:
            return
        state[module] = 1
        for name in graph[module] & graph.keys() - {module}:
            walk(name, (*trail, module))
        state[module] = 2

    for module in graph:
        walk(module, ())


def test_only_algos_and_config_ask_which_algorithm_runs():
    from algos import ALGORITHMS

    for path in FILES:
        if path.parts[0] in ("algos", "configs") or path.name in ("config.py", "make_tiny.py"):
            continue
        strings = {
            node.value
            for node in ast.walk(ast.parse((ROOT / path).read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert not strings & set(ALGORITHMS), f"{path} names an algorithm"


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in FILES
        if path.parts[0] in ("algos", "envs")
        or path.name in ("config.py", "command_line.py", "traces.py", "curriculum.py")
    ],
    ids=str,
)
def test_what_help_needs_is_light(path):
    assert not {name.split(".")[0] for name in imports(path, top_level_only=True)} & {"torch", "transformers", "vllm"}


def test_what_is_optional_waits_until_it_is_used():
    assert not [path for path in FILES if "peft" in imports(path, top_level_only=True)]


def test_help_imports_neither_torch_nor_transformers():
    start = time.perf_counter()
    script = f"import sys; sys.argv = ['train.py', '--help']; sys.path.insert(0, {str(ROOT)!r})\nimport runpy\ntry:\n    runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')\nfinally:\n    assert not {{'torch', 'transformers'}} & set(sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "--group-size" in result.stdout
    assert time.perf_counter() - start < 10, "seconds, with room for a busy machine; 0.4 were measured"
