"""This machine's memories below its devices. The disk is measured as a run uses it: by one thread,
past the page cache. Free of torch."""

import mmap
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from xgpt.core.cluster import Link, Tier
from xgpt.core.errors import XgptError
from xgpt.core.placement import SECTOR
from xgpt.core.system.direct_file import DirectFile, why_no_disk
from xgpt.core.system.machine import available_memory_bytes

_PART_BYTES, _PARTS, _LEAST_PARTS = 2**23, 16, 4  # chosen: 128 MiB, at least 32
_MOST_S = 0.5  # chosen: for writing, and for reading


def measured_tiers(folder: Path, host_link: Link | None = None) -> tuple[Tier, ...]:
    """The disk of `folder`, measured in about a second, and before it this machine's host memory
    if its devices have memory of their own: `host_link` is the bus to them. Raises XgptError, with
    the requirement that `folder` fails."""
    if (reason := why_no_disk(folder, _PARTS * _PART_BYTES)) is not None:
        raise XgptError(reason)
    read, write = _disk(folder)
    disk = Tier(name="disk", memory_bytes=shutil.disk_usage(folder).free, up=read, down=write)
    return (disk,) if host_link is None else (
        Tier(name="host", memory_bytes=available_memory_bytes(), up=host_link, down=host_link,
             attention=True), disk)


def _disk(folder: Path) -> tuple[Link, Link]:
    """Reading from the disk of `folder`, and writing to it. The latency is a single sector's."""
    with closing(DirectFile(folder / "xgpt-rate", _PARTS * _PART_BYTES, is_scratch=True)) as file, (
            memoryview(mmap.mmap(-1, _PART_BYTES))) as part:
        part[:] = bytes(range(256)) * (_PART_BYTES // 256)
        written = _repeated(lambda at: file.write(at * _PART_BYTES, part))
        sync_s = _timed(file.sync)
        read = _repeated(lambda at: file.read(at * _PART_BYTES, part), len(written))
        link = Link(name="disk", bandwidth_bytes_per_s=_PART_BYTES / statistics.fmean(read),
                    source=f"measured: requests of 8 MiB, {file.way}",
                    latency_s=statistics.median(_timed(lambda: file.read(0, part[:SECTOR]))
                                                for _ in range(_PARTS)))
    return link, replace(link, bandwidth_bytes_per_s=_PART_BYTES * len(written) / (
        sum(written) + sync_s))


def _repeated(call: Callable[[int], object], most: int = _PARTS) -> list[float]:
    taken = list[float]()
    while len(taken) < most and (len(taken) < _LEAST_PARTS or sum(taken) < _MOST_S):
        taken.append(_timed(partial(call, len(taken))))
    return taken


def _timed(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s
