"""An output folder as a run of two stages leaves it, hostile texts included, without any run."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from problems import estimate_from_flat, schedule_from_flat
from profiles import profile

from xgpt.core.deployment import StageAssignment
from xgpt.core.schedule import Rejected, Schedule
from xgpt.core.schedule_file import save_schedule
from xgpt.requests.spool import Record, SpoolWriter
from xprofiler.profile import Sample
from xprofiler.profile_file import save_profile

HOSTILE_TEXTS = (
    "</script><script>document.title = 'OWNED'</script>",
    "<img src=x onerror=\"document.title = 'OWNED'\">",
    "</p></article><style>body{display:none}</style>{{ 7 * 191 }} {% raw %}",
    "\u202eright to left override\u202c and \u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
    "nul \x00, bell \x07, lone surrogate \ud800, emoji \U0001f9ea\U0001f44d\U0001f3fd",
    "W" * 900,
    "  indented\n\tcode:\n    return [x for x in range(3)]\n",
    "",
)
NUM_LAYERS, ENCODE_BATCH, DECODE_ITERATIONS, NUM_GROUPS = 30, 8, 12, 2


def fake_schedule(**changes: Any) -> Schedule:
    estimate = estimate_from_flat(
        policy="rra", encode_batch=2 * ENCODE_BATCH, decode_batch=52.4,
        decode_iterations=DECODE_ITERATIONS, decode_micro_batches=NUM_GROUPS, tp_degree=1,
        tp_gpus=0, throughput_qps=2.31, output_tokens_per_s=134.0, latency_s=27.6, encode_s=1.31,
        decode_iteration_s=0.46, period_s=6.92, memory_bytes=(412_000_000, 398_000_000),
        memory_capacity_bytes=12_000_000_000, kv_tokens=13_900, fits=True,
        stages=(StageAssignment(index=0, ranks=(0,), first_layer=0, num_layers=16),
                StageAssignment(index=1, ranks=(1,), first_layer=16, num_layers=14)),
        notes=("truncated normal on (0, 160] with mean 58 and std 39",))
    own: dict[str, Any] = {
        "estimate": estimate, "latency_bound_s": 30.0, "constraint_kind": "sequence",
        "quantile": 0.99, "status": "optimal", "bound_qps": 2.34, "gap": 0.013, "nodes": 214,
        "seconds": 0.38, "fingerprint": "9f2c", "unbounded_qps": 2.74,
        "pruned": (("expected to be no better", 1200), ("without room", 12)),
        "margin": 1.065, "margin_cost": 0.0412,
        "margin_note": "planned for 28.2 s, so that the bound of 30.0 s is kept with a confidence "
                       "of 95%: 6.5% for what the profile may be off",
        "explanation": ("RRA (every device encodes and decodes in turn) is the <best>.",
                        "16 queries are encoded together.", "The latency bound binds."),
        "rejected": (
            Rejected(kind="policy", subject="waa-c", words="encode_batch 2, "
                     "decode_micro_batches 3, tp_degree 1, tp_gpus 0", throughput_qps=2.04,
                     latency_s=25.3,
                     reason="lower throughput: between 2.04 and 2.05 requests/s"),
            Rejected(kind="policy", subject="waa-m",
                     reason="no admissible schedule"),
            Rejected(kind="highest in steady state", words="encode 16, 4 iterations",
                     throughput_qps=2.52, latency_s=35.1,
                     reason="latency 35.1 s is over the bound of 30 s"),
            Rejected(kind="highest in steady state", words="encode 24, 12 iterations",
                     throughput_qps=2.66, latency_s=39.7,
                     reason="latency 39.7 s is over the bound of 30 s"),
            Rejected(kind="highest in steady state", words="encode 8, 12 iterations",
                     throughput_qps=1.71, latency_s=19.4,
                     reason="lower throughput"),
            Rejected(kind="highest in steady state", words="encode 64, 1 iteration",
                     throughput_qps=None, latency_s=None,
                     reason="does not fit: rank 0 would hold 13.1 GiB of 11.2 GiB"))}
    return schedule_from_flat(**{**own, **changes})


def write_fake_run(directory: Path, num_queries: int = 72, answers: dict[str, str] | None = None,
                   prompts: list[dict[str, Any]] | None = None) -> Path:
    """Fill `directory` with every file of a finished run and return it. Seeded: always the same."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(7)
    requests = prompts or _requests(num_queries)
    write_spool(directory, [Record(id=request["id"], line=i + 1, prompt=request["prompt"])
                            for i, request in enumerate(requests)])
    _write_object(directory / "job.json", _job(directory / "requests.jsonl"))
    save_schedule(fake_schedule(), directory / "schedule.json")
    lengths = [max(3, min(160, round(rng.gauss(58, 39)))) for _ in requests]
    steps, times = _timeline(lengths, rng)
    _write_lines(directory / "steps.jsonl", steps)
    results = [_result(i, request, lengths[i], times[i], answers or {})
               for i, request in enumerate(requests)]
    _write_lines(directory / "results.jsonl", results)
    _write_lines(directory / "errors.jsonl", [
        {"line": 19, "error": "not JSON: </td><script>alert(1)</script>"},
        {"line": 44, "id": "summarise-99", "error": "the prompt has 4102 tokens, the model 2048"}])
    _write_object(directory / "metrics.json", _metrics(results))
    points = [Sample(x=x, samples_s=(1e-3 * x, 1.1e-3 * x)) for x in (1, 2, 4, 8)]
    save_profile(profile(decode_attention=points, layer_rest=points), directory / "profile.json")
    _write_object(directory / "expected.json", _expected(len(requests)))
    return directory


