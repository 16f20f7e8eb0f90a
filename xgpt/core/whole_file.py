"""Files that a reader finds whole, whenever he looks."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Writes `text` so that a reader sees the old content or the new, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
