"""Writes `report.html`, a self-contained page of one run, done or interrupted; and a page that
compares several runs: their figures, requests and differing keys.

Prompts, answers and error texts are untrusted: templates escape them, and the page's own policy
runs only scripts whose hashes it names."""

import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from xgpt.core import catalog
from xgpt.core.lengths import Lengths, truncated_normal
from xgpt.core.policies import policy
from xgpt.core.schedule import Schedule
from xgpt.core.system.whole_file import write_atomically
from xgpt.report import figures, offload_words, words
from xgpt.report import run_charts as charts
from xgpt.report.chart import PALETTE, Chart
from xgpt.report.figures import BoundCheck, check_bound, lost_to_bound, percent, plain, quantity
from xgpt.report.html_page import render_page
from xgpt.report.output import Output, number, read_output, text_at
from xgpt.report.profile_table import profile_facts
from xgpt.report.replicas import replica_rows
from xgpt.report.table import alternative_cells, schedule_facts
from xgpt.report.words import controls_cell, counted

REPORT_NAME = "report.html"
MAX_ANSWERS = 100
SHOWN_ANSWERS = 3  # chosen: the others are folded
MAX_ERRORS = 100


def write_report(output_dir: Path, path: Path | None = None) -> Path:
    """Writes the page of the run in `output_dir`, also of an interrupted one, and returns its path.
    `path`: default `report.html` there. Raises InputError if `output_dir` is no folder, and
    MissingExtraError without jinja2."""
    return write_page(read_output(output_dir, MAX_ANSWERS), path)


def write_page(output: Output, path: Path | None = None) -> Path:
    """Writes the page of an Output with MAX_ANSWERS answers, and returns its path."""
    path = path or output.directory / REPORT_NAME
    metrics = figures.metrics_of(output)
    drawn = run_charts(output, metrics)
    write_atomically(path, render_page(
        "report.html.j2", REPORT_NAME, drawn, files=_files(output, path.parent),
        **_context(output, metrics, drawn)))
    return path


def run_charts(output: Output, metrics: Mapping[str, Any]) -> list[Chart]:
    """The charts that can be drawn of a run, in the order of its page."""
    # a prediction is of the whole job on one clock: it does not fit a continued run
    schedule, expected = output.schedule, None if output.queries_before else output.expected
    queries = output.queries
    made = (
        charts.latencies(output, expected.latency_s if expected else None),
        charts.first_tokens(output, expected.ttft_s if expected else None),
        None if output.queries_before else charts.done_curve(  # each run has a clock of its own
            queries, expected.done if expected else ()),
        charts.output_lengths(queries, expected_output_lengths(output.job)),
        charts.memory(schedule, metrics) if schedule else None,
        *charts.service(output),
        charts.timeline(output, expected.lanes if expected else ()))
    return [chart for chart in made if chart is not None]


def _context(output: Output, metrics: Mapping[str, Any], drawn: Sequence[Chart]) -> dict[str, Any]:
    check, schedule = check_bound(output), output.schedule
    decisions = metrics.get("rescheduling")
    return {
        "name": text_at(output.job, "name") or output.directory.name,
        "headline": words.headline(output, metrics),
        "subject": words.subject(output, metrics),
        "expected": words.expected_words(metrics),
        "truncated": _truncated(output),
        "check": check,
        "banner": words.banner(output),
        "is_done": output.metrics is not None and text_at(output.metrics, "status") != "stopped",
        "tiles": _tiles(metrics, check) + _cost(output, metrics),
        "comparisons": figures.comparisons(metrics),
        "replicas": replica_rows(metrics),
        "offload": offload_words.offload_rows(metrics),
        "unpredicted": figures.why_not_predicted(metrics),
        "schedule": schedule,
        "stages": [(pool.role, stage) for pool in schedule.estimate.all_pools
                   for stage in pool.stages] if schedule else (),
        "schedule_facts": schedule_facts(schedule) if schedule else (),
        "reasons": words.reasons(schedule) if schedule else (),
        "policy_sentence": words.policy_sentence(schedule.estimate) if schedule else "",
        "rejected": [(row.label, *alternative_cells(row, schedule), row.reason)
                     for row in schedule.rejected] if schedule else (),
        "words": words,
        "plots": [chart for chart in drawn if not chart.is_wide],
        "timelines": [chart for chart in drawn if chart.is_wide],
        "next_steps": next_steps(output, metrics, check),
        "changes": [said for row in (decisions if isinstance(decisions, list) else ())
                    if (said := text_at(row, "sentence")) is not None],
        "run_facts": _run_facts(output, metrics),
        "profile_facts": profile_facts(output.profile) if output.profile else (),
        "answers": output.answers, "shown": SHOWN_ANSWERS,
        "num_queries": len(output.queries),
        "errors": output.errors[:MAX_ERRORS],
        "num_errors": len(output.errors),
        "remarks": output.remarks,
    }