def write_spool(directory: Path, records: Sequence[Record]) -> None:
    """Of requests that all run, each of three tokens."""
    spool = SpoolWriter()
    for record in records:
        spool.add(record, (5, 6, 7))
    spool.save(directory, np.array([(i, 9) for i in range(len(records))]).reshape(-1, 2), 0)


def _requests(count: int) -> list[dict[str, Any]]:
    kinds = ("summarise", "translate", "code", "question", "classify")
    made = [{"id": f"{kinds[i % 5]}-{i // 5 + 1:02d}",
             "prompt": f"Say something sensible about the number {i}, in a sentence or two."}
            for i in range(count)]
    for row, text in zip(made, HOSTILE_TEXTS, strict=False):
        row["prompt"] = f"Prompt: {text}"
    if made:
        made[0]["id"] = "<b onmouseover=alert(1)>id</b>"
    return made


def _result(index: int, request: dict[str, Any], length: int, times: tuple[float, float],
            answers: dict[str, str]) -> dict[str, Any]:
    plain = " ".join(f"word{k}" for k in range(length))
    hostile = HOSTILE_TEXTS[index] if index < len(HOSTILE_TEXTS) and not answers else plain
    return {"id": request["id"], "index": index, "text": answers.get(request["id"], hostile),
            "output_ids": list(range(length)), "input_tokens": 30 + 7 * index % 150,
            "output_tokens": length, "finish_reason": "length" if length == 160 else "stop",
            "latency_s": times[1] - times[0], "encode_start_s": times[0]}


