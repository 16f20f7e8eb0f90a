"""Rows of a sweep: their columns with units, read from a sweep's folder; the best policy of each
scenario and latency limit, also as text for the terminal."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from xgpt.core.errors import wrong
from xgpt.core.policies import policy, policy_names
from xgpt.core.units import format_seconds
from xgpt.report.figures import plain
from xgpt.report.table import fact, paragraph, table
from xgpt.report.words import clean, counted

SWEEP_FILE, ROWS_FILE, EARLIER_FILE = "sweep.json", "sweep.jsonl", "earlier.jsonl"
VERSION = 1
_MOST_LINES, _MOST_REASONS = 15, 3  # chosen: a screen has 25 lines
_MOST_REASON = 300  # chosen: characters
TIE = 0.02  # chosen: predictions are further off than that
OK, INFEASIBLE, REFUSED, GIVEN_UP = "ok", "infeasible", "refused", "given up"  # of `status`

Row = dict[str, Any]
Kind = Literal["text", "whole", "number"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepColumn:
    """A column. `group`: its subject, such as the point, an axis, the answer, its figures, control
    variables, proof, or a real run."""

    name: str
    group: str
    kind: Kind
    title: str
    unit: str = ""


# unit by the end of a column's name; `gap` and `margin_cost` are whole names
_UNITS = {"tokens_per_s": "tokens/s", "_qps": "requests/s", "_bytes": "bytes", "_s": "s",
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
    *_columns("axis", "text", task="task", engine="engine", copies="replicas asked for",
              policy="policy", bound="latency limit"),
    *_columns("answer", "number", bound_s="latency limit"),
    *_columns("answer", "text", status="status", reason="why there is no schedule",
              chosen="policy chosen"),
    *_columns("figure", "number", throughput_qps="steady rate",
              output_tokens_per_s="steady rate of output tokens",
              latency_s="latency", encode_s="time of an encode step",
              decode_iteration_s="time of a decode iteration", period_s="period",
              decode_batch="requests decoding at once"),
    *_columns("figure", "whole", memory_bytes="memory of the fullest rank",
              memory_capacity_bytes="memory of a rank"),
    *_columns("figure", "number", gpu_s_per_query="device time per request",
              makespan_s="time of the job", job_throughput_qps="throughput of the job",
              latency_p50_s="latency P50", latency_p99_s="latency P99",
              ttft_p50_s="TTFT P50", ttft_p99_s="TTFT P99",
              tpot_p50_s="TPOT P50", tpot_p99_s="TPOT P99"),
    *_columns("served", "number", capacity_qps="capacity", saturated_qps="saturated throughput",
              capacity_per_price="capacity per price of an hour (else per device)",
              attainment="share within all limits", queueing_p99_s="wait for the prefill P99",
              ttft_p90_s="TTFT P90", tpot_p90_s="TPOT P90"),
    *_columns("served", "text", deployment="deployment asked for", binds="what binds"),
    *_columns("control", "whole", encode_batch="requests encoded together",
              decode_iterations="decode iterations between two prefills",
              encode_chunk="tokens encoded beside decoding",
              decode_micro_batches="micro-batches of the decode batch",
              encode_micro_batches="steps in which a batch is encoded",
              max_active="concurrent requests", token_budget="tokens per step",
              max_in_system="requests in the system", tp_degree="tensor-parallel degree",
              tp_gpus="devices in tensor-parallel groups", replicas="replicas",
              stages="stages of a replica", encode_stages="stages that encode alone"),
    *_columns("control", "text", controls="control variables"),
    *_columns("proof", "text", proof="how the search ended"),
    *_columns("proof", "number", bound_qps="upper bound on the throughput", gap="gap"),
    *_columns("proof", "whole", nodes="configurations evaluated"),
    *_columns("proof", "number", search_s="time of the search", margin="margin",
              margin_cost="cost of the margin", unbounded_qps="throughput without a limit"),
    *_columns("proof", "text", times="where step times come from"),
    *_columns("measured", "text", measured_status="the run", measured_reason="why it failed"),
    *_columns("measured", "number", measured_qps="throughput measured",
              measured_tokens_per_s="output tokens measured",
              measured_latency_p50_s="latency P50 measured",
              measured_latency_p99_s="latency P99 measured",
              measured_ttft_p50_s="TTFT P50 measured",
              measured_ttft_p99_s="TTFT P99 measured",
              measured_tpot_p50_s="TPOT P50 measured",
              measured_tpot_p99_s="TPOT P99 measured",
              measured_wall_s="time of the run measured"),
    *_columns("measured", "text", folder="folder of the run"))
# column of what a run measured -> key of its metrics.json
MEASURED = {column.name: {"measured_qps": "throughput_qps",
                          "measured_tokens_per_s": "output_tokens_per_s"}.get(
    column.name, column.name.removeprefix("measured_"))
    for column in COLUMNS if column.group == "measured" and column.kind == "number"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRows:
    """Contents of a sweep's folder. `meta`: sweep.json. `rows`: a mapping per point, in the order
    of the grid if the sweep is done, else in the order of completion."""

    meta: Mapping[str, Any]
    rows: Sequence[Row]


def read_sweep(folder: Path) -> SweepRows:
    """The sweep in a folder, finished or not. Raises InputError if there is none."""
    path = folder / SWEEP_FILE
    if not path.is_file():
        raise wrong(folder, "sweep", None, f"a sweep's folder, with {SWEEP_FILE}; `xgpt sweep` "
                    "makes one")
    meta = json.loads(path.read_text(encoding="utf-8"))
    if meta.get("version") != VERSION:
        raise wrong(path, "version", meta.get("version"), f"{VERSION}, of this xgpt")
    return SweepRows(meta=meta, rows=list(read_rows(folder / ROWS_FILE).values()))


def read_rows(path: Path) -> dict[str, Row]:
    """Rows by key; of several lines of one point the last counts. A torn line of a killed sweep is
    ignored."""
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
    """All columns of a sweep that varies these axes; those of other keys follow the usual axes."""
    known = {column.name for column in COLUMNS}
    more = tuple(SweepColumn(name=axis["name"], group="axis", kind="text", title=axis["title"])
                 for axis in axes if axis["name"] not in known)
    place = max(index for index, column in enumerate(COLUMNS) if column.group == "axis") + 1
    return (*COLUMNS[:place], *more, *COLUMNS[place:])


def number_of(row: Row, name: str) -> float | None:
    """A number of a row, infinity included; None if it has none."""
    value = row.get(name)
    if isinstance(value, str) and value in ("inf", "-inf"):
        return math.inf if value == "inf" else -math.inf
    return float(value) if isinstance(value, (int, float)) else None


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[str, ...], list[Row]]:
    """The rows grouped by their values in these columns, in order of first appearance."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(str(row.get(name)) for name in names), []).append(row)
    return found


