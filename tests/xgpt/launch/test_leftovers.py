"""Shared memory that killed ranks left is removed; what a living process has, is not."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from xgpt.launch.leftovers import remove_leftovers


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
