"""Several runs beside one another: their figures, their queries, and what their jobs differ in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from xgpt.core.policies import policy
from xgpt.core.schedule import Schedule
from xgpt.core.system.whole_file import write_atomically
from xgpt.report import figures
from xgpt.report.chart import PALETTE, Chart
from xgpt.report.figures import check_bound, percent, quantity
from xgpt.report.html_page import render_page
from xgpt.report.output import Output, number, read_output, text_at
from xgpt.report.run_charts import done_curve, latencies
from xgpt.report.words import controls_cell

_FIGURES = [(key, *figures.MEASURES[key]) for key in (
    "throughput_qps", "output_tokens_per_s", "latency_p50_s", "latency_p99_s", "ttft_p99_s",
    "tpot_p99_s", "wall_s")]
_AS_FAST = 0.03  # runs of one schedule differ by as much
# keys of job.json that say where it lies, or the same once more
_OF_PLACE = ("output", "name", "source", "results", "asked")


class Run(NamedTuple):
    """A run under a name that no other of the comparison has."""

    name: str
    output: Output
    metrics: Mapping[str, Any]

    def measured(self, key: str) -> float | None:
        return number(self.metrics, key, "measured")


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Writes a page that compares the runs of `folders`. Raises InputError where one is no
    folder, MissingExtraError without jinja2."""
    runs = read_runs(folders)
    drawn = comparison_charts(runs)
    write_atomically(path, render_page(
        "comparison.html.j2", path.name, drawn, charts=drawn, headline=headline(runs),
        headers=[run.name for run in runs], rows=figure_rows(runs),
        differences=differences(runs),
        missing=[run.name for run in runs if not run.output.queries]))
    return path


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs, each named by its folder, with as much of the path as tells them apart."""
    resolved = [folder.resolve() for folder in folders]
    deepest = max(len(folder.parts) for folder in resolved)
    depth = next((n for n in range(1, deepest) if len(
        {folder.parts[-n:] for folder in resolved}) == len(resolved)), deepest)
    made = []
    for folder, whole in zip(folders, resolved, strict=True):
        output = read_output(folder, 0)
        made.append(Run("/".join(whole.parts[-depth:]), output, figures.metrics_of(output)))
    return made


def headline(runs: Sequence[Run]) -> str:
    """Which is fastest, and by how much, where that is measured of all."""
    rates = {run.name: rate for run in runs if (rate := run.measured("throughput_qps"))}
    text = f"{len(runs)} runs beside one another"
    if len(rates) < len(runs) or len(runs) < 2:
        return text
    first, second, *_ = sorted(rates, key=lambda name: -rates[name])
    ratio, slowest = rates[first] / rates[second], min(rates.values())
    shown = f"{quantity(rates[first], 'queries/s')} against {quantity(rates[second], 'queries/s')}"
    if ratio - 1 < _AS_FAST:
        return f"{text}: {first} and {second} are as fast within {percent(_AS_FAST)}, {shown}"
    if len(runs) == 2:
        return f"{first} is {ratio:.2f} times as fast as {second}: {shown}"
    return (f"{text}: {first} is the fastest, {shown} of the next, {second}, and "
            f"{quantity(slowest, 'queries/s')} of the slowest")


def figure_rows(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """(label, a cell a run): what was run, what came of it, and what was predicted."""
    rows = [("Model", [text_at(run.output.job, "model") or "-" for run in runs]),
            ("Policy", [_of(run.output.schedule, lambda s: policy(s.estimate.policy).title)
                        for run in runs]),
            ("Control variables", [_of(run.output.schedule, lambda s: controls_cell(s.estimate))
                                   for run in runs]),
            ("Engine", [text_at(run.metrics, "engine") or "-" for run in runs]),
            ("Queries", [_queries(run) for run in runs])]
    for key, label, unit in _FIGURES:
        if any(run.measured(key) is not None for run in runs):
            rows.append((label, [_figure(run, key, unit) for run in runs]))
    return [*rows, ("Bound", [check_bound(run.output).sentence for run in runs])]


def _queries(run: Run) -> str:
    text = f"{number(run.metrics, 'queries') or 0:,.0f}"
    before = run.output.queries_before
    return f"{text}, {before:,} by earlier runs; the figures are of the others" if before else text


def _figure(run: Run, key: str, unit: str) -> str:
    predicted = number(run.metrics, key, "predicted")
    text = quantity(run.measured(key), unit)
    return text if predicted is None else f"{text} (predicted {quantity(predicted, unit)})"


def _of(schedule: Schedule | None, words: Any) -> str:
    return "-" if schedule is None else str(words(schedule))


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """(key of the job, its value in each run) where they are not all the same."""
    flat = [dict(_flat(run.output.job)) for run in runs]
    keys = dict.fromkeys(key for job in flat for key in job)
    return [(key, [job.get(key, "-") for job in flat]) for key in keys
            if len({job.get(key) for job in flat}) > 1 and key.partition(".")[0] not in _OF_PLACE]


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    if not isinstance(value, Mapping):
        return [(prefix, "-" if value is None else str(value))]
    return [pair for key, inner in value.items()
            for pair in _flat(inner, f"{prefix}.{key}" if prefix else str(key))]


def comparison_charts(runs: Sequence[Run]) -> list[Chart]:
    """Of the runs that have answered something."""
    done = [run for run in runs if run.output.queries]
    # the queries of a run that went on are on several clocks
    on_one_clock = [run for run in done if not run.output.queries_before]
    charts = [_beside(done, latencies),
              _beside(on_one_clock, lambda output: done_curve(output.queries, ()))]
    return [chart for chart in charts if chart is not None]


def _beside(runs: Sequence[Run], chart_of: Callable[[Output], Chart | None]) -> Chart | None:
    """What was measured of each run, in one chart."""
    drawn = [(run.name, chart) for run in runs if (chart := chart_of(run.output)) is not None]
    if not drawn:
        return None
    return replace(drawn[0][1], marks=(), caption="", series=[
        replace(chart.series[0], label=name, colour=PALETTE[place % len(PALETTE)])
        for place, (name, chart) in enumerate(drawn)])
