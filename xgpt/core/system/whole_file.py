"""Files that a reader finds whole, whenever he looks, and that are there after a power cut."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

MOST_BYTES = 2**27  # of a JSON file read as a whole: such are a few MiB
_TRIED_BYTES = 4096  # the block of most file systems: an empty file fits on a full disk


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The text of a file of unknown origin. Raises OSError, and ValueError where it is larger than
    MOST_BYTES, no plain file (a pipe may never end), or no text."""
    if not path.is_file():
        path.stat()
        raise ValueError("no plain file")
    with path.open("rb") as file:
        raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise ValueError(f"larger than {MOST_BYTES // 2**20} MiB")
    return raw.decode(encoding)


def read_object(path: Path) -> dict[str, Any]:
    """The object of a JSON file; an empty one where there is none, or it is not whole."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def write_atomically(path: Path, text: str, *, is_durable: bool = True) -> None:
    """Writes `text` so that a reader sees the old content or the new, never half of it; so does who
    reads after a power cut, and once this returns it is the new. `is_durable` False: for what is
    replaced every second, and worth nothing after its run."""
    target = target_of(path)
    temporary = temporary_of(target)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        error.filename, error.filename2 = str(path), None  # which the user gave, for messages
        raise
    if is_durable:
        sync_folder(target.parent)


def json_text(value: Any, **options: Any) -> str:
    """`value` as JSON, which has no NaN and no infinity: null. `options`: of json.dumps."""
    text = json.dumps(value, **options)
    return text if "NaN" not in text and "Infinity" not in text else json.dumps(
        json.loads(text, parse_constant=lambda _: None), **options)


def target_of(path: Path) -> Path:
    """Where a file written to `path` lies: a symbolic link stays one, and its target is replaced.
    """
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def temporary_of(path: Path) -> Path:
    """The file beside `path` that is written first, and takes its name once it is whole."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def why_no_file(path: Path) -> str | None:
    """What `path` should be for a file to be written there, in words; None where one can be, as far
    as that is known before: its folder is made, and a small file lay beside it for a moment."""
    reason = "a file that can be written to"
    try:
        if not path.name or path.is_dir():
            return "a file, not a folder"
        if path.exists() and not path.is_file():  # a file in its place would take a device's name
            return "a plain file, or a new one: a device or a pipe is there"
        target = target_of(path)
        if target.exists() and not os.access(target, os.W_OK):
            return reason
        reason = "a file in a folder that can be made"
        target.parent.mkdir(parents=True, exist_ok=True)
        reason = "a file that can be written to"
        _try(temporary_of(target))
    except OSError as cause:
        return f"{reason}: {cause.strerror}"
    return None


def why_no_folder(path: Path) -> str | None:
    """The same of a folder that files are to be written into."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        _try(temporary_of(path / "xgpt"))
    except OSError as cause:
        return f"a folder that can be written to: {cause.strerror}"
    return None


def _try(path: Path) -> None:
    """Raises OSError where a small file finds no place."""
    try:
        path.write_bytes(bytes(_TRIED_BYTES))
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Returns when the names in the folder are on the disk: a new file, or a new name of one, is
    not there after a power cut otherwise, whatever was done for its content."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # may be read by nobody, or gone
        return
    try:
        os.fsync(descriptor)
    except OSError:  # a file system that keeps names by itself
        pass
    finally:
        os.close(descriptor)


def sync_files(folder: Path) -> None:
    """The same of all files of a folder, then of their names."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        elif path.is_dir():
            sync_folder(path)
    sync_folder(folder)
