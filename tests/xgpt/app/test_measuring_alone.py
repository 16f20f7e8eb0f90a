"""One process at a time measures on a host, and who waits for it says so."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from profiles import amdahl, profile_of
from runs import Told

from jobs import opened
from xgpt.app import needed_profile as profile_identity
from xgpt.app import profile as module
from xgpt.app.needed_profile import needed_profile, profile_metadata
from xgpt.app.opened_job import OpenedJob
from xgpt.app.profile import alone, local_profile
from xgpt.app.teller import LogTeller
from xgpt.app.top import stop_job
from xgpt.core.errors import StoppedEarly
from xgpt.launch.launcher import RankProgram
from xprofiler.profile import (
    TRANSFER,
    Profile,
    Sample,
    TableKey,
    cached_profile_path,
    kernels_fingerprint,
)
from xprofiler.profile_file import load_profile, save_profile
from xrunner.files.lock import StopRequest, output_lock
from xrunner.ops import build

_HOLDS = """
import os, sys, time
from pathlib import Path
from xgpt.app.profile import alone
from xgpt.app.teller import LogTeller
with alone(Path(sys.argv[1]), Path("/jobs/other"), LogTeller(), sys.argv[2]):
    print("held", flush=True)
    time.sleep(100)
"""

@contextmanager
def held(folder: Path, engine: str = "xgpt", before: tuple[str, ...] = ()) -> Iterator[int]:
    """Another process has the lock; its id."""
    process = subprocess.Popen([*before, sys.executable, "-c", _HOLDS, folder, engine, "job.yaml"],
                               stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_the_wait_is_told_each_minute_with_who_holds_the_lock(tmp_path, monkeypatch):
    tell, output, clock = Told(), tmp_path / "out", [0.0]
    output.mkdir()

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        if clock[0] > 150:
            StopRequest(output).make_by_user()

    with held(tmp_path) as pid, output_lock(output), pytest.raises(StoppedEarly):
        monkeypatch.setattr(time, "monotonic", lambda: clock[0])
        monkeypatch.setattr(time, "sleep", sleep)
        with alone(tmp_path, output, tell):
            pass
    monkeypatch.undo()
    assert len(tell.lines) == 3
    assert all(f"(process {pid} on {socket.gethostname()}), since 20" in said
               and said.endswith("job.yaml") for said in tell.lines)
    assert "waiting, 2 min" in tell.lines[2]


def test_another_engine_does_not_wait_nor_another_host(tmp_path):
    tell = Told()
    with held(tmp_path, "vllm"), alone(tmp_path, tmp_path, tell):
        pass
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs rights to give a process another host's name")
    elsewhere = ("unshare", "--uts", "sh", "-c", 'hostname elsewhere; exec "$@"', "sh")
    with held(tmp_path, before=elsewhere), alone(tmp_path, tmp_path, tell):
        pass
    assert not tell.lines


def test_a_holder_that_was_killed_is_not_waited_for(tmp_path):
    tell = Told()
    with held(tmp_path) as pid:
        os.kill(pid, signal.SIGKILL)  # nobody has taken note of its end yet
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with alone(tmp_path, tmp_path, tell):
            pass
    assert not tell.lines


class Measuring:
    """A launcher whose ranks measure until they are asked to stop; the user asks meanwhile."""

    is_here = True

    def __init__(self, output: Path) -> None:
        self._output, self.looks = output, 0

    def run(self, program: object, *, watch: Callable[[], None],
            ask_to_stop: Callable[[], None]) -> None:
        stop = Path(program.argument).with_name("stop")
        for self.looks in range(1, 6):
            if self.looks == 3:
                stop_job(self._output)
            watch()
            if stop.exists():
                return
        raise AssertionError("never asked to stop")


@pytest.fixture
def wanted(tmp_path, monkeypatch):
    pytest.importorskip("mpi4py", reason="measuring needs the extra `run`")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "out").mkdir()
    own = opened(tmp_path, model="opt-125m", cluster="local", output="out", run="{ranks: 1}")
    return needed_profile(own.job, own.problem)


def test_a_run_that_measures_is_asked_between_measurements(wanted):
    launcher = Measuring(wanted.job.output)
    with output_lock(wanted.job.output), pytest.raises(
            StoppedEarly, match="measured points are kept"):
        local_profile(replace(wanted, launcher=launcher), LogTeller())
    assert launcher.looks == 3


def test_an_earlier_request_stops_no_profile_and_one_of_now_who_waits(wanted, tmp_path):
    StopRequest(wanted.job.output).make_by_user()
    assert not module.is_asked_to_stop(wanted.job.output)
    with output_lock(wanted.job.output):
        assert module.is_asked_to_stop(wanted.job.output)
    StopRequest(wanted.job.output).make_by_user()
    cache = tmp_path / "cache" / "xgpt" / "profiles"
    with output_lock(wanted.job.output), alone(cache, wanted.job.output, LogTeller()), (
            pytest.raises(StoppedEarly, match="before its profile was measured")):
        local_profile(wanted, LogTeller())


def test_a_profile_of_gpus_tells_whether_kernels_read_each_query_alone_and_steps_are_captured(
        tmp_path, monkeypatch):
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


def opened_on(folder: Path, hosts: str) -> OpenedJob:
    return opened(folder, model="opt-125m", cluster="local", run=(
        f"{{ranks: 2, threads_per_rank: 1, dtype: float32, hosts: [{hosts}]}}"))


@dataclass
class Measurer:
    """Stands for ranks that measure: adds what it is told to the profile it is asked for."""

    add: Callable[[Profile], Profile]
    is_here: bool = True
    found: list[Profile] = field(default_factory=list)

    def run(self, ranks: RankProgram, **_: Any) -> None:
        target = Path(json.loads(ranks.argument.read_text())["target"])
        self.found.append(load_profile(target))
        save_profile(self.add(self.found[-1]), target)


def test_nodes_are_told_apart_and_messages_between_them_measured_and_added_once(
        tmp_path, monkeypatch):
    one, two = (profile_metadata(opened.job, opened.problem) for hosts in ("", "a, b")
                for opened in [opened_on(tmp_path, hosts)])
    assert (one.ranks, two.ranks, one.nodes, two.nodes) == (2, 2, 1, 2)
    assert cached_profile_path(tmp_path, one) != cached_profile_path(tmp_path, two)
    monkeypatch.setattr(module, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(module, "missing_skeleton", lambda *_: [])
    opened = opened_on(tmp_path, "a, b")
    over_network = TableKey(TRANSFER, 1, "network")
    points = (Sample(x=1024, samples_s=(1e-4,) * 3),)
    ranks = Measurer(lambda known: replace(known, tables={**known.tables, over_network: points}))
    wanted = replace(needed_profile(opened.job, opened.problem), launcher=ranks)
    near = replace(profile_of(wanted.problem.model, 2, 1, amdahl(0.0)), metadata=wanted.metadata)
    path = cached_profile_path(tmp_path / "profiles", wanted.metadata)
    path.parent.mkdir()
    save_profile(near, path)
    whole = local_profile(wanted, LogTeller())
    assert over_network not in ranks.found[0].tables
    assert set(whole.tables) == {*near.tables, over_network}
    assert set(local_profile(wanted, LogTeller()).tables) == set(whole.tables)
    assert len(ranks.found) == 1, "what is whole is not measured again"
