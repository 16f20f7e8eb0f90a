"""Bounds of a job file, and what it asks for among the schedules that keep them."""

from __future__ import annotations

import math
from datetime import datetime
from pathlib import Path

import pytest

from xgpt.core import catalog
from xgpt.core.errors import InputError
from xgpt.job.job import Job
from xgpt.job.job_file import load_job
from xgpt.job.resolve import resolve_cluster, until_clock

JOB = """model: opt-13b
cluster: a40-4
workload: {requests: {count: 100}, task: S}
constraint:
"""


def job_of(folder: Path, *constraint: str, more: str = "") -> Job:
    path = folder / "job.yaml"
    path.write_text(JOB + "".join(f"  {line}\n" for line in constraint) + more)
    return load_job(path)


def test_bounds_hold_jointly(tmp_path: Path) -> None:
    constraint = job_of(tmp_path, "latency_s: 30", "quantile: 0.95", "ttft_s: 2",
                        "tpot_s: {limit_s: 60 ms, quantile: 0.9}", "makespan_s: 6h").constraint
    assert constraint.latency_s == 30 and constraint.limit_s("makespan") == 6 * 3600
    ttft, tpot = constraint.bound_on("ttft"), constraint.bound_on("tpot")
    assert ttft is not None and (ttft.limit_s, ttft.quantile, ttft.kind) == (2, 0.95, "queries")
    assert tpot is not None and (tpot.limit_s, tpot.quantile) == (pytest.approx(0.06), 0.9)
    assert math.isinf(job_of(tmp_path, "latency_s: 30").constraint.limit_s("ttft"))
    assert job_of(tmp_path, "tpot_s: 1", more="objective: devices\n").constraint.objective == (
        "devices")


def test_a_time_of_day_is_the_next_one(tmp_path: Path) -> None:
    constraint = job_of(tmp_path, "makespan_s: '06:00'").constraint
    bound = constraint.bound_on("makespan")
    assert bound is not None and bound.until == "06:00"
    for hour, left in ((22, 8), (5, 1), (6, 24)):
        now = datetime(2026, 11, 23, hour, 0)
        assert until_clock(constraint, now).limit_s("makespan") == left * 3600
    unquoted = job_of(tmp_path, "makespan_s: 16:30").constraint.bound_on("makespan")
    assert unquoted is not None and unquoted.until == "16:30"


@pytest.mark.parametrize(("line", "key", "said"), [
    ("ttft_s: 0", "constraint.ttft_s", "seconds > 0"),
    ("ttft_s: soon", "constraint.ttft_s", "{limit_s: 0.5"),
    ("ttft_s: {quantile: 0.9}", "constraint.ttft_s.limit_s", "required"),
    ("tpot_s: {limit_s: 1, quantile: 2}", "constraint.tpot_s.quantile", "between 0 and 1"),
    ("tpot_s: {limit_s: 1, kind: queries}", "constraint.tpot_s.kind", "unknown key"),
    ("makespan_s: '25:00'", "constraint.makespan_s", "a time of day"),
    ("makespan_s: inf", "constraint.makespan_s", "'6h'"),
])
def test_what_is_no_bound(tmp_path: Path, line: str, key: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        job_of(tmp_path, line)
    (mistake,) = error.value.mistakes
    assert mistake.key == key and said in mistake.allowed and mistake.line == 5


def test_a_makespan_is_of_requests(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("model: opt-13b\ncluster: a40-4\nworkload: {task: S}\n"
                    "constraint: {makespan_s: 60}\n")
    with pytest.raises(InputError, match=r"makespan_s = 60: of a job with requests"):
        load_job(path)


@pytest.mark.parametrize("more", [
    "objective: speed\n", "objective: devices\nrun: {ranks: 2, hosts: [a, b]}\n",
    "objective: cost\nslurm: {partition: x}\n", "price_per_hour: 0\n"])
def test_what_goes_not_together(tmp_path: Path, more: str) -> None:
    with pytest.raises(InputError) as error:
        job_of(tmp_path, "latency_s: 30", more=more)
    assert any(mistake.key in ("objective", "price_per_hour") for mistake in error.value.mistakes)


def test_prices(tmp_path: Path) -> None:
    assert resolve_cluster(job_of(tmp_path)).device.price_per_hour is None
    own = resolve_cluster(job_of(tmp_path, more="price_per_hour: 0.4\n")).device
    assert (own.price_per_hour, own.price_source) == (0.4, "the job file")
    known = [catalog.device(name) for name in catalog.names("device")]
    assert all(bool(device.price_source) == (device.price_per_hour is not None)
               for device in known)
    inline = ("model: opt-13b\nworkload: {task: S}\ncluster: {devices_per_node: 2, intra_link: "
              "nvlink4, device: {memory_bytes: 8e10, bandwidth_bytes_per_s: 1e12, flops_per_s: "
              "{float32: 1e13}, price_per_hour: 1.5}}\n")
    path = tmp_path / "inline.yaml"
    path.write_text(inline)
    assert resolve_cluster(load_job(path)).device.price_per_hour == 1.5
