"""What other launchers and resource managers left in the environment is nothing to ranks here."""

import os
import sys
from pathlib import Path

import pytest
from job_folder import SUPPORT, read_lines  # noqa: E402
from surroundings import LEFT, OWN  # noqa: E402

from xgpt.app import doctor  # noqa: E402
from xgpt.job.sections import SlurmSpec  # noqa: E402
from xgpt.launch.launcher import (
    LocalLauncher,  # noqa: E402
    RankProgram,  # noqa: E402
    SlurmLauncher,  # noqa: E402
)


@pytest.fixture
def left(monkeypatch):
    for name, value in {**LEFT, **OWN, "PYTHONPATH": os.pathsep.join(
            [str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.mpi
@pytest.mark.parametrize("count", [1, 2])
def test_ranks_here_meet_and_know_of_no_other_launcher(tmp_path, left, count):
    seen = tmp_path / "seen.jsonl"
    LocalLauncher().run(RankProgram(module="surroundings", argument=seen, count=count),
                        watch=lambda: None)
    ranks = read_lines(seen)
    assert sorted((each["rank"], each["size"]) for each in ranks) == [
        (rank, count) for rank in range(count)]
    for each in ranks:
        assert not {n for n, value in LEFT.items() if each["environment"].get(n) == value}
        assert OWN.items() <= each["environment"].items()


def test_the_doctor_asks_mpi_without_them(left):
    pytest.importorskip("torch", reason="the doctor's processes import it")
    assert doctor.asked("mpi").startswith("mpi4py ")


def test_ranks_in_an_allocation_know_of_it(tmp_path, left, monkeypatch):
    srun = tmp_path / "srun"
    srun.write_text(f"#!/bin/sh\nenv > {tmp_path}/seen\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    SlurmLauncher(spec=SlurmSpec(), ranks_each=1, environ=os.environ).run(
        RankProgram(module="surroundings", argument=Path(sys.prefix), count=2),
        watch=lambda: None)
    seen = (tmp_path / "seen").read_text().splitlines()
    assert {"SLURM_JOB_ID=77", "PMIX_SECURITY_MODE=77"} <= set(seen)
