"""Where a replay comes upon steps larger than any whose time is known, nothing is predicted, in
words: figures were 0 queries/s, infinite and not a number."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from xgpt.app.running import run
from xgpt.cli.main import cli
from xgpt.core.errors import InputError
from xgpt.core.queries import QueryTimes
from xsimulator.replay.records import ReplayResult

JOB = """
model: opt-13b
cluster: a40-4
workload: {requests: {count: 60}, task: S}
schedule: {policy: rra, encode_batch: 8, decode_iterations: 9}
"""


def result_of(*last_token_s: float) -> ReplayResult:
    last_s = np.array(last_token_s)
    times = QueryTimes(arrival_s=np.zeros(len(last_s)), start_s=np.zeros(len(last_s)),
                       first_token_s=last_s / 2, last_token_s=last_s)
    return ReplayResult(pools=(), handovers=(), times=times, preemptions=0,
                        output_tokens=np.full(len(last_s), 3))


@pytest.mark.parametrize("replays", [[(1.0, np.inf)], [(1.0, 2.0), (np.inf, np.inf)]])
def test_nothing_is_predicted_of_a_run_with_such_steps(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replays: list[tuple[float, ...]]) -> None:
    replayed = SimpleNamespace(results=iter([result_of(*one) for one in replays]), is_whole=False,
                               num_queries=2)
    for name, value in (("replays_of", replayed), ("said_of", None),
                        ("engine_of", SimpleNamespace(is_predicted=True))):
        monkeypatch.setattr(run, name, lambda *_, value=value: value)
    said: list[str] = []
    opened: Any = SimpleNamespace(job=SimpleNamespace(output=tmp_path), problem=None,
                                  tell=SimpleNamespace(say=said.append))
    assert run._predicted(opened, None, SimpleNamespace(estimate=None)) is None  # type: ignore[arg-type]
    assert "nothing is predicted of this run" in said[0] and list(tmp_path.iterdir()) == []


def test_such_a_schedule_is_not_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.setattr(ReplayResult, "is_timed", False)
    done = CliRunner().invoke(cli, ["simulate", str(tmp_path / "job.yaml")])
    assert isinstance(done.exception, InputError)
    assert "within 4 times the sizes that the profile measured: larger steps" in str(done.exception)
