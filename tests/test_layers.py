"""Imports point one way (docs/design.md), and torch and MPI stay where they belong."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("xgpt", "xprofiler", "xsimulator", "xscheduler", "xrunner")

# A layer may import itself and the layers listed. First match of the longest prefix decides.
WORDS = "words"  # xgpt.core
REQUESTS, JOB = "requests", "job"
ALLOWED: dict[str, set[str]] = {
    WORDS: {WORDS},
    REQUESTS: {WORDS, REQUESTS},
    JOB: {WORDS, REQUESTS, JOB},
    "rules": {WORDS, "rules"},
    "profile": {WORDS, "profile"},
    "compiling": {"compiling"},
    "simulator": {WORDS, REQUESTS, "rules", "profile", "compiling", "simulator"},
    "scheduler": {WORDS, "rules", "profile", "simulator", "scheduler"},
    "runner": {WORDS, REQUESTS, JOB, "rules", "compiling", "runner"},
    "measure": {WORDS, "rules", "profile", "runner", "measure"},
    "launch": {WORDS, JOB, "launch"},
    "report": {WORDS, REQUESTS, JOB, "rules", "profile", "simulator", "scheduler", "report"},
    "run_folder": {WORDS, REQUESTS, JOB, "runner", "launch", "report", "run_folder"},
    "app": {WORDS, REQUESTS, JOB, "rules", "profile", "compiling", "simulator", "scheduler",
            "runner", "launch", "report", "run_folder", "app"},
    "cli": {WORDS, REQUESTS, JOB, "rules", "profile", "simulator", "scheduler", "runner", "launch",
            "report", "run_folder", "app", "cli"},
}
LAYER_OF = {
    "xgpt": WORDS, "xgpt.job": JOB, "xgpt.requests": REQUESTS, "xgpt.__main__": "cli",
    "xgpt.app": "app", "xgpt.cli": "cli", "xgpt.launch": "launch", "xgpt.report": "report",
    "xgpt.run_folder": "run_folder",
    "xprofiler": "profile", "xprofiler.measure": "measure", "xsimulator": "simulator",
    "xscheduler": "scheduler", "xrunner": "runner", "xrunner.rules": "rules",
    "xrunner.ops.build": "compiling",
}
TORCH = {"torch", "safetensors", "mpi4py", "transformers", "gguf", "cupy", "deepspeed"}
MAY_IMPORT_TORCH = ("runner", "measure")


@cache
def modules() -> dict[str, Path]:
    """Of all packages, by name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


@cache
def imports(module: str) -> frozenset[str]:
    """Modules that it imports, and names from them, dotted."""
    path, found = modules()[module], set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if (layer := LAYER_OF.get(".".join(parts[:length]))) is not None:
            return layer
    return None


def members(layer: str) -> list[str]:
    found = [module for module in modules() if layer_of(module) == layer]
    assert found, layer
    return found


def test_every_module_lies_in_a_layer():
    assert not [module for module in modules() if layer_of(module) is None]
    assert set(LAYER_OF.values()) == ALLOWED.keys()


@pytest.mark.parametrize("layer", ALLOWED)
def test_a_module_imports_only_its_own_layer_and_those_below(layer):
    wrong = {(module, name) for module in members(layer) for name in imports(module)
             if name.split(".")[0] in PACKAGES and layer_of(name) not in ALLOWED[layer]}
    assert not wrong


@pytest.mark.parametrize("layer", sorted(ALLOWED.keys() - set(MAY_IMPORT_TORCH)))
def test_torch_and_its_kin_are_imported_only_by_the_runner_and_the_measuring_part(layer):
    heavy = {(module, name) for module in members(layer) for name in imports(module)
             if name.split(".")[0] in TORCH}
    assert not heavy


def test_no_rank_imports_torch_s_compiler_before_it_is_asked_for():
    """It takes as long as torch itself, and comes with what seems to be small."""
    compilers = ("torch._dynamo", "torch._inductor", "torch.nn.attention", "sympy")
    heavy = {(module, name) for module, path in modules().items()
             for node in ast.parse(path.read_text(encoding="utf-8")).body
             for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import)
                          else [str(node.module)] if isinstance(node, ast.ImportFrom) else [])
             if name.startswith(compilers)}
    assert not heavy


def test_only_the_command_line_knows_click():
    assert {layer_of(module) for module in modules() if "click" in imports(module)} == {"cli"}


def test_the_command_line_is_commands_alone():
    """What it does is in xgpt.app: only the entry point and what all commands share stand beside
    the commands."""
    shared = ("__main__", "cli", "main", "options", "surroundings", "terminal")
    for module in members("cli"):
        functions = [n for n in ast.walk(ast.parse(modules()[module].read_text("utf-8")))
                     if isinstance(n, ast.FunctionDef)]
        assert module.rpartition(".")[2] in shared or any(
            "click" in ast.unparse(d) for f in functions for d in f.decorator_list), module
