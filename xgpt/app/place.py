"""A run as commands about runs are told of it: by its output folder, or by its job file; and what
the folder keeps of its submission to Slurm: slurm.json."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xgpt.core.errors import InputError, Mistake, wrong
from xgpt.core.job_file import in_order, job_of, job_tree
from xgpt.core.json_values import write_json
from xgpt.core.yaml_tree import OVERRIDE_FILE
from xgpt.launch.slurm_jobs import SlurmJob, ask

RECORD_FILE = "slurm.json"
# Keys of what a run reads before its ranks start, of which it keeps what it needs.
_INPUTS = ("workload.", "model", "profile", "cluster")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a run writes. `bound_s`: on its latency. `results`, `quote_formulas`: a table of them,
    besides, as a job has it."""

    name: str
    output: Path
    bound_s: float
    results: Path | None = None
    quote_formulas: bool = False


def place_of(where: Path, overrides: Sequence[str] = ()) -> Place:
    """Raises InputError of a job file, for overrides of a folder, and where there is neither."""
    if not where.exists() and where.suffix not in (".yaml", ".yml"):
        raise wrong("command line", "DIR|JOB.yaml", str(where), "no such folder, and no job file")
    if not where.is_dir():
        mistakes: list[Mistake] = []
        job = job_of(job_tree(where, overrides, mistakes), where, mistakes)
        own = Place(name=job.name, output=job.output, bound_s=job.constraint.latency_s,
                    results=job.results, quote_formulas=job.quote_formulas)
        if not mistakes:
            return own
        # one that says no more what can be run (its requests were moved, say): a run that was begun
        # by it is still to be asked for and stopped
        if (begun := _begun(own)) is None or any(map(_hides_which_run, mistakes)):
            raise in_order(mistakes)
        return begun
    if overrides:
        raise InputError([Mistake(file=OVERRIDE_FILE, line=None, key=override.partition("=")[0],
                                  value=None, allowed="goes with a job file, not with a folder")
                          for override in overrides])
    return _of_folder(Path(os.path.abspath(where)))


def _hides_which_run(mistake: Mistake) -> bool:
    """Whether another run than is meant may be found for it, which must not be stopped."""
    return mistake.key in ("output", "name") or (
        mistake.file == OVERRIDE_FILE and not mistake.key.startswith(_INPUTS))


def _begun(own: Place) -> Place | None:
    """The run of this name that is in the folder; None where there is none."""
    if (own.output / "job.json").is_file():
        found = _of_folder(own.output)
        return found if found.name == own.name else None
    # a run leaves job.json as its ranks start
    is_there = any((own.output / name).is_file() for name in ("progress.json", RECORD_FILE))
    return own if is_there else None


def _of_folder(output: Path) -> Place:
    try:
        asked = json.loads((output / "job.json").read_text(encoding="utf-8"))
        table = asked.get("results")
        return Place(name=str(asked["name"]), output=output,
                     bound_s=float(asked["constraint"]["latency_s"]),
                     results=None if table is None else Path(table),
                     quote_formulas=asked.get("quote_formulas") is True)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # its results decide
        return Place(name=output.name, output=output, bound_s=math.inf)


_LOG_LINES, _LOG_BYTES = 12, 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmRecord:
    """`job_id`: as squeue takes it, of a task of an array `123_4`. `cluster`: of a federation."""

    job_id: str
    cluster: str | None
    script: Path
    log: Path
    submitted: str

    def save(self, output: Path) -> None:
        write_json(output / RECORD_FILE, {"version": 1, **{
            name: getattr(self, name) for name in self.__slots__}})

    def ask(self) -> SlurmJob | None:
        """What Slurm says of the job now. Raises XgptError where it cannot be asked."""
        return ask(self.job_id, self.cluster)

    def end_of_log(self) -> str:
        """The last lines that the job said; empty where it said nothing."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self.log.stat().st_size - _LOG_BYTES, 0))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.rstrip().splitlines()[-_LOG_LINES:])


def load_record(output: Path) -> SlurmRecord | None:
    """The folder's latest submission; None where there was none."""
    try:
        values = json.loads((output / RECORD_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return SlurmRecord(job_id=values["job_id"], cluster=values["cluster"],
                       script=Path(values["script"]), log=Path(values["log"]),
                       submitted=values["submitted"])
