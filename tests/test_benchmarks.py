"""Benchmarks are run by hand, and seldom: what they import of each other and of us is there."""

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted((ROOT / "benchmarks").rglob("*.py"))
OURS = ("xgpt", "xprofiler", "xsimulator", "xscheduler", "xrunner")


def defined(path: Path) -> set[str]:
    """Names at the top of a script, however they come there."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return names


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_benchmark_imports_is_there(script):
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        wanted = {alias.name for alias in node.names}
        beside = script.with_name(f"{node.module}.py")
        if beside.is_file():
            assert wanted <= defined(beside), f"{beside.name} lacks {wanted - defined(beside)}"
        elif node.module.split(".")[0] in OURS:
            module = importlib.import_module(node.module)
            lacking = {name for name in wanted if not hasattr(module, name) and (
                importlib.util.find_spec(f"{node.module}.{name}") is None)}
            assert not lacking, f"{node.module} lacks {lacking}"
