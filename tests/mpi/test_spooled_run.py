"""A file of requests, here a CSV file, is opened by the launcher, once, and by nobody else; its
results are a CSV file too. The run says whether it kept its bounds, and `--strict` is an error
where it did not."""

import csv
import json
from collections import Counter

import numpy as np
import pytest
import toys
from by_data_sheets import COMMAND
from job_folder import as_requests, read_lines, write_job
from mpi_runs import answered, call, injected, json_of, said

pytestmark = pytest.mark.mpi
# every process of the run imports this
HOOK = """
import os, sys
_log = os.open(os.environ["OPENED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def _opened(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        name = os.fsdecode(arguments[0])
        if name.endswith(("requests.csv", "tokens.bin")):
            os.write(_log, f"{os.getpid()} {os.path.basename(name)}\\n".encode())
    if event == "import" and arguments[0] == "torch._dynamo":
        os.write(_log, f"{os.getpid()} compiler\\n".encode())
sys.addaudithook(_opened)
"""
BOUNDS = "constraint: {ttft_s: {limit_s: 2, quantile: 0.9}, tpot_s: 0.5, makespan_s: 10 min}\n"


def test_requests_are_opened_once_and_the_spool_by_those_who_need_it(tmp_path, llama, cache):
    (directory, reference), out, opened = llama, tmp_path / "out", tmp_path / "opened"
    queries = toys.random_queries(12)
    requests = [*as_requests(queries), {"id": "bad"}]
    job = write_job(tmp_path, directory, requests, ranks=2,
                    schedule="policy: rra, encode_batch: 3, decode_iterations: 4, tp_degree: 1, "
                             "replicas: 1")
    job.write_text(job.read_text().replace("requests.jsonl", "requests.csv") + BOUNDS)
    with (tmp_path / "requests.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["id", "tokens", "max_tokens", "topic, in words"])
        table.writeheader()
        table.writerows({"topic, in words": f"\"{r['id']}\",\n", **r} for r in requests)
    env = injected(tmp_path / "hook", HOOK, **{**cache, "OPENED": str(opened)})
    done = call("submit", job, "--strict", env=env, xgpt=COMMAND)

    names = Counter(line.split()[1] for line in opened.read_text().splitlines())
    pids = Counter(line.split()[0] for line in opened.read_text().splitlines())
    assert names["requests.csv"] == 1, opened.read_text()
    assert not names["compiler"], "torch's own takes a rank a second to import"
    assert len(pids) == 2, "the launcher and rank 0, and no other rank"
    results = answered(out, queries, reference)
    assert all(r["ttft_s"] > 0 and r["ttft_s"] <= r["encode_start_s"] + r["latency_s"] + 1e-6
               for r in results)
    assert [e["id"] for e in read_lines(out / "errors.jsonl")] == ["bad"]
    with (out / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["id"], row["topic, in words"]) for row in rows] == [
        (r["id"], f"\"{r['id']}\",\n") for r in requests]
    assert [int(row["output_tokens"]) for row in rows[:-1]] == [
        len(r["output_ids"]) for r in results]
    assert rows[-1]["error"] == "tokens is null: the cell is empty" and not rows[-1]["text"]
    metrics = json_of(out / "metrics.json")
    assert 0 < metrics["ttft_p50_s"]["measured"] <= metrics["ttft_p99_s"]["measured"]
    assert metrics["tpot_p50_s"]["measured"] > 0

    assert metrics["bound_kept"] is True
    ttft, tpot, makespan = metrics["bounds"]
    first_s = np.array([one["ttft_s"] - one["encode_start_s"] for one in results])
    assert ttft["worst_s"] == pytest.approx(first_s.max()) and first_s.min() >= 0
    assert tpot["worst_s"] == max(one["tpot_s"] or 0 for one in results)
    assert makespan["worst_s"] == metrics["wall_s"]["measured"]
    assert "bound of 2.00 s on the time to the first token kept: 100 % of the queries" in said(done)
    assert "bound of 10m00s on the time of the whole job kept: it took" in said(done)
    schedule = json_of(out / "schedule.json")
    assert [one["metric"] for one in schedule["prospects"]] == ["ttft", "tpot", "makespan"]
    schedule["bounds"][2]["limit_s"] = 1e-6  # nothing keeps that
    tight = tmp_path / "tight.json"
    tight.write_text(json.dumps(schedule))
    missed = call("run", job, "--schedule", tight, "--strict", "--json", env=cache, code=4,
                  xgpt=COMMAND)
    told = json.loads(missed.stdout)
    assert told["bound_kept"] is False and "time per output token missed: 0 %" in told["error"]
    assert told["bounds"][1]["over"] == told["bounds"][1]["of"] > 0
