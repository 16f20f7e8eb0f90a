"""A key that is not indented, or lacks its section on the command line, is refused with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from xgpt.core.errors import InputError
from xgpt.core.job_file import load_job

# it has neither `constraint` nor `run`, `schedule` or `slurm`, whose keys are known all the same
JOB = "model: opt-13b\ncluster: a40-4\nworkload: {requests: {count: 9}, task: S}\n"
MEANT = {"latency_s": "constraint.latency_s", "temperature": "run.temperature",
         "max_tokens": "workload.max_tokens", "policy": "schedule.policy",
         "partition": "slurm.partition"}


def refusal(folder: Path, text: str, *overrides: str) -> str:
    (folder / "job.yaml").write_text(text)
    with pytest.raises(InputError) as refused:
        load_job(folder / "job.yaml", overrides)
    (mistake,) = refused.value.mistakes
    return str(mistake)


@pytest.mark.parametrize("key", MEANT)
def test_a_key_without_its_section_is_refused_with_it(tmp_path: Path, key: str) -> None:
    words = f"unknown key; did you mean '{MEANT[key]}'? known: "
    assert refusal(tmp_path, JOB, f"{key}=1").startswith(f"--set: {key}: {words}")
    assert f"job.yaml:4: {key}: {words}" in refusal(tmp_path, f"{JOB}{key}: 1\n")


def test_a_slip_of_the_hand_is_still_named(tmp_path: Path) -> None:
    assert "unknown key; did you mean 'output'? known: " in refusal(tmp_path, JOB, "outpt=x")
