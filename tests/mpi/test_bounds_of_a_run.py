"""A run says whether it kept its bounds, and `--strict` is an error where it did not."""

from __future__ import annotations

import json
import subprocess

import numpy as np
import pytest

pytest.importorskip("torch", reason="runs need the extra `run`")
import toys  # noqa: E402
from by_data_sheets import COMMAND  # noqa: E402
from job_folder import as_requests, read_lines, write_job  # noqa: E402

pytestmark = pytest.mark.mpi
PLANNED = "constraint: {ttft_s: {limit_s: 2, quantile: 0.9}, tpot_s: 0.5, makespan_s: 10 min}\n"


def test_bounds_are_kept_by_a_run_or_told_and_strict(tmp_path, cache):
    directory, out = tmp_path / "model", tmp_path / "out"
    _, queries = toys.make_model("llama", directory), toys.random_queries(24)
    job = write_job(tmp_path, directory, as_requests(queries), ranks=1,
                    schedule="policy: rra, encode_batch: 3, decode_iterations: 4, tp_degree: 1")
    job.write_text(job.read_text() + PLANNED)
    done = subprocess.run([*COMMAND, "submit", str(job), "--strict"], capture_output=True,
                          text=True, env=cache, timeout=240)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["bound_kept"] is True
    ttft, tpot, makespan = metrics["bounds"]
    results = read_lines(out / "results.jsonl")
    first_s = np.array([one["ttft_s"] - one["encode_start_s"] for one in results])
    assert ttft["worst_s"] == pytest.approx(first_s.max()) and first_s.min() >= 0
    assert tpot["worst_s"] == max(one["tpot_s"] or 0 for one in results)
    assert makespan["worst_s"] == metrics["wall_s"]["measured"]
    said = " ".join(done.stderr.split())
    assert "bound of 2.00 s on the time to the first token kept: 100 % of the queries" in said
    assert "bound of 10m00s on the time of the whole job kept: it took" in said

    schedule = json.loads((out / "schedule.json").read_text())
    assert [one["metric"] for one in schedule["prospects"]] == ["ttft", "tpot", "makespan"]
    schedule["bounds"][2]["limit_s"] = 1e-6  # nothing keeps that
    tight = tmp_path / "tight.json"
    tight.write_text(json.dumps(schedule))
    missed = subprocess.run([*COMMAND, "run", str(job), "--schedule", str(tight), "--strict",
                             "--json"], capture_output=True, text=True, env=cache, timeout=240)
    assert missed.returncode == 4, missed.stderr
    told = json.loads(missed.stdout)
    assert told["bound_kept"] is False and "time per output token missed: 0 %" in told["error"]
    assert told["bounds"][1]["over"] == told["bounds"][1]["of"] > 0
