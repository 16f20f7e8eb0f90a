"""Real ranks that admit requests by forecasts: who outgrows one may be evicted, and no token depends
on it. The ranks take the steps of the replay."""

from dataclasses import replace

import numpy as np
import pytest
import toys
from given_runs import given, run
from job_folder import as_requests
from mpi_runs import answered, check_steps
from replays import estimated, lengths_of, problem_for, replayed

from xgpt.core.controls import Admission, Forecasting
from xrunner.files.forecasts import keep_forecasts

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