def _tiles(metrics: Mapping[str, Any], check: BoundCheck) -> list[dict[str, str]]:
    """The page's four main figures, each with its prediction."""
    tiles, keys = [], ("output_tokens_per_s", "latency_p50_s", "latency_p99_s")
    if "served" in metrics:
        keys = "served.attainment", "served.ttft_p90_s", "served.tpot_p90_s"
    for key in ("throughput_qps", *keys):
        label, unit = figures.MEASURES[key]
        own = [number(metrics, *key.split("."), side) for side in ("measured", "predicted")]
        value, _, shown_unit = quantity(own[0], unit).partition(" ")
        note = "" if own[1] is None else f"predicted {quantity(own[1], unit)}"
        is_bad = key in ("latency_p99_s", "served.attainment") and check.is_kept is False
        tiles.append({"label": label, "value": value, "unit": shown_unit, "note": note,
                      "state": "bad" if is_bad else ""})
    return tiles


def _cost(output: Output, metrics: Mapping[str, Any]) -> list[dict[str, str]]:
    """A tile with the device-hours of this run, loading included, and their price if known."""
    devices, wall_s = number(metrics, "ranks"), number(metrics, "wall_s", "measured")
    if not devices or wall_s is None:
        return []
    hours = devices * (wall_s + (number(metrics, "load_s", "measured") or 0.0)) / 3600
    price, unit = number(output.job, "asked", "job", "price_per_hour"), ""
    name = text_at(metrics, "machine", "device")
    if price is None and name in catalog.names("device"):
        price, unit = catalog.device(name).price_per_hour, " USD"
    note = f"{counted(devices, 'device')}, loading included" if price is None else (
        f"about {plain(price * hours)}{unit}, at {price:g} an hour for each")
    return [{"label": "Device-hours", "value": f"{hours:.2g}" if hours < 1 else plain(hours),
             "unit": "", "note": note, "state": ""}]


def _files(output: Output, folder: Path) -> list[tuple[str, str]]:
    """Names, and links from `folder`, of the run's files that are not empty."""
    table = text_at(output.job, "results")
    names = ("results.jsonl", *([] if table is None else [table]), "errors.jsonl", "metrics.json",
             "schedule.json")
    paths = [output.directory / name for name in names]
    return [(path.name, quote(os.fsencode(os.path.relpath(path, folder)))) for path in paths
            if path.is_file() and path.stat().st_size]


def expected_output_lengths(job: Mapping[str, Any]) -> Lengths | None:
    """The output lengths that the job states as a distribution; None if it states none."""
    task = text_at(job, "workload", "output_tokens", "task")
    if task is not None:
        return catalog.task(task).outputs if task in catalog.names("task") else None
    mean, std, maximum = (number(job, "workload", "output_tokens", key)
                          for key in ("mean", "std", "maximum"))
    if mean is None or std is None or maximum is None or not 0 < mean <= maximum or std < 0:
        return None
    return truncated_normal(mean, std, int(maximum))