def title_of(name: str) -> str:
    """A policy's title for screens; `auto` is "best of all"."""
    return "best of all" if name == "auto" else (
        policy(name).title if name in policy_names() else name)


def line_of(row: Row, name: str | None = None) -> str:
    """Title of the policy of a row (or of `name`), with the number of replicas asked for; of a
    service the deployment asked for."""
    if row.get("deployment"):
        return str(row["deployment"])
    title, copies = title_of(name or str(row.get("policy"))), row.get("copies")
    if copies in (None, "auto"):
        return title
    return f"{title}, {copies} {'copy' if str(copies) == '1' else 'copies'}"


def bound_of(row: Row) -> float:
    """The latency limit of a row in seconds; infinite for none, and if unknown."""
    bound_s = number_of(row, "bound_s")
    return math.inf if bound_s is None else bound_s


class Winner(NamedTuple):
    """The best policy of a scenario under a latency limit. `upper`: upper bound on the requests/s
    of all policies compared. `second`: the runner-up. `others`: requests/s of other policies.
    `why`: explanation, if another policy is best under the next tighter limit. `rates`: requests/s
    by policy, the best first."""

    scenario: str
    bound: str
    policy: str
    throughput: str
    upper: str
    latency: str
    devices: str
    second: str
    others: str
    controls: str
    why: str
    replicas: str
    rates: Mapping[str, float]

    @property
    def is_tie(self) -> bool:
        """Whether the second is as good within TIE."""
        best, *others = self.rates.values()
        return any(rate >= (1 - TIE) * best for rate in others)


