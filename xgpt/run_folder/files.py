"""Files of a run's output folder: their names, the run's messages and its end, its submission to
Slurm; and the folder itself, found by a job file or a path."""

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from itertools import chain, count
from pathlib import Path
from typing import IO, Any, BinaryIO

from xgpt.core.errors import Mistake, StoppedEarly, XgptError, refuse, wrong
from xgpt.core.schedule_file import write_json
from xgpt.core.system.whole_file import read_object, temporary_of
from xgpt.job.job import Job
from xgpt.job.job_file import in_order, job_of, job_tree
from xgpt.job.yaml_tree import OVERRIDE_FILE
from xgpt.launch.slurm_jobs import SlurmJob, query_job
from xgpt.report.lanes import EXPECTED_FILE
from xgpt.report.table import shown
from xgpt.report.words import counted
from xgpt.requests.request import Requests
from xgpt.requests.request_files import TABLES
from xgpt.requests.spool import num_queries
from xgpt.requests.spool_columns import temporary_file
from xrunner.files.deaths import DEATHS_FILE
from xrunner.files.expired import num_expired
from xrunner.files.forecasts import FORECASTS_FILE
from xrunner.files.heartbeat import HEARTBEATS
from xrunner.files.launcher_link import ADJUST_FILE, OBSERVED_FILE
from xrunner.files.order_file import ORDER_FILE
from xrunner.files.result_line import spool_of
from xrunner.files.results import HELD_FILE, answered, count_errors
from xrunner.files.sink import STARTING, UNDERWAY_FILE, read_progress, write_progress
from xrunner.plan import AGREEMENT_FILE

RESULTS_FILE, METRICS_FILE = "results.jsonl", "metrics.json"
MESSAGES_FILE = "messages.log"  # messages of the last run, a line each, with the time
START_FILE = "started.json"  # when the job's first command began; gone once the job is done
DOING_FILE = "doing"  # a long activity under way, in one line; exists while it lasts
_FAILED = "failed: "
RECORD_FILE = "slurm.json"
KEPT_FILE = "standard-input"  # a copy of it: the same command continues without it
# Keys of inputs that a run reads before its ranks start, and of which it keeps what it needs.
_INPUTS = ("workload.", "model", "profile", "cluster")
_LOG_LINES, _LOG_BYTES = 12, 20_000  # chosen: shown, and read
# All files of one run. Kept results of other runs have names of their own, and Slurm's logs bear
# the number of their job.
OF_A_RUN = (RESULTS_FILE, HELD_FILE, "errors.jsonl", "spool", "schedule.json", "profile.json",
            "job.json", "run.json", METRICS_FILE, "measured.json", "steps.jsonl", "progress.json",
            ORDER_FILE, AGREEMENT_FILE, DEATHS_FILE, UNDERWAY_FILE, OBSERVED_FILE, ADJUST_FILE,
            EXPECTED_FILE, MESSAGES_FILE, FORECASTS_FILE, START_FILE,
            "report.html", *(f"results.{table}" for table in TABLES))


def fault_words(output: Path) -> str | None:
    """A message if somebody changed results.jsonl: the line, and the requests to run again; else
    None."""
    found = answered(output / RESULTS_FILE)
    if not found.fault:
        return None
    if num_expired(output):  # these have no lines
        return None
    lost = [query for query in range(found.written, max(found.held, default=-1) + 1)
            if query not in found.held]
    again = f"{counted(len(lost), 'request')} from request {lost[0]} on" if lost else "nothing"
    return (f"{found.fault}: the file was changed. Results behind that line go into their places; "
            f"run again because of it: {again}")


def whole_metrics(output: Path) -> dict[str, Any] | None:
    """The object in metrics.json of a run that is done, with all results and errors; else None."""
    metrics, found = read_object(output / METRICS_FILE), answered(output / RESULTS_FILE)
    is_whole = is_intact(output) and not found.fault and (
        metrics.get("queries") == num_queries(output) == found.written > 0)
    return metrics if is_whole and metrics.get("status") == "done" else None


def is_intact(output: Path) -> bool:
    """Whether the spool exists, and errors.jsonl has as many lines as it says."""
    spool = spool_of(output)
    return spool is not None and count_errors(output / "errors.jsonl") == spool.num_errors


def start_of(output: Path, requests: Requests | None) -> datetime:
    """When the first command of the unfinished job in `output` began, if its requests are these;
    else now."""
    kept = read_object(output / START_FILE)
    is_own = kept.get("requests") in (None, requests and requests.digest)
    at = kept.get("at")
    return datetime.fromtimestamp(at) if is_own and isinstance(at, float) else datetime.now()