def _timeline(lengths: list[int], rng: random.Random,
              ) -> tuple[list[dict[str, Any]], list[tuple[float, float]]]:
    """Steps of two stages under RRA, and (start, end) of every query."""
    waiting, active = list(range(len(lengths))), [[], []]
    left, start_s, end_s = list(lengths), [0.0] * len(lengths), [0.0] * len(lengths)
    stage_free, group_free = [0.0, 0.0], [0.0, 0.0]
    steps: list[dict[str, Any]] = []
    phase = 0

    def run(kind: str, group: int, iteration: int, queries: list[int], cost_s: float) -> None:
        for stage in (0, 1):
            begin = max(stage_free[stage], group_free[group])
            finish = begin + cost_s * (1.06 - 0.1 * stage) * rng.uniform(0.97, 1.08)
            steps.append({"stage": stage, "kind": kind, "group": group, "phase": phase,
                          "iteration": iteration, "queries": len(queries),
                          "tokens": len(queries), "start_s": begin, "end_s": finish})
            stage_free[stage] = group_free[group] = finish
        if kind == "encode":
            for query in queries:
                start_s[query] = steps[-2]["start_s"]
        for query in queries:
            left[query] -= 1
            end_s[query] = group_free[group]
        active[group] = [query for query in active[group] if left[query] > 0]

    while waiting or any(active):
        for group in range(NUM_GROUPS):
            joined, waiting = waiting[:ENCODE_BATCH], waiting[ENCODE_BATCH:]
            active[group] += joined
            if joined:
                run("encode", group, 0, joined, 0.05 * len(joined))
        for iteration in range(1, DECODE_ITERATIONS + 1):
            for group in range(NUM_GROUPS):
                if active[group]:
                    run("decode", group, iteration, list(active[group]),
                        0.045 + 0.003 * len(active[group]))
        phase += 1
    return steps, list(zip(start_s, end_s, strict=True))


def _job(requests: Path) -> dict[str, Any]:
    return {"name": "quickstart", "model": "smollm2-135m", "cluster": "local",
            "workload": {"requests": str(requests), "count": None, "max_tokens": 160,
                         "input_tokens": {"kind": "from_requests"},
                         "output_tokens": {"kind": "normal", "mean": 58, "std": 39,
                                           "maximum": 160}},
            "constraint": {"latency_s": 30, "kind": "sequence", "quantile": 0.99},
            "run": {"ranks": 2, "dtype": "auto", "seed": 0, "temperature": 0}}


def _metrics(results: list[dict[str, Any]]) -> dict[str, Any]:
    latencies = sorted(r["latency_s"] for r in results)
    wall_s = max(r["encode_start_s"] + r["latency_s"] for r in results)
    tokens = sum(r["output_tokens"] for r in results)
    return {
        "version": 1, "name": "quickstart", "status": "done", "queries": len(results), "errors": 2,
        "throughput_qps": {"measured": len(results) / wall_s, "predicted": 2.05},
        "output_tokens_per_s": {"measured": tokens / wall_s, "predicted": 119.0},
        "latency_p50_s": {"measured": latencies[len(latencies) // 2], "predicted": 14.9},
        "latency_p99_s": {"measured": latencies[-1], "predicted": 27.6},
        "wall_s": {"measured": wall_s, "predicted": 35.1},
        "load_s": {"measured": 1.84, "predicted": None},
        "overhead_share": {"measured": 0.031, "predicted": 0.02}, "steady_state_qps": 2.19,
        "model_source": "hub cache, HuggingFaceTB/SmolLM2-135M-Instruct", "ranks": 2,
        "dtype": "bfloat16", "date": "2026-03-14T09:26:53+00:00",
        "machine": {"cpu": "Xeon, 2 cores", "memory_gib": 24, "torch": "2.13.0+cpu"}}


def _expected(count: int) -> dict[str, Any]:
    """Two stages, one query a second from 7.5 s on."""
    stages = [{"label": f"stage {stage}", "pool": "both", "steps": [
        [kind, 1.5 * i + stage, 1.5 * i + stage + 1, i % NUM_GROUPS]
        for i, kind in enumerate(["encode", "encode", "decode", "decode"] * 4)]}
        for stage in (0, 1)]
    return {"version": 1, "stages": stages, "done": [[7.5 + i, i + 1] for i in range(count)],
            "latency_s": [5.0, 14.0, 27.0], "ttft_s": [1.0, 2.0, 3.0]}


def _write_object(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


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
                 {"name": "bound", "key": "constraint.latency_s", "title": "latency limit",
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