def all_winners(rows: Iterable[Row]) -> list[Winner]:
    """The best policy of each scenario and latency limit, from the tightest limit on."""
    return [winner for (scenario,), own in grouped(rows, "scenario").items()
            for winner in winners(scenario, own)]


def winners(scenario: str, rows: Iterable[Row]) -> list[Winner]:
    """The best policy of one scenario at each latency limit, from the tightest on."""
    found: list[Winner] = []
    before: dict[str, float] = {}
    lacked: set[str] = set()
    for _, here in itertools.groupby(sorted(rows, key=bound_of), bound_of):
        own = list(here)
        best: dict[str, Row] = {}  # of each policy, the best policy first
        for row in sorted(own, key=lambda row: -rate_of(row)):
            if row.get("status") == OK and rate_of(row):
                best.setdefault(line_of(row, row.get("chosen")), row)
        if not best:
            continue
        now = {line: rate_of(row) for line, row in best.items()}
        lacks = {line_of(row) for row in own if row.get("status") == INFEASIBLE}
        (first, row), *others = best.items()
        found.append(Winner(
            scenario=scenario, bound=bound_text(row), policy=first, throughput=_shown_rate(row),
            upper=_upper(own), devices=str(row.get("gpus") or "-"), second=_second(now),
            latency="-" if (latency_s := number_of(row, "latency_s")) is None else
            format_seconds(latency_s),
            others=", ".join(f"{line} {_shown_rate(other)}" for line, other in others),
            controls=str(row.get("controls") or "").partition(": ")[2],
            why=_why(first, before, now, lacked, lacks), rates=now,
            replicas=str(row.get("replicas") or 1)))
        before, lacked = now, lacks
    return found


def rate_of(row: Row) -> float:
    """Requests/s of the job where it was planned for its own requests, else in steady state."""
    return number_of(row, "job_throughput_qps") or number_of(row, "throughput_qps") or 0.0


def rate_words(rows: Iterable[Row]) -> str:
    """Words for the quantity that `rate_of` returns for these rows."""
    is_of_job = any(number_of(row, "job_throughput_qps") for row in rows)
    return "requests/s of the job" if is_of_job else "steady requests/s"


def _upper(rows: Iterable[Row]) -> str:
    """The largest upper bound of the rows that have a schedule; `-` if one's is unknown."""
    bounds = [number_of(row, "bound_qps") or math.inf for row in rows if row.get("status") == OK]
    return "-" if math.isinf(most := max(bounds, default=math.inf)) else plain(most)


def _shown_rate(row: Row) -> str:
    """Requests/s of a row, with the measured ones of its run, if it has any."""
    measured = number_of(row, "measured_qps")
    return plain(rate_of(row)) + ("" if measured is None else f" (measured {plain(measured)})")


def _why(first: str, before: Mapping[str, float], now: Mapping[str, float], lacked: Container[str],
         lacks: Container[str]) -> str:
    """A sentence about why `first` is best now and was not under the tighter limit; "" if it was.
    `before`, `now`: requests/s by policy, the best first. `lacked`, `lacks`: policies that were
    compared and have no schedule."""
    if not before or first == (last := next(iter(before))):
        return ""
    new = (f"{first} rises from {plain(before[first])} to {plain(now[first])} requests/s"
           if first in before else f"no {first} schedule was found at the tighter limit"
           if first in lacked else f"{first} was not compared at the tighter limit")
    old = (f"{last} from {plain(before[last])} to {plain(now[last])}" if last in now else
           f"no {last} schedule was found here" if last in lacks else
           f"{last} was not compared here (--over policy=all compares)")
    return f"{new}; {old}"


