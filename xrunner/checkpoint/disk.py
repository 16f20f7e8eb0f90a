"""What loading took from the disk, as opposed to the page cache, and what the disk gives.

A checkpoint that was read before lies in memory: a rate of loading says nothing of the disk unless
it is known how many of its bytes came from there. Linux counts them for each process.
"""

from __future__ import annotations

import mmap
import os
import re
import time
from pathlib import Path

_BLOCK_BYTES = 4 * 2**20
_SAMPLE_BYTES, _SAMPLE_S = 64 * 2**20, 0.25


class DiskMeter:
    """Bytes that storage delivered to this process since the meter was made, those read ahead
    among them."""

    def __init__(self) -> None:
        self._before = _storage_bytes()

    @property
    def num_bytes(self) -> int | None:
        """Bytes read from the disk so far; None where the system does not count them."""
        now = _storage_bytes()
        return None if now is None or self._before is None else now - self._before


def disk_bytes_per_s(directory: Path) -> float | None:
    """What one reader gets of the disk that holds the directory's largest file: a quarter of a
    second's reading past the page cache. None where the file system has no such reading."""
    path = max((p for p in directory.iterdir() if p.is_file()), key=lambda p: p.stat().st_size)
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except (OSError, AttributeError):  # a file system, or a system, without it
        return None
    try:
        return _sample(file)
    except OSError:
        return None
    finally:
        os.close(file)


def _sample(file: int) -> float | None:
    block = mmap.mmap(-1, _BLOCK_BYTES)  # aligned to pages, as such reading asks for
    done, begin = 0, time.perf_counter()
    while done < _SAMPLE_BYTES and time.perf_counter() - begin < _SAMPLE_S:
        got = os.preadv(file, [block], done)
        done += got
        if got < _BLOCK_BYTES:
            break
    # fewer bytes than a few blocks measure the first access, not the rate
    return done / (time.perf_counter() - begin) if done >= 2 * _BLOCK_BYTES else None


def _storage_bytes() -> int | None:
    try:
        text = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        return None
    line = re.search(r"^read_bytes: (\d+)$", text, re.M)
    return None if line is None else int(line.group(1))
