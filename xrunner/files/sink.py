"""Results, progress and stop requests of rank 0's head, as files of the output folder. Ranks' own
output goes through the MPI launcher's pipes. So progress is a small file, replaced at most twice a
second, for the progress bar and `xgpt status`."""

import json
import math
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from xgpt.core.prefixes import Prefixes
from xgpt.core.system.whole_file import json_text, write_atomically
from xgpt.requests.prefixes import encoded_tokens
from xrunner.files.expired import write_expired
from xrunner.files.launcher_link import LauncherLink
from xrunner.files.lock import StopRequest
from xrunner.files.result_line import spool_of
from xrunner.files.results import Answered, ResultWriter
from xrunner.files.tokenizer import TextTokenizer
from xrunner.plan import RunPlan
from xrunner.query import EXPIRED, FinishedQuery

UNDERWAY_FILE = "underway.jsonl"


class Underway:
    """underway.jsonl: requests that ranks have begun, a line per step, for diagnosis after a
    crash."""

    def __init__(self, output: Path) -> None:
        self._file: IO[str] = (output / UNDERWAY_FILE).open("w", encoding="utf-8")

    def begin(self, queries: Iterable[int]) -> None:
        self._file.write(json.dumps(list(queries)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_underway(output: Path) -> list[int]:
    """Requests that ranks have begun, finished ones included; empty if there are none."""
    queries: list[int] = []
    try:
        with (output / UNDERWAY_FILE).open(encoding="utf-8") as file:
            for line in file:
                queries += json.loads(line)
    except (OSError, ValueError):  # a torn last line
        pass
    return queries


_LOOK_S = 0.1  # chosen: seconds between checks for a stop, since shared folders respond slowly
_INTERVAL_S = 0.5  # chosen: seconds between states of progress.json
_WINDOW = 1000  # chosen: latencies in the running percentiles
# figures of a request whose percentiles are reported
TIMES = ("latency", "ttft", "tpot")


class RunSink:
    """Writes results and progress to the output folder, and checks for a stop request."""

    def __init__(self, plan: RunPlan, *, num_queries: int, before: Answered,
                 parsed: Callable[[FinishedQuery], FinishedQuery] = lambda result: result) -> None:
        """`before`: results of earlier runs. `parsed`: turns a result into the form to write."""
        self.plan = plan
        self.output, self._stop = plan.output, StopRequest(plan.output)
        self._model_dir, self._tokenizer = plan.model_dir, cast("TextTokenizer | None", None)
        self._writer = ResultWriter(plan.output / "results.jsonl", first_index=before.written,
                                    model=plan.model_name, sync_s=plan.sync_s,
                                    token_text=lru_cache(65_536)(self._token_text))
        self._total, self._done_before = num_queries, before.total
        self.underway = Underway(plan.output)
        self._latencies: deque[float] = deque(maxlen=_WINDOW)
        self._last_done_s: float | None = None
        self._written_s = -math.inf  # when progress.json was written
        self._looked_s, self._is_to_stop = -math.inf, False
        self.launcher: LauncherLink | None = None  # set if the launcher follows output lengths
        self.tally, self._parsed = Tally(plan.clock_s), parsed
        self.on_end: Callable[[], None] = lambda: None  # called as a request ends
        self.deadlines, self.sharing = DeadlineTally(plan), SharingTally()

    def _token_text(self, token: int) -> str:
        if self._tokenizer is None:  # few jobs need it
            self._tokenizer = TextTokenizer(self._model_dir)
        return self._tokenizer.token_text(token)

    def finished(self, result: FinishedQuery) -> None:
        self.on_end()
        if self.deadlines.take(result):
            return
        self._writer.write(self._parsed(result))
        self.tally.add(result)
        self.sharing.add(result)
        if result.output_ids:
            self._latencies.append(result.latency_s)
        self._last_done_s = max(self._last_done_s or 0.0, result.last_token_s)
        if self.launcher is not None:
            self.launcher.finished(result)

    def progress(self, elapsed_s: float, output_tokens: int) -> None:
        if elapsed_s - self._written_s >= _INTERVAL_S:
            self._write_progress(elapsed_s, output_tokens, "running")
        if self.launcher is not None:
            self.launcher.look(elapsed_s)

    def should_stop(self) -> bool:
        now = time.monotonic()
        if not self._is_to_stop and now - self._looked_s >= _LOOK_S:
            self._looked_s, self._is_to_stop = now, self._stop.is_made
        return self._is_to_stop

    @property
    def leaves_some(self) -> bool:
        """Whether requests are left that this run does not answer."""
        return bool(self.plan.aside or self.deadlines.expired)

    @property
    def num_held(self) -> int:
        """Number of results that wait for an earlier one."""
        return self._writer.num_held

    def close(self, elapsed_s: float, state: str) -> None:
        """Closes all files, `elapsed_s` by the run's clock. `state`: "done" or "stopped"."""
        if self.deadlines.expired:
            self._writer.leave_out(write_expired(self.output, self.deadlines.expired))
        self._writer.close()
        self.underway.close()
        self._write_progress(elapsed_s, self.tally.output_tokens, state)

    def _write_progress(self, elapsed_s: float, output_tokens: int, state: str) -> None:
        self._written_s, began_s = elapsed_s, self.plan.clock_s
        p50, p99 = _p50_and_p99(self._latencies)
        last_s = None if self._last_done_s is None else self._last_done_s - began_s
        write_progress(self.output / "progress.json", Progress(
            state=state, total=self._total, done=self._done_before + len(self.tally),
            output_tokens=output_tokens, elapsed_s=elapsed_s - began_s, latency_p50_s=p50,
            latency_p99_s=p99, done_before=self._done_before, last_done_s=last_s,
            clock_s=elapsed_s if self.plan.arrives else 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A run's progress. Latencies are over the latest requests; None before the first is done.
    `clock_s`: where the clock of a job stands whose requests arrive over time: it goes on from
    there when the job does."""

    state: str  # "starting" | "loading" | "running" | "done" | "stopped"
    total: int
    done: int
    output_tokens: int
    elapsed_s: float
    latency_p50_s: float | None
    latency_p99_s: float | None
    done_before: int = 0  # of `done`: by earlier runs
    last_done_s: float | None = None  # `elapsed_s` when the last request was done
    clock_s: float = 0.0


STARTING = Progress(state="starting", total=0, done=0, output_tokens=0, elapsed_s=0.0,
                    latency_p50_s=None, latency_p99_s=None)


def write_progress(path: Path, progress: Progress) -> None:
    """Writes progress.json, durably in a final state."""
    write_atomically(path, json_text(asdict(progress)) + "\n",
                     is_durable=progress.state in ("done", "stopped"))


def read_progress(path: Path) -> Progress | None:
    """The progress that a run wrote last; None if it cannot be read."""
    try:
        return Progress(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


class DeadlineTally:
    """Counts of requests by their deadlines, which count from the arrival where requests arrive
    over time. `expired`: those that did not begin. `began_s`: seconds from the job's first command
    to the run's first step."""

    def __init__(self, plan: RunPlan) -> None:
        spool = spool_of(plan.output)
        self._plan, self._deadlines_s = plan, None if spool is None else spool.deadlines_s
        self.expired, self.began_s = list[int](), 0.0
        self._of = self._in_time = 0

    def take(self, result: FinishedQuery) -> bool:
        """Counts a request that has ended; returns whether it has expired."""
        index, is_expired = result.query.index, result.finish_reason == EXPIRED
        if is_expired:
            self.expired.append(index)
        if self._deadlines_s is not None and math.isfinite(own_s := self._deadlines_s[index]):
            self._of += 1
            has_answer = result.finish_reason not in (EXPIRED, "error")
            passed_s = (time.time() - self._plan.started_at if result.arrival_s is None
                        else result.latency_s)
            self._in_time += has_answer and bool(passed_s <= own_s)
        return is_expired

    @property
    def facts(self) -> dict[str, float]:
        """Keys of measured.json; none without deadlines. `in_time`: of `with_deadline`."""
        if self._deadlines_s is None and self._plan.expires_s is None:
            return {}
        return {"began_s": self.began_s, "expired": len(self.expired),
                "with_deadline": self._of, "in_time": self._in_time}


class SharingTally:
    """Input tokens of a run whose requests share prefixes. `prefixes`: which the run shares; None:
    nothing is counted."""

    def __init__(self) -> None:
        self.prefixes: Prefixes | None = None
        self._columns = array("q")  # request and input tokens, of each answered one

    def add(self, result: FinishedQuery) -> None:
        """Counts a request that has ended."""
        if self.prefixes is not None and result.output_ids:
            self._columns.extend((result.query.index, len(result.query.input_ids)))

    def facts(self, encoded: int) -> dict[str, Any]:
        """Keys of measured.json; none if nothing is shared. `encoded`: tokens that the run
        encoded. Together with the shared ones they are the input tokens and those that were
        encoded again."""
        if self.prefixes is None:
            return {}
        queries, inputs = np.array(self._columns, np.int64).reshape(-1, 2).T
        own, total = self.prefixes[queries], int(inputs.sum())
        once = encoded_tokens(own, inputs)
        return {"prefixes": {
            "prefixes": int(own.used.sum()), "input_tokens": total, "encoded_tokens": encoded,
            "shared_tokens": total - once, "encoded_again_tokens": encoded - once}}


class Tally:
    """Columns of figures of finished requests; ten million take 240 MB."""

    def __init__(self, began_s: float = 0.0) -> None:
        """`began_s`: clock time at which the run began."""
        self._began_s = began_s
        # of each replica: requests, output tokens, and seconds to its last one
        self.replicas = defaultdict[int, tuple[int, int, float]](lambda: (0, 0, 0.0))
        self.num_failed = 0  # with an error instead of an answer
        self._times = {name: array("d") for name in TIMES}

    def add(self, result: FinishedQuery) -> None:
        queries, tokens, last_s = self.replicas[result.replica or 0]
        self.replicas[result.replica or 0] = (
            queries + 1, tokens + len(result.output_ids), max(
                last_s, result.last_token_s - self._began_s))
        self.num_failed += result.error is not None
        if not result.output_ids:
            return  # refused or failed at once: its times are meaningless
        for name, column in self._times.items():
            if (value := getattr(result, f"{name}_s")) is not None:
                column.append(value)

    def __len__(self) -> int:
        return sum(queries for queries, _, _ in self.replicas.values())

    @property
    def output_tokens(self) -> int:
        return sum(tokens for _, tokens, _ in self.replicas.values())

    def percentiles(self) -> dict[str, float | None]:
        return percentiles_of(self._times)


def percentiles_of(times: dict[str, Any]) -> dict[str, float | None]:
    """P50 and P99 of each of TIMES by their keys in metrics.json; None if never measured."""
    return {f"{name}_{label}_s": value for name in TIMES
            for label, value in zip(("p50", "p99"), _p50_and_p99(times[name]), strict=True)}


def _p50_and_p99(values: Sequence[float]) -> Sequence[float | None]:
    return np.quantile(values, (0.5, 0.99)).tolist() if len(values) else (None, None)
