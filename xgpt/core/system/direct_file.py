"""Files read and written past the system's page cache, which no budget of memory counts."""

import errno
import fcntl
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from xgpt.core.errors import XgptError
from xgpt.core.placement import SECTOR, sectors
from xgpt.core.system.whole_file import why_no_folder
from xgpt.core.units import format_bytes

MEMORY_SYSTEMS = re.compile("tmpfs|ramfs")
MOUNTS = Path("/proc/self/mountinfo")
_REQUEST_BYTES = 2**23  # chosen: rates are about equal from 1 MiB to 64 MiB


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


class DirectFile:
    """A file of whole sectors, read and written by several threads at once. Offsets, lengths and
    addresses are multiples of SECTOR (xrunner.offload.arena makes such tensors). `bytes_read`:
    so far."""

    def __init__(self, path: Path, num_bytes: int | None = None, *,
                 is_scratch: bool = False) -> None:
        """num_bytes: makes a file of so many bytes, which may grow; None: opens one for reading.
        is_scratch: a file beside `path` without a name, which goes however the process ends. Raises
        XgptError."""
        self.path, self.bytes_read, self._is_direct = path, 0, True
        new = 0 if num_bytes is None else os.O_RDWR | os.O_CREAT | os.O_TRUNC
        try:
            if is_scratch:  # a name of its own: ranks may open theirs at once
                self._file, name = tempfile.mkstemp(prefix=f"{path.name}-", dir=path.parent)
                os.unlink(name)
            else:
                self._file = os.open(path, new | os.O_CLOEXEC, 0o600)
            self._set_direct(True)
            if num_bytes is not None:
                # reserved now: a full disk ends the run at its start, not in the night
                os.posix_fallocate(self._file, 0, sectors(max(num_bytes, 1)))
            self.num_bytes = os.fstat(self._file).st_size
        except OSError as error:
            size = "" if num_bytes is None else f" {num_bytes:,} bytes"
            raise XgptError(f"{path}: cannot be opened for offloading{size}: {error.strerror}"
                            ) from None

    @property
    def way(self) -> str:
        """How requests pass the page cache, in words for a report."""
        return "past the page cache (O_DIRECT)" if self._is_direct else (
            "through the page cache, dropped after each request (O_DIRECT refused)")

    def read(self, offset: int, into: memoryview) -> None:
        """Fills `into` with the bytes from `offset` on. Raises XgptError."""
        assert offset + len(into) <= self.num_bytes, f"{offset = } {self.num_bytes = }"
        self._transfer(offset, into, is_write=False)
        self.bytes_read += len(into)

    def write(self, offset: int, data: memoryview) -> None:
        """Writes `data` at `offset`. Raises XgptError."""
        self._transfer(offset, data, is_write=True)
        self.num_bytes = max(self.num_bytes, offset + len(data))

    def sync(self) -> None:
        """Waits until the file is on the disk. Raises OSError."""
        os.fsync(self._file)

    def close(self) -> None:
        """Closes the file; may be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _set_direct(self, is_direct: bool) -> None:
        """Sets whether requests pass the page cache; some file systems refuse to."""
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | (os.O_DIRECT if is_direct else 0))
            self._is_direct = is_direct
        except OSError:
            self._is_direct = False

    def _transfer(self, offset: int, data: memoryview, *, is_write: bool) -> None:
        assert offset % SECTOR == len(data) % SECTOR == 0, f"{offset = } {len(data) = }"
        done = 0
        while done < len(data):
            part, at = data[done:done + _REQUEST_BYTES], offset + done
            try:
                moved = (os.pwritev if is_write else os.preadv)(self._file, [part], at)
                if not self._is_direct:
                    if is_write:
                        os.fdatasync(self._file)  # only pages on the disk can be dropped
                    os.posix_fadvise(self._file, at, moved, os.POSIX_FADV_DONTNEED)
            except OSError as error:
                if error.errno == errno.EINVAL and self._is_direct:
                    self._set_direct(False)
                    continue
                raise XgptError(f"{self.path}: {'writing' if is_write else 'reading'} at byte "
                                f"{at:,} failed: {error.strerror}") from None
            if moved == 0:
                raise XgptError(f"{self.path}: ended at byte {at:,} of "
                                f"{self.num_bytes:,}: another program has shortened it")
            done += moved
