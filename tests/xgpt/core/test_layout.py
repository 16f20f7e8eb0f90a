"""Which layouts of the cores there are, and which a job leaves open."""

from __future__ import annotations

from pathlib import Path

import pytest

from xgpt.core.system.machine import Layout, layouts
from xgpt.job import resolve as layout
from xgpt.job.job import Job
from xgpt.job.job_file import load_job
from xgpt.job.resolve import laid_out, open_layouts


@pytest.mark.parametrize(("cores", "expected"), [
    (1, ["1x1"]), (2, ["1x2", "2x1"]), (7, ["1x7", "7x1"]), (8, ["1x8", "2x4", "4x2", "8x1"]),
    (48, ["1x48", "2x24", "3x16", "4x12", "6x8", "8x6"])])
def test_layouts_are_the_divisors_of_the_cores_with_at_most_eight_ranks(
        cores: int, expected: list[str]) -> None:
    assert [str(each) for each in layouts(cores)] == expected


def job_of(folder: Path, run: str, cluster: str = "local", constraint: str = "5") -> Job:
    path = folder / "job.yaml"
    path.write_text(f"model: opt-125m\ncluster: {cluster}\nworkload: {{task: S}}\n"
                    f"constraint: {{latency_s: {constraint}}}\nrun: {{{run}}}\n")
    return load_job(path, ())


@pytest.mark.parametrize(("run", "cluster", "constraint", "expected"), [
    ("", "local", "5", ["1x4", "4x1"]), ("ranks: 2", "local", "5", []),
    ("threads_per_rank: 2", "local", "5", ["2x2"]), ("threads_per_rank: 9", "local", "5", ["1x9"]),
    ("", "a40-4", "5", []), ("hosts: [a, b]", "local", "5", []),
    ("engine: deepspeed", "local", "5", []),
    ("", "local", "5, max_gpus: 3", ["1x4", "2x2"])])
def test_a_wish_or_another_cluster_or_engine_leaves_nothing_open(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str, cluster: str, constraint: str,
        expected: list[str]) -> None:
    monkeypatch.setattr(layout, "usable_cores", lambda: 4)
    monkeypatch.setattr(layout, "gpus_here", list)
    assert [str(e) for e in open_layouts(job_of(tmp_path, run, cluster, constraint))] == expected


def test_gpus_are_not_laid_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "gpus_here", lambda: [object()])
    assert open_layouts(job_of(tmp_path, "")) == ()


def test_a_job_that_is_laid_out_leaves_nothing_open(tmp_path: Path) -> None:
    job = laid_out(job_of(tmp_path, ""), Layout(2, 3))
    assert (job.run.ranks, job.run.threads_per_rank) == (2, 3) and not open_layouts(job)
    assert Layout(1, 2).words == "1 rank x 2 threads"
