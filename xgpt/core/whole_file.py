"""Files that a reader finds whole, whenever he looks."""

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


def write_atomically(path: Path, text: str) -> None:
    """Writes `text` so that a reader sees the old content or the new, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
