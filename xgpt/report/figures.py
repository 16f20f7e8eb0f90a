"""Figures of a report: predicted beside measured values, and whether a run kept its limits."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from xgpt.core.constraint import METRIC_WORDS, Bound, Metric
from xgpt.core.lengths import FloatArray
from xgpt.core.schedule import Schedule, Status
from xgpt.core.units import format_seconds
from xgpt.report.lanes import Lane
from xgpt.report.output import Output, QueryColumns, ends_since_first, number, recorded, text_at
from xsimulator.replay.prediction import JobPrediction

# Limits of the relative error of a good and of a fair prediction; the first is the project's goal.
GOOD_WITHIN, FAIR_WITHIN = 0.15, 0.30
MEASURES = {  # key of metrics.json -> (label, unit)
    "throughput_qps": ("Throughput", "requests/s"),
    "output_tokens_per_s": ("Output tokens", "tokens/s"),
    "served.attainment": ("Attainment", "%"),
    **{f"{of}{key}_{share.lower()}_s": (f"{label} {share}", "s") for of in ("", "served.")
       for key, label in (("latency", "Latency"), ("ttft", "TTFT"), ("tpot", "TPOT"),
                          ("queueing", "Queueing")) for share in ("P50", "P90", "P99")},
    "wall_s": ("Time of the run", "s"), "load_s": ("Time to load", "s"),
    "overhead_share": ("Overhead", "%"),
    "prefixes.encoded_tokens": ("Input tokens encoded", "tokens"),
    "prefixes.shared_tokens": ("Input tokens shared", "tokens"),
    "prefixes.encoded_again_tokens": ("Tokens encoded again", "tokens")}
JOB_FIGURES = tuple(of.name for of in fields(JobPrediction) if of.compare)
MOST_STEPS = 1500  # chosen: shown at first
TIMES = 2.0  # chosen: larger ratios are shown as a factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A quantity, predicted and measured, as texts. `ratio` is measured / predicted."""

    label: str
    predicted: str
    measured: str
    ratio: float | None
    is_rate: bool  # more of it is better

    @property
    def ratio_text(self) -> str:
        return "" if self.ratio is None else f"{self.ratio:.2f}"

    @property
    def is_faster(self) -> bool:
        """Whether the run was faster than predicted by more than GOOD_WITHIN."""
        return self.ratio is not None and (self.ratio > 1) == self.is_rate and (
            round(abs(self.ratio - 1), 9) > GOOD_WITHIN)

    @property
    def verdict(self) -> str:
        """"good" (also if the run was faster), "fair", "bad", or "none" without a ratio."""
        if self.ratio is None:
            return "none"
        off = round(abs(self.ratio - 1), 9)  # 1.15 - 1 is a little more than 0.15 in binary
        if off <= GOOD_WITHIN or self.is_faster:
            return "good"
        return "fair" if off <= FAIR_WITHIN else "bad"

    @property
    def verdict_text(self) -> str:
        if self.ratio is None:
            return ""
        if self.is_faster:
            return "faster than predicted"
        if self.verdict == "good":
            return f"within {percent(GOOD_WITHIN)}"
        if self.ratio >= TIMES:
            return f"{self.ratio:.1f} times as much"
        off = abs(self.ratio - 1)
        # just beyond the limit must not read as the limit
        return (f"{percent(off, digits=0 if off >= GOOD_WITHIN + 0.01 else 1)} "
                f"{'more' if self.ratio > 1 else 'less'}")


def comparisons(metrics: Mapping[str, Any]) -> tuple[Comparison, ...]:
    """A Comparison for each quantity that `metrics` has."""
    rows = []
    for key, (label, unit) in MEASURES.items():
        measured, predicted = (number(metrics, *key.split("."), name) for name in (
            "measured", "predicted"))
        if measured is None and predicted is None:
            continue
        if key == "load_s" and not measured:  # the ranks still held the weights
            continue
        if "served" in metrics and f"served.{key}" in MEASURES:
            continue
        # no ratio of shares: 1 % against 2 % would be 2, and does not matter; a service has its
        # arrivals' rates
        has_ratio = unit not in ("%", "tokens") and ("served" not in metrics or "served" in key)
        ratio = measured / predicted if has_ratio and predicted and measured is not None and (
            math.isfinite(predicted)) else None
        rows.append(Comparison(label=label, predicted=quantity(predicted, unit),
                               measured=quantity(measured, unit), ratio=ratio,
                               is_rate=unit.endswith("/s")))
    return tuple(rows)


