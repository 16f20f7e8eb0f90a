"""The native operators are built once, found again, and done without where they cannot be had."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from xgpt.core.errors import XgptError
from xrunner.ops import build
from xrunner.ops.cpu import native

ROOT = Path(__file__).resolve().parents[3]
HEADER = (ROOT / "csrc/ops/cpu/native.h").read_text("utf-8")
DECLARATION = re.compile(r"^((?:const )?\w+ \*?)(xgpt_\w+)\(([^)]*)\);", re.M)
LEVELS = "ops/cpu/levels.cpp"
KINDS = {"int": "i", "int64_t": "l", "float": "f"}


def kind(declared: str) -> str:
    if "*" in declared:
        return "s" if declared.startswith("const char") else "p"
    return "v" if declared == "void" else KINDS[declared.split()[0]]


def declared_in_header() -> dict[str, str]:
    """name -> signature, as native.OPERATORS writes it."""
    plain = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.S)
    return {name: " ".join([kind(result.strip()), "".join(
                kind(argument.strip()) for argument in arguments.split(",")
                if argument.strip() != "void")]).strip()
            for result, name, arguments in DECLARATION.findall(plain)}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of libraries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "xgpt" / "native"


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """csrc/ops/cpu of one function, which compiles in an instant."""
    folder = tmp_path / "csrc" / "ops" / "cpu"
    folder.mkdir(parents=True)
    (folder / "one.cpp").write_text('extern "C" int one(void) { return 1; }\n')
    monkeypatch.setattr(build, "source_folder", lambda: folder.parents[1])
    return folder


def test_the_table_of_operators_is_that_of_the_header():
    assert declared_in_header() == native.OPERATORS


def test_the_levels_are_those_of_the_header():
    found = re.search(r"enum \{ (XGPT_PORTABLE.*?) \}", HEADER, re.S)
    names = [part.split("=")[0].strip() for part in found.group(1).split(",")]
    assert names == [*(f"XGPT_{name.upper()}" for name in native.LEVELS), "XGPT_NUM_LEVELS"]


needs_compiler = pytest.mark.skipif(not native.levels(), reason=native.describe())
ONE = 'extern "C" int {}(void) {{ return {}; }}\n'


@needs_compiler
def test_every_level_can_be_used_and_none_beyond():
    lib = native.library()
    before = lib.xgpt_level()
    try:
        for name in native.levels():
            native.check(lib.xgpt_use_level(native.LEVELS.index(name)))
            assert native.LEVELS[lib.xgpt_level()] == name and name in native.describe()
        with pytest.raises(ValueError, match="lacks the instruction set"):
            native.check(lib.xgpt_use_level(len(native.LEVELS)))
    finally:
        lib.xgpt_use_level(before)


def test_a_tensor_that_no_operator_serves_is_told_apart():
    assert [native.dtype_code(torch.zeros(1, dtype=dtype)) for dtype in (
        torch.float32, torch.bfloat16, torch.float64)] == [0, 1, None]
    assert not native.serves(torch.zeros(1, dtype=torch.float16))
    assert not native.serves(torch.zeros(1, device="meta"))


@needs_compiler
def test_a_library_is_built_once_of_all_sources_and_anew_for_others(cache, sources, monkeypatch):
    (sources / "two.cpp").write_text(ONE.format("two", 2))
    first = build.cached_library(cache)
    lib, made = ctypes.CDLL(str(first)), first.stat().st_mtime_ns
    assert (lib.one(), lib.two()) == (1, 2)
    assert build.cached_library(cache) == first and first.stat().st_mtime_ns == made
    (sources / "two.h").write_text("\n")
    second = build.cached_library(cache)
    monkeypatch.setenv("XGPT_NATIVE_FLAGS", "-g")
    assert len({first, second, build.cached_library(cache)}) == 3


@needs_compiler
def test_ranks_wait_for_no_source_of_replays(cache, sources):
    two = sources.parents[1] / "replay" / "two.cpp"
    two.parent.mkdir()
    two.write_text(ONE.format("two", 2))
    first = build.cached_library(cache)
    own, replays = ctypes.CDLL(str(first)), ctypes.CDLL(
        str(build.cached_library(cache, build.REPLAYS)))
    assert hasattr(own, "one") and not hasattr(own, "two")
    assert hasattr(replays, "two") and not hasattr(replays, "one")
    two.write_text(ONE.format("two", 3))
    two.with_name("two.h").write_text("\n")
    assert build.cached_library(cache) == first, "nor is it compiled anew for one"
    whole = cache / "whole.so"
    build.compile_library(sources.parents[1], whole, build.find_compiler())
    assert hasattr(ctypes.CDLL(str(whole)), "two"), "a wheel's library has all"


@needs_compiler
@pytest.mark.parametrize(("best", "least", "pairs"), [
    (0, 0, 0), (1, 1, 0), (2, 2, 0), (3, 2, 1), (3, 2, 0)])
def test_what_is_kept_here_has_the_sets_and_products_that_serve_here(
        cache, sources, monkeypatch, best, least, pairs):
    monkeypatch.delenv("XGPT_NATIVE_LEVELS", raising=False)
    (sources / "one.cpp").write_text("""
