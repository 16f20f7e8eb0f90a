"""csrc/ compiled into one shared library, kept by all that makes one differ from another.

Free of torch and of this project's other modules: the wheel's build hook runs it, too, where
neither is installed.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

LIBRARY = "libxgpt_native.so"
REPLAYS = "replay/*.cpp"  # what planning alone needs, and compiles for itself
EVERYTHING, OPERATORS = "**/*.cpp", "ops/cpu/*.cpp"  # a wheel's; what ranks need, and is kept apart
VARIABLE = "XGPT_NATIVE"  # auto, off or require
# Which instruction sets are compiled into a library that is kept on this machine: `own` (those that
# serve on its processor, which takes a third of the time), or `all`, as in a wheel.
LEVELS_VARIABLE = "XGPT_NATIVE_LEVELS"
# Portable: what instruction set serves is chosen when it runs (csrc/ops/cpu/levels.h), so that one
# library is right on every CPU of a family. No OpenMP: it is handed torch's (threads.h there).
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread")
_PROBE = "ops/cpu/levels.cpp"  # tells the processor's best set
_WIDE = 2  # the set that those above build on
_COMPILERS = ("g++", "c++", "clang++")
_LIMIT_S = 600.0
_CPU_KEYS = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "Features")
_PR_SET_PDEATHSIG = 1
_AGAIN_S = 0.05


class BuildError(Exception):
    """No library, and why in one line."""


class Compiler(NamedTuple):
    """`command`: as it is called, more than one word of `$CXX` included."""

    command: tuple[str, ...]
    version: str  # its own first line about itself


def source_folder() -> Path:
    """csrc/ of an installed wheel, or else of the checkout."""
    packaged = Path(__file__).resolve().parent.parent / "csrc"
    return packaged if packaged.is_dir() else packaged.parent.parent / "csrc"


def cache_folder() -> Path:
    """Where compiled libraries are kept: the cache's place as xrunner.checkpoint.source has it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xgpt" / "native"


def find_compiler() -> Compiler:
    """`$CXX`, or the first that is on the PATH. Raises BuildError."""
    asked = shlex.split(os.environ.get("CXX", ""))
    commands = [asked] if asked else [[name] for name in _COMPILERS]
    command = next((c for c in commands if shutil.which(c[0])), None)
    if command is None:
        raise BuildError(f"$CXX is {shlex.join(asked)}, which is not there" if asked
                         else "no C++ compiler (g++, c++ or clang++) is on the PATH")
    said = _run([*command, "--version"])
    if said.returncode != 0 or not said.stdout.strip():
        raise BuildError(f"{shlex.join(command)} --version fails: {_last_line(said)}")
    path = shutil.which(command[0]) or command[0]
    return Compiler((path, *command[1:]), said.stdout.splitlines()[0].strip())


def extra_flags() -> tuple[str, ...]:
    """What `$XGPT_NATIVE_FLAGS` adds to the compiler's options (a sanitizer's, say)."""
    return tuple(shlex.split(os.environ.get("XGPT_NATIVE_FLAGS", "")))


def library_key(folder: Path, compiler: Compiler, flags: Sequence[str] = (),
                names: str = EVERYTHING) -> str:
    """Fingerprint of the sources, the compiler, its options and the CPU."""
    digest = hashlib.sha256()
    sources = list(folder.glob(names))
    headers = [path for beside in {s.parent for s in sources} for path in beside.glob("*.h")]
    for path in sorted([*sources, *headers]):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    digest.update("\0".join([*compiler.command, compiler.version, *_FLAGS, *flags,
                             _cpu()]).encode())
    return digest.hexdigest()[:16]


def compile_library(folder: Path, target: Path, compiler: Compiler,
                    flags: Sequence[str] = (), names: str = EVERYTHING) -> None:
    """All of `folder`'s C++, or those of such names (a pattern), as `target`, which is there whole
    or not at all: as many sources at once as there are cores, the largest first. Raises
    BuildError."""
    sources = sorted(folder.glob(names), key=_work, reverse=True)
    if not sources:
        raise BuildError(f"no sources in {folder}")
    # of this process on this machine: others may share the folder, where nothing can be locked
    temporary = target.with_name(f".{target.name}.{platform.node()}.{os.getpid()}.tmp")
    command = [*compiler.command, *_FLAGS, *flags]
    try:
        if len(sources) == 1:
            _compile([*command, "-shared", "-o", str(temporary), str(sources[0])])
        else:
            with (tempfile.TemporaryDirectory(prefix="xgpt-native-") as scratch,
                  ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool):
                objects = [f"{scratch}/{source.stem}.o" for source in sources]
                list(pool.map(_compile, ([*command, "-c", "-o", one, str(source)]
                                         for one, source in zip(objects, sources, strict=True))))
                _compile([*command, "-shared", "-o", str(temporary), *objects])
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _work(source: Path) -> int:
    """How long a source takes, roughly: what is compiled for each instruction set far longer."""
    text = source.read_text(encoding="utf-8", errors="replace")
    bodies = [source.parent / str(name) for name in re.findall(r'#define XGPT_BODY "(.*)"', text)]
    return len(text) + 10 * sum(body.stat().st_size for body in bodies if body.is_file())


def _compile(command: Sequence[str]) -> None:
    done = _run(command)
    if done.returncode != 0:
        raise BuildError(f"{Path(command[0]).name} fails on csrc: {_last_line(done)}")


