"""Real runs of a sweep's points, one after the other, each in a folder of its own."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from xgpt.app.checks import refuse_what_cannot_run
from xgpt.app.submit import submit
from xgpt.app.sweeps.folder import SweepFolder
from xgpt.app.telling import Teller
from xgpt.core.errors import InputError, Mistake, StoppedEarly, XgptError
from xgpt.core.job import Job
from xgpt.core.sweep_file import SweepPoint, SweepSpec
from xgpt.report.sweep_rows import OK, Row, number_of

# column of a row -> key of metrics.json
_MEASURED = {"measured_qps": "throughput_qps", "measured_tokens_per_s": "output_tokens_per_s",
             "measured_latency_p50_s": "latency_p50_s", "measured_latency_p99_s": "latency_p99_s",
             "measured_ttft_p50_s": "ttft_p50_s", "measured_ttft_p99_s": "ttft_p99_s",
             "measured_tpot_p50_s": "tpot_p50_s", "measured_tpot_p99_s": "tpot_p99_s",
             "measured_wall_s": "wall_s"}


def check_runs(spec: SweepSpec, tell: Teller) -> None:
    """Raises InputError, with every mistake, where a point cannot be run on this machine."""
    mistakes: dict[Mistake, None] = {}
    for point in spec.points:
        try:
            refuse_what_cannot_run(point.job, tell)
        except InputError as refusal:
            mistakes.update(dict.fromkeys(refusal.mistakes))
    if mistakes:
        raise InputError(list(mistakes))


def run_points(spec: SweepSpec, keys: Sequence[str], rows: dict[str, Row], folder: SweepFolder,
               tell: Teller) -> None:
    """Runs every point that has a schedule and has not been run; measured figures join its row.
    Raises StoppedEarly where it was asked to stop."""
    todo = [(key, point) for key, point in dict(zip(keys, spec.points, strict=True)).items()
            if rows[key]["status"] == OK and rows[key]["measured_status"] != "done"]
    for number, (key, point) in enumerate(todo, 1):
        tell.end_progress()
        tell.say(f"run {number} of {len(todo)}: {rows[key]['scenario']}, {rows[key]['policy']}, "
                 f"bound {rows[key]['bound']}")
        output = folder.path / "points" / key
        rows[key] = {**rows[key], **_measured(_job_of(point, rows[key], output), tell),
                     "folder": f"points/{key}"}
        folder.append(rows[key])


def _job_of(point: SweepPoint, row: Row, output: Path) -> Job:
    bound_s = number_of(row, "bound_s")
    constraint = point.job.constraint.with_latency(
        limit_s=math.inf if bound_s is None else bound_s)
    return replace(point.job, output=output, constraint=constraint,
                   name=f"{row['scenario']}, {row['policy']}, {row['bound']}")


def _measured(job: Job, tell: Teller) -> Row:
    """Of a run that failed only why: the sweep goes on with the next."""
    try:
        submit(job, tell)
    except StoppedEarly:
        raise
    except XgptError as failure:
        tell.say(f"this point failed: {failure}")
        return {"measured_status": "failed", "measured_reason": str(failure)}
    metrics: dict[str, Any] = json.loads(
        (job.output / "metrics.json").read_text(encoding="utf-8"))
    return {"measured_status": "done", "measured_reason": None,
            **{column: metrics[key]["measured"] for column, key in _MEASURED.items()}}
