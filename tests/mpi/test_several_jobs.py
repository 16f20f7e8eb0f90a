"""Several jobs of one command: the same ranks take them one after another, with the weights they
have, and give each job's own tokens."""

import json

import pytest
import toys
from job_folder import as_requests, read_lines, write_job
from mpi_runs import call, json_of, stopped_under_way

pytestmark = pytest.mark.mpi
STAGES, HALVES = "tp_degree: 1", "tp_degree: 2, tp_gpus: 2"
QUERIES = {"first": toys.random_queries(7, seed=1), "long": toys.random_queries(180, seed=2),
           "never": toys.random_queries(7, seed=1), "last": toys.random_queries(8, seed=3),
           "halves": toys.random_queries(6, seed=4)}


def states(out: str) -> list[str]:
    return [job["status"] for job in json.loads(out)["jobs"]]


def test_jobs_of_one_model_load_it_once_and_a_stop_ends_all_until_the_same_command_goes_on(
        tmp_path, llama, profiled):
    words, env = ["submit"], profiled("llama", 2)
    for name, queries in QUERIES.items():
        (tmp_path / name).mkdir()
        layout, bound = HALVES if name == "halves" else STAGES, "1 us" if name == "never" else "inf"
        job = write_job(tmp_path / name, llama[0], as_requests(queries), ranks=2, schedule=(
            f"policy: rra, encode_batch: 3, decode_iterations: 4, {layout}"))
        job.write_text(f"{job.read_text()}name: {name}\nconstraint: {{latency_s: {bound}}}\n")
        words.append(str(job))

    def loaded(name: str) -> int:
        return json_of(tmp_path / name / "out" / "metrics.json")["loaded_bytes"]

    results = tmp_path / "long" / "out" / "results.jsonl"
    process, out, told = stopped_under_way([*words, "--json"], results, env)
    assert process.returncode == 75, told  # the first that did not come to its end was stopped
    assert states(out) == ["done", "stopped", "failed", "not started", "not started"], told
    assert told.index("planning job 5 of 5") < told.index("running job 1 of 5"), told
    kept = results.read_bytes()
    assert 0 < kept.count(b"\n") < 180 and loaded("first") > 0 == loaded("long")

    done = call(*words, "--json", env=env, code=3)  # that no schedule keeps the bound
    assert states(done.stdout) == ["already done", "done", "failed", "done", "done"], done.stderr
    assert loaded("long") > 0 and loaded("last") == 0 and loaded("halves") > 0
    anew = "ranks: started anew, for the job has another layout of ranks and stages\n"
    assert done.stderr.count("those of the job before") == 1 and done.stderr.count(anew) == 1
    assert results.read_bytes().startswith(kept)
    for name in ("first", "long", "last", "halves"):
        answers = {r["id"]: r["output_ids"] for r in read_lines(
            tmp_path / name / "out" / "results.jsonl")}
        assert len(answers) == len(QUERIES[name])
        for query in QUERIES[name][:8]:
            assert answers[query.id] == toys.generate(llama[1], query), (name, query.id)
