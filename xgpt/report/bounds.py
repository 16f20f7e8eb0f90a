"""Whether a run kept each of its bounds."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np

from xgpt.core.constraint import METRIC_WORDS, Bound, BoundKind, Metric
from xgpt.core.lengths import FloatArray
from xgpt.core.units import format_seconds
from xgpt.report.output import Output, QueryColumns, QueryFigures, columns_of, number, told


class BoundCheck(NamedTuple):
    """Whether a bound was kept (None where no statement is possible), in words; and how many of so
    many queries (of a makespan: jobs) were over it, and the worst of them."""

    is_kept: bool | None
    sentence: str
    bound: Bound | None = None
    over: int = 0
    of: int = 0
    worst_s: float | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What metrics.json says of it."""
        assert self.bound is not None, f"{self = }"
        return {"metric": self.bound.metric, "limit_s": self.bound.limit_s,
                "kind": self.bound.kind, "quantile": self.bound.quantile, "is_kept": self.is_kept,
                "over": self.over, "of": self.of, "share_over": self.over / max(self.of, 1),
                "worst_s": self.worst_s, "sentence": self.sentence}


def check_bounds(output: Output) -> list[BoundCheck]:
    """A check of each bound that was set, in their order."""
    bounds = output.schedule.bounds if output.schedule is not None else tuple(_asked(output))
    return [_checked(output, bound) for bound in bounds if math.isfinite(bound.limit_s)]


def check_bound(output: Output) -> BoundCheck:
    """All bounds in one: kept where each is that can be judged."""
    checks = check_bounds(output)
    if not checks:
        is_known = output.schedule is not None or number(
            output.job, "constraint", "latency_s") is not None or "constraint" in output.job
        return BoundCheck(None, "no latency bound was set" if is_known else
                          "the latency bound is not known")
    if len(checks) == 1:
        return checks[0]
    judged = [check.is_kept for check in checks if check.is_kept is not None]
    return BoundCheck(all(judged) if judged else None,
                      "; ".join(check.sentence for check in checks))


def kept_facts(checks: Sequence[BoundCheck]) -> dict[str, Any]:
    """What metrics.json says of all: `bound_kept` is None where none can be judged."""
    judged = [check.is_kept for check in checks if check.is_kept is not None]
    return {"bound_kept": all(judged) if judged else None,
            "bounds": [check.facts for check in checks]}


def _asked(output: Output) -> Iterator[Bound]:
    """The bounds of a job whose schedule is not known."""
    constraint = output.job.get("constraint")
    if not isinstance(constraint, dict):
        return
    given = constraint.get("bounds")
    rows: Iterable[Any] = given if isinstance(given, list) else [constraint | {
        "metric": "latency", "limit_s": constraint.get("latency_s")}]
    for row in rows:
        limit_s = number(row, "limit_s") if isinstance(row, dict) else None
        if limit_s is not None and row.get("metric") in get_args(Metric):
            kind: BoundKind = "queries" if row.get("kind") == "queries" else "sequence"
            yield Bound(metric=row["metric"], limit_s=limit_s, kind=kind,
                        quantile=number(row, "quantile") or 0.99)


def _checked(output: Output, bound: Bound) -> BoundCheck:
    if bound.metric == "makespan":
        return _check_makespan(output, bound)
    if not output.queries:
        return BoundCheck(None, f"{_named(bound)}, no query done yet", bound)
    kept = "kept" if output.metrics is not None else "kept so far"
    check = (_check_sequences if bound.metric == "latency" and bound.kind == "sequence" else
             _check_queries)
    found = check(output.queries, bound, kept)
    return found._replace(sentence=f"{found.sentence}, over all runs of this job"
                          ) if output.queries_before else found


def _named(bound: Bound) -> str:
    limit = format_seconds(bound.limit_s)
    return (f"latency bound of {limit}" if bound.metric == "latency" else
            f"bound of {limit} on {METRIC_WORDS[bound.metric]}")


def _check_makespan(output: Output, bound: Bound) -> BoundCheck:
    took_s = number(output.metrics, "wall_s", "measured")
    if output.metrics is None or took_s is None or output.metrics.get("status") != "done":
        return BoundCheck(None, f"{_named(bound)}: the job is not done", bound)
    if output.queries_before:
        return BoundCheck(None, f"{_named(bound)}: not judged, for the job took several runs",
                          bound)
    is_kept = took_s <= bound.limit_s
    return BoundCheck(is_kept, f"{_named(bound)} {'kept' if is_kept else 'missed'}: it took "
                      f"{format_seconds(took_s)}", bound, int(not is_kept), 1, took_s)


def _seconds(queries: QueryColumns, metric: Metric) -> FloatArray:
    """What a bound on the metric counts of each query whose result tells."""
    if metric == "ttft":  # a result counts it from the run's start, the bound from the encoding's
        return told(queries.times("ttft_s") - queries.times("encode_start_s"))
    return told(queries.times("tpot_s" if metric == "tpot" else "latency_s"))


def _check_queries(queries: Sequence[QueryFigures], bound: Bound, kept: str) -> BoundCheck:
    values = _seconds(columns_of(queries), bound.metric)
    if not len(values):
        return BoundCheck(None, f"{_named(bound)}: the results do not tell", bound)
    over, slowest = int((values > bound.limit_s).sum()), float(values.max())
    share = 1 - over / len(values)
    verb = kept if share >= bound.quantile else "missed"
    # rounded down: 98.99 % must not read as the 99 % that were asked for
    shown = f"{math.floor(share * 1000) / 10:g} %"
    worst = f"; {over} of {len(values):,} took longer, the slowest {format_seconds(slowest)}"
    return BoundCheck(share >= bound.quantile, (
        f"{_named(bound)} {verb}: {shown} of the queries stayed within it, "
        f"{bound.quantile * 100:g} % were asked for{worst if over else ''}"),
        bound, over, len(values), slowest)


def _check_sequences(queries: Sequence[QueryFigures], bound: Bound, kept: str) -> BoundCheck:
    lengths = columns_of(queries).counts("output_tokens")
    place = min(math.ceil(bound.quantile * len(lengths)) - 1, len(lengths) - 1)
    longest = int(np.partition(lengths, place)[place])
    latencies = columns_of(queries).times("latency_s")[lengths <= longest]
    late, slowest = int((latencies > bound.limit_s).sum()), float(latencies.max())
    found = BoundCheck(not late, "", bound, late, len(latencies), slowest)
    if late:
        share = 100 * late / len(latencies)
        shown = f"{share:.2g}" if share < 10 else f"{math.floor(share)}"
        return found._replace(sentence=(
            f"{_named(bound)} missed by {late} of {len(latencies):,} sequences "
            f"({shown} %) of up to {longest} tokens, the slowest took "
            f"{format_seconds(slowest)}"))
    return found._replace(sentence=(
        f"{_named(bound)} {kept}: no sequence of up to {longest} tokens took longer than "
        f"{format_seconds(slowest)}"))