#ifdef XGPT_NO_PAIRS
#define PAIRS 0
#else
#define PAIRS 1
#endif
""" + ONE.format("one", "10 * XGPT_LEAST_LEVEL + XGPT_MOST_LEVEL") + ONE.format("two", "PAIRS"))
    (sources / "levels.cpp").write_text(
        ONE.format("xgpt_best_level", best) + ONE.format("xgpt_has_pairs", pairs))
    own = build.cached_library(cache)
    lib = ctypes.CDLL(str(own))
    assert (lib.one(), lib.two()) == (10 * least + best, pairs)
    monkeypatch.setenv("XGPT_NATIVE_LEVELS", "own")
    assert build.cached_library(cache) == own
    monkeypatch.setenv("XGPT_NATIVE_LEVELS", "avx2")
    assert "XGPT_NATIVE_LEVELS is 'avx2'; it may be own, all" in native.open_native("auto").reason
    monkeypatch.setenv("XGPT_NATIVE_LEVELS", "all")
    (sources / "one.cpp").write_text("#ifdef XGPT_LEAST_LEVEL\n#error\n#endif\n")
    assert build.cached_library(cache) != own


@needs_compiler
def test_where_nothing_may_be_loaded_from_the_temporary_folder_all_sets_are_compiled(
        cache, sources, monkeypatch):
    monkeypatch.delenv("XGPT_NATIVE_LEVELS", raising=False)
    (sources / "levels.cpp").write_text(ONE.format("xgpt_best_level", 1))
    (sources / "one.cpp").write_text("#ifdef XGPT_LEAST_LEVEL\n#error\n#endif\n")
    load = ctypes.CDLL

    def mounted_noexec(name: str) -> ctypes.CDLL:
        if not name.startswith(str(cache)):
            raise OSError(f"{name}: failed to map segment from shared object")
        return load(name)

    monkeypatch.setattr(ctypes, "CDLL", mounted_noexec)
    assert build.cached_library(cache).is_file()


@needs_compiler
def test_a_library_of_another_processor_is_not_called(cache, sources):
    """A cache may be shared by machines whose processors tell themselves apart by nothing."""
    (sources / "one.cpp").write_text("".join(
        ONE.format(name, int(name == "xgpt_least_level")) for name in native.OPERATORS))
    found = native.open_native("auto")
    assert found.library is None
    assert "compiled for avx2 and more, and this processor has portable" in found.reason


@needs_compiler
def test_ranks_that_start_together_build_one_library(tmp_path, sources):
    calls, compiler, found = tmp_path / "calls", tmp_path / "c++", build.find_compiler()
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo >> {calls}\n'
                        f'exec {" ".join(found.command)} "$@"\n')
    compiler.chmod(0o755)
    program = (f"from pathlib import Path; from xrunner.ops import build; "
               f"build.source_folder = lambda: Path({str(sources.parents[1])!r}); "
               f"print(build.cached_library(Path({str(tmp_path / 'cache')!r})))")
    ranks = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "CXX": str(compiler)}) for _ in range(4)]
    said = {rank.communicate(timeout=60)[0] for rank in ranks}
    assert all(rank.returncode == 0 for rank in ranks)
    assert len(said) == 1 and len(calls.read_text().splitlines()) == 1


@needs_compiler
def test_a_failing_build_names_its_error(cache, sources):
    (sources / "one.cpp").write_text("int one(void) { return nowhere; }\n")
    with pytest.raises(build.BuildError, match="fails on csrc: .*nowhere"):
        build.cached_library(cache)
    assert not list(cache.glob("*.so")) and not list(cache.glob(".*.tmp"))
    (sources / "one.cpp").write_text(ONE.format("one", 1))
    assert build.cached_library(cache).is_file()


@pytest.mark.parametrize(("variables", "words"), [
    ({"CXX": "/nowhere/c++"}, "which is not there"), ({"CXX": "false"}, "--version fails"),
    ({"CXX": None, "PATH": ""}, "no C\\+\\+ compiler"), ({}, "")])
def test_what_cannot_be_built_or_kept_leaves_torch_with_its_reason(
        tmp_path, cache, sources, monkeypatch, variables, words):
    """The last: the cache cannot be written."""
    for name, value in variables.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name,
                                                                                       value)
    if not variables:
        (tmp_path / "xgpt").write_text("a file where the folder would be")
    found = native.open_native("auto")
    assert found.library is None and found.reason and re.search(words, found.reason)
    with pytest.raises(XgptError, match=f"(?s)require.*{words}"):
        native.open_native("require")


def test_native_can_be_switched_off_and_nothing_else_is_understood():
    assert native.open_native("off") == native.Native(None, reason="XGPT_NATIVE is off")
    with pytest.raises(XgptError, match="auto, off, require"):
        native.open_native("on")


@needs_compiler
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
def test_wide_registers_are_used_where_their_instruction_set_was_asked_for_alone():
    """A template of the standard library that was compiled for AVX-512 would serve, and end, every
    processor that has none."""
    lib = native.library()
    shown = subprocess.run(["objdump", "-d", "--no-show-raw-insn", lib._name], check=True,
                           capture_output=True, text=True, timeout=100).stdout
    wide = {name for name, code in re.findall(r"^\w+ <(\S+)>:\n((?:.+\n)+)", shown, re.M)
            if re.search(r"%[yz]mm\d", code)}
    assert not {name for name in wide if "avx2" not in name and "avx512" not in name}
