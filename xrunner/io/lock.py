"""One run at a time writes into an output folder."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xgpt.core.errors import XgptError

_FILE = ".lock"
_TRIES, _PAUSE_S = 5, 0.05  # `is_locked` holds the lock for an instant; a run holds it for good


@contextmanager
def output_lock(output: Path) -> Iterator[int]:
    """Holds the folder's lock; yields the descriptor that carries it. A child that inherits it
    keeps the lock as long as it lives, even if this process is killed. Raises XgptError when
    another run has it: two would mix their lines in results.jsonl."""
    with (output / _FILE).open("w") as file:
        for rest in reversed(range(_TRIES)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not rest:
                    raise XgptError(f"{output}: another run is writing there (see `xgpt status`); "
                                    "wait for it, or give this one another `output`") from None
                time.sleep(_PAUSE_S)
            except OSError as cause:
                raise XgptError(f"{output}: its file system cannot lock files "
                                f"({cause.strerror}); choose another `output`") from None
        yield file.fileno()


def is_locked(output: Path) -> bool | None:
    """Whether a run, or a part of one, is alive in the folder; None where that cannot be told."""
    try:
        with (output / _FILE).open("rb") as file:
            # shared: two who ask do not take each other for a run
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False
