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


# by the end of a column's name; of `gap` and `margin_cost` it is the whole
_UNITS = {"tokens_per_s": "tokens/s", "_qps": "queries/s", "_bytes": "bytes", "_s": "s",
          "_s_per_query": "s", "gap": "share", "margin_cost": "share"}


def _columns(group: str, kind: Kind, **titles: str) -> tuple[SweepColumn, ...]:
    return tuple(SweepColumn(
        name=name, group=group, kind=kind, title=title,
        unit=next((unit for end, unit in _UNITS.items() if name.endswith(end)), ""))
        for name, title in titles.items())


COLUMNS = (
    *_columns("point", "text", key="key", scenario="scenario", fingerprint="fingerprint"),
    *_columns("axis", "text", model="model", cluster="cluster"),
    *_columns("axis", "whole", gpus="GPUs (or ranks)"),
    *_columns("axis", "text", task="task", engine="engine", copies="copies asked for",
              policy="policy", bound="latency bound"),
    *_columns("answer", "number", bound_s="latency bound"),
    *_columns("answer", "text", status="status", reason="why there is no schedule",
              chosen="policy chosen"),
    *_columns("figure", "number", throughput_qps="throughput", output_tokens_per_s="output tokens",
              latency_s="latency", encode_s="time of an encode step",
              decode_iteration_s="time of a decode iteration", period_s="period",
              decode_batch="queries decoding at once"),
    *_columns("figure", "whole", memory_bytes="memory of the fullest rank",
              memory_capacity_bytes="memory of a rank"),
    *_columns("figure", "number", gpu_s_per_query="device time a query",
              makespan_s="time of the job", job_throughput_qps="throughput of the job",
              latency_p50_s="latency P50", latency_p99_s="latency P99",
              ttft_p50_s="first token P50", ttft_p99_s="first token P99",
              tpot_p50_s="time per token P50", tpot_p99_s="time per token P99"),
    *_columns("control", "whole", encode_batch="queries encoded together",
              decode_iterations="decode iterations between two encodings",
              encode_chunk="tokens encoded beside decoding",
              decode_micro_batches="groups of the decode batch",
              encode_micro_batches="steps in which a batch is encoded",
              max_active="queries at a time", token_budget="tokens of a step",
              max_in_system="queries in the system", tp_degree="tensor-parallel degree",
              tp_gpus="devices in tensor-parallel groups", replicas="copies of the model",
              stages="stages of a copy", encode_stages="stages that encode alone"),
    *_columns("control", "text", controls="control variables"),
    *_columns("proof", "text", proof="how the search ended"),
    *_columns("proof", "number", bound_qps="upper bound on the throughput", gap="gap"),
    *_columns("proof", "whole", nodes="configurations evaluated"),
    *_columns("proof", "number", search_s="time of the search", margin="margin",
              margin_cost="cost of the margin", unbounded_qps="throughput without a bound"),
    *_columns("proof", "text", times="where step times come from"),
    *_columns("measured", "text", measured_status="the run", measured_reason="why it failed"),
    *_columns("measured", "number", measured_qps="throughput measured",
              measured_tokens_per_s="output tokens measured",
              measured_latency_p50_s="latency P50 measured",
              measured_latency_p99_s="latency P99 measured",
              measured_ttft_p50_s="first token P50 measured",
              measured_ttft_p99_s="first token P99 measured",
              measured_tpot_p50_s="time per token P50 measured",
              measured_tpot_p99_s="time per token P99 measured",
              measured_wall_s="time of the run measured"),
    *_columns("measured", "text", folder="folder of the run"))
# column of what a run measured -> key of its metrics.json
MEASURED = {column.name: {"measured_qps": "throughput_qps",
                          "measured_tokens_per_s": "output_tokens_per_s"}.get(
    column.name, column.name.removeprefix("measured_"))
    for column in COLUMNS if column.group == "measured" and column.kind == "number"}


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
