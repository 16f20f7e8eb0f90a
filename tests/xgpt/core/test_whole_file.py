"""Files of unknown origin that are read as a whole: plain ones, and not without end."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from xgpt.core.errors import InputError
from xgpt.core.hf.values import load_json
from xgpt.core.schedule_file import load_schedule
from xgpt.core.system import whole_file
from xprofiler.profile_file import load_profile

READERS = pytest.mark.parametrize("read", [load_json, load_schedule, load_profile])


@READERS
def test_a_pipe_is_no_file_and_is_not_waited_for(read: Callable[[Path], object],
                                                 tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    os.mkfifo(path)
    with pytest.raises(InputError, match="no plain file"):
        read(path)


@READERS
def test_what_is_larger_than_such_a_file_is_refused(
        read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert whole_file.MOST_BYTES == 128 * 2**20
    monkeypatch.setattr(whole_file, "MOST_BYTES", 2**20)
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(2**20 + 1)
    with pytest.raises(InputError, match="larger than 1 MiB"):
        read(path)


def test_what_is_no_place_for_a_file_is_said_and_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    os.mkfifo(tmp_path / "pipe")
    said = {name: str(whole_file.why_no_file(tmp_path / name)) for name in (
        "folder", "file/x.json", "pipe", "a" * 300)}
    assert said == {
        "folder": "a file, not a folder", "pipe": "a plain file, or a new one: a device or a pipe "
        "is there", "file/x.json": "a file in a folder that can be made: File exists",
        "a" * 300: "a file that can be written to: File name too long"}
    assert whole_file.why_no_folder(tmp_path / "file") == (
        "a folder that can be written to: File exists")
    for good in ("file", "new/x.json"):
        assert whole_file.why_no_file(tmp_path / good) is None
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "new", "pipe"]
    assert (tmp_path / "file").read_text() == "kept"


def test_a_device_and_what_lies_where_nothing_can_are_no_places_for_files() -> None:
    assert "a device" in str(whole_file.why_no_file(Path("/dev/full")))
    assert whole_file.why_no_file(Path("/proc/x.json")) == (
        "a file that can be written to: No such file or directory")


def test_a_full_disk_is_seen_before_the_work(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))
    try:
        assert whole_file.why_no_file(tmp_path / "x") == (
            "a file that can be written to: File too large")
        with pytest.raises(OSError) as failed:
            whole_file.write_atomically(tmp_path / "x", "x" * 513)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert failed.value.filename == str(tmp_path / "x") and list(tmp_path.iterdir()) == []


def test_a_link_to_a_file_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    whole_file.write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"