def _run_facts(output: Output, metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = [("Job", text_at(output.job, "name")), ("Model", text_at(output.job, "model")),
             ("Weights", text_at(metrics, "model_source")),
             ("Loading", words.loading_words(metrics)), ("Engine", text_at(metrics, "engine")),
             ("Ranks", None if (ranks := number(metrics, "ranks")) is None else f"{ranks:.0f}"),
             ("Dtype", text_at(metrics, "dtype")),
             ("Forecasts", text_at(metrics, "forecast", "sentence")),
             ("Requests", text_at(output.job, "workload", "requests")),
             ("Date", text_at(metrics, "date")), ("Status", text_at(metrics, "status"))]
    machine = metrics.get("machine")
    facts += [(str(key).replace("_", " "), str(value)) for key, value in (
        machine.items() if isinstance(machine, Mapping) else ()) if value is not None]
    return [(label, value) for label, value in facts if value is not None]


_MATTERS = 0.05  # chosen: share of the time or throughput that is worth a change
_NEAR = 0.03  # chosen: another policy is as good, within the error of a profile
_BUSY_OTHERS = 0.05  # chosen: share of the cores that other programs used


class Hint(NamedTuple):
    """A reason and a command for it (after `xgpt`; JOB.yaml if the job's file is unknown)."""

    why: str
    command: str


def next_steps(output: Output, metrics: Mapping[str, Any], check: BoundCheck) -> list[Hint]:
    """At most six hints for the user, the most important first."""
    steps = list(_after_misses(output, metrics, check))
    if output.schedule is not None:
        steps += _of_the_choice(output.schedule)
    return [_named(output, step) for step in steps[:6]]


def _named(output: Output, hint: Hint) -> Hint:
    """The hint with the job's file in its command, if it is known."""
    source = text_at(output.job, "source")
    return hint if source is None else hint._replace(
        command=hint.command.replace("JOB.yaml", shlex.quote(source)))


def _after_misses(output: Output, metrics: Mapping[str, Any], check: BoundCheck) -> Iterator[Hint]:
    seconds = [number(metrics, "attribution", key) for key in (
        "predicted_s", "with_lengths_s", "with_times_s", "measured_s")]
    changes = [b / a - 1 if a and b and math.isfinite(a + b) else 0.0
               for a, b in zip(seconds, seconds[1:], strict=False)]
    lengths, times, rest = changes
    if abs(lengths) >= _MATTERS or (check.is_kept is False and lengths > 0):
        yield Hint(f"The answers were not as long as planned ({100 * lengths:+.0f} % of the time). "
                   "Plan with the lengths that this run observed:", _observed(output))
    if abs(times) >= _MATTERS:
        yield Hint(f"Steps took {percent(abs(times))} {'longer' if times > 0 else 'less'} than the "
                   "profile says. Measure it anew, while nothing else runs:",
                   "profile JOB.yaml --again")
    if (others := number(metrics, "others_cpu_share") or 0.0) >= _BUSY_OTHERS:
        yield Hint(f"Other programs took {percent(others)} of the cores. Run it on a "
                   "quiet machine:",
                   "submit JOB.yaml --set output=out/again")
    elif rest >= 2 * _MATTERS:
        yield Hint(f"{percent(rest)} of the time is neither lengths nor steps: messages, the host, "
                   "ranks that wait for one another. See what this machine has:", "doctor")
    if check.is_kept is False:
        yield Hint("The limit was missed. Plan with more margin:",
                   "submit JOB.yaml --set constraint.confidence=0.99")


def _truncated(output: Output) -> Hint | None:
    """How many answers are truncated, and the command that allows longer ones; None if none is."""
    cut, cap = words.truncated(output), number(output.job, "workload", "max_tokens")
    return _named(output, Hint(
        f"{cut:,} of {counted(len(output.queries), 'answer')} were truncated at their max_tokens. "
        "Where that matters, raise it:", f"submit JOB.yaml --set workload.max_tokens="
        f"{2 * (cap or max(output.queries.counts('output_tokens'))):.0f}")) if cut else None


def _of_the_choice(schedule: Schedule) -> Iterator[Hint]:
    lost = lost_to_bound(schedule)
    if lost is not None and lost >= _MATTERS and schedule.proof.unbounded_qps:
        yield Hint(f"The latency limit costs {percent(lost)} of the throughput "
                   f"({plain(schedule.proof.unbounded_qps)} requests/s without it). See what lies "
                   "between:", "sweep JOB.yaml")
    if schedule.margin.cost >= _MATTERS:
        yield Hint(f"The margin costs {percent(schedule.margin.cost)} of the throughput. Where a "
                   "limit missed now and then does no harm, plan with less:",
                   "schedule JOB.yaml --set constraint.confidence=0.8")
    for row in schedule.rejected:
        name = row.subject
        if row.kind == "policy" and row.throughput_qps is not None and (
                row.throughput_qps >= (1 - _NEAR) * schedule.figures.throughput_qps):
            yield Hint(f"{row.name} is expected to be as good within {percent(_NEAR)}. Measure it:",
                       f"submit JOB.yaml --set schedule.policy={name} --set output=out/{name}")
    yield Hint("See what more latency, another device or more memory brings:", "schedule JOB.yaml "
               "--price") if schedule.served is None else Hint(
        "See the attainment at other rates:", "sweep JOB.yaml --over rate=1,2,4")


def _observed(output: Output) -> str:
    lengths = output.queries.counts("output_tokens") if output.queries else np.ones(1)
    moments = f"mean: {lengths.mean():.0f}, std: {max(lengths.std(), 1):.0f}, max: {lengths.max()}"
    return f"schedule JOB.yaml --set 'workload.output_tokens={{{moments}}}'"


_FIGURES = [(key, *figures.MEASURES[key]) for key in (
    "throughput_qps", "output_tokens_per_s", "latency_p50_s", "latency_p99_s", "ttft_p99_s",
    "tpot_p99_s", "wall_s")]
_AS_FAST = 0.03  # chosen: runs of one schedule differ by as much
# keys of job.json that only say where it lies, or repeat others
_OF_PLACE = ("output", "name", "source", "results", "asked")


class Run(NamedTuple):
    """A run in a comparison, with a unique name."""

    name: str
    output: Output
    metrics: Mapping[str, Any]

    def measured(self, key: str) -> float | None:
        return number(self.metrics, key, "measured")


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Writes a page that compares the runs of `folders`, and returns its path. Raises InputError if
    one is no folder, MissingExtraError without jinja2."""
    runs = read_runs(folders)
    drawn = comparison_charts(runs)
    write_atomically(path, render_page(
        "comparison.html.j2", path.name, drawn, charts=drawn, headline=headline(runs),
        headers=[run.name for run in runs], rows=figure_rows(runs),
        differences=differences(runs),
        missing=[run.name for run in runs if not run.output.queries]))
    return path


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs, each named by its folder, with as much of the path as is needed to differ."""
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
    """A sentence about the fastest run and its lead, if all have a throughput of their own."""
    rates = {run.name: rate for run in runs if (rate := run.measured("throughput_qps"))}
    text, given = f"{len(runs)} runs", any("served" in run.metrics for run in runs)
    if len(rates) < len(runs) or len(runs) < 2 or given:
        return text
    first, second, *_ = sorted(rates, key=lambda name: -rates[name])
    ratio, slowest = rates[first] / rates[second], min(rates.values())
    shown = " against ".join(quantity(rates[one], "requests/s") for one in (first, second))
    if ratio - 1 < _AS_FAST:
        return f"{text}: {first} and {second} are as fast within {percent(_AS_FAST)}, {shown}"
    if len(runs) == 2:
        return f"{first} is {ratio:.2f} times as fast as {second}: {shown}"
    return (f"{first} is the fastest of {text}, {quantity(rates[first], 'requests/s')}; "
            f"{second} has {plain(rates[second])}, the slowest {plain(slowest)}")


def figure_rows(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Rows (label, a cell per run): what was run, measured and predicted."""
    rows = [("Model", [text_at(run.output.job, "model") or "-" for run in runs]),
            ("Policy", [_of(run.output.schedule, lambda s: policy(s.estimate.policy).title)
                        for run in runs]),
            ("Control variables", [_of(run.output.schedule, lambda s: controls_cell(s.estimate))
                                   for run in runs]),
            ("Engine", [text_at(run.metrics, "engine") or "-" for run in runs]),
            ("Requests", [_queries(run) for run in runs])]
    if any(cut := [words.truncated(run.output) for run in runs]):
        rows.append(("Truncated answers", [f"{count:,}" for count in cut]))
    for key, label, unit in _FIGURES:
        if any(run.measured(key) is not None for run in runs):
            rows.append((label, [_figure(run, key, unit) for run in runs]))
    return [*rows, ("Limit", [check_bound(run.output).sentence for run in runs])]


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
    """Charts that compare the runs with answers."""
    done = [run for run in runs if run.output.queries]
    # the requests of a continued run are on several clocks
    on_one_clock = [run for run in done if not run.output.queries_before]
    made = (_beside(done, charts.latencies),
            _beside(on_one_clock, lambda output: charts.done_curve(output.queries, ())))
    return [chart for chart in made if chart is not None]


def _beside(runs: Sequence[Run], chart_of: Callable[[Output], Chart | None]) -> Chart | None:
    """One chart with the measured series of each run's chart."""
    drawn = [(run.name, chart) for run in runs if (chart := chart_of(run.output)) is not None]
    if not drawn:
        return None
    return replace(drawn[0][1], marks=(), caption="", series=[
        replace(chart.series[0], label=name, colour=PALETTE[place % len(PALETTE)])
        for place, (name, chart) in enumerate(drawn)])
