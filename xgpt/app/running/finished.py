"""A job that is done: told from the files its run left, without planning it anew. What is asked of
a job decides, not how it came about: the machine, the hosts, or Slurm."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from xgpt.app.telling import LogTeller, Teller
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
    kept,
    standard_input,
    whole_metrics,
)
from xrunner.checkpoint.identity import model_files, weights_whole
from xrunner.files.lock import output_lock
from xrunner.plan import saved_model

DONE = "already done"  # the status that `--json` prints
# keys that decide nothing of answers
_LABELS = ("name", "source", "output", "slurm", "results", "quote_formulas", "max_search_s")
_GUARDS = ("sync_s", "restarts", "stall_timeout_s", "verify")  # of the section run


def asked_of(job: Job, digests: Sequence[str] | None = None) -> dict[str, Any]:
    """All that the job file asks for, and what its requests are: equal for two jobs that are one.
    Requests that can be read but once have no digest, and are never the same. `digests`: of the
    files of requests, where they were read."""
    job_keys = {key: value for key, value in plain(job).items() if key not in _LABELS}
    job_keys["run"] = {key: value for key, value in job_keys["run"].items() if key not in _GUARDS}
    files = job.workload.requests
    paths = () if files is None else files.paths
    found = [_digest(job, path) for path in paths] if digests is None else digests
    return {"job": job_keys, "requests": dict(zip(map(str, paths), found, strict=True))}


def done_already(job: Job, tell: Teller, *, is_again: bool = False) -> dict[str, Any] | None:
    """What `--json` prints of a job that is done; None where it is to be run. `is_again`: what an
    earlier run left is moved aside first. Tells what was found. Raises XgptError where a run is at
    work in the folder."""
    if is_again:
        if (aside := set_aside(job.output, job.results)) is not None:
            tell.say(f"what the earlier run left is kept in {shown(aside)}")
            tell.say("(a run that is stopped goes on without `--again`, which begins anew)")
        return None
    metrics = whole_metrics(job.output)
    asked = None if metrics is None else read_object(job.output / "job.json").get("asked")
    if metrics is None or not isinstance(asked, dict):
        return None
    if changed := sorted([*_differences(asked, asked_of(job)), *_model_changes(job)]):
        tell.say(paragraph(
            f"note: {shown(job.output)} has the finished results of another job (changed since: "
            f"{', '.join(changed)}): this one is run, and they are kept"))
        return None
    results = job.output / RESULTS_FILE
    total, errors = metrics["queries"], metrics.get("errors")
    tell.say(f"already done: {total} of {total} ({shown(results)})"
             + (f"; {errors} could not run (errors.jsonl)" if errors else ""))
    tell.say("`--again` runs it anew and keeps these results")
    if job.results is not None:
        tell.say(write_results(job.output, job.results, job.quote_formulas))
    if not (job.output / "report.html").is_file():
        tell.say(f"its page was not written: `xgpt report {shown(job.output)}` does")
    found = {**metrics, **kept(job), "status": DONE}
    refuse_no_answer(results, found)
    return found


def set_aside(output: Path, results: Path | None = None) -> Path | None:
    """Moves what a run left, its table of `results` elsewhere too, into a folder of its own inside
    `output`, named by the time at which it ended; the folder, or None where nothing was there.
    Raises XgptError where a run is at work."""
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
    """Keys whose values differ. One that is on one side alone is of another version of xgpt."""
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
    """The files that the model of the run had, or has now, and that differ."""
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
    """Raises XgptError, which carries the `facts` of the run, where every line of its results has
    an error in the place of an answer. Reads no further than to the first answer."""
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
