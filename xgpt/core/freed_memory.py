"""Memory that is freed, and wanted again at once.

glibc hands much of it back to the system, which then gives it again page by page, each of zeros. Of
a search, which makes tens of thousands of arrays a second and keeps few, that is one to five
hundredths of the time (70B on 16 H100: the first plan takes 27,000 pages, 43,000 without this)."""

from __future__ import annotations

import ctypes
import os
from functools import cache

# glibc's mallopt(3): its numbers, the variables by which a user sets the same, and what is set
_TRIM, _PAD, _MAPPED = -1, -2, -3
_OPTIONS = {
    _TRIM: ("MALLOC_TRIM_THRESHOLD_", 2**30),  # bytes free at the end before they are given back
    _PAD: ("MALLOC_TOP_PAD_", 64 * 2**20),  # asked for beyond what is wanted
    _MAPPED: ("MALLOC_MMAP_THRESHOLD_", 32 * 2**20),  # from which on a block is the system's own
}


@cache
def keep_freed() -> None:
    """From now on this process keeps what it frees, up to 1 GiB, for itself. What a user's
    environment says of it stays; with another C library than glibc nothing changes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for option, (variable, num_bytes) in _OPTIONS.items():
        if variable not in os.environ:
            mallopt(option, num_bytes)
