"""`xgpt schedule` prints the very schedule that `xgpt submit` runs on the same job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from problems import TakenAsTrue

from xgpt.app.opened import OpenedJob, open_file
from xgpt.app.plan import executable, plan_job
from xgpt.app.telling import LogTeller
from xgpt.cli.schedule import schedule
from xgpt.core.json_values import flat
from xprofiler.roofline import Roofline

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
          "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
          "num_hidden_layers": 2, "vocab_size": 97, "max_position_embeddings": 128,
          "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
          "hidden_act": "silu"}


def roofline(opened: OpenedJob) -> Roofline:
    problem = opened.problem
    return TakenAsTrue(problem.model, problem.cluster.device, problem.dtype)


@pytest.mark.parametrize(("controls", "engine", "policy"), [
    ("", "xgpt", None), ("policy: ft", "xgpt", "ft"), ("", "deepspeed", "ft"),
    pytest.param("policy: rra", "xgpt", "rra", marks=pytest.mark.slow),
    pytest.param("policy: orca", "xgpt", "orca", marks=pytest.mark.slow)])
def test_schedule_prints_what_submit_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          controls: str, engine: str, policy: str | None) -> None:
    for module in ("plan",):
        monkeypatch.setattr(f"xgpt.app.{module}.timing_of", roofline)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(
        {"tokens": [7, 8, 9] * (1 + i % 5), "max_tokens": 30 if i % 5 == 2 else 5}) + "\n"
        for i in range(24)))
    path = tmp_path / "job.yaml"
    path.write_text(f"""
model: {tmp_path}
cluster: local
workload: {{requests: requests.jsonl, output_tokens: {{mean: 9, std: 6, max: 40}}}}
schedule: {{{controls}}}
run: {{ranks: 2, dtype: float32, threads_per_rank: 1, engine: {engine}}}
output: out
""")
    done = CliRunner().invoke(schedule, [str(path), "--json"], catch_exceptions=False)
    printed = json.loads(done.stdout)
    submitted = plan_job(executable(open_file(path, (), LogTeller(), "run"))).schedule
    ran: dict[str, Any] = json.loads(json.dumps(flat(submitted), default=str))
    assert printed["horizon"] == "job" and policy in (None, printed["policy"])
    for key in ("policy", "encode_batch", "stages", "kv_tokens", "throughput_qps", "latency_s",
                "status", "decode_micro_batches"):
        assert printed[key] == ran[key], key
