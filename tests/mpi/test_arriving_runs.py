"""Load tests with real ranks: the answers of a batch job, the moments of each request, kills, and
the time that idle ranks take."""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from faults import ToyJob, await_lines, below

from xgpt.requests.spool import Spool

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
COUNT, LIMIT = 90, "constraint: {ttft_s: 5, attainment: 0.9}\nsearch: {queries: 200}\n"
SKEW_S = 0.05  # between the clocks of ranks, which leave a barrier one after the other
BUDGET = "max_active: 8, token_budget: 64"


def toy_job(folder: Path, schedule: str, arrivals: str, ranks: int = 1, limits: str = LIMIT,
            count: int = COUNT) -> ToyJob:
    job = ToyJob(folder=folder, schedule=schedule, ranks=ranks, count=count).write()
    if arrivals:
        job.file.write_text(job.file.read_text().replace(
            "max_tokens: 40}", f"max_tokens: 40, arrivals: {arrivals}}}") + limits)
    return job


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The answers of a batch job."""
    job = toy_job(tmp_path_factory.mktemp("batch"), f"policy: sarathi, {BUDGET}", "")
    assert job.run_to_end().returncode == 0
    return job.answers()


def check(job: ToyJob, expected: list[tuple[str, tuple[int, ...]]]) -> list[dict[str, float]]:
    """The results: each request once, with its tokens, and moments in their order."""
    assert job.answers() == expected
    rows = [json.loads(line) for line in (job.output / "results.jsonl").read_text().splitlines()]
    for row in rows:
        waited_s = row["encode_start_s"] - row["arrival_s"]
        assert waited_s > (-SKEW_S if row.get("replica") else -1e-5)
        assert waited_s <= row["ttft_s"] + 1e-5 and row["ttft_s"] <= row["latency_s"] + 1e-5
    return rows


@pytest.mark.parametrize(("schedule", "ranks"), [
    ("policy: rra, encode_batch: 4, decode_iterations: 4", 1),
    ("policy: rra, encode_batch: 4, decode_iterations: 4, replicas: 2", 2),
    ("policy: waa-c, encode_batch: 2", 2), (f"policy: sarathi, {BUDGET}", 1),
    (f"policy: sarathi, {BUDGET}, replicas: 2", 2), (f"policy: sarathi, {BUDGET}, replicas: 1", 2),
    (f"policy: vllm, {BUDGET}", 1), (f"policy: vllm, {BUDGET}, replicas: 2", 2),
    ("policy: ft, encode_batch: 6", 1), ("policy: ft, encode_batch: 6, replicas: 2", 2)])
def test_what_arrives_gets_the_tokens_of_a_batch_job(tmp_path, expected, schedule, ranks):
    job = toy_job(tmp_path, schedule, "{rate: 40, process: poisson}", ranks)
    done = job.run_to_end()
    assert done.returncode == 0, done.stderr
    rows, served = check(job, expected), json.loads(done.stdout)["served"]
    arrival_s = np.array([row["arrival_s"] for row in rows])
    assert arrival_s == pytest.approx(Spool(job.output).arrival_s, abs=1e-5)
    assert served["rate"]["measured"] == pytest.approx(
        (COUNT - 1) / float(np.ptp(arrival_s)), rel=1e-3)
    for key in ("attainment", "ttft_p50_s", "tpot_p90_s", "latency_per_token_p99_s"):
        assert all(value is not None for value in served[key].values()), key
    if "replicas: 2" in schedule:
        assert {row["replica"] for row in rows} == {0, 1}


def test_clients_of_a_closed_loop_are_never_more(tmp_path, expected):
    job = toy_job(tmp_path, f"policy: sarathi, {BUDGET}", "{concurrency: 3}")
    assert job.run_to_end().returncode == 0
    rows = check(job, expected)
    for row in rows:
        begun = [other for other in rows if other["arrival_s"] <= row["arrival_s"] < (
            other["arrival_s"] + other["latency_s"] - 1e-5)]
        assert len(begun) <= 3


@pytest.mark.parametrize(("schedule", "ranks"), [
    (f"policy: sarathi, {BUDGET}", 1), (f"policy: vllm, {BUDGET}, replicas: 2", 2)])
def test_arrivals_go_on_from_where_a_run_was_killed(tmp_path, expected, schedule, ranks):
    job = toy_job(tmp_path, schedule, "{rate: 12, process: even}", ranks)
    process = job.start()
    assert await_lines(job, process, 10)
    os.kill(below(process.pid)["rank"][-1], signal.SIGKILL)  # the command starts others
    assert await_lines(job, process, 40)
    process.kill()
    process.communicate()
    kept, before = job.lines(), Spool(job.output).arrival_s
    time.sleep(8)  # the rest would have arrived meanwhile
    begun = time.monotonic()
    assert job.run_to_end().returncode == 0
    assert job.lines().items() >= kept.items() and (Spool(job.output).arrival_s == before).all()
    rows = check(job, expected)
    left_s = before[-1] - before[len(kept)]
    assert time.monotonic() - begun > 0.8 * left_s, "they arrived one by one"
    late_s = [row["encode_start_s"] - row["arrival_s"] for row in rows[-20:]]
    assert np.median(late_s) < 1, "the clock went on from the kill"


@pytest.mark.parametrize(("schedule", "ranks"), [
    (f"policy: sarathi, {BUDGET}", 1), (f"policy: vllm, {BUDGET}, replicas: 2", 2)])
def test_idle_ranks_take_hardly_any_time(tmp_path, schedule, ranks):
    job = toy_job(tmp_path, schedule, "from_requests", ranks, count=8)
    path = job.folder / "requests.jsonl"
    path.write_text("".join(json.dumps({**json.loads(line), "arrival_s": 15 * (row > 3)}) + "\n"
                            for row, line in enumerate(path.read_text().splitlines())))
    process = job.start()
    assert await_lines(job, process, 4)
    time.sleep(2)
    own = below(process.pid)["rank"]
    begun = [cpu_s(one) for one in own]
    time.sleep(8)
    assert max(cpu_s(one) - before for one, before in zip(own, begun, strict=True)) < 0.05 * 8
    beat = json.loads((job.output / "ranks" / "0.json").read_text())
    assert beat["note"] == "waiting for requests to arrive"
    assert process.communicate()[0] and process.returncode == 0
    rows = [json.loads(line) for line in (job.output / "results.jsonl").read_text().splitlines()]
    first_s = min(row["encode_start_s"] for row in rows[4:])
    assert 15 <= first_s < 15.05, "not by the next look for a stop"


def cpu_s(pid: int) -> float:
    """Seconds of processors that the process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_what_has_not_begun_by_its_deadline_expires_and_is_run_by_the_same_command(tmp_path):
    """A single slot of many clients, each of whose requests has its own time since it arrived."""
    limits = "constraint: {deadline_s: 0.06, on_deadline: stop, attainment: 0.01}\n"
    job = toy_job(tmp_path, "policy: sarathi, max_active: 1, token_budget: 64",
                  "{rate: 40, process: gamma, cv: 8}", limits=f"{limits}search: {{queries: 100}}\n")
    stopped = job.run_to_end()
    assert stopped.returncode == 4, stopped.stderr
    rows = [json.loads(line) for line in (job.output / "results.jsonl").read_text().splitlines()]
    assert 0 < len(rows) < COUNT and rows[-1]["arrival_s"] > 1
    assert all(row["encode_start_s"] - row["arrival_s"] < 0.2 for row in rows)
    assert job.run_to_end().returncode == 0
    assert len(job.answers()) == COUNT