def write_start(output: Path, start: datetime, requests: Requests | None = None,
                expired: int = 0) -> None:
    """Keeps the time at which a job's first command began, and the number of requests that have
    expired. `requests`: None where they are not known yet."""
    write_json(output / START_FILE, {
        "at": start.timestamp(), "requests": requests and requests.digest, "expired": expired})


def begin_clock(output: Path) -> None:
    """Keeps now as the start of the job in `output`, unless it has begun."""
    if not (output / START_FILE).exists():
        write_start(output, datetime.now())


def free_path(path: Path, moment_s: float) -> Path:
    """A path like `path` with a moment in its name that no file has: nothing is overwritten."""
    stamp = f"{datetime.fromtimestamp(moment_s):%Y%m%d-%H%M%S}"
    names = chain([stamp], (f"{stamp}-{number}" for number in count(2)))
    return next(free for name in names
                if not (free := path.with_name(f"{path.stem}-{name}{path.suffix}")).exists())


def job_facts(job: Job) -> dict[str, Any]:
    """The job's name, engine, answered and total queries, and path of results, by the keys of
    metrics.json: what is known of a run without it."""
    results = job.output / RESULTS_FILE
    return {"name": job.name, "engine": job.run.engine, "queries": answered(results).total,
            "queries_total": num_queries(job.output), "results": results}


@contextmanager
def ending_recorded(output: Path) -> Iterator[None]:
    """Records how a run ends, for commands that ask later. progress.json says that it starts, and
    that it was stopped; a failure becomes the last line of messages.log."""
    shutil.rmtree(output / HEARTBEATS, ignore_errors=True)  # of ranks of an earlier run
    before = read_progress(output / "progress.json") or STARTING
    with suppress(OSError):  # reported where results are written
        write_progress(output / "progress.json", replace(STARTING, clock_s=before.clock_s))
    try:
        yield
    except (StoppedEarly, KeyboardInterrupt):
        now = read_progress(output / "progress.json") or STARTING
        if now.state in ("starting", "loading", "running"):
            with suppress(OSError):
                write_progress(output / "progress.json", replace(now, state="stopped"))
        raise
    except XgptError as error:
        with suppress(OSError), (output / MESSAGES_FILE).open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {_FAILED}{' '.join(str(error).split())}\n")
        raise


def failure(output: Path) -> str | None:
    """The error that the last run failed with; None if it did not fail, or could not say so."""
    said = [line.partition(" ")[2] for line in last_messages(output, 1)]
    return said[0].removeprefix(_FAILED) if said and said[0].startswith(_FAILED) else None


def last_messages(output: Path, count: int) -> list[str]:
    """The last `count` messages of the run, with their times."""
    return text_or_empty(output / MESSAGES_FILE).splitlines()[-count:]


def current_activity(output: Path) -> str:
    """The long activity under way, in one line; "" for none."""
    return text_or_empty(output / DOING_FILE).strip()


