"""Sums and gathers over ranks, and blocks between them, under real mpiexec."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="ranks need the extra `run`")
from job_folder import SUPPORT  # noqa: E402

from xgpt.launch.local import find_mpiexec  # noqa: E402

SCRIPT = SUPPORT / "ranks_script.py"


@pytest.mark.mpi
def test_every_rank_holds_the_same_sum_and_the_first_one_every_part() -> None:
    done = subprocess.run(
        [find_mpiexec(), "-n", "3", sys.executable, "-m", "mpi4py", str(SCRIPT), "mpi", "gloo"],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ})
    assert done.returncode == 0, done.stdout + done.stderr
    for what in ("no JSON: UnicodeDecodeError", "int expected, not str", "'Other' is none of",
                 "a tensor [-1] of 'int64'", "1099511627776 bytes was announced, 8 came"):
        assert done.stdout.count(what) == 2, what  # of two ranks, and of three
    for over in ("mpi", "gloo"):
        for ranks in (2, 3):
            assert done.stdout.count(f"{over} over {ranks} ok") == ranks
