"""Profiles measured on this machine, kept by everything that makes one differ from another."""

import ast
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from xgpt.core.model import ModelSpec
from xprofiler.profile import ProfileMetadata

_TIMED_CODE = ("xrunner/models", "xrunner/ops", "xrunner/engine/stage.py", "xrunner/engine/kv.py",
               "xrunner/engine/graphs.py", "xrunner/rules/buckets.py",
               "xrunner/engine/head.py", "xrunner/engine/roster.py",
               "xrunner/engine/stage.py", "xrunner/engine/group.py",
               "xrunner/transport", "xrunner/devices.py", "xprofiler/measure",
               "xgpt/launch/environment.py", "csrc")
_TIMED_SUFFIXES = (".py", ".cpp", ".cu", ".h")
_C_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def model_shape(spec: ModelSpec) -> str:
    """Fingerprint of what a layer's cost depends on; names and sources do not."""
    # norm_eps: a checkpoint's config rounds it differently, and it costs nothing
    labels = ("name", "hub_id", "wheel", "source", "norm_eps", "not_used")
    # stored_as: weights of fewer bits are executed as any others
    shape = {k: v for k, v in asdict(replace(spec, stored_as="")).items() if k not in labels}
    # what came later counts where it says something: profiles of before stay
    if shape["decoder"]["latent"] is None:
        del shape["decoder"]["latent"]
    if (experts := shape["decoder"]["experts"]) is not None:
        for later in ("shared", "dense_layers", "dense_inner"):
            if not experts[later]:
                del experts[later]
    return _digest(json.dumps(shape, sort_keys=True))


@cache
def kernels_fingerprint() -> str:
    """Fingerprint of the code that is timed, without its comments and docstrings: a profile of
    other code is none of this one."""
    root = Path(__file__).resolve().parent.parent
    return _digest("".join(timed_text(file.read_text(encoding="utf-8"), file.suffix)
                           for name in _TIMED_CODE for file in _code_files(root / name)))


def timed_text(source: str, suffix: str) -> str:
    """What of a source file changes what it takes: of Python the syntax tree, else its words."""
    if suffix != ".py":
        return " ".join(_C_COMMENT.sub(" ", source).split())
    tree = ast.parse(source)
    _strip_docstrings(tree)
    return ast.dump(tree)


def _strip_docstrings(scope: ast.Module | ast.ClassDef | ast.FunctionDef) -> None:
    scope.body = [own for own in scope.body if not (
        isinstance(own, ast.Expr) and isinstance(own.value, ast.Constant))]
    for own in scope.body:
        if isinstance(own, (ast.ClassDef, ast.FunctionDef)):
            _strip_docstrings(own)


def cached_profile_path(folder: Path, metadata: ProfileMetadata) -> Path:
    """Where the profile of this identity lies, existing or not."""
    digest = _digest(json.dumps(metadata.identity, sort_keys=True))
    machine = f"{metadata.ranks}x{metadata.threads_per_rank}"
    return folder / f"{metadata.dtype}-{machine}-{digest}.json"


@contextmanager
def changing(folder: Path) -> Iterator[None]:
    """Of processes that add to a profile of the folder, which they read, change and write, one at a
    time does: of two at once one's would be lost. Where the file system has no locks, or the lock
    is another user's who lets nobody open it, nobody waits. Not for measuring, which takes longer
    (xgpt.app.local_profile.alone)."""
    with ExitStack() as held:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            lock = _opened(folder / ".changing.lock")
            held.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _opened(lock: Path) -> int:
    """The file to lock, made where there is none. Raises OSError."""
    try:
        return os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)  # NFS wants it open for writing
    except PermissionError:  # another user's
        return os.open(lock, os.O_RDONLY)


def _code_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path] if path.is_file() else []  # an installed package may lack csrc
    return sorted(f for f in path.rglob("*") if f.suffix in _TIMED_SUFFIXES
                  and "replay" not in f.stem)  # of csrc, what only plans


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
