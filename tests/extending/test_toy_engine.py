"""An engine in a package of its own plans and runs jobs by the commands as they are."""

import json
from pathlib import Path
from typing import Any

import pytest

# Not this file's own folder: pytest puts that on the path, and every test would see the toy.
FOLDER = Path(__file__).resolve().parent / "toy_engine"
JOB = FOLDER.parents[2] / "jobs" / "opt-13b-summarise.yaml"


def test_schedule_plans_what_the_engine_executes(with_package):
    planned = json.loads(with_package(FOLDER, "schedule", JOB, "--json", "--set", "run.engine=toy"))
    assert planned["policy"] == "ft" and planned["deployment"]["tp_degree"] == 1
    assert "an echo takes no time: nothing is predicted" in planned["notes"]


@pytest.mark.parametrize(("wanted", "message"), [
    ("schedule.policy=rra", "ft: the engine toy works static batches"),
    ("run.engine=other", "allowed: xgpt, deepspeed, vllm, toy")])
def test_what_it_does_not_execute_is_refused(within, wanted, message):
    with pytest.raises(AssertionError, match=message):
        within(FOLDER, "schedule", JOB, "--set", "run.engine=toy", "--set", wanted)


def submit(toy_job: Any) -> tuple[object, ...]:
    return (FOLDER, "submit", toy_job.path, "--json", "--set", "run.engine=toy", "--set",
            "schedule=auto")


@pytest.mark.mpi
def test_submit_runs_a_job_with_it(toy_job, with_package):
    done = json.loads(with_package(*submit(toy_job), cache=toy_job.cache))
    assert done["status"] == "done" and done["engine"] == "toy"
    assert done["queries"] == len(toy_job.queries)
    assert done["throughput_qps"]["measured"] > 0 and done["throughput_qps"]["predicted"] is None
    results = (toy_job.output / "results.jsonl").read_text().splitlines()
    assert {row["id"]: row["output_ids"] for row in map(json.loads, results)} == {
        query.id: list(query.input_ids)[::-1][:query.max_new_tokens] for query in toy_job.queries}
    assert (toy_job.output / "report.html").stat().st_size > 10_000
    with pytest.raises(AssertionError, match=r"run\.temperature"):
        with_package(*submit(toy_job), "--set", "run.temperature=1", cache=toy_job.cache)


@pytest.mark.mpi
@pytest.mark.slow  # as the own engine's: tests/mpi/test_several_jobs.py
def test_a_run_that_was_stopped_goes_on_after_what_is_there(toy_job, with_package):
    arguments = (*submit(toy_job), "--set", "output=stopped")
    with_package(*arguments, cache=toy_job.cache)
    output = toy_job.path.parent / "stopped"
    results = (output / "results.jsonl").read_text().splitlines()
    (output / "results.jsonl").write_text("".join(line + "\n" for line in results[:10]))
    (output / "metrics.json").unlink()
    again = json.loads(with_package(*arguments, cache=toy_job.cache))
    assert (again["queries_before"], again["queries"]) == (10, len(toy_job.queries))
    ids = [json.loads(line)["id"] for line in
           (output / "results.jsonl").read_text().splitlines()]
    assert ids == [query.id for query in toy_job.queries]
