"""The code keeps a size that can be read: files, classes, functions; imports stand at the top."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("xgpt", "xprofiler", "xsimulator", "xscheduler", "xrunner")
PATHS = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
MAX_LINES, MAX_METHODS, MAX_PARAMETERS = 400, 15, 7

# Imports of our own packages inside a function: (file, module imported) -> why. There are none.
LATE_IMPORTS: dict[tuple[str, str], str] = {}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@pytest.fixture(params=PATHS, ids=lambda path: str(path.relative_to(ROOT)))
def path(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def is_command(function: Function) -> bool:
    """Click passes a command's options as parameters: there are as many as it has options."""
    called = [d.func if isinstance(d, ast.Call) else d for d in function.decorator_list]
    return any(isinstance(d, ast.Attribute) and d.attr in ("command", "group") for d in called)


def num_parameters(function: Function) -> int:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    extra = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return len(names) - (names[:1] in (["self"], ["cls"])) + len(extra)


def late_imports(tree: ast.Module) -> Iterator[str]:
    """Modules of our own that are imported anywhere but at the top of the module."""
    for node in ast.walk(tree):
        if node in tree.body:
            continue
        names = ([alias.name for alias in node.names] if isinstance(node, ast.Import) else
                 [node.module or ""] if isinstance(node, ast.ImportFrom) else [])
        yield from (name for name in names if name.split(".")[0] in PACKAGES)


def test_a_file_is_short(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= MAX_LINES


def test_a_class_has_few_methods(tree: ast.Module) -> None:
    many = {c.name: count for c in ast.walk(tree) if isinstance(c, ast.ClassDef)
            if (count := sum(isinstance(n, Function) for n in c.body)) > MAX_METHODS}
    assert not many


def test_a_function_has_few_parameters(tree: ast.Module) -> None:
    many = {f.name: count for f in ast.walk(tree) if isinstance(f, Function)
            if not is_command(f) and (count := num_parameters(f)) > MAX_PARAMETERS}
    assert not many


def test_our_own_modules_are_imported_at_the_top(path: Path, tree: ast.Module) -> None:
    name = str(path.relative_to(ROOT))
    assert not {m for m in late_imports(tree) if (name, m) not in LATE_IMPORTS}


def test_every_exception_is_still_needed() -> None:
    late = {(str(path.relative_to(ROOT)), module) for path in PATHS
            for module in late_imports(ast.parse(path.read_text("utf-8")))}
    assert LATE_IMPORTS.keys() <= late