def text_or_empty(path: Path) -> str:
    """Text of a file; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """A run's output folder. `bound_s`: latency limit. `results`, `quote_formulas`: its table of
    results, as in its job."""

    name: str
    output: Path
    bound_s: float
    results: Path | None = None
    quote_formulas: bool = False


def no_run_error(output: Path | None = None) -> XgptError:
    """An XgptError that says that there is no run in `output` (None: none at all)."""
    where = "here" if output is None else f"in {shown(output)}"
    return XgptError(f"No run {where} yet. Start one: xgpt submit job.yaml")


def newest_run_folder() -> Path:
    """./job.yaml, or the newest run under ./out. Raises XgptError if there is none."""
    if (job := Path("job.yaml")).is_file():
        return job
    found = {path.stat().st_mtime: path.parent for name in ("progress.json", RECORD_FILE)
             for path in Path("out").glob(f"*/{name}")}
    if not found:
        raise no_run_error()
    return found[max(found)]


def find_run(where: Path | None, overrides: Sequence[str] = ()) -> RunFolder:
    """Finds the run of a job file or of an output folder; None: of ./job.yaml, or the newest run
    under ./out. Raises InputError for a wrong job file, for overrides of a folder, and if there is
    neither."""
    where = newest_run_folder() if where is None else where
    if not where.exists() and where.suffix not in (".yaml", ".yml"):
        raise wrong("command line", "DIR|JOB.yaml", str(where), "no such folder, and no job file")
    if not where.is_dir():
        mistakes: list[Mistake] = []
        job = job_of(job_tree(where, overrides, mistakes), where, mistakes)
        own = RunFolder(name=job.name, output=job.output, bound_s=job.constraint.latency_s,
                    results=job.results, quote_formulas=job.quote_formulas)
        if not mistakes:
            return own
        # a job file that is no longer valid (its requests were moved, say): its run must still be
        # found, so that `status` and `stop` work
        if (begun := _begun(own)) is None or any(map(_hides_which_run, mistakes)):
            raise in_order(mistakes)
        return begun
    refuse(Mistake(file=OVERRIDE_FILE, line=None, key=override.partition("=")[0], value=None,
                   allowed="goes with a job file, not with a folder") for override in overrides)
    return _of_folder(Path(os.path.abspath(where)))


def _hides_which_run(mistake: Mistake) -> bool:
    """Whether this mistake could lead to another run, which must not be stopped."""
    return mistake.key in ("output", "name") or (
        mistake.file == OVERRIDE_FILE and not mistake.key.startswith(_INPUTS))


def _begun(own: RunFolder) -> RunFolder | None:
    """The run with this name in the folder; None if there is none."""
    if (own.output / "job.json").is_file():
        found = _of_folder(own.output)
        return found if found.name == own.name else None
    # a run writes job.json when its ranks start
    is_there = any((own.output / name).is_file() for name in ("progress.json", RECORD_FILE))
    return own if is_there else None


def _of_folder(output: Path) -> RunFolder:
    try:
        asked = json.loads((output / "job.json").read_text(encoding="utf-8"))
        table = asked.get("results")
        return RunFolder(name=str(asked["name"]), output=output,
                     bound_s=float(asked["constraint"]["latency_s"]),
                     results=None if table is None else Path(table),
                     quote_formulas=asked.get("quote_formulas") is True)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # its results decide
        return RunFolder(name=output.name, output=output, bound_s=math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmRecord:
    """A submission to Slurm. `job_id`: as squeue takes it, for a task of an array `123_4`.
    `cluster`: in a federation."""

    job_id: str
    cluster: str | None
    script: Path
    log: Path
    submitted: str

    def save(self, output: Path) -> None:
        write_json(output / RECORD_FILE, {"version": 1, **{
            name: getattr(self, name) for name in self.__slots__}})

    def ask(self) -> SlurmJob | None:
        """The job's present state in Slurm; None if Slurm does not know it any more. Raises
        XgptError if Slurm cannot be asked."""
        return query_job(self.job_id, self.cluster)

    def end_of_log(self) -> str:
        """The last lines of the job's log; "" if it is empty."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self.log.stat().st_size - _LOG_BYTES, 0))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.rstrip().splitlines()[-_LOG_LINES:])


def load_record(output: Path) -> SlurmRecord | None:
    """The folder's latest submission to Slurm; None if there was none."""
    try:
        values = json.loads((output / RECORD_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    del values["version"]
    return SlurmRecord(**{**values, "script": Path(values["script"]), "log": Path(values["log"])})


def standard_input(job: Job, say: Callable[[str], None], *, is_kept: bool) -> IO[bytes]:
    """A file with the requests from standard input, or else with those that an earlier run of this
    job kept. `is_kept`: whether to keep a copy in the output folder, as a run does. Raises
    InputError if there are none."""
    # sys.stdin is None in a process that was started without it
    kept, came = job.output / KEPT_FILE, _copied(sys.stdin and sys.stdin.buffer)
    if came.seek(0, os.SEEK_END) > 0:
        if is_kept:
            _keep(came, kept, job)
        return came
    try:
        earlier = kept.open("rb")  # closed with the last reference to it
    except OSError:
        raise wrong(job.source, "workload.requests", "-", "nothing came on standard input: `cat "
                    "prompts.jsonl | xgpt submit JOB.yaml`, or name a file") from None
    with earlier:
        shutil.copyfileobj(earlier, came)
    say(f"nothing came on standard input: using the requests of an earlier run, {kept}")
    return came


@lru_cache(1)
def _copied(stream: BinaryIO | None) -> IO[bytes]:
    """A file with all that comes on a stream, read once per process, as a command may open its job
    twice. Empty for a terminal, where nobody would know to type."""
    file = temporary_file(_copied)
    if stream is not None and not stream.isatty():
        shutil.copyfileobj(stream, file)
    return file


def _keep(came: IO[bytes], kept: Path, job: Job) -> None:
    temporary = temporary_of(kept)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        came.seek(0)
        with temporary.open("wb") as file:
            shutil.copyfileobj(came, file)
        os.replace(temporary, kept)
    except OSError as cause:
        raise wrong(job.source, "output", str(job.output),
                    f"a folder that can be written to: {cause.strerror}") from None
