"""A schedule that vLLM executes changes while it runs, as our own engine's does, and no token
does."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import by_data_sheets
import numpy as np
import pytest
import toys
from given_runs import given
from job_folder import read_lines
from replays import estimated
from vllm_jobs import engine_of, vllm_job

from xgpt.app.opened import open_file
from xrunner.files.launcher_link import load_change_order, read_observed
from xrunner.files.sink import read_progress

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
KINDS, COUNT = 20, 600  # so many different queries, repeated
ENOUGH = 100  # queries done before the engine stands still until a change is planned
RUNS_S, STANDS_S = 0.05, 0.5  # until then: a state is written every half second of the clock
LIMIT_S = 600.0


def wait(launcher: subprocess.Popen[str], until_s: float, step_s: float = 0.02) -> None:
    assert launcher.poll() is None, launcher.communicate()
    assert time.monotonic() < until_s, "the run goes on for ever"
    time.sleep(step_s)


def hold_until_planned(launcher: subprocess.Popen[str], output: Path) -> None:
    """The engine runs in short bursts until enough queries are done, and then stands still until
    the launcher has planned a change: however quick the one and slow the other, the run is not
    over before."""
    until_s = time.monotonic() + LIMIT_S
    while (state := read_progress(output / "progress.json")) is None or state.state != "running":
        wait(launcher, until_s)
    engine = engine_of(launcher.pid)
    assert engine is not None
    try:
        while (seen := read_observed(output)) is None or len(seen.finished) < ENOUGH:
            os.kill(engine, signal.SIGSTOP)
            wait(launcher, until_s, STANDS_S)
            os.kill(engine, signal.SIGCONT)
            wait(launcher, until_s, RUNS_S)
        os.kill(engine, signal.SIGSTOP)
        while load_change_order(output) is None:
            wait(launcher, until_s)
    finally:
        os.kill(engine, signal.SIGCONT)


def test_a_running_schedule_changes_and_no_token_does(tmp_path, toy, vllm_python, cache):
    folder, reference = toy
    made = toys.random_queries(KINDS, seed=8, longest=6)
    queries = [toys.PreparedQuery(index=i, id=f"q{i}", input_ids=made[i % KINDS].input_ids,
                                  max_new_tokens=20 + i % KINDS, is_forced=True)
               for i in range(COUNT)]  # of 20 to 39 tokens, where the job plans with 15
    # the engine stands still now and then: neither are its steps slow for it, nor does it hang
    job = vllm_job(tmp_path, folder, vllm_python, [
        {"id": q.id, "tokens": list(q.input_ids), "forced_tokens": q.max_new_tokens}
        for q in queries], "policy: rra", f"step_times: off, stall_timeout: {LIMIT_S:.0f}, ")
    problem = open_file(job).problem
    given(estimated("rra", problem, encode_batch=3, decode_iterations=6), problem,
          tmp_path / "given.json")
    with (tmp_path / "said.json").open("w+") as out, (tmp_path / "said").open("w+") as err:
        launcher = subprocess.Popen(
            [*by_data_sheets.COMMAND, "run", str(job), "--schedule", str(tmp_path / "given.json"),
             "--json"],
            stdout=out, stderr=err, text=True, env=cache)
        try:
            hold_until_planned(launcher, tmp_path / "out")
            code = launcher.wait(timeout=LIMIT_S)
        finally:
            launcher.kill()
    assert code == 0, (tmp_path / "said").read_text()
    first = json.loads((tmp_path / "said.json").read_text())["rescheduling"][0]
    assert first["choice"] == "adjust" and first["phase"] > 0 and first["cause"] == "drift"
    assert first["to"] != first["from"]
    results = read_lines(tmp_path / "out" / "results.jsonl")
    assert [r["id"] for r in results] == [q.id for q in queries]
    answers = {k: toys.generate(reference, queries[k]) for k in range(KINDS)}
    assert all(r["output_ids"] == answers[r["index"] % KINDS] for r in results)
    assert first["mean_output_tokens"]["observed"] == pytest.approx(
        np.mean([q.max_new_tokens for q in queries]), rel=0.1)
