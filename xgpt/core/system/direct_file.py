"""Files read and written past the system's page cache, which no budget of memory counts."""

import errno
import fcntl
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from xgpt.core.errors import XgptError
from xgpt.core.placement import SECTOR, sectors
from xgpt.core.system.whole_file import why_no_folder
from xgpt.core.units import format_bytes

MEMORY_SYSTEMS = re.compile("tmpfs|ramfs")
_REQUEST_BYTES = 8 * 2**20  # chosen: measured rates are equal from 1 MiB to 64 MiB
MOUNTS = Path("/proc/self/mountinfo")


def file_system(path: Path) -> str:
    """Type of the file system with `path`, such as "ext4"; "" if unknown. Raises OSError."""
    device, mounted = path.stat().st_dev, MOUNTS.read_text(errors="replace").splitlines()
    kinds = {line.split()[2]: line.partition(" - ")[2].split()[0] for line in mounted}
    return kinds.get(f"{os.major(device)}:{os.minor(device)}", "")


def why_no_disk(folder: Path, num_bytes: int) -> str | None:
    """The requirement that `folder` fails for files of `num_bytes` in all that lie on a disk, in
    words; None if it meets all. Creates the folder."""
    if (reason := why_no_folder(folder)) is not None:
        return reason
    with suppress(OSError):
        if MEMORY_SYSTEMS.fullmatch(kind := file_system(folder)):
            return f"a folder on a disk: this one lies in memory ({kind})"
        if (free := shutil.disk_usage(folder).free) < num_bytes:
            return (f"a folder with room for {format_bytes(num_bytes)} ({num_bytes:,} bytes): "
                    f"{format_bytes(free)} ({free:,} bytes) are free")
    return None


def check_disk(folder: Path, num_bytes: int) -> None:
    """Raises XgptError if `run.offload` cannot be `folder`, where `num_bytes` are needed."""
    if (reason := why_no_disk(folder, num_bytes)) is not None:
        raise XgptError(f"run.offload = {folder}: {reason}")


class DirectFile:
    """A file of whole sectors, read and written by several threads at once. Offsets, lengths and
    addresses are multiples of SECTOR (xrunner.offload.arena makes such tensors). `bytes_read`,
    `bytes_written`: so far."""

    def __init__(self, path: Path, num_bytes: int | None = None, *,
                 is_scratch: bool = False) -> None:
        """num_bytes: makes a new file of so many bytes, to be written; None: an existing one, to be
        read. is_scratch: without a name from now on, so that it goes however the process ends.
        Raises XgptError."""
        self.path, self.bytes_read, self.bytes_written = path, 0, 0
        self._refused = ""  # why requests pass through the page cache; "": they do not
        is_new = num_bytes is not None
        flags = os.O_CLOEXEC | (os.O_RDWR | os.O_CREAT | os.O_TRUNC if is_new else os.O_RDONLY)
        try:
            try:
                self._file = os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._file = os.open(path, flags, 0o600)
                self._refused = "O_DIRECT refused"
            if is_new:
                if is_scratch:
                    path.unlink()
                # reserved now: a full disk ends the run at its start, not in the night
                os.posix_fallocate(self._file, 0, max(sectors(num_bytes or 0), SECTOR))
            self.num_bytes = os.fstat(self._file).st_size
        except OSError as error:
            raise XgptError(f"{path}: cannot be opened for offloading"
                            f"{f' {num_bytes:,} bytes' if is_new else ''}: "
                            f"{error.strerror}") from None

    @property
    def way(self) -> str:
        """How requests pass the page cache, in words for a report."""
        return (f"through the page cache, dropped after each request ({self._refused})"
                if self._refused else "past the page cache (O_DIRECT)")

    def read(self, offset: int, into: memoryview) -> None:
        """Fills `into` with the bytes from `offset` on. Raises XgptError."""
        self._transfer(offset, into, is_write=False)
        self.bytes_read += len(into)

    def write(self, offset: int, data: memoryview) -> None:
        """Writes `data` at `offset`. Raises XgptError."""
        self._transfer(offset, data, is_write=True)
        self.bytes_written += len(data)

    def sync(self) -> None:
        """Waits until the file is on the disk. Raises OSError."""
        os.fsync(self._file)

    def close(self) -> None:
        """Closes the file; may be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _transfer(self, offset: int, data: memoryview, *, is_write: bool) -> None:
        assert offset % SECTOR == len(data) % SECTOR == 0, f"{offset = } {len(data) = }"
        if is_write:  # a file may grow
            self.num_bytes = max(self.num_bytes, offset + len(data))
        assert 0 <= offset <= self.num_bytes - len(data), f"{offset = } {self.num_bytes = }"
        done = 0
        while done < len(data):
            part = data[done:done + _REQUEST_BYTES]
            try:
                moved = self._request(offset + done, part, is_write=is_write)
            except OSError as error:
                if error.errno == errno.EINVAL and not self._refused:
                    self._refused = "O_DIRECT refused"
                    fcntl.fcntl(self._file, fcntl.F_SETFL,
                                fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_DIRECT)
                    continue
                raise XgptError(f"{self.path}: {'writing' if is_write else 'reading'} "
                                f"{len(part):,} bytes at {offset + done:,} failed: "
                                f"{error.strerror}") from None
            if moved == 0:
                raise XgptError(f"{self.path}: ended at byte {offset + done:,} of "
                                f"{self.num_bytes:,}: another program has shortened it")
            done += moved

    def _request(self, offset: int, part: memoryview, *, is_write: bool) -> int:
        """Bytes moved by one request of the system."""
        moved = os.pwritev(self._file, [part], offset) if is_write else (
            os.preadv(self._file, [part], offset))
        if self._refused:
            if is_write:
                os.fdatasync(self._file)  # only pages on the disk can be dropped
            os.posix_fadvise(self._file, offset, moved, os.POSIX_FADV_DONTNEED)
        return moved
