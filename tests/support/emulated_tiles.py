"""Tiles (Intel's AMX) carried out by a handler of refused instructions (emulated_tiles.cpp), for
processors that lack them but have AVX-512 with bfloat16 pairs: the native operators run as they
would on a processor with tiles. On one that has them, they run there."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from xrunner.ops import native
from xrunner.ops.build import BuildError, extra_flags, find_compiler

_SOURCE = Path(__file__).with_suffix(".cpp")
_KEPT = Path(__file__).resolve().parents[2] / ".pytest_cache" / "emulated_tiles"
_FLAGS = ("-std=c++17", "-O2", "-mfma", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra",
          "-Werror")
LEVEL, BELOW = "avx512_amx", "avx512_bf16"


def are_there() -> bool:
    """Whether this processor has tiles."""
    return LEVEL in native.levels()


def are_emulated() -> bool:
    """Whether this processor lacks nothing but the tiles, and they can be compiled."""
    if native.levels()[-1:] != (BELOW,):
        return False
    try:
        return "clang" not in find_compiler().version
    except BuildError:
        return False


@cache
def _emulator() -> ctypes.CDLL:
    compiler = find_compiler()
    digest = hashlib.sha256(_SOURCE.read_bytes())
    digest.update("\0".join([*compiler.command, compiler.version, *extra_flags()]).encode())
    target = _KEPT / f"{digest.hexdigest()[:16]}.so"
    if not target.is_file():
        _KEPT.mkdir(parents=True, exist_ok=True)
        made = target.with_suffix(f".{os.getpid()}")
        subprocess.run([*compiler.command, *_FLAGS, *extra_flags(), "-o", str(made), str(_SOURCE)],
                       check=True, timeout=200)
        made.replace(target)
    lib = ctypes.CDLL(str(target))
    lib.tiles_done.restype = ctypes.c_int64
    return lib


def done() -> int:
    """Instructions of tiles carried out so far; of a processor's own nobody knows."""
    return 0 if are_there() else int(_emulator().tiles_done())


def are_used_since(before: int, is_meant: bool = True) -> bool:
    """Whether tiles were used, or left alone, as is meant, since so many were done."""
    return are_there() or (done() > before) == is_meant


@contextmanager
def faulty() -> Iterator[None]:
    """Products by tiles come out wrong meanwhile."""
    _emulator().tiles_be_faulty(1)
    try:
        yield
    finally:
        _emulator().tiles_be_faulty(0)


@contextmanager
def by_avx512() -> Iterator[None]:
    """The native operators use it, and no tiles."""
    lib = native.library()
    assert lib is not None
    before = lib.xgpt_level()
    native.use_level("avx512")
    try:
        yield
    finally:
        lib.xgpt_use_level(before)


@contextmanager
def a_processor_with_tiles(level: str = LEVEL) -> Iterator[None]:
    """The native operators are on one, and use `level`."""
    lib = native.library()
    assert lib is not None
    before = lib.xgpt_level()
    if are_there():
        native.use_level(level)
        try:
            yield
        finally:
            lib.xgpt_use_level(before)
        return
    emulator = _emulator()
    lib.xgpt_assume_best_level(native.LEVELS.index(LEVEL))
    assert emulator.tiles_begin() == 0
    try:
        native.use_level(level)
        yield
    finally:
        emulator.tiles_end()
        lib.xgpt_use_level(before)
        lib.xgpt_assume_best_level(-1)
    assert not emulator.tiles_in_use(), "a call leaves this thread's tiles configured"
