"""The section `slurm` of a job file: every option arrives, and every mistake is named at once."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from xgpt.core.errors import InputError
from xgpt.job.job_file import load_job
from xgpt.job.slurm_section import SlurmSpec, seconds_of, time_of

JOB = "model: opt-125m\ncluster: local\nworkload: {requests: {count: 4}, task: S}\n"
FULL = """
slurm:
  partition: gpu
  account: 007
  qos: high
  constraint: "a40&nvme"
  reservation: maintenance
  dependency: afterok:12:13_2,singleton
  nodes: 2
  ntasks_per_node: 4
  gpus_per_node: a40:4
  cpus_per_task: 8
  mem: 200G
  time: 1-02:30:00
  exclusive: true
  mail_type: [end, "FAIL,TIME_LIMIT_80"]
  mail_user: me@example.org
  at_once: 3
  extra: ["--comment=two words", --nice, "-L matlab:1"]
  modules: cuda/12.4
  venv: envs/xgpt
  env: {UCX_NET_DEVICES: "mlx5_0:1", OMP_PLACES: cores, N: 3}
  prologue: [ulimit -l unlimited, "cd /tmp"]
  container: [apptainer, exec, --nv, image.sif]
  launch: srun
  mpi: pmix
  requeue: 5
  warning: 5 min
"""


def load(folder: Path, text: str, *overrides: str) -> SlurmSpec | None:
    path = folder / "job.yaml"
    path.write_text(JOB + text, encoding="utf-8")
    return load_job(path, overrides).slurm


def mistakes(folder: Path, text: str, *overrides: str) -> dict[str, str]:
    with pytest.raises(InputError) as caught:
        load(folder, text, *overrides)
    return {mistake.key: mistake.allowed for mistake in caught.value.mistakes}


def test_every_option_arrives_in_slurms_own_words(tmp_path: Path) -> None:
    spec = load(tmp_path, FULL)
    assert spec == SlurmSpec(
        partition="gpu", account="007", qos="high", constraint="a40&nvme",
        reservation="maintenance", dependency="afterok:12:13_2,singleton", nodes=2,
        ntasks_per_node=4, gpus_per_node="a40:4", cpus_per_task=8, mem="200G", time="1-02:30:00",
        exclusive=True, mail_type=("END", "FAIL", "TIME_LIMIT_80"), mail_user="me@example.org",
        at_once=3, extra=("--comment=two words", "--nice", "-L matlab:1"), modules=("cuda/12.4",),
        venv=str(tmp_path / "envs/xgpt"),
        env=(("UCX_NET_DEVICES", "mlx5_0:1"), ("OMP_PLACES", "cores"), ("N", "3")),
        prologue=("ulimit -l unlimited", "cd /tmp"),
        container=("apptainer", "exec", "--nv", "image.sif"), mpi="pmix", requeue=5, warning_s=300)
    assert spec.gpus_each == 4 and spec.time_s == 26.5 * 3600


def test_an_empty_section_is_none_and_one_key_makes_it(tmp_path: Path) -> None:
    assert load(tmp_path, "") is None and load(tmp_path, "slurm:\n") is None
    assert load(tmp_path, "", "slurm.launch=srun") == load(tmp_path, "slurm: {}") == SlurmSpec()


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    found = mistakes(tmp_path, """slurm:
  nodes: 0
  mem: lots
  launch: ssh
  mail_type: [END, SOMETIMES]
  dependency: after the other
  partitions: gpu
  warning: 5 s
""")
    assert set(found) == {f"slurm.{key}" for key in (
        "nodes", "mem", "launch", "mail_type", "dependency", "partitions", "warning")}
    assert "allowed: srun, mpiexec" in found["slurm.launch"]
    assert "TIME_LIMIT_90" in found["slurm.mail_type"]
    assert "did you mean 'partition'" in found["slurm.partitions"]
    assert "at least 30 s" in found["slurm.warning"]


@pytest.mark.parametrize(("override", "key", "message"), [
    ("slurm.gpus_per_node=a40:many", "slurm.gpus_per_node", "a100:4"),
    ("slurm.gpus_per_node=true", "slurm.gpus_per_node", "a number"),
    ("slurm.time=soon", "slurm.time", "HH:MM:SS"),
    ("slurm.time=2", "slurm.time", "more than slurm.warning, 120 s"),
    ("slurm.mail_type=END", "slurm.mail_type", "needs slurm.mail_user"),
    ("slurm.extra=--comment x", "slurm.extra", "a list of whole options"),
    ("slurm.extra=comment", "slurm.extra", "a list of whole options"),
    ("slurm.extra=--output=x", "slurm.extra", "the batch script says itself"),
    ("slurm.extra=[--nice, '-a 1-3']", "slurm.extra", "the batch script says itself"),
    ("slurm.extra=--mem=3G", "slurm.extra", "a key of its own, slurm.mem"),
    ("slurm.extra=--cpus-per-task=3", "slurm.extra", "a key of its own, slurm.cpus_per_task"),
    ('slurm.extra="--nice\\n#SBATCH --x"', "slurm.extra", "a list of whole options"),
    ("slurm.env=[A]", "slurm.env", "a mapping"), ("slurm.env={A-B: 1}", "slurm.env", "a mapping"),
    ("slurm.env={A: [1]}", "slurm.env", "a mapping"),
    ("slurm.prologue=[1]", "slurm.prologue", "lines of bash"),
    ("slurm.exclusive=1", "slurm.exclusive", "true or false"),
    ("slurm.requeue=-1", "slurm.requeue", "a whole number >= 0"),
    ("slurm.dependency=afterok", "slurm.dependency", "afterok:123"),
    ("slurm={launch: mpiexec, mpi: pmi2}", "slurm.mpi", "only with launch: srun"),
    ("slurm=gpu", "slurm", "a mapping of sbatch options")])
def test_one_wrong_value_is_one_mistake_that_says_what_is_allowed(
        tmp_path: Path, override: str, key: str, message: str) -> None:
    found = mistakes(tmp_path, "", override)
    assert list(found) == [key] and message in found[key]


def test_slurm_says_which_hosts(tmp_path: Path) -> None:
    found = mistakes(tmp_path, "slurm: {nodes: 2}\nrun: {hosts: [h1, h2]}\n")
    assert list(found) == ["run.hosts"] and "Slurm says" in found["run.hosts"]


@pytest.mark.parametrize(("text", "seconds"), [
    ("90", 5400), ("2:30", 150), ("02:00:00", 7200), ("1-0", 86400), ("1-02:30", 95400),
    ("2-01:00:01", 176401), ("infinite", math.inf), ("UNLIMITED", math.inf)])
def test_a_time_is_read_as_slurm_reads_it(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(("seconds", "text"), [
    (1, "00:01:00"), (3600, "01:00:00"), (3601, "01:01:00"), (90_000, "1-01:00:00")])
def test_a_time_is_written_in_whole_minutes_that_hold_it(seconds: float, text: str) -> None:
    assert time_of(seconds) == text and seconds <= seconds_of(text) < seconds + 60
