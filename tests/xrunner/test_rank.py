"""A rank: it ends with its launcher, waits and takes what it is told, and computes with fewer
threads while others take its cores; measured.json and steps.jsonl of stages of several ranks."""

import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from xgpt.core.errors import XgptError
from xgpt.core.prefixes import Prefixes
from xgpt.core.system import lifeline
from xgpt.core.system.lifeline import DONE, READY
from xrunner.engine.pipeline import RankReport
from xrunner.files.heartbeat import HEARTBEATS, Heartbeat
from xrunner.files.sink import SharingTally, Tally
from xrunner.query import FinishedQuery, PreparedQuery
from xrunner.rank import standby
from xrunner.rank.lifecycle import RunOutcome, operators_of, write_measured
from xrunner.rank.threads import HOLD_S, LOOK_S, Threads, WaitedForCores, threads_of
from xrunner.step_record import StepRecord

_RANK = """
from xgpt.core.system.lifeline import begin_rank
begin_rank()
print("began", flush=True)
import time
time.sleep(60)
"""


def test_a_rank_ends_with_the_pipe_of_its_launcher():
    """mpiexec is not there to end it."""
    line = lifeline.Lifeline()
    rank = subprocess.Popen([sys.executable, "-c", _RANK], env={**os.environ, **line.name},
                            pass_fds=(line.end,), stdout=subprocess.PIPE)
    with rank:
        line.close_ranks_end()
        assert rank.stdout is not None and rank.stdout.readline() == b"began\n"
        line.close()
        try:
            assert rank.wait(20) == lifeline.EXIT_ORPHANED
        finally:
            rank.kill()


def test_operators_are_told_once_where_they_are_the_same_on_all_ranks():
    reports = [replace(report(rank, 0), operators=said) for rank, said in (
        (2, "ours"), (1, "ours"), (0, "ours"), (3, None))]
    assert operators_of(reports) == "ours"
    assert operators_of(reports[3:]) is None
    reports[0] = replace(reports[0], operators="none, torch's serve: no cupy")
    assert operators_of(reports) == "rank 0: ours; rank 2: none, torch's serve: no cupy"


def report(rank: int, stage: int, *, late_s: float = 0.0, iterations: int = 2) -> RankReport:
    log = tuple(StepRecord("decode", 0, 0, i, 5, 5, i + late_s, i + 0.5 + late_s)
                for i in range(iterations))
    return RankReport(rank=rank, stage=stage, log=log, busy_s=1.0 + rank, load_s=0.1 * rank,
                      bytes_read=100, rows_compacted=3, peak_memory_bytes=10 + rank)


def write(folder: Path, reports: list[RankReport]) -> dict[str, Any]:
    """measured.json of these."""
    tally = Tally()
    for count, last_s in ((1, 2.0), (6, 4.5)):
        tally.add(FinishedQuery(
            query=PreparedQuery(index=count, id="", input_ids=(1,), max_new_tokens=9),
            output_ids=(7,) * count, finish_reason="stop", text="",
            encode_start_s=1.0, first_token_s=2.0, last_token_s=last_s))
    outcome = RunOutcome(state="done", wall_s=10.0, queries_before=0, num_errors=0)
    write_measured(folder, outcome, tally, reports)
    return json.loads((folder / "measured.json").read_text())


def test_the_queries_times_are_told_by_their_percentiles(tmp_path):
    measured = write(tmp_path, [])
    assert (measured["queries"], measured["output_tokens"]) == (2, 7)
    assert (measured["latency_p50_s"], measured["ttft_p50_s"], measured["ttft_p99_s"]) == (
        2.25, 2.0, 2.0)
    assert measured["tpot_p50_s"] == measured["tpot_p99_s"] == 0.5, "one token alone has no pace"


def test_a_stage_is_as_busy_as_its_busiest_rank_and_reads_what_its_ranks_read(tmp_path):
    measured = write(tmp_path, [report(0, 0), report(1, 0, late_s=0.1), report(2, 1)])
    stages, ranks = measured["stages"], measured["ranks"]
    assert [(s["stage"], s["ranks"]) for s in stages] == [(0, [0, 1]), (1, [2])]
    assert [s["busy_s"] for s in stages] == [2.0, 3.0]
    assert [s["bytes_read"] for s in stages] == [200, 100]
    assert sum(s["bytes_read"] for s in stages) == measured["loaded_bytes"] == sum(
        r["bytes_read"] for r in ranks)
    assert [(r["rank"], r["stage"], r["busy_s"]) for r in ranks] == [
        (0, 0, 1.0), (1, 0, 2.0), (2, 1, 3.0)]
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [(s["stage"], s["rank"], s["start_s"]) for s in steps] == [
        (0, 0, 0.0), (0, 0, 1.0), (1, 2, 0.0), (1, 2, 1.0)]


