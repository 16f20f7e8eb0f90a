"""Says what the shared prefixes of a job save: words for screens, and figures for metrics.json."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from xgpt.core.controls import SHARING_ORDERS
from xgpt.core.prefixes import Prefixes
from xgpt.core.problem import Problem, QueryLengths
from xgpt.core.schedule import Estimate, Schedule
from xgpt.core.units import format_seconds
from xgpt.report.figures import percent
from xgpt.report.words import counted
from xprofiler.timing import TimingSource
from xscheduler.evaluator import predict
from xsimulator.replay.prediction import JobPrediction

_ONCE = 0.1  # chosen: share of the encoded tokens, such as rests of blocks in the same step
_GAIN = 1.05  # chosen: least gain that is shown


def prefix_lines(problem: Problem, schedule: Schedule, prediction: JobPrediction | None,
                 timing: TimingSource) -> list[str]:
    """Sentences on what the schedule's prefixes save, and what its order costs; none if it shares
    none. `prediction`: of the job by the schedule."""
    known, estimate = problem.queries, schedule.estimate
    if known is None or known.prefixes is None or not estimate.shares_prefixes:
        return []
    total, once = _tokens(known)
    of = "the" if problem.num_queries is None else _short(total)
    text = f"{percent(1 - once / total)} of {of} input tokens are shared: {_forest(known.prefixes)}"
    if prediction is not None:
        again = prediction.encoded_tokens - once
        text += ", each encoded once" if again < _ONCE * once else (
            f"; {_short(round(again))} are encoded again")
        if gain := _gain(problem, timing, estimate, prediction):
            text += f"; {gain} x as fast as this schedule without sharing"
    return [text, _order(schedule)] if schedule.order in SHARING_ORDERS else [text]


def _tokens(known: QueryLengths) -> tuple[int, int]:
    """(input tokens, those encoded if each prefix is encoded once) of the requests that can run."""
    own = known.take(np.flatnonzero(known.most_outputs))
    return int(own.inputs.sum()), int(own.encoded.sum())


def _forest(prefixes: Prefixes) -> str:
    """`50 prefixes of 3,000 tokens`, by the tokens that each adds to the one above it."""
    own = prefixes.own_tokens[prefixes.used]
    sizes = f"{own.min():,}" if own.min() == own.max() else f"{own.min():,} to {own.max():,}"
    return f"{counted(len(own), 'prefix')} of {sizes} tokens"


def _gain(problem: Problem, timing: TimingSource, estimate: Estimate,
          prediction: JobPrediction) -> str:
    """Throughput by that of the same schedule without sharing; "" where it is hardly more, or
    unknown."""
    assert problem.queries is not None
    without = predict(replace(problem, queries=replace(problem.queries, prefixes=None)), timing,
                      estimate, replays=1)
    gain = math.inf if without is None else without.wall_s / prediction.wall_s
    return f"{gain:.{int(gain < 10)}f}" if _GAIN <= gain < math.inf else ""


def _order(schedule: Schedule) -> str:
    """`order prefix, window job: first results after 40 s (2 s in the input's order, ...)`."""
    text, cost = f"order {schedule.order}, window {schedule.window or 'job'}", schedule.reordered
    return text if cost is None else (
        f"{text}: first results after {format_seconds(cost.first_s)} "
        f"({format_seconds(cost.input_first_s)} in the input's order, which would save "
        f"{percent(cost.input_saved)})")


def _short(tokens: int) -> str:
    return f"{tokens / 1e6:,.1f} M" if tokens >= 1e6 else f"{tokens:,}"


def prefix_figures(problem: Problem, measured: Mapping[str, Any],
                   prediction: JobPrediction | None) -> dict[str, Any]:
    """Keys of metrics.json on shared prefixes, from those of measured.json; none for a run that
    shared none. `prediction`: of the whole job."""
    own, known, expected = measured.get("prefixes"), problem.queries, dict[str, float]()
    if own is None:
        return {}
    is_whole = measured["state"] == "done" and measured["queries_before"] == 0
    if is_whole and prediction is not None and known is not None and known.prefixes is not None:
        total, once = _tokens(known)
        expected = {"encoded_tokens": prediction.encoded_tokens, "shared_tokens": total - once,
                    "encoded_again_tokens": prediction.encoded_tokens - once}
    pairs = {key: {"measured": own[key], "predicted": expected.get(key)} for key in (
        "encoded_tokens", "shared_tokens", "encoded_again_tokens")}
    return {"prefixes": {**own, **pairs}}
