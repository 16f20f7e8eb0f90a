"""The files of a run in its output folder, by name, and how far they say that it came."""

import json
from pathlib import Path
from typing import Any

from xgpt.app.messages import MESSAGES_FILE
from xgpt.app.telling import Teller
from xgpt.core.job import Job
from xgpt.core.request_files.files import TABLES
from xgpt.core.spool import num_queries
from xgpt.report.lanes import EXPECTED_FILE
from xgpt.report.table import paragraph
from xgpt.report.words import counted
from xrunner.io.checked import spool_of
from xrunner.io.launcher_link import ADJUST_FILE, OBSERVED_FILE
from xrunner.io.results import HELD_FILE, answered, count_errors
from xrunner.io.underway import UNDERWAY_FILE
from xrunner.plan import AGREEMENT_FILE

RESULTS_FILE, METRICS_FILE = "results.jsonl", "metrics.json"
DEATHS_FILE = "deaths.json"  # at which queries' work ranks died (xgpt.app.deaths)
# All that one run leaves. Results that were kept of others have names of their own, and what Slurm
# wrote bears its job's number.
OF_A_RUN = (RESULTS_FILE, HELD_FILE, "errors.jsonl", "spool", "schedule.json", "profile.json",
            "job.json", "run.json", METRICS_FILE, "measured.json", "steps.jsonl", "progress.json",
            AGREEMENT_FILE, DEATHS_FILE, UNDERWAY_FILE, OBSERVED_FILE, ADJUST_FILE, EXPECTED_FILE,
            MESSAGES_FILE,
            "report.html", *(f"results.{table}" for table in TABLES))


def tell_fault(output: Path, tell: Teller) -> None:
    """Tells of a results file that somebody else changed: which line, and what is run again."""
    found = answered(output / RESULTS_FILE)
    if not found.fault:
        return
    lost = [query for query in range(found.written, max(found.held, default=-1) + 1)
            if query not in found.held]
    again = f"{counted(len(lost), 'query')} from query {lost[0]} on" if lost else "nothing"
    tell.say(paragraph(f"note: {found.fault}: the file was changed. Results behind that line go "
                       f"into their places; run again because of it: {again}"))


def whole_metrics(output: Path) -> dict[str, Any] | None:
    """metrics.json of a run that is done and whose results and errors are all there; else None: it
    decides nothing."""
    metrics, found = _read(output / METRICS_FILE), answered(output / RESULTS_FILE)
    is_whole = is_intact(output) and not found.fault and (
        metrics.get("queries") == num_queries(output) == found.written > 0)
    return metrics if is_whole and metrics.get("status") == "done" else None


def is_intact(output: Path) -> bool:
    """Whether the spool is there, and errors.jsonl as it says."""
    spool = spool_of(output)
    return spool is not None and count_errors(output / "errors.jsonl") == spool.num_errors


def asked_then(output: Path) -> dict[str, Any] | None:
    """What was asked of the run; None where that is not known."""
    asked = _read(output / "job.json").get("asked")
    return asked if isinstance(asked, dict) else None


def is_told_done(output: Path) -> bool:
    """Whether the folder tells of a run that is done, and of what: who asks for another job then
    has it run."""
    return whole_metrics(output) is not None and "model" in _read(output / "job.json")


def _read(path: Path) -> dict[str, Any]:
    """The object of a JSON file; an empty one where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def is_half_done(output: Path) -> bool:
    """Whether an earlier run left answers there, and not all of them."""
    before, total = answered(output / RESULTS_FILE), num_queries(output)
    return before.total > 0 and (total is None or before.total < total)


def kept(job: Job) -> dict[str, Any]:
    """What is known of a run that did not come to its end, by the keys of metrics.json."""
    results = job.output / RESULTS_FILE
    return {"name": job.name, "engine": job.run.engine, "queries": answered(results).total,
            "queries_total": num_queries(job.output), "results": results}
