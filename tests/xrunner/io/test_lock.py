"""One run at a time in an output folder, even after its launcher was killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from xgpt.core.errors import XgptError
from xrunner.io.lock import is_locked, output_lock


def test_a_second_run_is_refused_until_the_first_and_its_children_are_gone(tmp_path: Path) -> None:
    with output_lock(tmp_path) as descriptor:
        with pytest.raises(XgptError, match="another run"), output_lock(tmp_path):
            pass
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE,
                                 pass_fds=(descriptor,))
    with pytest.raises(XgptError, match="another run"), output_lock(tmp_path):
        pass
    child.communicate(b"\n", timeout=30)
    with output_lock(tmp_path):
        pass


def owner(folder: Path, **values: object) -> Path:
    path = folder / ".owner.json"
    path.write_text(json.dumps({"host": "elsewhere", "boot": "b", "pid": 1, "started": "1",
                                **values}))
    return path


def test_another_hosts_run_is_seen_by_its_file_until_it_is_silent(tmp_path: Path) -> None:
    """As on a file system whose locks do not reach other hosts."""
    (tmp_path / ".lock").touch()
    path = owner(tmp_path)
    assert is_locked(tmp_path)
    with pytest.raises(XgptError, match=r"process 1 on elsewhere.*free 60 s after"), output_lock(
            tmp_path):
        pass
    os.utime(path, (path.stat().st_mtime - 61,) * 2)
    assert is_locked(tmp_path) is False
    with output_lock(tmp_path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
        assert is_locked(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [".lock"]


def test_what_a_dead_process_of_this_host_left_is_taken_over_at_once(tmp_path: Path) -> None:
    with output_lock(tmp_path):
        mine = json.loads((tmp_path / ".owner.json").read_text())
    child = subprocess.Popen(["true"])
    child.wait()
    owner(tmp_path, **{**mine, "pid": child.pid})
    assert is_locked(tmp_path) is False
    owner(tmp_path, **{**mine, "started": "1"})  # its number is another process's by now
    with output_lock(tmp_path):
        pass
