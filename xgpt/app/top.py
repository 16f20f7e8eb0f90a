"""Shows a running job, here or under Slurm, from the files it writes, on the live screen of `xgpt
top`, which rich draws (the extra `top`); and stops it, for `xgpt stop`."""

import importlib.util
import json
import math
import shutil
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xgpt.app.teller import bar, time_left_s
from xgpt.core.errors import MissingExtraError, XgptError, visible
from xgpt.core.units import format_seconds
from xgpt.launch.slurm_jobs import SlurmJob, cancel_job
from xgpt.report.table import fact, shown, shown_width, table
from xgpt.report.words import counted
from xgpt.run_folder.files import (
    RunFolder,
    SlurmRecord,
    current_activity,
    last_messages,
    no_run_error,
)
from xgpt.run_folder.state import State, are_silent, job_status, notes_of, signs_of_life
from xrunner.files.heartbeat import RankState, of_replicas, read_heartbeats
from xrunner.files.lock import StopRequest
from xrunner.files.sink import Progress

_MESSAGES = 8
MOST_ROWS = 16  # chosen: of a table of ranks, where it does not fill a screen
_LEFT = ("pool", "node", "device")  # columns of words
ASK_S = 10.0  # between queries of Slurm
_LOOK_S = 1.0
_PANEL = 4  # columns of the panel's border
_COLOURS: dict[str, str] = {State.RUNNING: "green", State.DONE: "green", State.DIED: "red",
                            State.STOPPED: "yellow", State.COMPLETE: "yellow"}
