"""What a run says on a machine with GPUs: nvidia-smi alone is asked before it starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import job as job_of
from xgpt.app import checks, timing
from xgpt.app.opened import open_file
from xgpt.app.timing import timing_of
from xgpt.cli.terminal import Terminal
from xgpt.core import local
from xgpt.core.errors import InputError
from xgpt.core.job import Job
from xprofiler.roofline import Roofline

TWO_A40 = "0, GPU-a, NVIDIA A40, 46068\n1, GPU-b, NVIDIA A40, 46068\n"


@pytest.fixture()
def job(tmp_path: Path) -> Callable[..., Job]:
    def make(ranks=None, cluster="local"):
        return job_of(tmp_path, model="opt-125m", cluster=cluster,
                      run=f"{{ranks: {ranks}}}" if ranks else None)

    return make


@pytest.fixture()
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, and a PyTorch that can use them."""
    monkeypatch.setattr(local, "_query_gpus", lambda: local.parse_smi(TWO_A40))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(local, "usable_cores", lambda *_: 8)
    for module in (checks, timing):
        monkeypatch.setattr(module, "why_no_torch", lambda kind: None)


@pytest.mark.parametrize("ranks", [None, 1, 2])
def test_a_run_on_this_machines_gpus_is_executed(
        machine: None, job: Callable[..., Job], capsys: pytest.CaptureFixture[str],
        ranks: int | None) -> None:
    checks.refuse_what_cannot_run(job(ranks), Terminal())
    assert "note" not in capsys.readouterr().err


def test_ranks_that_share_a_gpu_are_told_so(
        machine: None, job: Callable[..., Job], capsys: pytest.CaptureFixture[str]) -> None:
    checks.refuse_what_cannot_run(job(3), Terminal())
    assert "3 ranks share 2 x A40" in capsys.readouterr().err


def test_gpus_of_another_machine_are_planned_not_executed(machine: None,
                                                          job: Callable[..., Job]) -> None:
    with pytest.raises(InputError, match="this machine's GPUs.*plan for any cluster"):
        checks.refuse_what_cannot_run(job(cluster="a40-4"), Terminal())


def test_a_pytorch_without_cuda_is_refused_with_the_ways_out(
        machine: None, monkeypatch: pytest.MonkeyPatch, job: Callable[..., Job]) -> None:
    monkeypatch.setattr(checks, "why_no_torch", lambda kind: "PyTorch has no CUDA")
    with pytest.raises(InputError, match="PyTorch has no CUDA.*CUDA_VISIBLE_DEVICES"):
        checks.refuse_what_cannot_run(job(), Terminal())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    checks.refuse_what_cannot_run(job(), Terminal())  # on CPU ranks


def test_gpus_are_measured_where_they_can_be(
        machine: None, monkeypatch: pytest.MonkeyPatch, job: Callable[..., Job],
        capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def measure(wanted: object, tell: object) -> object:
        asked.append(wanted)
        return wanted

    monkeypatch.setattr(timing, "quick_profile", measure)
    monkeypatch.setattr(timing, "ProfileTiming", lambda profile: profile)
    opened = open_file(job().source, (), Terminal())
    assert timing_of(opened) is asked[0]
    assert asked[0].metadata.device == "A40" and asked[0].metadata.ranks == 2
    monkeypatch.setattr(timing, "why_no_torch", lambda kind: "PyTorch has no CUDA")
    assert isinstance(timing_of(opened), Roofline)
    assert "roofline of A40" in capsys.readouterr().err
