"""`xgpt stop` takes effect while a job's profile is measured, or waits for its turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import opened
from xgpt.app import local_profile as module
from xgpt.app.local_profile import WantedProfile, local_profile, wanted_profile
from xgpt.app.stop import stop_job
from xgpt.app.telling import LogTeller
from xgpt.core.errors import StoppedEarly
from xrunner.io.lock import output_lock
from xrunner.io.stop import StopRequest


class Measuring:
    """A launcher whose ranks measure until they are asked to stop; the user asks meanwhile."""

    is_here = True

    def __init__(self, output: Path) -> None:
        self._output, self.looks = output, 0

    def run(self, program: object, *, watch: Callable[[], None],
            ask_to_stop: Callable[[], None]) -> None:
        stop = Path(program.argument).with_name("stop")  # type: ignore[attr-defined]
        for self.looks in range(1, 6):
            if self.looks == 3:
                stop_job(self._output)
            watch()
            if stop.exists():
                return
        raise AssertionError("never asked to stop")


@pytest.fixture
def wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WantedProfile:
    pytest.importorskip("mpi4py", reason="measuring needs the extra `run`")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "out").mkdir()
    own = opened(tmp_path, model="opt-125m", cluster="local", output="out", run="{ranks: 1}")
    return wanted_profile(own.job, own.problem)


def test_a_run_that_measures_is_asked_between_measurements(wanted: WantedProfile) -> None:
    launcher = Measuring(wanted.output)
    with output_lock(wanted.output), pytest.raises(StoppedEarly, match="what was measured is kept"):
        local_profile(replace(wanted, launcher=launcher), LogTeller())
    assert launcher.looks == 3


def test_a_request_of_an_earlier_run_stops_no_later_profile(wanted: WantedProfile) -> None:
    StopRequest(wanted.output).make_by_user()
    assert not module.is_asked_to_stop(wanted.output)
    with output_lock(wanted.output):
        assert module.is_asked_to_stop(wanted.output)


def test_who_waits_for_another_that_measures_stops_too(wanted: WantedProfile,
                                                       tmp_path: Path) -> None:
    StopRequest(wanted.output).make_by_user()
    cache = tmp_path / "cache" / "xgpt" / "profiles"
    with output_lock(wanted.output), module.alone(cache, wanted.output, LogTeller()), (
            pytest.raises(StoppedEarly, match="before its profile was measured")):
        local_profile(wanted, LogTeller())
