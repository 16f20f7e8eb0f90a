"""The time left of a run, by a clock of the test's own: bursts, a slower machine, a resumption."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from xgpt.app.telling import time_left_s
from xgpt.core.json_values import write_json
from xgpt.report.lanes import EXPECTED_FILE, VERSION
from xrunner.io.sink import Progress

TOTAL, BATCH = 150, 25


def ends_of(seed: int, pace: float = 1.0) -> np.ndarray:
    """When queries end: six waves, each after four silent seconds, and a long last query."""
    rng = np.random.default_rng(seed)
    waves = np.repeat(np.arange(TOTAL // BATCH), BATCH) * 4.0 + 4.0
    ends = waves + rng.uniform(0, 0.6, TOTAL)
    ends[-1] += 2.0
    return np.sort(ends) * pace


def progress_at(second: float, ends: np.ndarray, done_before: int = 0) -> Progress:
    ended = ends[ends <= second]
    return Progress(state="running", total=TOTAL, elapsed_s=second, output_tokens=1,
                    done=done_before + len(ended), done_before=done_before,
                    latency_p50_s=None, latency_p99_s=None,
                    last_done_s=float(ended[-1]) if len(ended) else None)


def expect(output: Path, ends: np.ndarray) -> None:
    write_json(output / EXPECTED_FILE, {
        "version": VERSION, "stages": [], "latency_s": [1.0], "ttft_s": [1.0],
        "done": [[float(end), i + 1] for i, end in enumerate(ends)]})


@pytest.mark.parametrize("pace", [0.85, 1.0, 1.2])
def test_it_is_true_within_a_quarter_from_the_first_second_on(tmp_path: Path, pace: float) -> None:
    expect(tmp_path, ends_of(1))
    ends = ends_of(2, pace)
    for second in np.arange(0.5, ends[-1] - 2.0, 0.25):
        told, left = time_left_s(progress_at(second, ends), tmp_path), ends[-1] - second
        assert told == pytest.approx(left, rel=0.25, abs=1.0), f"at {second} s"


def test_a_machine_half_as_fast_is_found_out_by_the_middle(tmp_path: Path) -> None:
    expect(tmp_path, ends_of(1))
    ends = ends_of(2, 2.0)
    for second in np.arange(ends[-1] / 2, ends[-1] - 5.0, 0.5):
        told = time_left_s(progress_at(second, ends), tmp_path)
        assert told == pytest.approx(ends[-1] - second, rel=0.3)


def test_a_rest_begins_where_the_run_before_ended(tmp_path: Path) -> None:
    expect(tmp_path, ends_of(1))
    rest = ends_of(1)[75:] - 12.6  # half of it was done until then
    for second in (0.5, 4.0, 8.0):
        told = time_left_s(progress_at(second, rest, 75), tmp_path)
        assert told == pytest.approx(rest[-1] - second, rel=0.25)


def test_without_a_plan_of_this_job_it_is_the_pace_so_far(tmp_path: Path) -> None:
    progress = progress_at(5.0, ends_of(1))
    assert progress.done == BATCH
    assert time_left_s(progress, tmp_path) == pytest.approx(25.0)
    expect(tmp_path, ends_of(1)[:100])  # of another number of queries
    assert time_left_s(progress, tmp_path) == pytest.approx(25.0)
    (tmp_path / EXPECTED_FILE).write_text("torn")
    os.utime(tmp_path / EXPECTED_FILE, ns=(1, 1))
    assert time_left_s(progress, tmp_path) == pytest.approx(25.0)
    assert time_left_s(progress_at(0.5, ends_of(1)), tmp_path) is None
    assert time_left_s(progress_at(99.0, ends_of(1)), tmp_path) is None
