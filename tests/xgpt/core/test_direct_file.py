"""Files past the page cache, and the folders where they may lie."""

import ctypes
import errno
import fcntl
import mmap
import os
import re
import threading
from pathlib import Path

import pytest

from xgpt.core.errors import XgptError
from xgpt.core.placement import SECTOR
from xgpt.core.system import direct_file
from xgpt.core.system.direct_file import DirectFile, file_system, why_no_disk


@pytest.fixture
def folder(tmp_path):
    if direct_file.MEMORY_SYSTEMS.fullmatch(file_system(tmp_path)):
        pytest.skip("temporary files lie in memory here")
    return tmp_path


def memory(num_bytes: int, value: int = 0) -> memoryview:
    view = memoryview(mmap.mmap(-1, num_bytes))
    view[:] = bytes([value]) * num_bytes
    return view


def test_what_was_written_is_read_in_requests_of_any_size(tmp_path):
    size = 20 * 2**20  # several requests of the system
    data, back = memory(size), memory(size)
    for first in range(0, size, SECTOR):
        data[first:first + 4] = (first // SECTOR).to_bytes(4, "little")
    file = DirectFile(tmp_path / "weights", size)
    file.write(0, data)
    file.sync()
    file.close()
    file = DirectFile(tmp_path / "weights")
    file.read(0, back)
    assert back == data
    file.read(7 * SECTOR, back[:SECTOR])
    assert back[:SECTOR] == data[7 * SECTOR:8 * SECTOR]
    assert file.bytes_read == size + SECTOR
    file.close()
    file.close()


def test_a_file_past_the_page_cache_leaves_no_page_there(folder):
    """`mincore` of a mapping says which of its pages are in memory."""
    file = DirectFile(folder / "entries", 2**20)
    file.write(0, memory(2**20, 1))
    file.read(0, memory(2**20))
    assert file.way == "past the page cache (O_DIRECT)"
    assert cached_pages(folder / "entries") == 0
    file.close()


def cached_pages(path: Path) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    with path.open("r+b") as opened, mmap.mmap(opened.fileno(), size) as mapped:
        found = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
        hold = ctypes.c_char.from_buffer(mapped)
        assert libc.mincore(ctypes.c_void_p(ctypes.addressof(hold)), ctypes.c_size_t(size),
                            found) == 0
        del hold
        return sum(page & 1 for page in found)


def test_a_refusal_of_direct_requests_is_said_and_the_pages_are_dropped(folder, monkeypatch):
    allowed = fcntl.fcntl

    def refuse(file, command, value=0):
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return allowed(file, command, value)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    file, back = DirectFile(folder / "entries", 2**20), memory(2**20)
    file.write(0, memory(2**20, 3))
    file.read(0, back)
    assert set(back) == {3}
    assert file.way.startswith("through the page cache, dropped after each request")
    assert cached_pages(folder / "entries") < 32  # the last ones read ahead at most
    file.close()


def test_memory_that_is_not_aligned_is_read_through_the_page_cache(folder):
    """As on a file system that opens a file for direct requests, and then refuses these."""
    file, whole = DirectFile(folder / "entries", 2 * SECTOR), memory(2 * SECTOR)
    file.write(0, memory(2 * SECTOR, 9))
    file.read(0, whole[1:SECTOR + 1])
    assert set(whole[1:SECTOR + 1]) == {9} and whole[0] == 0
    assert "O_DIRECT refused" in file.way
    file.close()


def test_a_scratch_file_has_no_name_and_is_gone_with_its_process(tmp_path):
    file = DirectFile(tmp_path / "kv", 2**20, is_scratch=True)
    assert not list(tmp_path.iterdir())
    file.write(0, memory(SECTOR, 4))
    other, back = DirectFile(tmp_path / "kv", 2**20, is_scratch=True), memory(SECTOR)
    other.write(0, memory(SECTOR, 5))
    file.read(0, back)
    assert set(back) == {4}, "another rank's file of the same name is another file"
    file.close()
    other.close()


def test_ranks_make_their_scratch_files_at_once(tmp_path):
    failed = []

    def work(own: int) -> None:
        try:
            for _ in range(50):
                DirectFile(tmp_path / "kv", SECTOR, is_scratch=True).close()
        except XgptError as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and not list(tmp_path.iterdir())


def test_several_threads_use_one_file(tmp_path):
    file = DirectFile(tmp_path / "entries", 64 * SECTOR)

    def work(own: int) -> None:
        for turn in range(8):
            at, data, back = (own * 8 + turn) * SECTOR, memory(SECTOR, own + 1), memory(SECTOR)
            file.write(at, data)
            file.read(at, back)
            assert back == data

    threads = [threading.Thread(target=work, args=(own,)) for own in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    back = memory(64 * SECTOR)
    file.read(0, back)
    assert [back[at * SECTOR] for at in range(64)] == [at // 8 + 1 for at in range(64)]


def test_errors_name_the_file_and_the_bytes(tmp_path):
    with pytest.raises(XgptError, match="missing: cannot be opened for offloading: No such file"):
        DirectFile(tmp_path / "missing")
    file = DirectFile(tmp_path / "weights", 4 * SECTOR)
    os.truncate(tmp_path / "weights", SECTOR)
    with pytest.raises(XgptError, match="weights: ended at byte 4,096 of 16,384"):
        file.read(0, memory(2 * SECTOR))
    huge = 2**60
    with pytest.raises(XgptError, match=f"huge: cannot be opened for offloading {huge:,} bytes: "):
        DirectFile(tmp_path / "huge", huge)


def test_a_folder_in_memory_or_without_room_is_refused(folder, monkeypatch):
    assert why_no_disk(folder / "new", 2**20) is None
    needed = 2**60
    assert re.fullmatch(rf"a folder with room for .* \({needed:,} bytes\): .* bytes\) are free",
                        why_no_disk(folder, needed))
    (folder / "file").write_bytes(b"")
    assert "a folder that can be written to" in why_no_disk(folder / "file", 0)
    device = os.stat(folder).st_dev
    mounts = folder / "mounts"
    mounts.write_text(f"21 1 {os.major(device)}:{os.minor(device)} / / rw - tmpfs none rw\n")
    monkeypatch.setattr(direct_file, "MOUNTS", mounts)
    assert why_no_disk(folder, 0) == "a folder on a disk: this one lies in memory (tmpfs)"
