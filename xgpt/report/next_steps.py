"""What to try next, told from what one run left: no search, only figures that are there."""

import math
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from xgpt.core.schedule import Schedule
from xgpt.report.bounds import BoundCheck
from xgpt.report.figures import lost_to_bound, percent, plain
from xgpt.report.output import Output, columns_of, number, text_at
from xgpt.report.words import counted

_MATTERS = 0.05  # share of the time or throughput that is worth a change
_NEAR = 0.03  # another policy is as good, within what a profile is off
_BUSY_OTHERS = 0.05  # share of the cores that other programs took


class Hint(NamedTuple):
    """Why, and the command for it (after `xgpt`; JOB.yaml where the job's file is not known)."""

    why: str
    command: str


def next_steps(output: Output, metrics: Mapping[str, Any], check: BoundCheck) -> list[Hint]:
    """At most a handful, the most telling first."""
    steps = list(_after_misses(output, metrics, check))
    if output.schedule is not None:
        steps += _of_the_choice(output.schedule)
    source = text_at(output.job, "source")
    return [Hint(step.why, step.command if source is None else step.command.replace(
        "JOB.yaml", shlex.quote(source))) for step in steps[:6]]


def _after_misses(output: Output, metrics: Mapping[str, Any], check: BoundCheck) -> Iterator[Hint]:
    seconds = [number(metrics, "attribution", key) for key in (
        "predicted_s", "with_lengths_s", "with_times_s", "measured_s")]
    changes = [b / a - 1 if a and b and math.isfinite(a + b) else 0.0
               for a, b in zip(seconds, seconds[1:], strict=False)]
    lengths, times, rest = changes
    if abs(lengths) >= _MATTERS or (check.is_kept is False and lengths > 0):
        yield Hint(f"The answers were not as long as planned ({_signed(lengths)} of the time). "
                   "Plan with the lengths that this run observed:", _observed(output))
    if abs(times) >= _MATTERS:
        yield Hint(f"Steps took {percent(abs(times))} {'longer' if times > 0 else 'less'} than the "
                   "profile says. Measure it anew, while nothing else runs:",
                   "profile JOB.yaml --again")
    others = number(metrics, "others_cpu_share") or 0.0
    if others >= _BUSY_OTHERS:
        yield Hint(f"Other programs took {percent(others)} of the cores. Run it on a "
                   "quiet machine:",
                   "submit JOB.yaml --set output=out/again")
    elif rest >= 2 * _MATTERS:
        yield Hint(f"{percent(rest)} of the time is neither lengths nor steps: messages, the host, "
                   "ranks that wait for one another. See what this machine has:", "doctor")
    if check.is_kept is False:
        yield Hint("The bound was missed. Plan with more margin:",
                   "submit JOB.yaml --set constraint.confidence=0.99")
    reasons = columns_of(output.queries).reasons()
    cut, cap = reasons["length"], number(output.job, "workload", "max_tokens")
    if cap and cut > 0.1 * len(output.queries):
        yield Hint(f"{counted(cut, 'answer')} of {len(output.queries)} were cut at the cap of "
                   f"{cap:.0f} tokens. Where that matters, raise it:",
                   f"submit JOB.yaml --set workload.max_tokens={2 * cap:.0f}")


def _of_the_choice(schedule: Schedule) -> Iterator[Hint]:
    lost = lost_to_bound(schedule)
    if lost is not None and lost >= _MATTERS and schedule.proof.unbounded_qps:
        yield Hint(f"The latency bound costs {percent(lost)} of the throughput "
                   f"({plain(schedule.proof.unbounded_qps)} queries/s without it). See what lies "
                   "between:", "sweep JOB.yaml")
    if schedule.margin.cost >= _MATTERS:
        yield Hint(f"The margin costs {percent(schedule.margin.cost)} of the throughput. Where a "
                   "bound missed now and then is no harm, plan with less:",
                   "schedule JOB.yaml --set constraint.confidence=0.8")
    for row in schedule.rejected:
        name = row.subject
        if row.kind == "policy" and row.throughput_qps is not None and (
                row.throughput_qps >= (1 - _NEAR) * schedule.figures.throughput_qps):
            yield Hint(f"{name} is expected to be as good within {percent(_NEAR)}. Measure it:",
                       f"submit JOB.yaml --set schedule.policy={name} --set output=out/{name}")
    yield Hint("What a little more latency, another device or more memory would bring:",
               "schedule JOB.yaml --price")


def _observed(output: Output) -> str:
    lengths = columns_of(output.queries).counts("output_tokens") if output.queries else np.ones(1)
    moments = f"mean: {lengths.mean():.0f}, std: {max(lengths.std(), 1):.0f}, max: {lengths.max()}"
    return f"schedule JOB.yaml --set 'workload.output_tokens={{{moments}}}'"


def _signed(share: float) -> str:
    return f"{100 * share:+.0f} %"
