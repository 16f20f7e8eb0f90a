"""Compiles csrc/ into one shared library, cached by everything that makes builds differ. Free of
torch and of this project's other modules: the wheel's build hook runs it where neither is
installed."""

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
REPLAYS = "replay/*.cpp"  # what planning needs, compiled apart
EVERYTHING, OPERATORS = "**/*.cpp", "ops/cpu/*.cpp"  # sources of a wheel; of ranks
VARIABLE = "XGPT_NATIVE"  # auto, off or require
# Instruction sets in a library cached on this machine: `own` (those that its processor uses, a
# third of the build time) or `all`, as in a wheel.
LEVELS_VARIABLE = "XGPT_NATIVE_LEVELS"
# Portable: the instruction set is chosen at run time (csrc/ops/cpu/levels.h), so one library suits
# every CPU of a family. No OpenMP: it gets torch's (threads.h there).
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread")
_PROBE = "ops/cpu/levels.cpp"  # reports the processor's best set
_WIDE = 2  # number of the set that those above build on
_COMPILERS = ("g++", "c++", "clang++")
_LIMIT_S = 600.0  # chosen
_CPU_KEYS = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "Features")
_PR_SET_PDEATHSIG = 1
_AGAIN_S = 0.05  # chosen


class BuildError(Exception):
    """There is no library; the message says why in one line."""


class Compiler(NamedTuple):
    """A C++ compiler. `command`: its words, as of `$CXX`."""

    command: tuple[str, ...]
    version: str  # first line of its --version


def source_folder() -> Path:
    """csrc/ of an installed wheel, else of the checkout."""
    packaged = Path(__file__).resolve().parent.parent / "csrc"
    return packaged if packaged.is_dir() else packaged.parent.parent / "csrc"


def cache_folder() -> Path:
    """Folder of compiled libraries, in the cache of xrunner.checkpoint.source."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xgpt" / "native"


def find_compiler() -> Compiler:
    """`$CXX`, or the first compiler on the PATH. Raises BuildError."""
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
    """Compiler options in `$XGPT_NATIVE_FLAGS` (a sanitizer's, say)."""
    return tuple(shlex.split(os.environ.get("XGPT_NATIVE_FLAGS", "")))


def library_key(folder: Path, compiler: Compiler, flags: Sequence[str] = (),
                names: str = EVERYTHING) -> str:
    """Hash (16 hex digits) of the sources, the compiler, its options and the CPU."""
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
    """Compiles the C++ files of `folder` that match `names` to `target`, all or nothing. Uses all
    cores, the slowest sources first. Raises BuildError."""
    sources = sorted(folder.glob(names), key=_work, reverse=True)
    if not sources:
        raise BuildError(f"no sources in {folder}")
    # unique to this process and machine: others may share the folder, and locks may not work there
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
    """Estimated compile time of a source; code for each instruction set takes far longer."""
    text = source.read_text(encoding="utf-8", errors="replace")
    bodies = [source.parent / str(name) for name in re.findall(r'#define XGPT_BODY "(.*)"', text)]
    return len(text) + 10 * sum(body.stat().st_size for body in bodies if body.is_file())


def _compile(command: Sequence[str]) -> None:
    done = _run(command)
    if done.returncode != 0:
        raise BuildError(f"{Path(command[0]).name} fails on csrc: {_last_line(done)}")


def own_levels(folder: Path, compiler: Compiler) -> tuple[str, ...]:
    """Compiler options that leave out instruction sets and products this processor cannot use.
    Empty if all are asked for, the sources have no probe, or nothing can be loaded from the
    temporary folder (administrators may forbid it)."""
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
    """Value of LEVELS_VARIABLE, "own" by default. Raises BuildError for another."""
    wish = os.environ.get(LEVELS_VARIABLE, "").strip() or "own"
    if wish not in ("own", "all"):
        raise BuildError(f"{LEVELS_VARIABLE} is {wish!r}; it may be own, all")
    return wish


def cached_library(cache: Path, names: str = OPERATORS) -> Path:
    """Library of the operators (or of sources matching `names`) in the folder `cache`. Compiles it
    if need be. Of ranks that start together one compiles, and the others share its result. Raises
    BuildError, or OSError if the folder is not writable."""
    compiler, flags, asked_at = find_compiler(), extra_flags(), time.time()
    folder, wish = source_folder(), _levels_wish()
    # the key includes the processor, whose sets are taken
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
    """Why torch is used on this CPU instead of native operators; "" if it is not. Compiles them if
    need be, so that no rank has to, but does not load them."""
    if os.environ.get(VARIABLE, "").strip() == "off":
        return f"{VARIABLE} is off"
    try:
        if not (source_folder() / LIBRARY).is_file():
            cached_library(cache)
    except (BuildError, OSError) as error:
        return str(error)
    return ""


def compile_for_user() -> None:
    """Compiles the libraries that runs of this checkout look for in the user's cache. Raises
    BuildError or OSError as `cached_library`."""
    if os.environ.get(VARIABLE, "").strip() != "off":
        for names in (REPLAYS, OPERATORS):
            cached_library(cache_folder(), names)


def why_no_cupy() -> str | None:
    """Why cupy is missing, without importing it; None if it is installed."""
    if importlib.util.find_spec("cupy") is None:
        return ("cupy is not installed (pip install -e '.[cuda12]', or '.[cuda13]' where the "
                "driver is of CUDA 13)")
    return None


def why_no_kernels() -> str:
    """Why torch is used on GPUs instead of our kernels, as far as known without a GPU; else ""."""
    if os.environ.get(VARIABLE, "").strip() == "off":
        return f"{VARIABLE} is off"
    return why_no_cupy() or ""


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Holds the lock. On file systems without locks ranks compile the same, and the last one's
    stays."""
    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cpu() -> str:
    """The CPU's family, by its first processor."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        text = ""
    return "\n".join([platform.machine(), *(line for line in text.splitlines()
                                            if line.split("\t")[0].strip() in _CPU_KEYS)])


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs the compiler in the C locale: a user's language must not change the key."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False,
                              errors="replace", stdin=subprocess.DEVNULL, timeout=_LIMIT_S,
                              env={**os.environ, "LC_ALL": "C"})
    except (OSError, subprocess.TimeoutExpired) as cause:
        raise BuildError(f"{command[0]}: {cause}") from None


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The first error that the compiler names, or its last line."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    wrong = [line for line in lines if "error" in line.lower()]
    return (wrong or lines[-1:] or [f"exit code {done.returncode}"])[0].strip()


def _ended(*_: object) -> None:
    """Ends a process that compiles for another which has ended. Its compilers end, its files are
    removed, and no failure is recorded."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # not SIG_IGN, which compilers inherit
    if os.getpgrp() == os.getpid():
        threading.Thread(target=_end_compilers, daemon=True).start()
    raise SystemExit(128 + signal.SIGTERM)


def _end_compilers() -> None:
    """Ends compilers until this process ends: after one, the next source's may have started."""
    while True:
        os.killpg(0, signal.SIGTERM)
        time.sleep(_AGAIN_S)


def _end_with(parent: int) -> None:
    """Ends this process when the one that started it ends, however that ends."""
    signal.signal(signal.SIGTERM, _ended)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has ended already
        _ended()


if __name__ == "__main__":
    _end_with(int(sys.argv[2]))
    sys.exit(why_not_native(Path(sys.argv[1])) or None)