def lost_to_bound(schedule: Schedule) -> float | None:
    """Share of the throughput that the latency limit costs; None if unknown, or if the schedule was
    chosen for the job's duration."""
    if math.isinf(schedule.bound.limit_s) and schedule.proof.status != Status.JOB:
        return 0.0
    free = schedule.proof.unbounded_qps
    if free is None or free <= 0 or schedule.proof.status == Status.JOB:
        return None
    lost = 1 - schedule.figures.throughput_qps / free
    return lost if lost >= 0.0005 else 0.0  # shown to a tenth of a per cent


def metrics_of(output: Output) -> dict[str, Any]:
    """The run's metrics.json, or the figures so far of a run that has not written it."""
    if output.metrics is not None:
        return dict(output.metrics)
    so_far = metrics_so_far(output.queries, len(output.errors))
    if not output.queries_before:
        return so_far
    # the answers of this run are not known before its end, so nothing is measured yet
    return {key: so_far[key] for key in ("queries", "errors")} | {
        "queries_before": output.queries_before}


def predicted_of(metrics: Mapping[str, Any]) -> dict[str, float | None] | None:
    """{name: figure} that a run's metrics predict of its whole job; None without a prediction."""
    found = {name: number(metrics, name, "predicted") for name in JOB_FIGURES}
    return None if found["wall_s"] is None else found


def was_changed(metrics: Mapping[str, Any]) -> bool:
    """Whether the schedule was changed while the job ran."""
    return any(decision.get("choice") == "adjust" for decision in metrics.get("rescheduling") or ()
               if isinstance(decision, Mapping))


def why_not_predicted(metrics: Mapping[str, Any]) -> str | None:
    """A sentence about why no measured figure has a prediction; None if one has."""
    rows = comparisons(metrics)
    if not rows or any(row.predicted != "-" for row in rows):
        return None
    if number(metrics, "queries_before"):
        what = "this run answered the rest of it"
    elif text_at(metrics, "status") == "stopped":
        what = "this run was stopped before its end"
    elif was_changed(metrics):
        what = "the schedule was changed while it ran"
    else:
        return "No prediction was made of this run."
    return f"No prediction beside it: what was predicted is the whole job, and {what}."


def metrics_so_far(queries: QueryColumns, num_errors: int) -> dict[str, Any]:
    """Figures so far of a run, by the keys of metrics.json."""
    if not queries:
        return {"queries": 0, "errors": num_errors}
    span_s = float(ends_since_first(queries)[-1])
    figures: dict[str, Any] = {"wall_s": {"measured": span_s}}
    for name in ("latency", "ttft", "tpot"):
        if len(known := recorded(queries.times(f"{name}_s"))):
            figures |= {f"{name}_{label}_s": {"measured": float(np.quantile(known, share))}
                        for label, share in (("p50", 0.5), ("p99", 0.99))}
    if span_s > 0:
        figures["throughput_qps"] = {"measured": len(queries) / span_s}
        tokens = int(queries.counts("output_tokens").sum(dtype=np.int64))
        figures["output_tokens_per_s"] = {"measured": tokens / span_s}
    return {"queries": len(queries), "errors": num_errors, **figures}


def middle_window(lanes: Sequence[Lane], wanted_s: float | None) -> tuple[float, float] | None:
    """(start, end) in seconds around the middle of the run: `wanted_s` long, or shorter, so that it
    has at most MOST_STEPS steps. None without steps."""
    span_s = max((float(lane.end_s.max()) for lane in lanes), default=0.0)
    if span_s <= 0:
        return None
    count = sum(len(lane.kinds) for lane in lanes)
    length_s = min(span_s, wanted_s or 0.1 * span_s, MOST_STEPS * span_s / count)
    return (span_s - length_s) / 2, (span_s + length_s) / 2


def quantity(value: float | None, unit: str) -> str:
    """`value` with its unit, three digits; '-' for None."""
    if value is None:
        return "-"
    if unit == "s":
        return format_seconds(value)
    if unit == "%":
        return percent(value, digits=1)
    return f"{plain(value)} {unit}"