_ASKED = "asked to stop: it ends in a few seconds, and the same command goes on from there"


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """The state of a job at one moment. `ranks`: none where they write no heartbeats. `activity`:
    words for the work before the ranks start."""

    name: str
    output: Path
    state: str
    is_active: bool
    progress: Progress | None
    bound_s: float
    ranks: tuple[RankState, ...]
    activity: str
    slurm: str
    remark: str  # the next step for the user, or why it failed
    messages: tuple[str, ...]

    @property
    def left_s(self) -> float | None:
        """Seconds until the run is done; None where they are not known."""
        if self.progress is None or (self.is_active and are_silent(self.ranks)):
            return None
        return time_left_s(self.progress, self.output)

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Labels and words of the run, without its ranks and messages."""
        p, facts = self.progress, []
        if self.slurm:
            facts.append(("slurm", self.slurm))
        is_begun = p is not None and p.state == "running"
        if self.is_active and (now := notes_of(self.ranks) or self.activity * (not is_begun)):
            facts.append(("now", now))
        if p is None or not p.total:
            return facts
        left = self.left_s
        facts.append(("requests", f"{p.done:,} of {p.total:,} done ({p.done / p.total:.0%})" + (
            "" if left is None else f", about {format_seconds(left)} left")))
        if self.is_active and are_silent(self.ranks) and (said := signs_of_life(self.ranks)):
            facts.append(("silent", said))
        pace, replicas = "", of_replicas(self.ranks) if self.is_active else []
        if replicas:
            pace = f"{sum(one.tokens_per_s for one in replicas):,.0f} output tokens/s now, "
            at_work = sum(one.queries for one in replicas)
            facts.append(("at work", f"{at_work:,} requests in the system"))
        if p.output_tokens and p.elapsed_s > 0:
            facts.append(("speed", f"{pace}{p.output_tokens / p.elapsed_s:,.0f} output tokens/s on "
                          f"average over {format_seconds(p.elapsed_s)}"))
        if p.latency_p99_s is not None and p.latency_p50_s is not None:
            verb = "OVER" if p.latency_p99_s > self.bound_s else "within"
            bound = "no limit" if math.isinf(self.bound_s) else (
                f"{verb} the limit of {format_seconds(self.bound_s)}")
            facts.append(("latency", f"{format_seconds(p.latency_p50_s)} for half of the requests, "
                          f"{format_seconds(p.latency_p99_s)} for 99 %; {bound}"))
        return facts

    def lines(self, most_rows: int = MOST_ROWS, width: int | None = None) -> list[str]:
        """The lines below the name and state, for at most `most_rows` ranks and `width` columns."""
        lines = [fact(label, words, width) for label, words in self.facts]
        if self.ranks:
            lines += ["", *rank_lines(self.ranks, most_rows, is_active=self.is_active)]
        if self.remark:
            lines += ["", fact("note", self.remark, width)]
        if self.messages:
            lines += ["", "last messages", *(textwrap.fill(
                " ".join(line.split()), width or shown_width(), initial_indent="  ",
                subsequent_indent=" " * 11, break_on_hyphens=False) for line in self.messages)]
        return lines

    def __str__(self) -> str:
        return "\n".join([fact(self.name, f"{self.state}, {shown(self.output)}"), *self.lines()])


def rank_lines(ranks: Sequence[RankState], most: int = MOST_ROWS, *,
               is_active: bool = True) -> list[str]:
    """A table of the ranks, or of the replicas where there are several, with a line for each of
    several nodes; at most `most` of each. `is_active`: whether their current figures hold."""
    replicas = of_replicas(ranks)
    rows = [_rank_row(rank, is_active) for rank in ranks] if len(replicas) == 1 else [
        _replica_row(replica, is_active) for replica in replicas]
    header = [name for name in rows[0] if any(row[name] for row in rows)]
    lines = [table(header, [[row[name] or "-" for name in header] for row in rows[:most]], right=[
        place for place, name in enumerate(header) if name not in _LEFT])]
    if more := len(rows[most:]):
        lines.append(f"and {counted(more, f'more {header[0]}')}")
    nodes: dict[str, list[RankState]] = {}
    for replica in replicas:
        nodes.setdefault(replica.node, []).append(replica)
    if len(nodes) > 1:
        lines += [f"{node}: {counted(len(own), 'replica')}" + (
            f", {sum(one.tokens_per_s for one in own):,.0f} tokens/s" * is_active)
            for node, own in [*nodes.items()][:most]]
        lines += [f"and {counted(more, 'more node')}"] if (more := len(nodes) - most) > 0 else []
    return lines


def _rank_row(rank: RankState, is_active: bool) -> dict[str, str]:
    mean = rank.busy_s / rank.elapsed_s if rank.elapsed_s > 0 else 0.0
    return {"rank": str(rank.rank), "stage": str(rank.stage), "pool": rank.pool,
            "busy now": f"{rank.recent_share:.0%}" if is_active else "-",
            "on average": f"{mean:.0%}", "queries": str(rank.queries) if is_active else "-"}


def _replica_row(replica: RankState, is_active: bool) -> dict[str, str]:
    """Cells by their columns; "" for what is not known, or 0."""
    busy = replica.recent_share if is_active else replica.busy_s / max(replica.elapsed_s, 1e-9)
    figures = {"at work": replica.queries, "waiting": replica.waiting,
               "tokens/s": replica.tokens_per_s, "restarts": replica.restarts}
    return {"replica": str(replica.replica), "node": replica.node, "device": replica.devices,
            "busy": f"{busy:.0%}", **{name: f"{value:,.0f}" if value else "" for name, value in (
                figures.items())}}


class CachedSlurmState:
    """Queries Slurm every ASK_S seconds, and returns the last answer in between, since one
    controller serves all users."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._asked_s = clock, -math.inf
        self._said: SlurmJob | None = None
        self._trouble: XgptError | None = None

    def __call__(self, record: SlurmRecord) -> SlurmJob | None:
        """The state of a Slurm job, None where Slurm does not know it. Raises XgptError as
        SlurmRecord.ask."""
        if self._clock() - self._asked_s >= ASK_S:
            self._asked_s, self._said, self._trouble = self._clock(), None, None
            try:
                self._said = record.ask()
            except XgptError as trouble:
                self._trouble = trouble
        if self._trouble is not None:
            raise self._trouble
        return self._said


