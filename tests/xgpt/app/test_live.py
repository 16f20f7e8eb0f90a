"""`xgpt top`: one look at a job's files, piped and on a terminal."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from runs import RUNNING, Told
from screens import check_screen, without_figures

from xgpt.app import teller as telling
from xgpt.app import top as live
from xgpt.app.running.follow import RanksHang, StallWatch
from xgpt.app.teller import KeptTeller, LogTeller, elapsed_told, tell_run, time_left_s
from xgpt.app.top import CachedSlurmState, glance
from xgpt.cli.main import cli
from xgpt.core.errors import MissingExtraError, XgptError
from xgpt.core.schedule_file import write_json
from xgpt.report.lanes import EXPECTED_FILE, VERSION
from xgpt.run_folder.files import RunFolder, find_run
from xgpt.run_folder.state import signs_of_life
from xrunner.files.heartbeat import HEARTBEATS, Heartbeat, RankState
from xrunner.files.lock import output_lock
from xrunner.files.sink import Progress, write_progress


@pytest.fixture
def place(tmp_path):
    """A job of two ranks that runs, as far as its files tell."""
    write_progress(tmp_path / "progress.json", RUNNING)
    for rank in (0, 1):
        Heartbeat(tmp_path, rank=rank, stage=rank, pool="all")(60.0, 45.0, 24)
    KeptTeller(LogTeller(), tmp_path).say("times: measured\nthe schedule " + "is long " * 20)
    return RunFolder(name="nightly", output=tmp_path, bound_s=2.0)


def test_a_running_job_at_a_glance_is_as_its_screen(place):
    with output_lock(place.output):
        now = glance(place)
    text = re.sub(rf"\s+{re.escape(str(place.output))}", " FOLDER", str(now))
    assert now.is_active and now.state == "running"
    assert now.left_s == pytest.approx(140.0) and "OVER the limit" in str(now)
    assert max(map(len, text.splitlines())) <= 80
    check_screen(Path(__file__).with_name("screens.txt"), "top, running", without_figures(
        re.sub(r"-{3,}", "---", text)))
    assert "24 requests in the system" in text and "0 output tokens/s now, 80 output" in text


def test_who_waits_for_a_silent_rank_has_no_time_left(place):
    path = place.output / "ranks" / "1.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "at_s": state["at_s"] - 42}))
    with output_lock(place.output):
        now = glance(place)
        plain = CliRunner().invoke(cli, ["status", str(place.output)], catch_exceptions=False)
    assert now.left_s is None and "left" not in str(now) and "left" not in plain.stdout
    for text in (str(now), plain.stdout):
        assert re.search(r"last sign of life: rank 1 \(stage 1\) 4\d\.0 s ago",
                         " ".join(text.split())), text


def test_before_the_ranks_start_it_says_what_is_done(tmp_path):
    (tmp_path / ".lock").touch()
    with output_lock(tmp_path):
        teller = KeptTeller(LogTeller(), tmp_path)
        teller.progress("profiling 43%, 20.0 s left")
        now = glance(find_run(tmp_path))
        assert now.state == "starting" and "profiling 43%, 20.0 s left" in str(now)
        plain = CliRunner().invoke(cli, ["status", str(tmp_path)], catch_exceptions=False).stdout
        assert plain.splitlines()[-1].strip() == "profiling 43%, 20.0 s left"
        teller.end_progress()
        assert "profiling" not in str(glance(find_run(tmp_path)))


def test_a_job_that_has_ended_shows_its_last_state_and_its_ranks(place):
    write_progress(place.output / "progress.json", replace(RUNNING, state="stopped"))
    for path in (place.output / "ranks").iterdir():
        path.unlink()
    (place.output / "measured.json").write_text(json.dumps({"wall_s": 60.0, "ranks": [
        {"rank": 0, "stage": 0, "pool": "all", "busy_s": 54.0}]}))
    now = glance(place)
    assert not now.is_active and "90%" in str(now) and "the same command goes on" in (
        " ".join(str(now).split()))
    assert "in the system" not in str(now)


def test_slurm_is_asked_now_and_then():
    now, answers = [0.0], [XgptError("no answer"), None]

    class Record:
        asked = 0

        def ask(self) -> None:
            self.asked += 1
            answer = answers[self.asked - 1]
            if answer is not None:
                raise answer

    record, ask = Record(), CachedSlurmState(clock=lambda: now[0])
    for now[0] in (0.0, 1.0, 9.0):
        with pytest.raises(XgptError, match="no answer"):
            ask(record)
    now[0] = 10.0
    assert ask(record) is None and record.asked == 2


def test_piped_it_prints_one_state_and_without_rich_it_names_the_command(
        place, tmp_path_factory, monkeypatch):
    shown = CliRunner().invoke(cli, ["top", str(place.output)], catch_exceptions=False)
    assert shown.exit_code == 0 and "\x1b" not in shown.stdout and "died" in shown.stdout
    empty = CliRunner().invoke(cli, ["top", str(tmp_path_factory.mktemp("empty"))])
    assert isinstance(empty.exception, XgptError) and "No run in" in str(empty.exception)
    monkeypatch.setattr(live.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"\[top\]"):
        live.follow(lambda: glance(place))


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_screen_fits(place, width):
    console = pytest.importorskip("rich.console", reason="the screen needs the extra `top`").Console
    with output_lock(place.output):
        now = glance(place)
    file = StringIO()
    console(file=file, width=width, force_terminal=True).print(
        live.screen(now))
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "nightly: running" in lines[0] and "Ctrl-C leaves" in lines[-1]
    assert "120 of 400" in text and "in the system" in text


def test_ctrl_c_leaves_the_terminal_as_it_was(place):
    pytest.importorskip("rich", reason="the screen needs the extra `top`")
    head, tail = pty.openpty()
    with output_lock(place.output):
        process = subprocess.Popen(
            [sys.executable, "-m", "xgpt.cli.main", "top", str(place.output)], stdin=tail,
            stdout=tail, stderr=tail, env={**os.environ, "TERM": "xterm", "COLUMNS": "80",
                                           "LINES": "24"}, start_new_session=True,
            # a shell ignores it for what it starts in the background, such as these tests
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        os.close(tail)
        seen = read_until(head, b"Ctrl-C leaves")
        process.send_signal(signal.SIGINT)
        seen += read_until(head, b"last messages\r\n")
        try:
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()
            process.wait()
    os.close(head)
    assert b"\x1b[?1049h" in seen and b"\x1b[?1049l" in seen, "its own screen, left again"


def read_until(descriptor: int, words: bytes) -> bytes:
    seen, end_s = b"", time.monotonic() + 30
    while words not in seen and time.monotonic() < end_s:
        if select.select([descriptor], [], [], 0.2)[0]:
            try:
                seen += os.read(descriptor, 65536)
            except OSError:  # the other end is closed
                break
    return seen


def test_what_takes_longer_is_told_of_until_it_ends(monkeypatch):
    listener = Told()
    with elapsed_told(listener, "searching"):
        pass
    assert (listener.shown, listener.ends) == ([], 0), "quick"
    monkeypatch.setattr(telling, "SILENT_S", 0.01)
    monkeypatch.setattr(telling, "_STILL_S", 0.01)
    with pytest.raises(ValueError, match="as it ends"), elapsed_told(listener, "searching"):
        end_s = time.monotonic() + 20
        while len(listener.shown) < 2 and time.monotonic() < end_s:
            time.sleep(0.01)
        raise ValueError("as it ends")
    told = len(listener.shown)
    assert told >= 2 and all(line.startswith("searching, ") for line in listener.shown)
    assert listener.ends == 1
    time.sleep(0.05)
    assert len(listener.shown) == told, "nothing is said once it has ended"


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


@pytest.mark.parametrize(("pace", "first", "off"), [
    (0.85, 0.5, 0.25), (1.0, 0.5, 0.25), (1.2, 0.5, 0.25),
    (2.0, 13.0, 0.3)])  # half as fast: found out by the middle
def test_it_is_true_within_a_quarter_from_the_first_second_on(tmp_path, pace, first, off):
    expect(tmp_path, ends_of(1))
    ends = ends_of(2, pace)
    for second in np.arange(first * pace, ends[-1] - 2.5 * pace, 0.25):
        told, left = time_left_s(progress_at(second, ends), tmp_path), ends[-1] - second
        assert told == pytest.approx(left, rel=off, abs=1.0), f"at {second} s"


def test_a_rest_begins_where_the_run_before_ended_and_without_a_plan_it_is_the_pace_so_far(
        tmp_path):
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
    expect(tmp_path, ends_of(1))
    rest = ends_of(1)[75:] - 12.6  # half of it was done until then
    for second in (0.5, 4.0, 8.0):
        told = time_left_s(progress_at(second, rest, 75), tmp_path)
        assert told == pytest.approx(rest[-1] - second, rel=0.25)


# Who holds up a run is named, and nobody else.


STATE = RankState(rank=0, stage=0, pool="all", elapsed_s=1.0, busy_s=1.0, recent_share=1.0,
                  queries=3, at_s=1000.0, num_steps=1, longest_step_s=0.5, told="to decode")


class Run:
    """Two ranks, as their files tell of them while a clock goes on."""

    def __init__(self, output: Path, limit_s: float | None = None) -> None:
        self.output, self.now = output, 0.0
        (output / HEARTBEATS).mkdir()
        self.states = {0: STATE, 1: replace(STATE, rank=1, stage=1)}
        self.watch = StallWatch(output, ranks=2, limit_s=limit_s, clock=lambda: self.now)

    def pass_by(self, seconds: int, *, lives: tuple[int, ...] = (0, 1),
                works: tuple[int, ...] = (0, 1)) -> None:
        for _ in range(seconds):
            self.now += 1.0
            for rank, state in self.states.items():
                if rank in lives:
                    state = replace(state, at_s=state.at_s + 1)
                if rank in works:
                    state = replace(state, num_steps=state.num_steps + 1)
                self.states[rank] = state
                (self.output / HEARTBEATS / f"{rank}.json").write_text(json.dumps(asdict(state)))
            self.watch.look()


@pytest.mark.parametrize(("limit_s", "first", "then", "said"), [
    (None, (20, {}), (62, {"lives": (0,), "works": (0,)}),
     r"rank 1 \(stage 1\) has given no sign of life for .*; its last order was"),
    (30, (5, {}), (32, {"works": ()}), "no rank has started a step for"),
    (None, (0, {}), (602, {"lives": (0,), "works": (0,), "told": (0,)}),
     "rank 1 of 2 gave no sign of life within")])
def test_who_holds_up_a_run_is_named_and_no_sooner(tmp_path, limit_s, first, then, said):
    run = Run(tmp_path, limit_s=limit_s)
    run.pass_by(first[0], **first[1])
    (seconds, keys) = then
    for rank in {*run.states} - {*keys.pop("told", (0, 1))}:
        del run.states[rank]
    run.pass_by(seconds - 2, **keys)
    with pytest.raises(RanksHang, match=said):
        run.pass_by(4, **keys)


def test_a_rank_that_is_at_one_step_is_named_and_not_who_waits_for_it(tmp_path):
    run = Run(tmp_path, limit_s=30)
    run.pass_by(5)
    run.states[1] = replace(run.states[1], step_since_s=7.0)
    with pytest.raises(RanksHang, match=r"rank 1 .* is alive, but has been in one step for"):
        run.pass_by(33, works=())


def test_a_first_step_may_compile(tmp_path):
    run = Run(tmp_path, limit_s=30)
    run.states = {rank: replace(state, num_steps=0) for rank, state in run.states.items()}
    run.states[0] = replace(run.states[0], step_since_s=7.0)
    run.pass_by(300, works=())
    with pytest.raises(RanksHang, match=r"rank 0 .* has been in one step for"):
        run.pass_by(310, works=())


def test_the_limit_follows_the_longest_step(tmp_path):
    run = Run(tmp_path)
    assert run.watch.limit_s() == 60
    run.states[0] = replace(STATE, longest_step_s=50.0)
    run.pass_by(1)
    assert run.watch.limit_s() == 500


def test_loading_is_no_hanging_but_silence_is(tmp_path):
    run = Run(tmp_path, limit_s=30)
    run.states = {rank: replace(state, num_steps=0) for rank, state in run.states.items()}
    run.pass_by(100, works=())
    with pytest.raises(RanksHang, match="no sign of life"):
        run.pass_by(32, lives=(1,), works=())


def test_a_command_that_was_stopped_itself_begins_to_count_anew(tmp_path):
    run = Run(tmp_path, limit_s=30)
    run.pass_by(5)
    run.now += 1000
    run.pass_by(29, lives=(), works=())


def test_the_oldest_sign_is_told_and_a_silent_rank_before_it_is_given_up(tmp_path):
    said = signs_of_life([STATE, replace(STATE, rank=1, stage=1, at_s=925.0)], now=1000.0)
    assert said == ("last sign of life: rank 1 (stage 1) 75.0 s ago, after the order to decode; "
                    "the others 0 us ago or less")
    assert signs_of_life([]) is None
    run = Run(tmp_path)
    run.pass_by(20)
    assert run.watch.silent is None
    run.pass_by(11, lives=(0,), works=(0,))
    assert run.watch.silent == "rank 1 silent for 11.0 s"
    write_progress(tmp_path / "progress.json", RUNNING)
    said: list[str] = []
    tell: Any = SimpleNamespace(progress=said.append)
    for silent in (None, run.watch.silent):
        tell_run(tell, tmp_path / "progress.json", 2.0, silent)
    assert "left" in said[0] and "left" not in said[1] and "rank 1 silent for 11.0 s" in said[1]
    assert max(map(len, said)) < 80