def rates(throughput_qps: float, output_tokens_per_s: float) -> str:
    """`9.10 requests/s, 2,335 output tokens/s`."""
    return f"{plain(throughput_qps)} requests/s, {plain(output_tokens_per_s)} output tokens/s"


def percent(share: float, digits: int = 0) -> str:
    """A share in per cent: 0.153 -> '15 %'."""
    return f"{share * 100:.{digits}f} %"


def floor_percent(share: float) -> str:
    """A share in per cent, rounded down: 98.99 % must not read as the 99 % that were asked for."""
    return f"{math.floor(round(share * 1000, 6)) / 10:g} %"


def plain(value: float) -> str:
    """A number with three significant digits, whole from a hundred on: 12345.6 -> '12,346'."""
    if math.isinf(value):
        return "inf"
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"


class BoundCheck(NamedTuple):
    """Result of checking a limit. `is_kept`: None if it cannot be judged. `over`: requests (for a
    makespan: jobs) above it, out of `of`; `worst_s`: the largest value, in seconds. `is_joint`: of
    all limits of a service together; `bound` has the share that must keep them."""

    is_kept: bool | None
    sentence: str
    bound: Bound | None = None
    over: int = 0
    of: int = 0
    worst_s: float | None = None
    is_joint: bool = False

    @property
    def facts(self) -> dict[str, Any]:
        """The check as an object of metrics.json."""
        assert self.bound is not None, f"{self = }"
        metric = "attainment" if self.is_joint else self.bound.metric
        return {"metric": metric, "limit_s": self.bound.limit_s,
                "kind": self.bound.kind, "quantile": self.bound.quantile, "is_kept": self.is_kept,
                "over": self.over, "of": self.of, "share_over": self.over / max(self.of, 1),
                "worst_s": self.worst_s, "sentence": self.sentence}


def check_bounds(output: Output) -> list[BoundCheck]:
    """A BoundCheck of each limit that was set, in their order."""
    bounds = () if output.schedule is None else output.schedule.bounds
    if output.schedule is not None and (own := output.schedule.served) and own.wanted:
        return [_check_jointly(output.metrics, own.wanted)]
    return [_checked(output, bound) for bound in bounds if (
        math.isfinite(bound.limit_s) or bound.metric == "deadline")]


def check_bound(output: Output) -> BoundCheck:
    """One BoundCheck of all limits: kept if all that can be judged are."""
    checks = check_bounds(output)
    if not checks:
        return BoundCheck(None, "the latency limit is not known" if output.schedule is None else
                          "no latency limit was set")
    if len(checks) == 1:
        return checks[0]
    judged = [check.is_kept for check in checks if check.is_kept is not None]
    return BoundCheck(all(judged) if judged else None,
                      "; ".join(check.sentence for check in checks))


def kept_facts(checks: Sequence[BoundCheck]) -> dict[str, Any]:
    """The checks as keys of metrics.json; `bound_kept` is None if none can be judged."""
    judged = [check.is_kept for check in checks if check.is_kept is not None]
    return {"bound_kept": all(judged) if judged else None,
            "bounds": [check.facts for check in checks]}


def _check_jointly(metrics: Mapping[str, Any] | None, wanted: float) -> BoundCheck:
    share, bound = number(metrics, "served", "attainment", "measured"), Bound(
        limit_s=math.inf, kind="queries", quantile=wanted)
    if share is None:
        return BoundCheck(None, "attainment is known at the end", bound, is_joint=True)
    met = "met" if share >= wanted else "missed"
    return BoundCheck(share >= wanted, (
        f"attainment of {wanted * 100:g} % {met}: {floor_percent(share)} of the requests kept all "
        "limits"), bound, is_joint=True)


def _checked(output: Output, bound: Bound) -> BoundCheck:
    if bound.metric == "makespan":
        return _check_makespan(output, bound)
    if bound.metric == "deadline":
        return _check_deadlines(output, bound)
    if not output.queries:
        return BoundCheck(None, f"{_named(bound)}, no request done yet", bound)
    met = "met" if output.metrics is not None else "met so far"
    check = (_check_sequences if bound.metric == "latency" and bound.kind == "sequence" else
             _check_queries)
    found = check(output.queries, bound, met)
    return found._replace(sentence=f"{found.sentence}, over all runs of this job"
                          ) if output.queries_before else found