def test_each_of_several_replicas_tells_its_requests_place_and_restarts(tmp_path):
    reports = [replace(report(rank, rank), replica=rank // 2) for rank in range(4)]
    for one in reports:
        heartbeat = Heartbeat(tmp_path, rank=one.rank, stage=one.stage, pool="all",
                              replica=one.replica, devices=f"GPU {one.rank}")
        heartbeat.restarts = one.rank % 2
        heartbeat(1.0, 1.0, 0)
    first, second = write(tmp_path, reports)["replicas"]
    assert (first["queries"], first["output_tokens"], first["wall_s"]) == (2, 7, 4.5)
    assert first["output_tokens_per_s"] == pytest.approx(7 / 4.5)
    assert (first["devices"], first["restarts"], first["load_s"]) == ("GPU 0, GPU 1", 1, 0.1)
    assert (second["replica"], second["queries"], second["output_tokens_per_s"]) == (1, 0, None)
    for rank in (2, 3):
        (tmp_path / HEARTBEATS / f"{rank}.json").unlink()
    assert "replicas" not in write(tmp_path, reports[:2]), "one has the run's figures"


def test_ranks_of_a_group_that_took_different_steps_are_our_own_mistake(tmp_path):
    with pytest.raises(AssertionError, match="ranks 0 and 1 of stage 0"):
        write(tmp_path, [report(0, 0), report(1, 0, iterations=3)])
    taken_up = replace(report(1, 0), log=(
        *report(1, 0).log, StepRecord("cross_kv", 0, 0, 0, 1, 9, 0.0, 0.1)))
    write(tmp_path, [report(0, 0), taken_up])  # when encoder output comes is each rank's own


def test_two_pools_say_what_each_stage_did_and_what_was_handed_over(tmp_path):
    reports = [replace(report(0, 0), role="encode", handover_bytes=70, handover_s=0.5),
               replace(report(1, 0), role="encode", handover_bytes=30, handover_s=0.7),
               replace(report(2, 1), role="decode", handover_bytes=100)]
    measured = write(tmp_path, reports)
    assert [(s["role"], s["handover_bytes"], s.get("handover_s")) for s in measured["stages"]] == [
        ("encode", 100, 0.7), ("decode", 100, None)]
    assert [r["handover_bytes"] for r in measured["ranks"]] == [70, 30, 100]
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    roles = [json.loads(line)["role"] for line in lines]
    assert roles == ["encode", "encode", "decode", "decode"]
    measured = write(tmp_path, [report(0, 0)])
    assert "handover_bytes" not in measured["stages"][0], "nothing to say of one pool"


def test_input_tokens_are_encoded_or_shared_and_those_encoded_again_are_counted():
    """Two of three prefixes are used, the second of which continues the first."""
    tally = SharingTally()
    assert tally.facts(500) == {}, "nothing is shared"
    tally.prefixes = Prefixes(parents=np.array([-1, 0, -1]), ends=np.array([100, 150, 90]),
                              nodes=np.array([1, -1, 0, 2, 1]))
    for index, tokens in ((4, 160), (0, 170), (1, 30), (2, 110)):
        tally.add(FinishedQuery(
            query=PreparedQuery(index=index, id="", input_ids=(1,) * tokens, max_new_tokens=9),
            output_ids=(7,), finish_reason="stop", text="", encode_start_s=1.0,
            first_token_s=2.0, last_token_s=3.0))
    # encoded once: 100 + 50 of prefixes, own tokens 10, 20, 30, 10
    assert tally.facts(230) == {"prefixes": {
        "prefixes": 2, "input_tokens": 470, "encoded_tokens": 230, "shared_tokens": 250,
        "encoded_again_tokens": 10}}


RUN = b"xrunner.rank.worker\0run.json"


class Knot:
    """Known to itself alone, as the parts of a run are in the end."""

    def __init__(self) -> None:
        self.own = self


@contextmanager
def waiting(codes: list[int]) -> Iterator[socket.socket]:
    """The launcher's end of a rank that waits, whose exit code comes in the end."""
    ours, its = socket.socketpair()
    ours.settimeout(20)
    with ours:
        rank = threading.Thread(target=lambda: codes.append(standby.main([str(its.detach())])))
        rank.start()
        assert ours.recv(1) == READY
        yield ours
        ours.shutdown(socket.SHUT_WR)
        rank.join(20)


@pytest.fixture
def alone(monkeypatch):
    """Puts other things in the places of a rank's parts."""
    def put(**parts: object) -> None:
        given = {"load_plan": lambda path: SimpleNamespace(device_kind="cpu", private=False),
                 "_ranks": lambda: None, **parts}
        for name, part in given.items():
            monkeypatch.setattr(standby, name, part)

    return put


def test_parts_are_taken_one_after_another_until_one_fails(tmp_path, monkeypatch, alone):
    (tmp_path / "other_part.py").write_text(
        "from pathlib import Path\n\n\ndef main(arguments):\n"
        "    path = Path(arguments[0])\n    code = int(path.read_text())\n"
        "    path.write_text('taken')\n    return code\n")
    monkeypatch.syspath_prepend(tmp_path)
    alone()
    codes: list[int] = []
    with waiting(codes) as line:
        for code in (0, 3):
            (tmp_path / "said").write_text(str(code))
            line.sendall(f"other_part\0{tmp_path / 'said'}".encode())
            assert line.recv(1) == (DONE if code == 0 else b"")
            assert (tmp_path / "said").read_text() == "taken"
    assert codes == [3]


def test_what_a_run_held_is_gone_when_the_next_begins_and_its_world_is_not(alone):
    held: list[weakref.ref[Knot]] = []
    left: list[int] = []
    calls: list[str] = []

    class World:
        def _replace(self, close: Callable[[], None]) -> SimpleNamespace:
            return SimpleNamespace(close=close)

        def close(self) -> None:
            calls.append("closed")

    def run(plan: object, join: Callable[[], SimpleNamespace], work: object) -> int:
        join().close()
        left.append(sum(knot() is not None for knot in held))
        held.append(weakref.ref(Knot()))
        return 0

    alone(connect=lambda kind: calls.append("connected") or World(), run_rank=run)
    codes: list[int] = []
    with waiting(codes) as line:
        for _ in range(3):
            line.sendall(RUN)
            assert line.recv(1) == DONE
        assert calls == ["connected"]
    assert (codes, left, calls) == ([0], [0, 0, 0], ["connected", "closed"])


def test_a_device_that_is_not_there_is_told_in_words(alone, capsys):
    def connect(kind: str) -> None:
        raise XgptError("no such device")

    alone(connect=connect)
    codes: list[int] = []
    with waiting(codes) as line:
        line.sendall(RUN)
        assert line.recv(1) == b""
    assert codes == [1] and "no such device" in capsys.readouterr().err


class Machine:
    """A clock, and threads that wait for a core where more of them are at work than it has."""

    def __init__(self, cores: int) -> None:
        self.cores, self.now_s, self.waited_s = cores, 0.0, 0.0
        self.applied: list[int] = []
        self.threads: Threads | None = None

    def start(self, most: int) -> Threads:
        self.threads = Threads(most, waited_s=lambda: self.waited_s, apply=self.applied.append,
                               clock=lambda: self.now_s)
        return self.threads

    def work(self, looks: int) -> None:
        for _ in range(looks):
            self.now_s += LOOK_S
            if self.threads.count > self.cores:
                self.waited_s += 0.5 * LOOK_S * (self.threads.count - self.cores)
            self.threads.look()


BACK = int(HOLD_S / LOOK_S) + 2  # looks until a core that came back is taken


@pytest.mark.parametrize(("most", "course", "applied"), [
    (4, [(4, 200)], []),  # nobody disturbs
    (1, [(0, 200)], []),  # there is one thread
    (2, [(1, 1), (2, 1)] * 20, []),  # one interval of waiting is none
    (4, [(3, 2), (4, BACK)], [3, 4]),  # a taken core comes back
    (4, [(0, 8)], [3, 2, 1])])  # several are taken, and never all
def test_a_taken_core_costs_a_thread_and_comes_back(most, course, applied):
    """`course`: cores, and how often it looks."""
    machine = Machine(most)
    threads = machine.start(most)
    for machine.cores, looks in course:
        machine.work(looks)
    assert machine.applied == applied and threads.count == [most, *applied][-1]


def test_tries_in_vain_become_seldom():
    machine = Machine(cores=3)
    machine.start(4)
    machine.work(int(60 / LOOK_S))
    assert machine.applied[:4] == [3, 4, 3, 4]
    assert machine.applied.count(4) <= 6, "after 2, 4, 8, 16, 32 s"
    machine.cores = 4
    machine.work(int(40 / LOOK_S))
    assert machine.applied[-1] == 4


def test_answers_in_float32_do_not_depend_on_what_else_the_machine_does():
    assert threads_of("cpu", "float32", 4) is None, "another number adds up in another order"
    assert threads_of("cpu", "bfloat16", 4, is_deterministic=True) is None
    assert threads_of("gpu", "bfloat16", 4) is None
    found = threads_of("cpu", "bfloat16", 4)
    assert found is not None and found.most == 4


def test_what_the_system_counts(tmp_path, monkeypatch):
    interrupted = [0]
    monkeypatch.setattr("xrunner.rank.threads._interrupted", lambda: interrupted[0])

    def counts(thread: str, text: str | None, *, is_interrupted: bool = True) -> None:
        (tmp_path / thread).mkdir(exist_ok=True)
        if text is not None:
            (tmp_path / thread / "schedstat").write_text(text)
        interrupted[0] += 10**9 * is_interrupted

    counts("7", "100 2000000000 5\n", is_interrupted=False)
    waited = WaitedForCores(tmp_path)
    assert waited() == 0.0, "what it waited before is not counted"
    counts("7", "100 3000000000 5\n", is_interrupted=False)
    assert waited() == 0.0, "not asked where no thread was interrupted"
    counts("7", None)
    assert waited() == pytest.approx(1.0)
    counts("8", "0 9000000000 0\n")
    assert waited() == pytest.approx(1.0), "a new thread has waited since it began"
    counts("9", None)
    assert waited() >= 1.0, "a thread that has ended"
