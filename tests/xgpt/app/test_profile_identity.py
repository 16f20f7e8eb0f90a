"""What is told of this machine before anything is measured on it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from jobs import opened
from xgpt.app import profile_identity, timing
from xprofiler.cache import kernels_fingerprint
from xrunner.ops import build


def test_that_operators_are_being_compiled_is_told_before_anything_is_timed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(timing, "why_no_torch", lambda _: None)
    monkeypatch.setattr(timing, "why_no_operators", lambda: order.append("compiled"))
    monkeypatch.setattr(timing, "told_while",
                        lambda _, what: order.append(what) or contextlib.nullcontext())

    def stop(*_: object) -> None:
        order.append("timed")
        raise InterruptedError

    monkeypatch.setattr(timing, "quick_profile", stop)
    own = opened(tmp_path, model="opt-125m", cluster="local", run="{ranks: 1}")
    if own.problem.cluster.device.kind != "cpu":
        pytest.skip("this machine's GPUs would be timed")
    with pytest.raises(InterruptedError):
        timing.timing_of(own)
    assert order == ["compiling what computes, once", "compiled", "timed"]


def test_a_profile_of_gpus_tells_whether_kernels_read_each_query_alone_and_steps_are_captured(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(graphs):
        own = opened(tmp_path, model="opt-125m", run=f"{{cuda_graphs: {graphs}}}")
        return profile_identity.profile_metadata(own.job, own.problem)

    monkeypatch.setattr(build, "why_no_cupy", lambda: "cupy is not installed")
    assert of("auto").is_padded, "torch reads all up to the longest"
    monkeypatch.setattr(build, "why_no_cupy", lambda: None)
    captured, launched = of("auto"), of("off")
    assert not captured.is_padded
    assert captured.kernels == kernels_fingerprint()
    assert launched.kernels == f"{captured.kernels}, no CUDA graphs"
    monkeypatch.setenv("XGPT_NATIVE", "off")
    assert of("auto").is_padded
