"""One run at a time writes into an output folder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xgpt.errors import XgptError


@contextmanager
def output_lock(output: Path) -> Iterator[int]:
    """Holds the folder's lock; yields the descriptor that carries it. A child that inherits it
    keeps the lock as long as it lives, even if this process is killed. Raises XgptError when
    another run has it: two would mix their lines in results.jsonl."""
    with (output / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise XgptError(f"{output}: another run is writing there (see `xgpt status`); wait for "
                            "it, or give this one another `output`") from None
        yield file.fileno()
