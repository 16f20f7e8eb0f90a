"""The files of a run in its output folder, by name, and how far they say that it came."""

import json
from pathlib import Path
from typing import Any

from xgpt.app.messages import MESSAGES_FILE
from xgpt.core.job import Job
from xgpt.core.request_files.files import TABLES
from xgpt.core.spool import num_queries
from xgpt.report.expected import EXPECTED_FILE
from xrunner.io.launcher_link import ADJUST_FILE, OBSERVED_FILE
from xrunner.io.results import HELD_FILE, answered
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


def is_told_done(output: Path) -> bool:
    """Whether metrics.json says that the run in the folder is done; one that was stopped as its
    last query ended may have all results and say otherwise."""
    try:
        metrics = json.loads((output / METRICS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(metrics, dict) and metrics.get("status") == "done"


def is_half_done(output: Path) -> bool:
    """Whether an earlier run left answers there, and not all of them."""
    before, total = answered(output / RESULTS_FILE), num_queries(output)
    return before.total > 0 and (total is None or before.total < total)


def kept(job: Job) -> dict[str, Any]:
    """What is known of a run that did not come to its end, by the keys of metrics.json."""
    results = job.output / RESULTS_FILE
    return {"name": job.name, "engine": job.run.engine, "queries": answered(results).total,
            "queries_total": num_queries(job.output), "results": results}