def _named(bound: Bound) -> str:
    limit = format_seconds(bound.limit_s)
    return f"limit of {limit} on {METRIC_WORDS[bound.metric]}"


def _check_makespan(output: Output, bound: Bound) -> BoundCheck:
    took_s = number(output.metrics, "wall_s", "measured")
    if output.metrics is None or took_s is None or output.metrics.get("status") != "done":
        return BoundCheck(None, f"{_named(bound)}: the job is not done", bound)
    if output.queries_before:
        return BoundCheck(None, f"{_named(bound)}: not judged, for the job took several runs",
                          bound)
    is_kept = took_s <= bound.limit_s
    return BoundCheck(is_kept, f"{_named(bound)} {'met' if is_kept else 'missed'}: it took "
                      f"{format_seconds(took_s)}", bound, int(not is_kept), 1, took_s)


def _check_deadlines(output: Output, bound: Bound) -> BoundCheck:
    of, in_time = (number(output.metrics, key) for key in ("with_deadline", "in_time"))
    if not of or in_time is None:
        return BoundCheck(None, "deadlines: the results do not tell", bound)
    share, expired = in_time / of, number(output.metrics, "expired") or 0
    verb = "met" if share >= bound.quantile else "missed"
    return BoundCheck(share >= bound.quantile, (
        f"deadlines {verb}: {floor_percent(share)} of {of:,.0f} requests were in "
        f"time, {bound.quantile * 100:g} % were asked for"
        + f"; {expired:,.0f} expired" * (expired > 0)), bound, int(of - in_time), int(of))


def _seconds(queries: QueryColumns, metric: Metric) -> FloatArray:
    """Seconds of a metric, of each request that recorded it."""
    arrival_s, starts_s = queries.times("arrival_s"), queries.times("encode_start_s")
    if metric == "queueing":
        return recorded(starts_s - arrival_s)
    if metric == "ttft":  # a batch job counts it from the run's start, the limit from the prefill
        return recorded(queries.times("ttft_s") - np.where(np.isnan(arrival_s), starts_s, 0.0))
    return recorded(queries.times("tpot_s" if metric == "tpot" else "latency_s"))


def _check_queries(queries: QueryColumns, bound: Bound, met: str) -> BoundCheck:
    values = _seconds(queries, bound.metric)
    if not len(values):
        return BoundCheck(None, f"{_named(bound)}: the results do not tell", bound)
    over, slowest = int((values > bound.limit_s).sum()), float(values.max())
    share = 1 - over / len(values)
    verb = met if share >= bound.quantile else "missed"
    shown = floor_percent(share)
    worst = f"; {over} of {len(values):,} took longer, the slowest {format_seconds(slowest)}"
    return BoundCheck(share >= bound.quantile, (
        f"{_named(bound)} {verb}: {shown} of the requests stayed within it, "
        f"{bound.quantile * 100:g} % were asked for{worst if over else ''}"),
        bound, over, len(values), slowest)


def _check_sequences(queries: QueryColumns, bound: Bound, met: str) -> BoundCheck:
    lengths = queries.counts("output_tokens")
    place = min(math.ceil(bound.quantile * len(lengths)) - 1, len(lengths) - 1)
    longest = int(np.partition(lengths, place)[place])
    latencies = queries.times("latency_s")[lengths <= longest]
    late, slowest = int((latencies > bound.limit_s).sum()), float(latencies.max())
    found = BoundCheck(not late, "", bound, late, len(latencies), slowest)
    if late:
        share = 100 * late / len(latencies)
        shown = f"{share:.2g}" if share < 10 else f"{math.floor(share)}"
        return found._replace(sentence=(
            f"{_named(bound)} missed by {late} of {len(latencies):,} requests "
            f"({shown} %) of up to {longest} tokens; the slowest took "
            f"{format_seconds(slowest)}"))
    return found._replace(sentence=(
        f"{_named(bound)} {met}: the slowest request of up to {longest} tokens took "
        f"{format_seconds(slowest)}"))
