"""The use case of `xgpt workload`: lengths and arrivals of a job's requests, or of a trace."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xgpt.app.opened_job import open_job
from xgpt.app.teller import Teller
from xgpt.core.lengths import FloatArray, IntArray, synthetic_lengths
from xgpt.core.problem import Problem
from xgpt.core.units import format_seconds
from xgpt.job.job_file import load_job
from xgpt.job.job_lengths import read_lengths, read_times, trace_columns
from xgpt.report.table import fact, table

_SAMPLED = 100_000  # chosen: requests drawn for a job that has no number of them
_COLUMNS = {"mean": np.mean, "median": np.median, "p90": lambda own: np.quantile(own, 0.9),
            "deviation": np.std}


def workload_figures(path: Path, overrides: Sequence[str], tell: Teller) -> dict[str, Any]:
    """Figures of a job file, with `key.path=value` overrides, or of a trace, as `--json` has them.
    Lengths, or arrivals, are None where it tells none. Raises InputError."""
    if path.suffix in (".yaml", ".yml") or overrides:
        problem = open_job(load_job(path, overrides), tell, "lengths").problem
        return _figures(*_of_job(problem), is_cap=problem.observes)
    has_lengths, has_times = trace_columns(path)
    return _figures(read_lengths(path, "input", "output") if has_lengths or not has_times else None,
                    read_times(path) if has_times else None)


def _of_job(problem: Problem) -> tuple[IntArray, FloatArray | None]:
    """([requests, 2] input and output tokens, [requests] times of arrival) of a job's own requests,
    or of drawn ones."""
    own, arrivals = problem.queries, problem.arrivals
    columns = (own.inputs, own.expected_outputs) if own is not None else synthetic_lengths(
        problem.lengths, problem.num_queries or _SAMPLED, problem.seed)
    if arrivals is None or arrivals.own_rate is None:
        return np.stack(columns, axis=1), None
    return np.stack(columns, axis=1), arrivals.times_s if arrivals.times_s is not None else (
        arrivals.at_rate(arrivals.own_rate, len(columns[0]), problem.seed))


def _figures(pairs: IntArray | None, times_s: FloatArray | None, *,
             is_cap: bool = False) -> dict[str, Any]:
    lengths = arrivals = None
    if pairs is not None:
        inputs, outputs = pairs.T
        is_varied = min(inputs.std(), outputs.std()) > 0
        lengths = {**{name: {key: float(of(own)) for key, of in _COLUMNS.items()}
                      for name, own in (("input_tokens", inputs), ("output_tokens", outputs),
                                        ("ratio", inputs / np.maximum(outputs, 1)))},
                   "correlation": float(np.corrcoef(pairs.T)[0, 1]) if is_varied else None,
                   "outputs_are_caps": is_cap}
    if times_s is not None and times_s[-1] > times_s[0]:
        gaps, minutes = np.diff(times_s), ((times_s - times_s[0]) // 60).astype(np.int64)
        counts = np.bincount(minutes)[:max(int(minutes[-1]), 1)]  # without the last, a part
        arrivals = {"seconds": float(gaps.sum()), "rate": float(1 / gaps.mean()),
                    "cv": float(gaps.std() / gaps.mean()),
                    "least_per_minute": int(counts.min()), "most_per_minute": int(counts.max())}
    count = len(pairs if pairs is not None else times_s if times_s is not None else ())
    return {"requests": count, "lengths": lengths, "arrivals": arrivals}


def workload_screen(figures: dict[str, Any]) -> str:
    """Text with the figures of `workload_figures`, at most 80 columns wide."""
    lengths, own = figures["lengths"], figures["arrivals"]
    span = f" in {format_seconds(own['seconds'])}" if own else ""
    lines = [fact("requests", f"{figures['requests']:,}{span}")]
    if own:
        lines += [fact("rate", f"{own['rate']:.4g} requests/s, CV of the gaps {own['cv']:.2f}"),
                  fact("a minute", f"{own['least_per_minute']:,} to {own['most_per_minute']:,} "
                       "requests")]
    if lengths is None:
        return "\n".join(lines)
    rows = [(label, *(f"{lengths[name][key]:,.{digits}f}" for key in _COLUMNS))
            for label, name, digits in (("input tokens", "input_tokens", 1),
                                        ("output tokens", "output_tokens", 1),
                                        ("input / output", "ratio", 2))]
    lines += ["", table(("", "mean", "median", "P90", "deviation"), rows, right=(1, 2, 3, 4)), ""]
    if lengths["correlation"] is not None:
        lines.append(fact("correlation", f"{lengths['correlation']:.2f} of inputs and outputs"))
    if lengths["outputs_are_caps"]:
        lines.append(fact("note", "outputs are caps: a run has not yet told their lengths"))
    return "\n".join(lines)
