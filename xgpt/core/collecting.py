"""When Python looks for garbage that refers to itself.

It does so after some hundred objects more than before, over all there are: of work that makes
hundreds of thousands, none of which refer to themselves, a tenth to a third of the time."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_held = 0  # who has asked for it not to, now
_was_enabled = True
_others_froze = False  # once seen, taken to stay so: what is frozen is counted one by one


@contextmanager
def uncollected() -> Iterator[None]:
    """No such garbage is looked for meanwhile, in any thread; what is not referred to is freed as
    ever. For seconds of work, not for a whole run. What is left of it in the end counts as old: it
    is looked at when all there is is, and not at once."""
    global _held, _was_enabled
    with _lock:
        if not _held:
            _was_enabled = gc.isenabled()
            gc.disable()
        _held += 1
    try:
        yield
    finally:
        with _lock:
            _held -= 1
            if not _held and _was_enabled:
                _age()
                gc.enable()


def _age() -> None:
    global _others_froze
    _others_froze = _others_froze or gc.get_freeze_count() > 0
    if not _others_froze:  # nor is what others have frozen melted
        gc.freeze()
        gc.unfreeze()
