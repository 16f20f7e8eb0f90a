"""What a replay showed beside what the estimate said, for the terminal."""

from collections.abc import Iterable
from dataclasses import dataclass

from xgpt.core.constraint import Constraint
from xgpt.core.policies import policy
from xgpt.core.schedule import Estimate
from xgpt.core.units import format_seconds
from xgpt.report.figures import percent, plain
from xgpt.report.policy_words import controls_cell
from xgpt.report.table import fact, table

NONE_KEEPS = "none fits and keeps the bound"  # of a policy
_STAGES_LISTED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayFigures:
    """A whole job with its start and end, and the steady state within it (None: too short a job
    for one, or no query of the length that the bound is about)."""

    queries: int
    throughput_qps: float
    output_tokens_per_s: float
    latency_p50_s: float
    latency_p99_s: float
    wall_s: float
    steady_throughput_qps: float | None
    steady_latency_s: float | None  # of unlike copies the slowest one's
    estimated_latency_s: float  # of the same copy, by the estimate
    utilisation: tuple[float, ...]  # per stage, of the steady state where there is one
    kv_peak_tokens: int  # of the fullest pool that decodes
    kv_tokens: int  # its budget
    preemptions: int


def replay_table(estimate: Estimate, replay: ReplayFigures) -> str:
    """The figures as lines of at most 80 columns."""
    lines = [("replay", f"{replay.queries} queries: {plain(replay.throughput_qps)} queries/s, "
              f"{plain(replay.output_tokens_per_s)} tokens/s, start and end included; latency p50 "
              f"{format_seconds(replay.latency_p50_s)}, p99 "
              f"{format_seconds(replay.latency_p99_s)}; {format_seconds(replay.wall_s)} in all")]
    if replay.steady_throughput_qps is None:
        lines.append(("steady", "the job is too short to have a steady state"))
    else:
        text = (f"{plain(replay.steady_throughput_qps)} queries/s "
                f"({_against(estimate.figures.throughput_qps, replay.steady_throughput_qps)})")
        if replay.steady_latency_s is not None:
            of = " of the slowest copy" if estimate.others else ""
            text += (f"; latency {format_seconds(replay.steady_latency_s)}{of} "
                     f"({_against(replay.estimated_latency_s, replay.steady_latency_s)})")
        lines.append(("steady", text))
    preemptions = f"; {replay.preemptions} preemptions" if replay.preemptions else ""
    share = percent(replay.kv_peak_tokens / max(replay.kv_tokens, 1))
    lines += [("busy", _busy(replay.utilisation)),
              ("KV held", f"at most {replay.kv_peak_tokens} of {replay.kv_tokens} tokens "
                          f"({share}){preemptions}")]
    return "\n".join(fact(label, value) for label, value in lines)


def policies_table(rows: Iterable[tuple[str, Estimate | str]], constraint: Constraint) -> str:
    """The best of each policy within the bound, one line each, or why there is none, against the
    first: the schedule that was asked for, which need not keep it."""
    rows = list(rows)
    first = rows[0][1]
    assert not isinstance(first, str)
    body = []
    for name, e in rows:
        cells = ("-", "-", "-", e if isinstance(e, str) else "")
        if not isinstance(e, str):
            over = " OVER" if e.figures.latency_s > constraint.latency_s else ""
            cells = (plain(e.figures.throughput_qps),
                     f"{e.figures.throughput_qps / first.figures.throughput_qps:.2f}",
                     format_seconds(e.figures.latency_s) + over, controls_cell(e))
        body.append((policy(name).title, *cells))
    return table(("policy", "queries/s", "share", "latency", "configuration"), body,
                 right=(1, 2, 3))


def _against(closed: float, replayed: float) -> str:
    return f"the estimate says {closed / replayed - 1:+.1%}"


def _busy(shares: tuple[float, ...]) -> str:
    if len(shares) > _STAGES_LISTED:
        return (f"stages work {percent(min(shares))} to {percent(max(shares))} of the time, "
                f"{percent(sum(shares) / len(shares))} in the mean")
    listed = ", ".join(f"stage {i} {percent(share)}" for i, share in enumerate(shares))
    return f"{listed} of the time; the rest are bubbles"
