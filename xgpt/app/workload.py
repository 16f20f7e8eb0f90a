"""The use case of `xgpt workload`: lengths and arrivals of a job's requests, or of a trace."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgpt.app.opened_job import open_job
from xgpt.app.teller import Teller
from xgpt.core.lengths import FloatArray, IntArray, synthetic_lengths
from xgpt.core.units import format_seconds
from xgpt.job.job_file import load_job
from xgpt.job.job_lengths import read_lengths, read_times, trace_columns
from xgpt.report.table import fact, table

_SAMPLED = 10_000  # chosen: requests drawn for a job that has no number of them
_ROWS = (("input tokens", "input_tokens", 1), ("output tokens", "output_tokens", 1),
         ("input / output", "ratio", 2))


def workload_figures(path: Path, overrides: Sequence[str], tell: Teller) -> dict[str, Any]:
    """Figures of a job file, with `key.path=value` overrides, or of a trace, as `--json` has them.
    `lengths` and `arrivals` are None where it tells none. Raises InputError."""
    if path.suffix not in (".yaml", ".yml") and not overrides:
        has_lengths, has_times = trace_columns(path)
        return _figures(read_times(path) if has_times else None, read_lengths(
            path, "input", "output") if has_lengths or not has_times else None)
    problem = open_job(load_job(path, overrides), tell, "lengths").problem
    own, pairs, arrivals = problem.queries, problem.lengths.pairs, problem.arrivals
    if own is not None:
        pairs = np.stack([own.inputs, own.expected_outputs], axis=1)
    elif pairs is None or problem.num_queries:
        pairs = np.stack(synthetic_lengths(
            problem.lengths, problem.num_queries or _SAMPLED, problem.seed), axis=1)
    rate = arrivals and arrivals.own_rate
    return _figures(arrivals.at_rate(rate, len(pairs), problem.seed) if arrivals and rate else None,
                    pairs, has_caps=problem.observes)


def _figures(times_s: FloatArray | None, pairs: IntArray | None,
             has_caps: bool = False) -> dict[str, Any]:
    """`times_s`: [requests] times of arrival. `pairs`: [requests, 2] input and output tokens."""
    found: dict[str, Any] = {"requests": 0 if times_s is None else len(times_s),
                             "lengths": None, "arrivals": None}
    if times_s is not None and times_s[-1] > times_s[0]:
        gaps, minutes = np.diff(times_s), ((times_s - times_s[0]) // 60).astype(np.int64)
        counts = np.bincount(minutes)[:max(int(minutes[-1]), 1)]  # without the last, a part
        found |= {"arrivals": {
            "seconds": float(gaps.sum()), "rate": float(1 / gaps.mean()),
            "cv": float(gaps.std() / gaps.mean()),
            "least_per_minute": int(counts.min()), "most_per_minute": int(counts.max())}}
    if pairs is not None:
        inputs, outputs = pairs[:, 0], pairs[:, 1]
        columns: Sequence[NDArray[Any]] = (inputs, outputs, inputs / np.maximum(outputs, 1))
        found |= {"requests": len(pairs), "lengths": {
            **{name: {"mean": float(own.mean()), "median": float(np.median(own)),
                      "p90": float(np.quantile(own, 0.9)), "deviation": float(own.std())}
               for (_, name, _), own in zip(_ROWS, columns, strict=True)},
            "has_caps": has_caps, "correlation": float(np.corrcoef(inputs, outputs)[0, 1]) if (
                inputs.std() * outputs.std() > 0) else None}}
    return found


def workload_screen(figures: dict[str, Any]) -> str:
    """Text with the figures of `workload_figures`, at most 80 columns wide."""
    lengths, own = figures["lengths"], figures["arrivals"]
    lines = [fact("requests", f"{figures['requests']:,}" + (
        f" in {format_seconds(own['seconds'])}" if own else ""))]
    if own:
        lines.append(fact("rate", f"{own['rate']:.4g} requests/s, {own['least_per_minute']:,} to "
                          f"{own['most_per_minute']:,} a minute; CV of the gaps {own['cv']:.2f}"))
    if lengths:
        if lengths["correlation"] is not None:
            lines.append(fact("correlation", f"{lengths['correlation']:.2f} of inputs and outputs"))
        if lengths["has_caps"]:
            lines.append(fact("note", "outputs are caps: a run has not yet told their lengths"))
        lines += ["", table(("", "mean", "median", "P90", "deviation"), [
            (label, *(f"{one:,.{digits}f}" for one in lengths[name].values()))
            for label, name, digits in _ROWS], right=(1, 2, 3, 4))]
    return "\n".join(lines)
