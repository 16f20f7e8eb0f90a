"""The whole way through a real Slurm of two nodes: handed in, followed, done; warned of its time
limit, requeued, resumed; stopped, cancelled, failed; several as an array."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs need the extra `run`")
import toys  # noqa: E402
from conftest import answers  # noqa: E402

pytestmark = [pytest.mark.slurm, pytest.mark.mpi]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def log_of(job: Path, job_id: str) -> str:
    return (job.parent / "out" / f"slurm-{job_id}.log").read_text()


def until(holds: Callable[[], object], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def num_lines(job: Path) -> int:
    path = job.parent / "out" / "results.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


@pytest.mark.parametrize("launch", ["srun", "mpiexec"])
def test_a_job_is_handed_in_followed_and_done(slurm, llama, make_job, over_network, launch):
    queries = toys.random_queries(12, seed=3)
    job = make_job(queries=queries, more=f"profile: {over_network}\n",
                   slurm=f"nodes: 2, ntasks_per_node: 1, time: 10, launch: {launch}, "
                         "container: [env, IN_CONTAINER=1], "
                         # Slurm 22.05's PMI2 takes addresses of few transports alone
                         "env: {NOTE: \"it's $5\", UCX_TLS: 'tcp,self'}, "
                         "prologue: ['echo noted: \"$NOTE\"'], extra: [--comment=\"two words\"]")
    out = job.parent / "out"
    (job_id,) = slurm.submit(job)
    seen = slurm.status(out)
    assert seen["state"] in ("pending", "starting", "running", "complete", "done")
    assert seen["slurm"]["job_id"] == job_id
    assert slurm.await_end(job_id) == "COMPLETED", log_of(job, job_id)
    assert answers(job) == {q.id: toys.generate(llama[1], q) for q in queries}
    seen = slurm.status(out)
    assert (seen["state"], seen["slurm"]["state"], seen["slurm"]["exit_code"]) == (
        "done", "COMPLETED", "0:0")
    assert seen["slurm"]["cause"] is None
    assert "noted: it's $5" in log_of(job, job_id)
    assert json.loads((out / "job.json").read_text())["run"]["hosts"] == ["n1", "n2"]
    assert "nothing" not in slurm.xgpt("status", out).stdout


def test_a_warning_of_the_time_limit_requeues_and_the_job_goes_on_with_every_line_once(
        slurm, llama, make_job):
    queries = toys.random_queries(600, seed=4)
    job = make_job(queries=queries, slurm="nodes: 1, ntasks_per_node: 2, time: 10, requeue: 1")
    (job_id,) = slurm.submit(job)
    until(lambda: num_lines(job) >= 3 or slurm.slurm_state(job_id) in ENDED)
    # what Slurm itself sends when the limit is near, by a clock that may be a minute fast
    slurm.call("scancel", "--batch", "--signal=USR1", job_id)
    slurm.await_state(job_id, "PENDING")
    before = answers(job)
    assert 3 <= len(before) < len(queries)
    assert slurm.status(job.parent / "out")["state"] == "pending"
    assert "back to the queue, time 1 of 1" in log_of(job, job_id)
    time.sleep(3)  # a node starts no job again within the second in which it ended it
    slurm.call("scontrol", "update", f"jobid={job_id}", "StartTime=now", "TimeLimit=10")
    assert slurm.await_end(job_id) == "COMPLETED", log_of(job, job_id)
    assert "continuing after the" in log_of(job, job_id)
    assert answers(job) == {q.id: toys.generate(llama[1], q) for q in queries}


@pytest.mark.slow
def test_slurms_own_warning_comes_and_is_enough(slurm, make_job):
    queries = toys.random_queries(20_000, seed=4)
    job = make_job(queries=queries,
                   slurm="nodes: 1, ntasks_per_node: 2, time: 1, warning: 30, requeue: 0")
    (job_id,) = slurm.submit(job)
    assert slurm.await_end(job_id) == "FAILED"
    found = slurm.status(job.parent / "out")
    assert (found["state"], found["slurm"]["exit_code"]) == ("stopped", "75:0")
    assert "the same `xgpt submit` goes on from here" in log_of(job, job_id)
    assert found["num_results"] == len(answers(job)) < len(queries)


def test_a_stop_by_the_user_ends_a_running_job_for_good(slurm, llama, make_job):
    queries = toys.random_queries(3000, seed=5)
    job = make_job(queries=queries)
    out = job.parent / "out"
    (job_id,) = slurm.submit(job)
    until(lambda: num_lines(job) >= 3 or slurm.slurm_state(job_id) in ENDED)
    said = slurm.xgpt("stop", out)
    assert said.returncode == 0 and f"job {job_id} is asked to stop" in said.stdout
    assert slurm.await_end(job_id) == "FAILED"  # with exit code 75: not all is done
    found = slurm.status(out)
    assert (found["state"], found["slurm"]["exit_code"]) == ("stopped", "75:0")
    assert "goes on after them" in " ".join(slurm.xgpt("status", out).stdout.split())
    assert 3 <= len(answers(job)) < len(queries)
    (again,) = slurm.submit(job)
    assert slurm.await_end(again) == "COMPLETED", log_of(job, again)
    assert answers(job) == {q.id: toys.generate(llama[1], q) for q in queries}


def test_a_waiting_job_is_taken_back_and_handed_in_only_once(slurm, make_job):
    job = make_job(queries=toys.random_queries(2), slurm="nodes: 2, ntasks_per_node: 1, time: 10, "
                   "extra: --begin=now+1hour")
    out = job.parent / "out"
    (job_id,) = slurm.submit(job)
    assert slurm.status(out)["state"] == "pending"
    text = " ".join(slurm.xgpt("status", job).stdout.split())
    assert f"Slurm: job {job_id} is pending (BeginTime)" in text and "starts about" in text
    refused = slurm.xgpt("submit", job)
    assert refused.returncode == 1 and f"job {job_id} for it is pending" in refused.stderr
    assert "was waiting and is cancelled" in slurm.xgpt("stop", job).stdout
    assert slurm.await_end(job_id) == "CANCELLED"
    assert slurm.status(out)["state"] == "cancelled"
    assert slurm.xgpt("stop", out).returncode == 1


def test_several_job_files_are_an_array_of_which_one_may_fail(slurm, llama, make_job):
    queries = {name: toys.random_queries(6, seed=index) for index, name in enumerate("abc")}
    same = "nodes: 1, ntasks_per_node: 2, time: 10, at_once: 1"
    jobs = {name: make_job(name, queries=of, slurm=same) for name, of in queries.items()}
    ids = slurm.submit(*jobs.values())
    assert [job_id.partition("_")[2] for job_id in ids] == ["0", "1", "2"]
    (jobs["b"].parent / "requests.jsonl").unlink()  # while it waits for the first
    states = [slurm.await_end(job_id) for job_id in ids]
    for name in "ac":
        assert answers(jobs[name]) == {q.id: toys.generate(llama[1], q) for q in queries[name]}
    assert states[0] == states[2] == "COMPLETED"
    failed = " ".join(slurm.xgpt("status", jobs["b"].parent / "out").stdout.split())
    assert states[1] == "FAILED" and "out failed" in failed and "no such file" in failed.lower()
    assert slurm.status(jobs["c"].parent / "out")["slurm"]["job_id"] == ids[2]


@pytest.mark.parametrize(("own", "state", "cause"), [
    ("container: [no-such-container, exec]", None, "no-such-container"),
    ("prologue: ['if true; then', cd /no/where, fi]", "failed",
     "failed with code 1:\n    cd /no/where")])
def test_a_failing_job_shows_its_cause(slurm, make_job, own, state, cause):
    job = make_job(queries=toys.random_queries(2),
                   slurm=f"nodes: 1, ntasks_per_node: 2, time: 10, {own}")
    (job_id,) = slurm.submit(job)
    assert slurm.await_end(job_id) == "FAILED"
    found = slurm.status(job.parent / "out")
    text = " ".join(slurm.xgpt("status", job.parent / "out").stdout.split())
    assert f"Slurm: job {job_id} ended as FAILED" in text and "exit code 1:0" in text
    assert cause.split()[-1] in text and cause in found["slurm"]["cause"]
    assert state in (None, found["state"]) and found["slurm"]["exit_code"] == "1:0"
    assert num_lines(job) == 0


def test_gpus_are_asked_for_and_their_absence_is_said(slurm, make_job):
    """The nodes have stand-ins, which no driver knows."""
    job = make_job(queries=toys.random_queries(2), slurm="nodes: 1, gpus_per_node: 2, time: 10, "
                   "prologue: ['echo GPUs $CUDA_VISIBLE_DEVICES']")
    (job_id,) = slurm.submit(job)
    assert slurm.await_end(job_id) == "COMPLETED", log_of(job, job_id)
    said = log_of(job, job_id)
    assert "GPUs 0,1" in said and "the job asks for GPUs, these nodes show none" in said
    named = make_job("named", queries=toys.random_queries(2), slurm="time: 10")
    named.write_text(named.read_text().replace("cluster: local", "cluster: a40-2"))
    done = slurm.xgpt("submit", named, "--set", "run.ranks=2", "--set", "cluster=a40-4", "--json")
    assert done.returncode == 0, done.stderr
    job_id = json.loads(done.stdout)["jobs"][0]["job_id"]
    assert slurm.await_end(job_id) == "FAILED"
    assert "show none" in slurm.xgpt("status", named.parent / "out").stdout
