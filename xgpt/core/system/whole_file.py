"""Reads and writes files so that readers find them whole, also after a power cut."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

MOST_BYTES = 2**27  # chosen: largest JSON file that is read; usual ones have a few MiB
_TRIED_BYTES = 4096  # the block of most file systems: an empty file fits on a full disk


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The text of a file of unknown origin. Raises OSError, and ValueError for a file larger than
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
    """The object in a JSON file; {} if there is no file, or it is not whole."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def write_atomically(path: Path, text: str, *, is_durable: bool = True) -> None:
    """Writes `text` so that readers see the old content or the new, never half of it. After a power
    cut they see the new content once this has returned. `is_durable` False drops that: for files
    replaced every second, of no use after their run."""
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
        error.filename, error.filename2 = str(path), None  # the user's name of it, for messages
        raise
    if is_durable:
        sync_folder(target.parent)


def json_text(value: Any, **options: Any) -> str:
    """`value` as JSON text, with null for NaN and infinity. `options`: those of json.dumps."""
    text = json.dumps(value, **options)
    return text if "NaN" not in text and "Infinity" not in text else json.dumps(
        json.loads(text, parse_constant=lambda _: None), **options)


def target_of(path: Path) -> Path:
    """The path that writing to `path` replaces: the target of a symbolic link, else `path`."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def temporary_of(path: Path) -> Path:
    """Path beside `path` that is written first, and renamed once it is whole."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def why_no_file(path: Path) -> str | None:
    """The requirement that `path` fails for a file to be written there, in words; None if it meets
    all. Creates its folder, and tries a small file beside it."""
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
    """The requirement that the folder `path` fails for files to be written into it, in words; None
    if it meets all. Creates it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        _try(temporary_of(path / "xgpt"))
    except OSError as cause:
        return f"a folder that can be written to: {cause.strerror}"
    return None


def _try(path: Path) -> None:
    """Raises OSError if a small file cannot be written to `path`."""
    try:
        path.write_bytes(bytes(_TRIED_BYTES))
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Waits until the names in the folder are on the disk: else a new or renamed file may be lost
    in a power cut, whatever was done for its content."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # unreadable, or gone
        return
    try:
        os.fsync(descriptor)
    except OSError:  # a file system that keeps names by itself
        pass
    finally:
        os.close(descriptor)


def sync_files(folder: Path) -> None:
    """Waits until all files of a folder, and their names, are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        elif path.is_dir():
            sync_folder(path)
    sync_folder(folder)
