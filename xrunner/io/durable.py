"""Results on the disk, not only with the operating system: what is written reaches it every few
seconds, beside the run, so that a power cut takes no more than the last seconds' results."""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from xgpt.core.errors import XgptError
from xgpt.core.system.whole_file import sync_folder


class Keeper:
    """Puts files on the disk about every `interval_s`, in a thread of its own; what goes wrong
    there is raised by `check`. `files`: the descriptors of those that are open; called with `lock`
    held, which their owner holds while he opens or closes one."""

    def __init__(self, folder: Path, files: Callable[[], Sequence[int]],
                 lock: threading.Lock, interval_s: float) -> None:
        self._folder, self._files, self._lock = folder, files, lock
        self._interval_s = interval_s
        self._trouble: OSError | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="keeper", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises OSError where results could not be put on the disk (it may be full)."""
        if self._trouble is not None:
            raise self._trouble

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._is_over.wait(self._interval_s):
            try:
                self._sync()
            except OSError as trouble:
                self._trouble = trouble
                return

    def _sync(self) -> None:
        with self._lock:
            copies = [os.dup(file) for file in self._files()]
        try:
            for copy in copies:
                os.fsync(copy)
        finally:
            for copy in copies:
                os.close(copy)
        sync_folder(self._folder)


def is_still(path: Path, descriptor: int) -> bool:
    """Whether the open file is the one that the path names."""
    own = os.fstat(descriptor)
    try:
        named = path.stat()
    except OSError:
        return False
    return (own.st_dev, own.st_ino) == (named.st_dev, named.st_ino)


def put_back(path: Path, descriptor: int) -> XgptError:
    """Gives the content of a file that is open, and has lost its name, its name back; what to say
    of it."""
    goes_on = "the same command goes on from there"
    if not path.parent.is_dir():
        return XgptError(f"{path.parent} was removed or renamed while a run wrote in it. A renamed "
                         f"folder has all that was done: give it its name back, and {goes_on}")
    target = path if not path.exists() else path.with_name(f"{path.stem}-kept{path.suffix}")
    with target.open("xb") as file:
        place = 0
        while block := os.pread(descriptor, 2**20, place):
            place += file.write(block)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)
    if target == path:
        return XgptError(f"{path} was removed while a run wrote to it. What it held is back, and "
                         f"{goes_on}")
    return XgptError(f"{path} was replaced while a run wrote to it. What it held is in "
                     f"{target.name}: give it its name back, and {goes_on}")
