"""A schedule that vLLM executes changes while it runs, as our own engine's does, and no token
does."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the reference needs the extra `run`")
import toys  # noqa: E402
from job_folder import XGPT, read_lines, write_job  # noqa: E402

from xgpt.app.opened import open_file  # noqa: E402
from xgpt.core.schedule_file import save_schedule, schedule_from_flat  # noqa: E402
from xprofiler.roofline import Roofline  # noqa: E402
from xsimulator.policies.rra.closed_form import Rra  # noqa: E402
from xsimulator.policies.rra.config import RraConfig  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
# So many different queries, repeated: 450 were done in 2.6 s, before a change could be planned.
KINDS, COUNT = 20, 2400


def test_a_running_schedule_changes_and_no_token_does(
        tmp_path: Path, toy: tuple[Path, Any], vllm_python: str, cache: dict[str, str]) -> None:
    folder, reference = toy
    made = toys.random_queries(KINDS, seed=8, longest=6)
    queries = [toys.PreparedQuery(index=i, id=f"q{i}", input_ids=made[i % KINDS].input_ids,
                                  max_new_tokens=20 + i % KINDS, is_forced=True)
               for i in range(COUNT)]  # of 20 to 39 tokens, where the job plans with 15
    job = write_job(tmp_path, folder, [
        {"id": q.id, "tokens": list(q.input_ids), "forced_tokens": q.max_new_tokens}
        for q in queries], schedule="policy: rra", ranks=1)
    job.write_text(job.read_text().replace(
        "run: {", f"run: {{engine: vllm, engine_python: {vllm_python}, "))
    problem = open_file(job).problem
    estimate = Rra(problem, Roofline(problem.model, problem.cluster.device,
                                     problem.dtype)).estimate(
        RraConfig(encode_batch=3, decode_iterations=6))
    save_schedule(schedule_from_flat(
        estimate=estimate, latency_bound_s=math.inf, constraint_kind="sequence", quantile=0.99,
        status="given", bound_qps=math.inf, gap=0.0, nodes=1, seconds=0.0,
        fingerprint=problem.fingerprint), tmp_path / "given.json")
    done = subprocess.run([*XGPT, "run", str(job), "--schedule", str(tmp_path / "given.json"),
                           "--json"], capture_output=True, text=True, env=cache, timeout=800,
                          check=False)
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)["rescheduling"][0]
    assert first["choice"] == "adjust" and first["phase"] > 0 and first["cause"] == "drift"
    assert first["to"] != first["from"]
    results = read_lines(tmp_path / "out" / "results.jsonl")
    assert [r["id"] for r in results] == [q.id for q in queries]
    answers = {k: toys.generate(reference, queries[k]) for k in range(KINDS)}
    assert all(r["output_ids"] == answers[r["index"] % KINDS] for r in results)
    assert first["mean_output_tokens"]["observed"] == pytest.approx(
        np.mean([q.max_new_tokens for q in queries]), rel=0.1)
