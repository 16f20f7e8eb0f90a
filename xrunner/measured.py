"""What a run measured: measured.json (figures) and steps.jsonl (every stage's steps)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from xrunner.pipeline import StageReport
from xrunner.plan import write_atomically


def write_measured(output: Path, *, state: str, wall_s: float,
                   finished: Sequence[tuple[int, float]], queries_before: int, num_errors: int,
                   reports: Sequence[StageReport]) -> None:
    """`finished`: (output tokens, latency_s) of each query of this run."""
    latencies = [latency for _, latency in finished]
    tokens = sum(count for count, _ in finished)
    p50, p99 = np.quantile(latencies, (0.5, 0.99)).tolist() if latencies else (None, None)
    busiest_s = max((report.busy_s for report in reports), default=0.0)
    figures = {
        "version": 1, "state": state, "queries": len(finished), "queries_before": queries_before,
        "errors": num_errors, "wall_s": wall_s,
        "throughput_qps": len(finished) / wall_s if wall_s > 0 else None,
        "output_tokens": tokens, "output_tokens_per_s": tokens / wall_s if wall_s > 0 else None,
        "latency_p50_s": p50, "latency_p99_s": p99,
        "load_s": max((report.load_s for report in reports), default=0.0),
        "loaded_bytes": sum(report.bytes_read for report in reports),
        # of the wall time: what even the busiest stage spent waiting (bubbles, host, messages)
        "overhead_share": 1 - busiest_s / wall_s if wall_s > 0 else None,
        "stages": [{"stage": r.stage, "busy_s": r.busy_s, "load_s": r.load_s,
                    "bytes_read": r.bytes_read, "rows_compacted": r.rows_compacted,
                    "peak_memory_bytes": r.peak_memory_bytes} for r in reports],
    }
    write_atomically(output / "measured.json", json.dumps(figures, indent=1) + "\n")
    lines = [json.dumps({"stage": report.stage, **record._asdict()})
             for report in reports for record in report.log]
    write_atomically(output / "steps.jsonl", "\n".join(lines) + "\n" if lines else "")
