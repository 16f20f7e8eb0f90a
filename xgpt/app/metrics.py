"""metrics.json: what a run measured, beside what was predicted."""

import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

import numpy as np

from xgpt.app.attribution import attribute
from xgpt.app.opened import OpenedJob
from xgpt.app.run_files import METRICS_FILE
from xgpt.core.json_values import plain, write_json
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xgpt.launch.contention import in_words
from xgpt.launch.launcher import threads_per_rank
from xgpt.report.bounds import check_bounds, kept_facts
from xgpt.report.output import Output, read_output
from xgpt.report.page import MAX_ANSWERS, write_page
from xgpt.report.queries import columns_of
from xgpt.report.results_file import write_results
from xgpt.report.table import paragraph, summary_table
from xgpt.report.words import clean, counted
from xprofiler.timing import TimingSource
from xsimulator.memory import kv_bytes

CHANGED = ("the schedule was changed while the queries ran; what was predicted is of the one that "
           "the run began with")


def write_metrics(opened: OpenedJob, timing: TimingSource | None, schedule: Schedule | None,
                  measured: Mapping[str, Any], prediction: Any, **own: Any) -> dict[str, Any]:
    """Writes metrics.json and the report, and tells a summary. Returns what metrics.json holds:
    every measured figure beside its prediction (None where there is none), what is the run's `own`,
    and why it took as long as it did. `timing`, `schedule`: where they are known."""
    metrics = {**_measured_beside_predicted(opened, schedule, measured, prediction), **own}
    # a replay of what was planned says nothing of a run that changed it
    is_told = prediction is not None and not measured["changes"]
    why = attribute(opened.problem, timing, schedule, opened.job.output, prediction.wall_s) if (
        is_told and timing and schedule) else None
    metrics["attribution"] = None if why is None else {**asdict(why), "sentence": why.sentence}
    output, tell = opened.job.output, opened.tell
    # read once: the figures of ten million queries are not to be there twice
    left = replace(read_output(output, MAX_ANSWERS), metrics=metrics, schedule=schedule,
                   queries_before=measured["queries_before"])
    metrics |= kept_facts(check_bounds(left))
    write_json(output / METRICS_FILE, metrics)
    report = _report(replace(left, metrics=plain(metrics)))
    tell.say(summary_table(metrics, tuple(_ends(opened, left))))
    if left.remarks:
        tell.say(paragraph(f"note: {' '.join(left.remarks)} Nothing is told of what stood there."))
    if (warning := in_words(metrics["others_cpu_share"])) is not None:
        tell.say(f"note: {warning}")
    tell.say(report)
    if opened.job.results is not None and metrics["status"] == "done":
        tell.say(write_results(output, opened.job.results, opened.job.quote_formulas))
    return metrics


def _report(left: Output) -> str:
    """Writes the page; a sentence on it. Without it the run is done all the same."""
    try:
        return f"report: {write_page(left)}"
    except OSError as cause:
        return (f"note: {cause.filename}: {cause.strerror}: the page is not written; `xgpt report` "
                "does")


def _ends(opened: OpenedJob, output: Output) -> Iterator[str]:
    """What the results say of the run besides its figures, in sentences: whether the bound was
    kept, how many answers were cut, and why the first entry has none."""
    yield from (check.sentence for check in check_bounds(output) if check.is_kept is not None)
    metrics = output.metrics or {}
    if metrics.get("rescheduling") and metrics["wall_s"]["predicted"] is not None:
        yield CHANGED
    known = opened.problem.queries
    is_wished = opened.job.run.ignore_eos or (known is not None and known.outputs is not None)
    cut = 0 if is_wished else columns_of(output.queries).reasons()["length"]
    if cut:
        yield (f"{counted(cut, 'answer')} of {len(output.queries):,} reached the most tokens that "
               "were allowed, and may end in mid-sentence")
    if output.errors:
        first = output.errors[0]
        yield clean(f"the first error, in line {first.get('line')} of the requests: "
                    f"{first.get('error')}")


def _measured_beside_predicted(opened: OpenedJob, schedule: Schedule | None,
                               measured: Mapping[str, Any], prediction: Any) -> dict[str, Any]:
    # what was predicted is the whole job: half of one, or a resumed rest, is something else. A job
    # whose schedule was changed is the one of which it was said how long it would take
    is_whole = measured["state"] == "done" and measured["queries_before"] == 0

    def pair(key: str) -> dict[str, float | None]:
        expected = getattr(prediction, key, None) if is_whole else None
        return {"measured": measured.get(key), "predicted": expected}

    keys = ("throughput_qps", "output_tokens_per_s", "latency_p50_s", "latency_p99_s", "ttft_p50_s",
            "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "wall_s", "load_s", "overhead_share")
    job, cluster = opened.job, opened.problem.cluster
    assert opened.files is not None
    planned = dict(enumerate(_kv_bytes(opened.problem, schedule) if schedule else ()))
    return {
        "version": 1, "name": job.name, "status": measured["state"], "engine": job.run.engine,
        "queries": measured["queries_before"] + measured["queries"],
        "queries_held": measured["queries_held"], "errors": measured["errors"],
        "failed": measured.get("failed", 0),
        "queries_before": measured["queries_before"], **{key: pair(key) for key in keys},
        "steady_state_qps": schedule.estimate.figures.throughput_qps if schedule else None,
        "load_bytes_per_s": None if measured["load_s"] is None else (
            measured["loaded_bytes"] / max(measured["load_s"], 1e-9)),
        **{key: measured[key] for key in (
            "loaded_bytes", "loaded_from_disk_bytes", "disk_bytes_per_s")},
        "operators": measured.get("operators"),
        "model_source": opened.files.served_by, "weights": job.run.weights,
        "ranks": schedule.estimate.num_devices if schedule else None, "dtype": opened.problem.dtype,
        "weight_dtype": opened.problem.weight_dtype,
        "date": datetime.now().astimezone().isoformat("T", "seconds"),
        "machine": {"device": cluster.device.name,
                    "threads_per_rank": threads_per_rank(job, opened.problem),
                    "system": f"{platform.system()} {platform.machine()}",
                    "python": platform.python_version(), "numpy": np.__version__},
        "stages": [{**stage, "kv_planned_bytes": planned.get(stage["stage"])}
                   for stage in measured["stages"]],
    }


def _kv_bytes(problem: Problem, schedule: Schedule) -> list[int]:
    """What each rank of a stage may hold of KV entries by the schedule, for the stages of all
    replicas."""
    return [int(held) for pool in schedule.estimate.all_pools
            for held in kv_bytes(problem, pool.stages, pool.kv_tokens)]
