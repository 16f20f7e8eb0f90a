"""Recognizes a job that is done by the files of its run, without planning it again. The keys and
requests of the job decide, not where it ran: the machine, the hosts, or Slurm."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from xgpt.app.teller import LogTeller, Teller
from xgpt.core.errors import XgptError, shorten
from xgpt.core.schedule_file import plain
from xgpt.core.system.whole_file import read_object
from xgpt.job.job import Job
from xgpt.report.results_file import write_results
from xgpt.report.table import paragraph, shown
from xgpt.requests.choices import parts
from xgpt.requests.request_files import STDIN
from xgpt.run_folder.files import (
    OF_A_RUN,
    RESULTS_FILE,
    free_path,
    job_facts,
    standard_input,
    whole_metrics,
)
from xrunner.checkpoint.identity import model_files, weights_whole
from xrunner.files.lock import output_lock
from xrunner.plan import saved_model

DONE = "already done"  # the status that `--json` prints
# keys that do not change answers
_LABELS = ("name", "source", "output", "slurm", "results", "quote_formulas", "max_search_s")
_GUARDS = ("sync_s", "restarts", "stall_timeout_s", "verify", "stage_model")  # of the section run


def job_identity(job: Job, digests: Sequence[str] | None = None) -> dict[str, Any]:
    """The job's keys that can change answers, and a digest per file of requests: equal for two jobs
    that have the same answers. Requests that can be read only once have the digest None and are
    never equal. `digests`: of the files, where they were read already."""
    job_keys = {key: value for key, value in plain(job).items() if key not in _LABELS}
    job_keys["run"] = {key: value for key, value in job_keys["run"].items() if key not in _GUARDS}
    files = job.workload.requests
    paths = () if files is None else files.paths
    found = [_digest(job, path) for path in paths] if digests is None else digests
    return {"job": job_keys, "requests": dict(zip(map(str, paths), found, strict=True))}


def finished_result(job: Job, tell: Teller, *, is_again: bool = False) -> dict[str, Any] | None:
    """Returns the `--json` object of a job that is done; None where it must be run. `is_again`:
    first moves the earlier run's files aside. Writes what it found to `tell`. Raises XgptError
    where another run has the folder."""
    if is_again:
        if (aside := move_earlier_run(job.output, job.results)) is not None:
            tell.say(f"the earlier run's files were moved to {shown(aside)}")
            tell.say("(to continue a stopped run, leave out `--again`, which starts from zero)")
        return None
    metrics = whole_metrics(job.output)
    asked = None if metrics is None else read_object(job.output / "job.json").get("asked")
    if metrics is None or not isinstance(asked, dict):
        return None
    if changed := sorted([*_differences(asked, job_identity(job)), *_model_changes(job)]):
        tell.say(paragraph(
            f"note: {shown(job.output)} has the finished results of another job (changed since: "
            f"{', '.join(changed)}): this job is run, and those results are kept"))
        return None
    results = job.output / RESULTS_FILE
    total, errors = metrics["queries"], metrics.get("errors")
    tell.say(f"already done: {total} of {total} ({shown(results)})"
             + (f"; {errors} could not run (errors.jsonl)" if errors else ""))
    tell.say("`--again` runs the job again and keeps these results")
    if job.results is not None:
        tell.say(write_results(job.output, job.results, job.quote_formulas))
    if not (job.output / "report.html").is_file():
        tell.say(f"its report was not written: `xgpt report {shown(job.output)}` writes it")
    found = {**metrics, **job_facts(job), "status": DONE}
    refuse_no_answer(results, found)
    return found


def move_earlier_run(output: Path, results: Path | None = None) -> Path | None:
    """Moves a run's files, and its table of `results` where that lies elsewhere, into a folder of
    `output` named by the time at which the run ended. Returns that folder, or None where there was
    no file. Raises XgptError where another run has `output`."""
    if not any((output / name).exists() for name in OF_A_RUN):
        return None
    with output_lock(output):
        left = [output / name for name in OF_A_RUN if (output / name).exists()]
        if results is not None and results.parent != output and results.is_file():
            left.append(results)
        target = free_path(output / "earlier", max(path.stat().st_mtime for path in left))
        target.mkdir()
        for path in left:
            shutil.move(path, target / path.name)  # elsewhere may be another file system
    return target


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yields keys whose values differ. A key of one side alone is of another version of xgpt."""
    if then.get("requests") != now["requests"] or None in now["requests"].values():
        yield "the requests"
    yield from _of_keys(then.get("job", {}), now["job"], "")


def _of_keys(then: Mapping[str, Any], now: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key in then.keys() & now.keys():
        before, after = then[key], now[key]
        if isinstance(before, dict) and isinstance(after, dict) and key != "cluster":
            yield from _of_keys(before, after, f"{prefix}{key}.")
        elif _common(before, after) != _common(after, before):
            yield f"{prefix}{key}"


def _common(value: Any, other: Any) -> Any:
    """The value; of lists of objects, such as the bounds, the keys that both sides have."""
    if not (isinstance(value, list) and isinstance(other, list) and len(value) == len(other)):
        return value
    return [{key: one[key] for key in one.keys() & two.keys()}
            if isinstance(one, dict) and isinstance(two, dict) else one
            for one, two in zip(value, other, strict=True)]


def _model_changes(job: Job) -> list[str]:
    """Names of the model's files that differ from those that the run in the folder had."""
    then = saved_model(job.output)
    if then is None or not then.directory.is_dir():
        return []
    whole = weights_whole(then.directory) if job.run.verify else {}
    return then.changed(model_files(then.directory), whole)


def _digest(job: Job, path: Path) -> str | None:
    if path == STDIN:
        came = standard_input(job, LogTeller().say, is_kept=False)
        came.seek(0)
        return hashlib.file_digest(came, "sha256").hexdigest()  # type: ignore[arg-type]
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_no_answer(results: Path, facts: Mapping[str, Any]) -> None:
    """Raises XgptError, with the run's `facts` as its details, where every line of `results` has an
    error instead of an answer. Stops reading at the first answer."""
    count, first = 0, ""
    with results.open(encoding="utf-8") as file:
        for line in file:
            for row in parts(json.loads(line)):
                if not (error := row.get("error")):
                    return
                count += 1
                first = first or str(error.get("message") if isinstance(error, dict) else error)
    if count:
        nothing = XgptError(f"none of the {count} queries has an answer (the `error` of each is in "
                            f"its result); the first: {shorten(first, 200)}")
        nothing.details = facts
        raise nothing
