"""How far a run is, from the files it writes, and whether it is alive."""

from dataclasses import dataclass, replace
from pathlib import Path

from xgpt.app.messages import failure
from xgpt.app.run_files import RESULTS_FILE
from xgpt.app.stall import oldest_s
from xgpt.core.spool import num_queries
from xrunner.io.beat import RankState, read_beats
from xrunner.io.lock import is_locked
from xrunner.io.results import Answered, answered_by_last_line
from xrunner.io.sink import STARTING, Progress, read_progress


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """`progress.state` as the run wrote it, or "died": nobody works on it, and it did not end in
    good order; "done" whatever it wrote where all results are there. Of a run that ended before
    all was done, `progress.done` is what is on the disk: in
    results.jsonl and, done but with one before it that is not, in held.jsonl."""

    progress: Progress
    is_alive: bool | None  # None: cannot be told
    output: Path
    counted: Answered | None = None  # of one that ended before all was done: what is on the disk
    ranks: tuple[RankState, ...] = ()  # of a run that is alive: what each told last

    @property
    def answered(self) -> Answered:
        """What is on the disk, of which results.jsonl can be long: its end alone is read."""
        if self.counted is not None:
            return self.counted
        return answered_by_last_line(self.output / RESULTS_FILE)

    @property
    def silent_s(self) -> float | None:
        """Seconds since the last sign of life of the rank that gave none for longest."""
        return oldest_s(self.ranks)


def run_status(output: Path) -> RunStatus | None:
    """Reads how far the run is; None where no run has started."""
    # in this order: a run that ends in between is done, not dead
    is_alive = is_locked(output)
    progress_now = read_progress(output / "progress.json")
    if progress_now is None and not is_alive and not (output / "run.json").is_file():
        return None
    progress = progress_now or STARTING
    if is_alive is False and progress.state not in ("done", "stopped", "planned"):
        progress = replace(progress, state="died")
    counted = None
    if progress.state in ("died", "stopped"):
        counted = answered_by_last_line(output / RESULTS_FILE)
        progress = replace(progress, done=counted.total,
                           total=num_queries(output) or progress.total)
        # what says how far it is may be lost; its results decide
        if counted.written and counted.written == num_queries(output):
            progress = replace(progress, state="done")
    return RunStatus(progress=progress, is_alive=is_alive, output=output, counted=counted,
                     ranks=tuple(read_beats(output)) if is_alive is not False else ())


def how_to_go_on(status: RunStatus, output: Path) -> str | None:
    """What a person does next, in words; None where the run needs nothing."""
    state = status.progress.state
    if status.is_alive is False and 0 < status.progress.total <= status.progress.done and (
            not (output / "metrics.json").is_file()):
        return ("all results are there, but the command was killed before it wrote metrics.json "
                "and the report: the same command writes them, and runs nothing again")
    if state == "planned":
        return "its schedule is found; its ranks start in its turn, or by the same command"
    if state not in ("stopped", "died"):
        return None
    found = status.answered
    kept = f"{found.written or 'no'} results are in results.jsonl"
    goes_on = "the same command goes on" + (" after them" if found.total else "")
    if found.held:
        kept += f" and {len(found.held)} in held.jsonl, until those before them are done"
    if state == "stopped":
        return f"{kept}; {goes_on}"
    why = failure(output)
    if why is None:
        return ("no process works on it any more (it, or the machine, was killed): "
                f"{kept}; {goes_on}")
    more = "" if "same command goes on" in why else f"; {goes_on}"
    return f"it failed: {why.rstrip('.')}" + (
        f". {kept[0].upper()}{kept[1:]}{more}" if found.total else "")
