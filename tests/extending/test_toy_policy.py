"""A policy in a package of its own is planned, replayed and run by the commands as they are."""

import json
from pathlib import Path

import pytest

# Not this file's own folder: pytest puts that on the path, and every test would see the toy.
FOLDER = Path(__file__).resolve().parent / "toy_policy"
JOB = FOLDER.parents[2] / "jobs" / "opt-13b-summarise.yaml"


def test_schedule_searches_its_grid(with_package, within):
    best, fixed = (json.loads(run(
        FOLDER, "schedule", JOB, "--json", "--horizon", "steady", "--set",
        f"schedule={{policy: waves{more}}}"))
        for run, more in ((with_package, ""), (within, ", wave_queries: 5")))
    assert best["policy"] == "waves" and best["proof"]["status"] == "within gap"
    assert best["controls"]["wave_queries"] > fixed["controls"]["wave_queries"] == 5
    assert best["figures"]["latency_s"] <= best["bounds"][0]["limit_s"]
    assert fixed["figures"]["throughput_qps"] < best["figures"]["throughput_qps"]


def test_schedule_shows_it_by_the_words_of_its_row(within):
    table = within(FOLDER, "schedule", JOB, "--horizon", "steady", "--set",
                   "schedule={policy: waves, wave_queries: 5}")
    assert "Waves" in table and "5 queries of a wave" in table


def test_simulate_replays_it_as_its_closed_form_says(within):
    shown = json.loads(within(FOLDER, "simulate", JOB, "--json", "--set",
                              "schedule={policy: waves, wave_queries: 16}"))
    assert shown["estimate"]["controls"] == {"policy": "waves", "wave_queries": 16}
    assert shown["replay"]["throughput_qps"] == pytest.approx(
        shown["estimate"]["figures"]["throughput_qps"], rel=0.2)


def test_a_variable_of_it_is_checked_as_ours_are(within):
    for wanted, message in (("policy: waves, wave_queries: 0", "schedule.wave_queries"),
                            ("policy: rra, wave_queries: 5", "a variable of waves; rra has")):
        with pytest.raises(AssertionError, match=message):
            within(FOLDER, "schedule", JOB, "--set", f"schedule={{{wanted}}}")


@pytest.mark.mpi
def test_ranks_execute_it_and_answer_as_rra_does(toy_job, with_package):
    from toy_runs import run_in_process  # torch, which planning does without

    done = json.loads(with_package(FOLDER, "submit", toy_job.path, "--json", "--set",
                                   "schedule={policy: waves, tp_degree: 1, replicas: 1}",
                                   cache=toy_job.cache))
    assert done["status"] == "done" and done["throughput_qps"]["predicted"] > 0
    results = (toy_job.output / "results.jsonl").read_text().splitlines()
    own = {row["id"]: row["output_ids"] for row in map(json.loads, results)}
    controls = json.loads((toy_job.output / "schedule.json").read_text())["controls"]
    assert set(controls) == {"policy", "wave_queries"} and controls["policy"] == "waves"
    steps = map(json.loads, (toy_job.output / "steps.jsonl").read_text().splitlines())
    encoded = [step for step in steps if step["kind"] == "encode" and step["stage"] == 0]
    assert len(encoded) == -(-len(toy_job.queries) // controls["wave_queries"]), "waves"
    sink, _ = run_in_process(toy_job.path.parent / "model", toy_job.queries, num_stages=2)
    rra = {result.query.id: list(result.output_ids) for result in sink.results}
    assert own == rra and len(rra) == len(toy_job.queries)
