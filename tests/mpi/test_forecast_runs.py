"""Real ranks that admit requests by forecasts: who outgrows one may be evicted, and no token
depends on it. The ranks take the steps of the replay."""

import signal
from dataclasses import replace

import numpy as np
import pytest
import toys
from given_runs import given, run
from job_folder import as_requests, write_job
from mpi_runs import answered, call, check_steps, json_of, stopped_under_way
from replays import estimated, lengths_of, problem_for, replayed

from xgpt.app.opened_job import open_job
from xgpt.app.teller import LogTeller
from xgpt.core.controls import Admission, Forecasting
from xgpt.job.job_file import load_job
from xrunner.files.forecasts import FORECASTS_FILE, keep_forecasts

pytestmark = pytest.mark.mpi
COUNT = 30
CLASS = Forecasting(kind="class", width=5, accuracy=0.8)
RRA = {"encode_batch": 6, "decode_iterations": 4}


def slow(*case, name):
    return pytest.param(*case, marks=pytest.mark.slow, id=name)


@pytest.mark.parametrize(("policy", "ranks", "kv_tokens", "variables"), [
    pytest.param("rra", 2, 160, RRA, id="rra-2"), slow("rra", 1, 150, RRA, name="rra-1"),
    slow("rra", 1, 150, {**RRA, "encode_chunk": 11}, name="chunks"),
    slow("orca", 1, 150, {"max_active": 24}, name="orca")])
def test_whoever_outgrows_a_class_is_evicted_and_every_token_stays(
        tmp_path, llama, policy, ranks, kv_tokens, variables):
    directory, out = llama[0], tmp_path / "out"
    reference, queries = toys.reference_of(directory), toys.random_queries(COUNT, seed=8)
    outputs = [len(toys.generate(reference, q)) for q in queries]
    problem = problem_for(directory, queries, outputs, ranks)
    asked = Admission(rule="future-peak", forecast=CLASS)
    problem = replace(problem, adjustment=replace(problem.adjustment, admission=asked))
    one = estimated(policy, problem, **variables).changed(kv_tokens=kv_tokens)
    assert one.controls.admission == asked
    assert replayed(problem, one, queries, outputs).preemptions > 0
    out.mkdir()
    given(one, problem, out / "schedule.json")
    keep_forecasts(out, problem, lengths_of(queries, outputs), np.arange(COUNT),
                   is_continued=False)
    run(directory, out, as_requests(queries), ranks=ranks)
    check_steps(out, problem, [one], queries, answered(out, queries, reference))


@pytest.mark.slow
@pytest.mark.parametrize("forecast", ["mean", "{kind: class, width: 4, accuracy: 0.8}"])
def test_a_run_that_is_killed_goes_on_by_the_forecasts_it_began_with(
        tmp_path, profiled, forecast):
    directory, out = tmp_path / "model", tmp_path / "out"
    reference = toys.make_model("llama", directory)
    queries = [replace(q, is_forced=True) for q in toys.random_queries(300, seed=3)]
    requests = [{"id": q.id, "tokens": list(q.input_ids), "forced_tokens": q.max_new_tokens}
                for q in queries]
    job = write_job(tmp_path, directory, requests, ranks=1, schedule=(
        f"policy: rra, encode_batch: 3, decode_iterations: 4, admission: future-peak, "
        f"forecast: {forecast}"))
    results, env = out / "results.jsonl", profiled("llama", 1)
    kept = set()
    for count in (5, 30):
        stopped_under_way(["submit", job], results, env, number=signal.SIGKILL, count=count)
        kept.add((out / FORECASTS_FILE).read_bytes())
    call("submit", job, env=env)
    kept.add((out / FORECASTS_FILE).read_bytes())
    assert len(kept) == 1
    answered(out, queries, reference)
    found = json_of(out / "metrics.json")["forecast"]
    assert 0 < found["mean_error_tokens"] < 40 and found["sentence"] in (
        out / "report.html").read_text()
    if forecast != "mean":
        # of a length that is forced the upper neighbour is cut to it: only a lower one is wrong
        assert 0.75 < found["coverage"] < 1 and found["outgrown"] == pytest.approx(
            1 - found["coverage"])
    # the next run begins with what this one finished
    opened = open_job(load_job(job), LogTeller(), "run")
    known = opened.problem.learned
    assert (known is None) == (forecast != "mean")
    assert known is None or len(known.pairs) == len(queries)
