"""Files that a reader finds whole, whenever he looks, and that are there after a power cut."""

import os
from pathlib import Path

MOST_BYTES = 2**27  # of a JSON file read as a whole: such are a few MiB


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


def write_atomically(path: Path, text: str, *, is_durable: bool = True) -> None:
    """Writes `text` so that a reader sees the old content or the new, never half of it; so does who
    reads after a power cut, and once this returns it is the new. `is_durable` False: for what is
    replaced every second, and worth nothing after its run."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if is_durable:
        sync_folder(path.parent)


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