def headline(rows: Sequence[Row]) -> str:
    """A sentence about which policies are best how often, and their range of throughput."""
    num_scenarios, best = len(grouped(rows, "scenario")), all_winners(rows)
    said = [counted(num_scenarios, "scenario")] * (num_scenarios != 1) + [
        counted(len(rows), "point")]
    if not best:
        return f"{', '.join(said)}, none with a schedule" if rows else said[-1]
    (name, count), *others = Counter(winner.policy for winner in best).most_common()
    is_best = f"{name} is best" + (f" in {count} of {counted(len(best), 'case')}" if others else "")
    is_best += "".join(f", {other} in {times}" for other, times in others)
    if num_scenarios > 1:
        return f"{', '.join(said)}: {is_best}"
    rates = f"{best[0].throughput} requests/s {_within(best[0])}"
    if len(best) > 1:
        rates = f"from {rates} to {best[-1].throughput} {_within(best[-1])}"
    return f"{is_best}: {rates}"


def _within(winner: Winner) -> str:
    return "without a limit" if winner.bound == "none" else f"within {winner.bound}"


def lacking(rows: Iterable[Row]) -> list[tuple[str, str, str, str]]:
    """(scenarios, policies, limits, reason) of points without a schedule, grouped by reason."""
    without = grouped((row for row in rows if row.get("status") != OK), "reason")
    return [(_some(row.get("scenario") for row in own), _some(map(line_of, own)),
             _some(map(bound_text, own)), clean(reason, _MOST_REASON))
            for (reason,), own in without.items()]


def _some(names: Iterable[Any]) -> str:
    distinct = list(dict.fromkeys(map(str, names)))
    return ", ".join(distinct[:3]) + (f" and {len(distinct) - 3} more" if len(distinct) > 3 else "")


def sweep_text(rows: Sequence[Row]) -> str:
    """Text with the best policy of each scenario and limit beside the second and FT, and the points
    without a schedule; of many only the first, as the page shows all."""
    best, without = all_winners(rows), lacking(rows)
    lines = [paragraph(f"{counted(len(rows), 'point')}: the best {rate_words(rows)} for each "
                       "latency limit, as predicted")]
    if best:
        static = policy("ft").title
        cells = [{"scenario": one.scenario, "limit": one.bound,
                  "best": f"{one.throughput} {one.policy}", "2nd": one.second,
                  static: plain(one.rates[static]) if static in one.rates else "",
                  "replicas": one.replicas, "latency": one.latency} for one in best]
        names = [name for name in cells[0] if any(row[name] for row in cells) and not (
            name == "scenario" and len({row[name] for row in cells}) == 1)]
        lines.append(table(names, [[row[name] for name in names] for row in cells[:_MOST_LINES]],
                           right=[at for at, name in enumerate(names) if name in (
                               static, "replicas", "latency")]))
    ties = [f"{one.scenario} {one.bound}" if names[0] == "scenario" else one.bound for one in best
            if one.is_tie]
    if ties:
        lines.append(paragraph(f"best and 2nd within {TIE:.0%}, a tie: {_some(ties)}"))
    lines += [paragraph(f"no schedule: {policies} at {bounds}: {why}")
              for _, policies, bounds, why in without[:_MOST_REASONS]]
    if (more := max(len(best) - _MOST_LINES, 0) + max(len(without) - _MOST_REASONS, 0)):
        lines.append(paragraph(f"{more} more lines are on the page; every point is in {ROWS_FILE}"))
    return "\n".join(lines)


def _second(rates: Mapping[str, float]) -> str:
    """Requests/s and name of the second best policy; "" if there is only one."""
    return next((f"{plain(rate)} {name}" for name, rate in list(rates.items())[1:2]), "")


def sweep_details(rows: Sequence[Row]) -> str:
    """Text about which policies are best how often, with the settings of each."""
    return "\n".join([paragraph(headline(rows)), *(
        fact(f"{one.bound} ", f"{one.scenario}: {one.policy}: {one.controls}" + (
            f"; others: {one.others}" if one.others else "")) for one in all_winners(rows))])


def bound_text(row: Row) -> str:
    """The limit of a row as given, with its seconds: `ft10 (3.08 s)`, `50% (10 s)`, `4 s`."""
    bound_s = number_of(row, "bound_s")
    if bound_s is None:
        return str(row["bound"])
    text, given = bound_words(bound_s), str(row["bound"])
    is_relative = given.endswith("%") or given.startswith("ft")
    return f"{given} ({text})" if is_relative else text


def bound_words(bound_s: float) -> str:
    """A limit with its unit, or `none`."""
    return "none" if math.isinf(bound_s) else format_seconds(bound_s)
