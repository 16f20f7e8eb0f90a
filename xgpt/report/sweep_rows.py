"""The rows of a sweep: which columns there are, in which units; a sweep's folder read back; and the
rows for the terminal, in full, or the best policy beside the others where there are many points."""

import json
import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from xgpt.core.errors import wrong
from xgpt.core.units import format_seconds
from xgpt.report.table import fact, shown_width, table
from xgpt.report.words import counted

SWEEP_FILE, ROWS_FILE, EARLIER_FILE = "sweep.json", "sweep.jsonl", "earlier.jsonl"
VERSION = 1
MANY_POINTS, MANY_POLICIES = 40, 3  # from which on only the best policy gets a line
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


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[str, ...], list[Row]]:
    """The rows by what they have in these columns, in the order in which that is met."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(str(row.get(name)) for name in names), []).append(row)
    return found


def sweep_text(rows: Sequence[Row]) -> str:
    """The table of all scenarios, and how many points have a schedule."""
    scenarios = grouped(rows, "scenario")
    is_brief = len(rows) >= MANY_POINTS and len(grouped(rows, "policy")) >= MANY_POLICIES
    parts = []
    for (scenario,), own in scenarios.items():
        text = _best_table(own) if is_brief else _full_table(own)
        text += _reasons([row for row in own if not is_brief or row["status"] == REFUSED])
        parts.append(f"{scenario}\n{text}" if len(scenarios) > 1 else text)
    if len(scenarios) > 1:
        parts.append(_summary(rows, is_brief))
    return "\n\n".join(parts)


def _full_table(rows: Sequence[Row]) -> str:
    """A line a point."""
    has_margin = any((number_of(row, "margin") or 1.0) > 1.0005 for row in rows)
    is_run = any(row["measured_status"] for row in rows)
    has_copies = any((number_of(row, "replicas") or 1) > 1 for row in rows)
    header = ["bound", "policy", *["copies"] * has_copies, "queries/s", "latency"]
    header += ["margin"] * has_margin + ["measured"] * is_run + ["schedule"]
    body = []
    for row in rows:
        cells = [bound_text(row), row["chosen"] or row["policy"],
                 *[str(row.get("replicas") or row.get("copies") or "-")] * has_copies,
                 _qps(row, "throughput_qps"), _seconds(row, "latency_s")]
        if has_margin:
            margin = number_of(row, "margin")
            cells.append("-" if margin is None else f"{margin - 1:.1%}")
        if is_run:
            cells.append(row["measured_status"] if row["measured_qps"] is None and
                         row["measured_status"] else _qps(row, "measured_qps"))
        body.append([*cells, schedule_words(row)])
    return table(header, body, right=tuple(range(2, len(header) - 1)))


def _best_table(rows: Sequence[Row]) -> str:
    """A line a bound: the best policy, and what the others reach."""
    body = []
    for own in grouped(rows, "bound").values():
        ranked = sorted((row for row in own if row["status"] == OK),
                        key=lambda row: -row["throughput_qps"])
        without = [row["policy"] for row in own if row["status"] != OK]
        others = [f"{row['policy']} {row['throughput_qps']:.3g}" for row in ranked[1:]]
        words = ", ".join(others) + (
            ("; " if others else "") + f"no schedule: {', '.join(without)}" if without else "")
        best = ranked[0] if ranked else own[0]
        body.append([bound_text(own[0]), best["policy"] if ranked else "none",
                     _qps(best, "throughput_qps"), _seconds(best, "latency_s"), words])
    return table(("bound", "best", "queries/s", "latency", "others, queries/s"), body,
                 right=(2, 3))


def _reasons(rows: Sequence[Row]) -> str:
    """Why points have no schedule, each reason once, in lines of their own."""
    points: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] != OK:
            points.setdefault(" ".join(str(row["reason"]).split()), []).append(
                row["policy"] if row["status"] == REFUSED else
                f"{row['policy']} at {bound_text(row)}")
    return "".join("\n" + textwrap.fill(
        f"{', '.join(dict.fromkeys(own))}: {reason}", shown_width(), break_on_hyphens=False,
        break_long_words=False, subsequent_indent="  ") for reason, own in points.items())


def schedule_words(row: Row) -> str:
    """The control variables of a row."""
    if row["status"] != OK:
        return "no schedule" if row["status"] == INFEASIBLE else "cannot be planned"
    words = str(row["controls"]).partition(": ")[2] or str(row["controls"])
    degree = row["tp_degree"] or 1
    return words + (f"; TP {degree} on {row['tp_gpus']}" if degree > 1 else "")


def bound_text(row: Row) -> str:
    """The bound in seconds, with the share that it was given as."""
    bound_s = number_of(row, "bound_s")
    if bound_s is None:
        return str(row["bound"])
    text = bound_words(bound_s)
    return f"{text} ({row['bound']})" if str(row["bound"]).endswith("%") else text


def bound_words(bound_s: float) -> str:
    """The bound in seconds, or `none`."""
    return "none" if math.isinf(bound_s) else format_seconds(bound_s)


def _summary(rows: Sequence[Row], is_brief: bool) -> str:
    solved = [row for row in rows if row["status"] == OK]
    text = f"{counted(len(rows), 'point')}, {len(solved)} with a schedule"
    if is_brief:
        wins = Counter(max(own, key=lambda row: row["throughput_qps"])["policy"]
                       for own in grouped(solved, "scenario", "bound").values())
        text += "; the best is " + ", ".join(
            f"{policy} {counted(count, 'time')}" for policy, count in wins.most_common())
        if len(solved) < len(rows):
            text += ". Why a point has none is told in its row, as `reason`"
    return fact("sweep", text)


def _qps(row: Row, name: str) -> str:
    value = number_of(row, name)
    return "-" if value is None else f"{value:.4g}"


def _seconds(row: Row, name: str) -> str:
    value = number_of(row, name)
    return "-" if value is None else format_seconds(value)
