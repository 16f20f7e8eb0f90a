"""What the machine does to a command at work in its output folder, as a message."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xgpt.core.errors import XgptError, in_words


@contextmanager
def troubles_told(output: Path) -> Iterator[None]:
    """A full disk, a folder that is gone, memory that ran out become an XgptError; what may be a
    fault of xgpt stays as it is."""
    try:
        yield
    except (OSError, MemoryError, RuntimeError, ImportError) as error:
        if (words := in_words(error, output)) is None:
            raise
        raise XgptError(words) from None
