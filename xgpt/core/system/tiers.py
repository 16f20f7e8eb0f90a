"""Rates of this machine's memories below its devices, measured as a run uses them: by one thread,
the disk past the page cache. Free of torch."""

import mmap
import shutil
import statistics
import time
from pathlib import Path

from xgpt.core.cluster import Link, Tier
from xgpt.core.placement import SECTOR
from xgpt.core.system.direct_file import DirectFile, check_disk
from xgpt.core.system.machine import available_memory_bytes

_PART_BYTES, _PARTS, _LEAST_PARTS = 2**23, 16, 4  # chosen: 128 MiB, at least 32
_MOST_S = 0.5  # chosen: for writing, and for reading
_SINGLE_READS = 16  # chosen


def measured_tiers(folder: Path, host_link: Link | None = None) -> tuple[Tier, ...]:
    """This machine's host memory and the disk of `folder`, in about a second. `host_link`: the bus
    to its devices; None: for CPU ranks, a copy within the memory. Raises XgptError for a folder
    that is not on a disk, cannot be written or is full."""
    link = host_link or Link(name="memory", bandwidth_bytes_per_s=copy_bytes_per_s(),
                             latency_s=0.0, source="measured: a copy by one core")
    read, write = disk_links(folder)
    free = shutil.disk_usage(folder).free
    return (Tier(name="host", memory_bytes=available_memory_bytes(), up=link, down=link,
                 attention=True),
            Tier(name="disk", memory_bytes=free, up=read, down=write))


def disk_links(folder: Path) -> tuple[Link, Link]:
    """Reading from the disk of `folder`, and writing to it. The latency is a single sector's.
    Raises XgptError as `measured_tiers`."""
    check_disk(folder, _PARTS * _PART_BYTES)
    file = DirectFile(folder / "xgpt-rate", _PARTS * _PART_BYTES, is_scratch=True)
    try:
        with memoryview(mmap.mmap(-1, _PART_BYTES)) as part:
            part[:] = bytes(range(256)) * (_PART_BYTES // 256)
            written, start_s = 0, time.perf_counter()
            while written < _PARTS and (
                    written < _LEAST_PARTS or time.perf_counter() - start_s < _MOST_S):
                file.write(written * _PART_BYTES, part)
                written += 1
            file.sync()
            write_s = (time.perf_counter() - start_s) / written
            read_s, singles = list[float](), list[float]()
            for number in range(written):
                if number >= _LEAST_PARTS and sum(read_s) > _MOST_S:
                    break
                read_s.append(_seconds(file, number * _PART_BYTES, part))
            for number in range(_SINGLE_READS):
                singles.append(_seconds(file, number * 17 % written * _PART_BYTES, part[:SECTOR]))
        way = f"measured: requests of 8 MiB, {file.way}"
    finally:
        file.close()
    return (Link(name="disk-read", bandwidth_bytes_per_s=_PART_BYTES / statistics.mean(read_s),
                 latency_s=statistics.median(singles), source=way),
            Link(name="disk-write", bandwidth_bytes_per_s=_PART_BYTES / write_s,
                 latency_s=statistics.median(singles), source=way))


def _seconds(file: DirectFile, offset: int, into: memoryview) -> float:
    start_s = time.perf_counter()
    file.read(offset, into)
    return time.perf_counter() - start_s


def copy_bytes_per_s() -> float:
    """Rate at which one core copies within the host's memory; the best of three copies."""
    with memoryview(mmap.mmap(-1, 8 * _PART_BYTES)) as memory:
        half, taken = len(memory) // 2, []
        memory[:] = b"\1" * len(memory)  # pages that were never written lie in no memory
        for _ in range(3):
            start_s = time.perf_counter()
            memory[half:] = memory[:half]
            taken.append(time.perf_counter() - start_s)
    return half / min(taken)
