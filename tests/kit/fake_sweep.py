"""A sweep's folder as `xgpt sweep` leaves it, without any search: two scenarios, three policies,
three bounds, one of them none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BOUNDS = ("2 s", "10 s", "inf")
RATES = {"rra": (None, 30.0, 45.0), "waa-c": (12.0, 24.0, 26.0), "ft": (4.0, 10.0, 15.0)}
HOSTILE = "<img src=x onerror=alert(1)>"


def write_fake_sweep(folder: Path, state: str = "done", **changes: Any) -> Path:
    """`changes` are put into every row."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{**_row(model, policy, place), **changes} for model in ("opt-13b", HOSTILE)
            for policy in RATES for place in range(len(BOUNDS))]
    meta = {
        "version": 1, "name": "two models", "source": "/jobs/two.yaml", "horizon": "steady",
        "state": state, "points": 18, "done": 18, "ok": 16, "seconds": 3.2, "is_run": False,
        "axes": [{"name": "model", "key": "model", "title": "model",
                  "values": ["opt-13b", HOSTILE]},
                 {"name": "bound", "key": "constraint.latency_s", "title": "latency bound",
                  "values": list(BOUNDS)}], "columns": []}
    (folder / "sweep.json").write_text(json.dumps(meta), encoding="utf-8")
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "sweep.jsonl").write_text(lines + '{"key": "torn', encoding="utf-8")
    return folder


def _row(model: str, policy: str, place: int) -> dict[str, Any]:
    rate, bound = RATES[policy][place], BOUNDS[place]
    common = {"key": f"{model} {policy} {place}", "scenario": f"{model}, a40-4, S", "model": model,
              "cluster": "a40-4", "gpus": 4, "task": "S", "policy": policy, "bound": bound,
              "bound_s": "inf" if bound == "inf" else float(bound.split()[0])}
    if rate is None:
        return {**common, "status": "infeasible", "reason": "no schedule of it keeps 2 s"}
    return {**common, "status": "ok", "reason": None, "chosen": policy, "throughput_qps": rate,
            "output_tokens_per_s": 32 * rate, "latency_s": 1.5 + 3 * place,
            "gpu_s_per_query": 4 / rate, "memory_bytes": 10**10 * (1 + place),
            "memory_capacity_bytes": 48 * 10**9, "makespan_s": None,
            "controls": f"{policy.upper()}: encode {place + 1} together", "times": "roofline"}
