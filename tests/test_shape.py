"""The code keeps a size that can be read: files, classes, functions; imports stand at the top."""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("xgpt", "xprofiler", "xsimulator", "xscheduler", "xrunner")
MAX_LINES, MAX_METHODS, MAX_PARAMETERS = 400, 15, 7

# Imports of our own packages anywhere but at the top: (file, module imported) -> why.
LATE_IMPORTS: dict[tuple[str, str], str] = {
    (name, "xgpt.core.system.lifeline"): "a rank ends with its launcher while it imports torch, too"
    for name in ("xprofiler/measure/vllm_worker.py", "xprofiler/measure/worker.py",
                 "xrunner/backends/deepspeed_worker.py",
                 "xrunner/backends/vllm/vllm_worker.py", "xrunner/rank/standby.py",
                 "xrunner/rank/worker.py")}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def nodes(path: Path) -> tuple[frozenset[ast.AST], tuple[ast.AST, ...]]:
    """(those at the top of the module, all)"""
    tree = ast.parse(path.read_text("utf-8"))
    return frozenset(tree.body), tuple(ast.walk(tree))


@pytest.fixture(params=PACKAGES)
def sources(request):
    """A package's files, by their path in the tree."""
    return sources_of(request.param)


def sources_of(package: str) -> dict[str, Path]:
    found = {str(path.relative_to(ROOT)): path for path in sorted((ROOT / package).rglob("*.py"))}
    assert f"{package}/__init__.py" in found
    return found


def is_command(function: Function) -> bool:
    """Click passes a command's options as parameters: there are as many as it has options."""
    called = [d.func if isinstance(d, ast.Call) else d for d in function.decorator_list]
    return any(isinstance(d, ast.Attribute) and d.attr in ("command", "group") for d in called)


def num_parameters(function: Function) -> int:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    extra = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return len(names) - (names[:1] in (["self"], ["cls"])) + len(extra)


def late_imports(path: Path) -> Iterator[str]:
    """Modules of our own that are imported anywhere but at the top of the module."""
    top, everything = nodes(path)
    for node in everything:
        if node in top:
            continue
        names = ([alias.name for alias in node.names] if isinstance(node, ast.Import) else
                 [node.module or ""] if isinstance(node, ast.ImportFrom) else [])
        yield from (name for name in names if name.split(".")[0] in PACKAGES)


def test_a_file_is_short(sources):
    long = {name: count for name, path in sources.items()
            if (count := len(path.read_text("utf-8").splitlines())) > MAX_LINES}
    assert not long


def test_a_file_of_tests_or_scripts_is_short():
    files = [path for room in (".ci", "benchmarks", "docs", "tests")
             for path in sorted((ROOT / room).rglob("*.py"))]
    assert len(files) > 100
    assert not [str(path.relative_to(ROOT)) for path in files
                if len(path.read_text("utf-8").splitlines()) > MAX_LINES]


def test_a_class_has_few_methods(sources):
    many = {(name, c.name): count for name, path in sources.items() for c in nodes(path)[1]
            if isinstance(c, ast.ClassDef)
            and (count := sum(isinstance(n, Function) for n in c.body)) > MAX_METHODS}
    assert not many


def test_a_function_has_few_parameters(sources):
    many = {(name, f.name): count for name, path in sources.items() for f in nodes(path)[1]
            if isinstance(f, Function) and not is_command(f)
            and (count := num_parameters(f)) > MAX_PARAMETERS}
    assert not many


def test_our_own_modules_are_imported_at_the_top(sources):
    late = {(name, module) for name, path in sources.items() for module in late_imports(path)}
    assert not late - LATE_IMPORTS.keys()


def test_no_two_test_files_have_one_name():
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, times in names.items() if times > 1], "pytest collects one of them"


def test_every_exception_is_still_needed():
    late = {(name, module) for package in PACKAGES for name, path in sources_of(package).items()
            for module in late_imports(path)}
    assert LATE_IMPORTS.keys() <= late