def own_levels(folder: Path, compiler: Compiler) -> tuple[str, ...]:
    """Options that leave out instruction sets, and products, which never serve on this processor;
    none where all are asked for, the sources do not tell, or nothing can be loaded from the
    temporary folder (a cluster's administrators may forbid that)."""
    if _levels_wish() == "all" or not (folder / _PROBE).is_file():
        return ()
    with tempfile.TemporaryDirectory(prefix="xgpt-native-") as scratch:
        probe = Path(scratch) / "levels.so"
        compile_library(folder, probe, compiler, names=_PROBE)
        try:
            told = ctypes.CDLL(str(probe))
        except OSError:
            return ()
        best = int(told.xgpt_best_level())
        return (f"-DXGPT_LEAST_LEVEL={min(best, _WIDE)}", f"-DXGPT_MOST_LEVEL={best}",
                *["-DXGPT_NO_PAIRS"] * (not told.xgpt_has_pairs()))


def _levels_wish() -> str:
    """Raises BuildError for one that there is not."""
    wish = os.environ.get(LEVELS_VARIABLE, "").strip() or "own"
    if wish not in ("own", "all"):
        raise BuildError(f"{LEVELS_VARIABLE} is {wish!r}; it may be own, all")
    return wish


def cached_library(cache: Path, names: str = OPERATORS) -> Path:
    """The library of the operators, or of sources of such names, on this machine, compiled where it
    is not in the folder `cache`. Ranks that start together wait for one of them, and share its
    failure. Raises BuildError, or OSError where the folder cannot be written to."""
    compiler, flags, asked_at = find_compiler(), extra_flags(), time.time()
    folder, wish = source_folder(), _levels_wish()
    # the processor, whose sets are taken, is in the key
    key = library_key(folder, compiler, (*flags, *([wish] if wish == "all" else [])), names)
    target, failure = cache / f"{key}.so", cache / f"{key}.failed"
    if target.is_file():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with _alone(cache / f"{key}.lock"):
        if target.is_file():
            return target
        if failure.is_file() and failure.stat().st_mtime >= asked_at:
            raise BuildError(failure.read_text(encoding="utf-8"))
        try:
            own = own_levels(folder, compiler) if names == OPERATORS else ()
            compile_library(folder, target, compiler, (*flags, *own), names)
        except BuildError as error:
            failure.write_text(str(error), encoding="utf-8")
            raise
        failure.unlink(missing_ok=True)
    return target


def why_not_native(cache: Path) -> str:
    """Why torch will serve on this machine's CPU instead of native operators; empty where they
    will. Found without loading them; they are compiled here where need be, so that no rank has
    to."""
    if os.environ.get(VARIABLE, "").strip() == "off":
        return f"{VARIABLE} is off"
    try:
        if not (source_folder() / LIBRARY).is_file():
            cached_library(cache)
    except (BuildError, OSError) as error:
        return str(error)
    return ""


def keep_here() -> None:
    """What runs of this checkout will look for in the user's cache is compiled into it, where it
    is not there. Raises BuildError or OSError as `cached_library`."""
    if os.environ.get(VARIABLE, "").strip() != "off":
        for names in (REPLAYS, OPERATORS):
            cached_library(cache_folder(), names)


def why_no_cupy() -> str | None:
    """Why cupy cannot be had, without importing it; None where it is installed."""
    if importlib.util.find_spec("cupy") is None:
        return ("cupy is not installed (pip install -e '.[cuda12]', or '.[cuda13]' where the "
                "driver is of CUDA 13)")
    return None


def why_no_kernels() -> str:
    """Why torch will serve on GPUs instead of our kernels, as far as it can be told without
    looking at one; empty where they will, unless they differ from torch there."""
    if os.environ.get(VARIABLE, "").strip() == "off":
        return f"{VARIABLE} is off"
    return why_no_cupy() or ""


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Holds the lock, where the file system has locks: without one several ranks compile the same,
    and the last one's library stays."""
    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cpu() -> str:
    """The family, as the first processor tells it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        text = ""
    return "\n".join([platform.machine(), *(line for line in text.splitlines()
                                            if line.split("\t")[0].strip() in _CPU_KEYS)])


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The compiler's answer in C's own words: a user's language must not change the key."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False,
                              errors="replace", stdin=subprocess.DEVNULL, timeout=_LIMIT_S,
                              env={**os.environ, "LC_ALL": "C"})
    except (OSError, subprocess.TimeoutExpired) as cause:
        raise BuildError(f"{command[0]}: {cause}") from None


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The first error the compiler names, or what it said last."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    wrong = [line for line in lines if "error" in line.lower()]
    return (wrong or lines[-1:] or [f"exit code {done.returncode}"])[0].strip()


def _ended(*_: object) -> None:
    """Of a process that compiles for another which has ended: its compilers end, its files are
    taken away, and no failure is kept."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # not ignored, which compilers would inherit
    if os.getpgrp() == os.getpid():
        threading.Thread(target=_end_compilers, daemon=True).start()
    raise SystemExit(128 + signal.SIGTERM)


def _end_compilers() -> None:
    """As long as this process lasts: where one ends, another may have begun on the next source
    before what is left is given up."""
    while True:
        os.killpg(0, signal.SIGTERM)
        time.sleep(_AGAIN_S)


def _end_with(parent: int) -> None:
    """This process is told when the one that started it ends, however that ends."""
    signal.signal(signal.SIGTERM, _ended)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has ended before
        _ended()


if __name__ == "__main__":
    _end_with(int(sys.argv[2]))
    sys.exit(why_not_native(Path(sys.argv[1])) or None)
