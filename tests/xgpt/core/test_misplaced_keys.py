"""A key that is not indented, lacks its section on the command line or stands in the wrong one is
refused with the right one."""

from __future__ import annotations

from pathlib import Path

import pytest

from xgpt.core.errors import InputError
from xgpt.job.job_file import load_job

# it has neither `constraint` nor `run`, `schedule` or `slurm`, whose keys are known all the same
JOB = "model: opt-13b\ncluster: a40-4\nworkload: {requests: {count: 9}, task: S}\n"
MEANT = {"latency_s": "constraint.latency_s", "temperature": "run.temperature",
         "max_tokens": "workload.max_tokens", "policy": "schedule.policy",
         "partition": "slurm.partition"}


def refusals(folder: Path, text: str, *overrides: str) -> list[str]:
    (folder / "job.yaml").write_text(text)
    with pytest.raises(InputError) as refused:
        load_job(folder / "job.yaml", overrides)
    return list(map(str, refused.value.mistakes))


def refusal(folder: Path, text: str, *overrides: str) -> str:
    (mistake,) = refusals(folder, text, *overrides)
    return mistake


@pytest.mark.parametrize("key", MEANT)
def test_a_key_without_its_section_is_refused_with_it(tmp_path: Path, key: str) -> None:
    words = f"unknown key; did you mean '{MEANT[key]}'? known: "
    assert refusal(tmp_path, JOB, f"{key}=1").startswith(f"--set: {key}: {words}")
    assert f"job.yaml:4: {key}: {words}" in refusal(tmp_path, f"{JOB}{key}: 1\n")


def test_a_slip_of_the_hand_is_still_named(tmp_path: Path) -> None:
    assert "unknown key; did you mean 'output'? known: " in refusal(tmp_path, JOB, "outpt=x")


@pytest.mark.parametrize(("key", "meant"), [
    ("run.latency_s", "constraint.latency_s"), ("cluster.dtype", "run.dtype"),
    ("constraint.output", "output"), ("workload.max_seconds", "search.max_seconds"),
    ("schedule.devices_per_node", "cluster.devices_per_node"),
    ("workload.requests.temperature", "run.temperature")])
def test_a_key_in_the_wrong_section_is_refused_with_the_right_one(
        tmp_path: Path, key: str, meant: str) -> None:
    job = JOB.replace("a40-4", "{device: A40, devices_per_node: 4, intra_link: pcie4-x16}")
    (mistake,) = [one for one in refusals(tmp_path, job, f"{key}=1") if "unknown key" in one]
    assert mistake.startswith(f"--set: {key}: unknown key; did you mean '{meant}'")


def test_a_key_that_is_known_elsewhere_and_resembles_one_of_its_section_is_refused_with_both(
        tmp_path: Path) -> None:
    device = "{name: X, memory: 1e9}"
    job = JOB.replace("a40-4", f"{{device: {device}, devices_per_node: 4, intra_link: pcie4-x16}}")
    (mistake,) = [one for one in refusals(tmp_path, job) if "unknown key" in one]
    assert "did you mean 'constraint.memory' or 'memory_bytes'? known: " in mistake
