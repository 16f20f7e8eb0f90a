"""Deadlines of a run: the job's start, from which they count, is kept in its folder until the job
is done. After requests have expired, the same command runs them to their end."""

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from xgpt.app.opened_job import OpenedJob
from xgpt.core.errors import DeadlinePassed
from xgpt.core.system.whole_file import read_object
from xgpt.report.table import paragraph
from xgpt.report.words import counted
from xgpt.requests.spool import Spool
from xgpt.run_folder.files import RESULTS_FILE, START_FILE, write_start
from xrunner.files.expired import expired_requests
from xrunner.files.results import answered
from xrunner.plan import RunPlan
from xsimulator.replay.prediction import JobPrediction


def keep_start(opened: OpenedJob, expired: int = 0) -> int:
    """Keeps the job's start in its folder; returns the number of its requests that have expired.
    Call it before errors.jsonl is written anew."""
    output = opened.job.output
    expired = max(expired, len(expired_requests(output)),
                  int(read_object(output / START_FILE).get("expired", 0)))
    write_start(output, opened.started, opened.requests, expired)
    return expired


def with_expiry(opened: OpenedJob, plan: RunPlan, expired: int) -> RunPlan:
    """Returns `plan` with the time after which no request begins, if the job stops at deadlines.
    Where only requests that have expired are left, they are run. `expired`: their number."""
    constraint, spool = opened.problem.constraint, Spool(plan.output)
    if constraint.on_deadline == "finish":
        return plan
    plan = replace(plan, expires_s=constraint.limit_s("makespan"))
    done = answered(plan.output / RESULTS_FILE)
    left = np.setdiff1d(np.arange(done.written, len(spool)), list(done.held))
    last = max((plan.expires_at(spool.deadlines_s, query) for query in left), default=math.inf)
    if len(left) > expired or last > time.time():
        return plan
    opened.tell.say(paragraph(
        f"note: {counted(len(left), 'request')} expired at their deadlines: they are run to their "
        "end, as with `on_deadline: finish`"))
    return replace(plan, expires_s=None)


def deadline_facts(measured: Mapping[str, Any], prediction: JobPrediction | None) -> dict[str, Any]:
    """Keys of metrics.json on deadlines; none for a job without. The prediction is for a run that
    began when this one did."""
    if "with_deadline" not in measured:
        return {}
    of, expired = measured["with_deadline"], measured["expired"]
    is_whole = measured["queries_before"] == 0 and (measured["state"] == "done" or expired)
    ends = prediction.ends if is_whole and prediction is not None else None
    return {"expired": expired, "with_deadline": of, "in_time": measured["in_time"], "attainment": {
        "measured": measured["in_time"] / of if of else None,
        "predicted": None if ends is None else ends.in_time(delay_s=measured["began_s"])}}


def refuse_expired(opened: OpenedJob, measured: Mapping[str, Any],
                   result: Mapping[str, Any]) -> None:
    """Raises DeadlinePassed, with the run's `result` as its details, where all requests that are
    left have expired."""
    expired = measured.get("expired", 0)
    if expired and result["queries"] + expired >= result["queries_total"]:
        keep_start(opened, expired)
        passed = DeadlinePassed(
            f"{counted(expired, 'request')} had not begun by their deadlines and expired: they are "
            "in errors.jsonl, and the same command runs them to their end")
        passed.details = result
        raise passed
