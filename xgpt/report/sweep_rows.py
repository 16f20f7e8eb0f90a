"""The rows of a sweep: which columns there are, in which units, and a sweep's folder read back."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from xgpt.core.errors import wrong

SWEEP_FILE, ROWS_FILE, EARLIER_FILE = "sweep.json", "sweep.jsonl", "earlier.jsonl"
VERSION = 1
OK, INFEASIBLE, REFUSED = "ok", "infeasible", "refused"  # what `status` may be

Row = dict[str, Any]
Kind = Literal["text", "whole", "number"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepColumn:
    """`group` says what a column is of: the point, its axes, the answer, its figures, control
    variables and proof, or a real run."""

    name: str
    group: str
    kind: Kind
    title: str
    unit: str = ""


def _columns(group: str, *rows: tuple[str, Kind, str, str]) -> tuple[SweepColumn, ...]:
    return tuple(SweepColumn(name=name, group=group, kind=kind, title=title, unit=unit)
                 for name, kind, title, unit in rows)


COLUMNS = (
    *_columns("point", ("key", "text", "key", ""), ("scenario", "text", "scenario", ""),
              ("fingerprint", "text", "fingerprint", "")),
    *_columns("axis", ("model", "text", "model", ""), ("cluster", "text", "cluster", ""),
              ("gpus", "whole", "GPUs (or ranks)", ""), ("task", "text", "task", ""),
              ("engine", "text", "engine", ""), ("copies", "text", "copies asked for", ""),
              ("policy", "text", "policy", ""),
              ("bound", "text", "latency bound", "")),
    *_columns("answer", ("bound_s", "number", "latency bound", "s"),
              ("status", "text", "status", ""),
              ("reason", "text", "why there is no schedule", ""),
              ("chosen", "text", "policy chosen", "")),
    *_columns("figure", ("throughput_qps", "number", "throughput", "queries/s"),
              ("output_tokens_per_s", "number", "output tokens", "tokens/s"),
              ("latency_s", "number", "latency", "s"),
              ("encode_s", "number", "time of an encode step", "s"),
              ("decode_iteration_s", "number", "time of a decode iteration", "s"),
              ("period_s", "number", "period", "s"),
              ("decode_batch", "number", "queries decoding at once", ""),
              ("memory_bytes", "whole", "memory of the fullest rank", "bytes"),
              ("memory_capacity_bytes", "whole", "memory of a rank", "bytes"),
              ("gpu_s_per_query", "number", "device time a query", "s"),
              ("makespan_s", "number", "time of the job", "s"),
              ("job_throughput_qps", "number", "throughput of the job", "queries/s"),
              ("latency_p50_s", "number", "latency P50", "s"),
              ("latency_p99_s", "number", "latency P99", "s"),
              ("ttft_p50_s", "number", "first token P50", "s"),
              ("ttft_p99_s", "number", "first token P99", "s"),
              ("tpot_p50_s", "number", "time per token P50", "s"),
              ("tpot_p99_s", "number", "time per token P99", "s")),
    *_columns("control", ("encode_batch", "whole", "queries encoded together", ""),
              ("decode_iterations", "whole", "decode iterations between two encodings", ""),
              ("encode_chunk", "whole", "tokens encoded beside decoding", ""),
              ("decode_micro_batches", "whole", "groups of the decode batch", ""),
              ("encode_micro_batches", "whole", "steps in which a batch is encoded", ""),
              ("max_active", "whole", "queries at a time", ""),
              ("token_budget", "whole", "tokens of a step", ""),
              ("max_in_system", "whole", "queries in the system", ""),
              ("tp_degree", "whole", "tensor-parallel degree", ""),
              ("tp_gpus", "whole", "devices in tensor-parallel groups", ""),
              ("replicas", "whole", "copies of the model", ""),
              ("stages", "whole", "stages of a copy", ""),
              ("encode_stages", "whole", "stages that encode alone", ""),
              ("controls", "text", "control variables", "")),
    *_columns("proof", ("proof", "text", "how the search ended", ""),
              ("bound_qps", "number", "upper bound on the throughput", "queries/s"),
              ("gap", "number", "gap", "share"), ("nodes", "whole", "configurations evaluated", ""),
              ("search_s", "number", "time of the search", "s"),
              ("margin", "number", "margin", ""), ("margin_cost", "number", "cost of the margin",
                                                   "share"),
              ("unbounded_qps", "number", "throughput without a bound", "queries/s"),
              ("times", "text", "where step times come from", "")),
    *_columns("measured", ("measured_status", "text", "the run", ""),
              ("measured_reason", "text", "why it failed", ""),
              ("measured_qps", "number", "throughput measured", "queries/s"),
              ("measured_tokens_per_s", "number", "output tokens measured", "tokens/s"),
              ("measured_latency_p50_s", "number", "latency P50 measured", "s"),
              ("measured_latency_p99_s", "number", "latency P99 measured", "s"),
              ("measured_ttft_p50_s", "number", "first token P50 measured", "s"),
              ("measured_ttft_p99_s", "number", "first token P99 measured", "s"),
              ("measured_tpot_p50_s", "number", "time per token P50 measured", "s"),
              ("measured_tpot_p99_s", "number", "time per token P99 measured", "s"),
              ("measured_wall_s", "number", "time of the run measured", "s"),
              ("folder", "text", "folder of the run", "")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRows:
    """What a sweep's folder holds: `meta` is sweep.json, `rows` one mapping a point, in the order
    of the grid where the sweep is done and as they were finished before."""

    meta: Mapping[str, Any]
    rows: Sequence[Row]


def read_sweep(folder: Path) -> SweepRows:
    """The sweep of a folder, whether it is done or not. Raises InputError where there is none."""
    path = folder / SWEEP_FILE
    if not path.is_file():
        raise wrong(folder, "sweep", None, f"a sweep's folder, with {SWEEP_FILE}; `xgpt sweep` "
                    "makes one")
    meta = json.loads(path.read_text(encoding="utf-8"))
    if meta.get("version") != VERSION:
        raise wrong(path, "version", meta.get("version"), f"{VERSION}, of this xgpt")
    return SweepRows(meta=meta, rows=list(read_rows(folder / ROWS_FILE).values()))


def read_rows(path: Path) -> dict[str, Row]:
    """Rows by key; of several lines of one point the last holds. A line that a killed sweep has
    not finished counts for nothing."""
    rows: dict[str, Row] = {}
    if not path.is_file():
        return rows
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:  # what ends without "\n" is torn
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("key"), str):
            rows.pop(row["key"], None)
            rows[row["key"]] = row
    return rows


def columns_with(axes: Sequence[Mapping[str, Any]]) -> tuple[SweepColumn, ...]:
    """All columns of a sweep that varies these axes: those of other keys stand behind the usual
    axes."""
    known = {column.name for column in COLUMNS}
    more = tuple(SweepColumn(name=axis["name"], group="axis", kind="text", title=axis["title"])
                 for axis in axes if axis["name"] not in known)
    place = max(index for index, column in enumerate(COLUMNS) if column.group == "axis") + 1
    return (*COLUMNS[:place], *more, *COLUMNS[place:])


def number_of(row: Row, name: str) -> float | None:
    """A number of a row, infinity included; None where it has none."""
    value = row.get(name)
    if isinstance(value, str) and value in ("inf", "-inf"):
        return math.inf if value == "inf" else -math.inf
    return float(value) if isinstance(value, (int, float)) else None