def glance(place: RunFolder, ask: Callable[[SlurmRecord], SlurmJob | None] = SlurmRecord.ask,
           ) -> Glance | None:
    """Reads the state of a run from its folder; None where there has been no job. `ask`: queries
    Slurm."""
    output = place.output
    status = job_status(output, ask)
    if status is None:
        return None
    progress = None if status.run.state is State.NONE else status.run.progress
    ranks = tuple(read_heartbeats(output)) or tuple(_measured(output))
    return Glance(
        name=place.name, output=output, state=status.state, is_active=status.is_active,
        progress=progress, bound_s=place.bound_s, ranks=ranks, activity=current_activity(output),
        slurm=(status.in_words or "").removeprefix("Slurm: "),
        remark=(None if status.is_active else status.run.next_step) or status.cause or "",
        messages=tuple(last_messages(output, _MESSAGES)))


def _measured(output: Path) -> Iterable[RankState]:
    """The ranks of a run that has ended, from its measured.json."""
    try:
        measured = json.loads((output / "measured.json").read_text(encoding="utf-8"))
        wall_s = float(measured["wall_s"])
        for rank in measured["ranks"]:
            busy_s = float(rank["busy_s"])
            yield RankState(
                rank=rank["rank"], stage=rank["stage"], pool=rank["pool"], elapsed_s=wall_s,
                busy_s=busy_s, recent_share=busy_s / wall_s if wall_s else 0.0, queries=0,
                replica=rank.get("replica", 0))
    except (OSError, ValueError, KeyError, TypeError):
        return


def follow(look: Callable[[], Glance | None]) -> Glance | None:
    """Shows the job once a second until it ends, or Ctrl-C is pressed; returns the last glance.
    Raises MissingExtraError without rich."""
    if importlib.util.find_spec("rich") is None:
        raise MissingExtraError("rich", "top", "the live view (`xgpt status` needs nothing)")
    from rich.live import Live

    now = look()
    if now is None or not now.is_active:
        return now
    with suppress(KeyboardInterrupt), Live(screen=True, auto_refresh=False) as live:
        while now is not None:
            live.update(screen(now), refresh=True)
            if not now.is_active:
                break
            time.sleep(_LOOK_S)
            now = look()
    return now


def screen(now: Glance) -> Any:
    """The rich panel that shows a glance, sized to the terminal."""
    from rich.panel import Panel
    from rich.text import Text

    most_rows = max(shutil.get_terminal_size((80, 36)).lines - 20, 4)  # there are lines for
    inside = shutil.get_terminal_size((80, 24)).columns - _PANEL
    lines, p = now.lines(most_rows, inside), now.progress
    if p is not None and p.total:
        lines.insert(0, fact("progress", bar(p.done, p.total)))
    title = Text(visible(f"{now.name}: {now.state}"),
                 style=f"bold {_COLOURS.get(now.state, 'cyan')}")
    return Panel(Text(visible("\n".join(lines)), no_wrap=True, overflow="ellipsis"), title=title,
                 subtitle="Ctrl-C leaves; the job goes on")


def stop_job(output: Path) -> str:
    """Cancels a job that waits in Slurm's queue, or asks a run to stop; returns a sentence about
    it. Raises XgptError where there is nothing to stop."""
    status = job_status(output)
    if status is None:
        raise no_run_error(output)
    record, said = status.record, status.said
    if record is not None and said is not None and said.is_waiting:
        cancel_job(record.job_id, record.cluster)
        return f"Slurm job {record.job_id} was waiting and is cancelled"
    is_unknown = record is not None and status.trouble is not None
    if not status.is_active and not is_unknown:
        raise XgptError(f"{shown(output)}: no run is active there (state: {status.state})")
    StopRequest(output).make_by_user()
    if is_unknown:
        return f"{status.trouble}; if the run is active, it was {_ASKED}"
    return _ASKED if said is None else f"Slurm job {record.job_id if record else ''} is {_ASKED}"
