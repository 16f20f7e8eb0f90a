"""What killed processes left is removed; what a living one has, is not."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from xgpt.launch.leftovers import passing_folder, remove_leftovers


def test_only_what_nobody_has_is_removed(tmp_path: Path) -> None:
    files = {name: tmp_path / f"mpich_shm_{name}_0" for name in ("left", "mapped", "young")}
    for path in (*files.values(), tmp_path / "of_another_program"):
        path.write_bytes(bytes(4096))
        if path != files["young"]:
            os.utime(path, (1e9, 1e9))
    with files["mapped"].open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert remove_leftovers(tmp_path) == [files["left"]]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mpich_shm_mapped_0", "mpich_shm_young_0", "of_another_program"]


def test_what_mpiexec_wrote_of_the_machine_goes_once_it_is_dead(tmp_path: Path) -> None:
    left, living = (tmp_path / f"hydra_hwloc_xmlfile_{name}" for name in ("left", "living"))
    left.touch()
    with living.open("w"):
        assert remove_leftovers(tmp_path) == [left]


def test_folders_that_a_killed_process_left_are_removed(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from xgpt.launch.leftovers import passing_folder
with passing_folder("ours-", Path({str(tmp_path)!r})) as folder:
    (folder / "request").write_text("words")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    (left,) = tmp_path.iterdir()
    assert killed.returncode == -signal.SIGKILL and (left / "request").is_file()
    with passing_folder("ours-", tmp_path):
        assert left.is_dir(), "young: it may be of a process that has not locked it yet"
    with passing_folder("ours-", tmp_path) as living:
        for path in (left, living):
            os.utime(path, (1e9, 1e9))
        (tmp_path / "theirs").mkdir()
        with passing_folder("ours-", tmp_path) as mine:
            assert {path.name for path in tmp_path.iterdir()} == {
                living.name, mine.name, "theirs"}
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_folder_goes_with_what_is_raised_meanwhile(tmp_path: Path) -> None:
    with pytest.raises(KeyError), passing_folder("ours-", tmp_path) as folder:
        (folder / "file").touch()
        raise KeyError
    assert not list(tmp_path.iterdir())
