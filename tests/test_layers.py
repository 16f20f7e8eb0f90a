"""Imports point one way (design.md section 4), and torch and MPI stay where they belong."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("xgpt", "xprofiler", "xsimulator", "xscheduler", "xrunner")

# A layer may import itself and the layers listed. First match of the longest prefix decides.
WORDS = "words"  # xgpt.core
ALLOWED: dict[str, set[str]] = {
    WORDS: {WORDS},
    "rules": {WORDS, "rules"},
    "profile": {WORDS, "profile"},
    "simulator": {WORDS, "rules", "profile", "simulator"},
    "scheduler": {WORDS, "rules", "profile", "simulator", "scheduler"},
    "runner": {WORDS, "rules", "runner"},
    "measure": {WORDS, "rules", "profile", "runner", "measure"},
    "launch": {WORDS, "launch"},
    "report": {WORDS, "rules", "profile", "simulator", "scheduler", "report"},
    "app": {WORDS, "rules", "profile", "simulator", "scheduler", "runner", "launch", "report",
            "app"},
    "cli": {WORDS, "rules", "profile", "simulator", "scheduler", "runner", "launch", "report",
            "app", "cli"},
}
LAYER_OF = {
    "xgpt": WORDS, "xgpt.app": "app", "xgpt.cli": "cli", "xgpt.launch": "launch",
    "xgpt.report": "report",
    "xprofiler": "profile", "xprofiler.measure": "measure", "xsimulator": "simulator",
    "xscheduler": "scheduler", "xrunner": "runner", "xrunner.rules": "rules",
}
TORCH = {"torch", "safetensors", "mpi4py", "transformers", "gguf", "cupy", "deepspeed"}
MAY_IMPORT_TORCH = ("runner", "measure")


def modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield name.removesuffix(".__init__"), path


def imports(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if (layer := LAYER_OF.get(".".join(parts[:length]))) is not None:
            return layer
    return None


@pytest.mark.parametrize(("module", "path"), list(modules()),
                         ids=lambda v: v if isinstance(v, str) else "")
def test_a_module_imports_only_its_own_layer_and_those_below(module: str, path: Path) -> None:
    layer = layer_of(module)
    assert layer is not None
    wrong = {name for name in imports(path)
             if name.split(".")[0] in PACKAGES and layer_of(name) not in ALLOWED[layer]}
    assert not wrong, f"{module} ({layer}) imports {sorted(wrong)}"


@pytest.mark.parametrize(("module", "path"), list(modules()),
                         ids=lambda v: v if isinstance(v, str) else "")
def test_torch_and_its_kin_are_imported_only_by_the_runner_and_the_measuring_part(
        module: str, path: Path) -> None:
    if layer_of(module) in MAY_IMPORT_TORCH:
        return
    heavy = {name for name in imports(path) if name.split(".")[0] in TORCH}
    assert not heavy, f"{module} imports {sorted(heavy)}"


CLI = [(module, path) for module, path in modules() if layer_of(module) == "cli"]


@pytest.mark.parametrize(("module", "path"), list(modules()),
                         ids=lambda v: v if isinstance(v, str) else "")
def test_only_the_command_line_knows_click(module: str, path: Path) -> None:
    assert layer_of(module) == "cli" or "click" not in set(imports(path))


@pytest.mark.parametrize(("module", "path"), CLI, ids=lambda v: v if isinstance(v, str) else "")
def test_the_command_line_is_commands_alone(module: str, path: Path) -> None:
    """What it does is in xgpt.app: only the entry point and what all commands share stand beside
    the commands."""
    if module.rpartition(".")[2] in ("cli", "main", "options", "terminal"):
        return
    functions = [n for n in ast.walk(ast.parse(path.read_text("utf-8")))
                 if isinstance(n, ast.FunctionDef)]
    assert any("click" in ast.unparse(d) for f in functions for d in f.decorator_list), module
