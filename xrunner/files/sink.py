"""Where rank 0's head reports: results, progress and the wish to stop, as files of the output
folder. The ranks' own output goes through the MPI launcher's pipes, so progress travels by a small
file, replaced at most twice a second, for the progress bar and `xgpt status`."""

import json
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from xgpt.core.system.whole_file import json_text, write_atomically
from xrunner.files.launcher_link import LauncherLink
from xrunner.files.lock import StopRequest
from xrunner.files.results import Answered, ResultWriter
from xrunner.files.tokenizer import TextTokenizer
from xrunner.plan import RunPlan
from xrunner.query import FinishedQuery

UNDERWAY_FILE = "underway.jsonl"


class Underway:
    """underway.jsonl: the queries that ranks began, a line a step, for who finds ranks dead."""

    def __init__(self, output: Path) -> None:
        self._file: IO[str] = (output / UNDERWAY_FILE).open("w", encoding="utf-8")

    def begin(self, queries: Iterable[int]) -> None:
        self._file.write(json.dumps(list(queries)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_underway(output: Path) -> list[int]:
    """The queries that ranks began; some may be done. None of a run that has not begun one."""
    queries: list[int] = []
    try:
        with (output / UNDERWAY_FILE).open(encoding="utf-8") as file:
            for line in file:
                queries += json.loads(line)
    except (OSError, ValueError):  # a torn last line
        pass
    return queries


_LOOK_S = 0.1  # between looks for it: a folder that other machines share answers slowly
_INTERVAL_S = 0.5  # between states of progress.json
_WINDOW = 1000  # latencies the running percentile is taken over
# figures of one query, of which a run's percentiles are told
TIMES = ("latency", "ttft", "tpot")


class RunSink:
    """Results, progress and the wish to stop, as files of the output folder."""

    def __init__(self, plan: RunPlan, *, num_queries: int, before: Answered,
                 parsed: Callable[[FinishedQuery], FinishedQuery] = lambda result: result) -> None:
        """`before`: what earlier runs answered, after which this one goes on. `parsed`: a result
        as it is written."""
        self.plan = plan
        self.output, self._stop = plan.output, StopRequest(plan.output)
        self._model_dir, self._tokenizer = plan.model_dir, cast("TextTokenizer | None", None)
        self._writer = ResultWriter(plan.output / "results.jsonl", first_index=before.written,
                                    model=plan.model_name, sync_s=plan.sync_s,
                                    token_text=lru_cache(65_536)(self._token_text))
        self._total, self._done_before = num_queries, before.total
        self.leaves_some = bool(plan.aside)
        self.underway = Underway(plan.output)
        self._latencies: deque[float] = deque(maxlen=_WINDOW)
        self._last_done_s: float | None = None
        self._written_s = -_INTERVAL_S  # when progress.json was
        self._looked_s, self._is_to_stop = -math.inf, False
        self.launcher: LauncherLink | None = None  # where the launcher follows the output lengths
        self.tally, self._parsed = Tally(), parsed

    def _token_text(self, token: int) -> str:
        if self._tokenizer is None:  # few jobs ask for it
            self._tokenizer = TextTokenizer(self._model_dir)
        return self._tokenizer.token_text(token)

    def finished(self, result: FinishedQuery) -> None:
        self._writer.write(self._parsed(result))
        self.tally.add(result)
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
    def num_held(self) -> int:
        """How many results wait for one before them."""
        return self._writer.num_held

    def close(self, wall_s: float, state: str) -> None:
        """`state`: "done" or "stopped"."""
        self._writer.close()
        self.underway.close()
        self._write_progress(wall_s, self.tally.output_tokens, state)

    def _write_progress(self, elapsed_s: float, output_tokens: int, state: str) -> None:
        self._written_s = elapsed_s
        p50, p99 = _p50_and_p99(self._latencies)
        write_progress(self.output / "progress.json", Progress(
            state=state, total=self._total, done=self._done_before + len(self.tally),
            output_tokens=output_tokens, elapsed_s=elapsed_s, latency_p50_s=p50, latency_p99_s=p99,
            done_before=self._done_before, last_done_s=self._last_done_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One state of a run. Latencies are over the last queries; None before the first is done."""

    state: str  # "starting" | "loading" | "running" | "done" | "stopped"
    total: int
    done: int
    output_tokens: int
    elapsed_s: float
    latency_p50_s: float | None
    latency_p99_s: float | None
    done_before: int = 0  # of `done`: by an earlier run, which this one goes on after
    last_done_s: float | None = None  # on the clock of the run: when the last query was done


STARTING = Progress(state="starting", total=0, done=0, output_tokens=0, elapsed_s=0.0,
                    latency_p50_s=None, latency_p99_s=None)


def write_progress(path: Path, progress: Progress) -> None:
    """It is durable where it says that something is."""
    write_atomically(path, json_text(asdict(progress)) + "\n",
                     is_durable=progress.state in ("done", "stopped"))


def read_progress(path: Path) -> Progress | None:
    """Reads the progress that a run wrote last; None where there is none that can be read."""
    try:
        return Progress(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


class Tally:
    """A column a figure: ten million queries take 320 MB."""

    def __init__(self) -> None:
        self._output_tokens = array("q")
        self.num_failed = 0  # with an error in the place of an answer
        self._times = {name: array("d") for name in TIMES}

    def add(self, result: FinishedQuery) -> None:
        self._output_tokens.append(len(result.output_ids))
        self.num_failed += result.error is not None
        if not result.output_ids:
            return  # refused, or failed at once: its times would be others' without any work
        for name, column in self._times.items():
            if (value := getattr(result, f"{name}_s")) is not None:
                column.append(value)

    def __len__(self) -> int:
        return len(self._output_tokens)

    @property
    def output_tokens(self) -> int:
        return sum(self._output_tokens)

    def percentiles(self) -> dict[str, float | None]:
        return percentiles_of(self._times)


def percentiles_of(times: dict[str, Any]) -> dict[str, float | None]:
    """P50 and P99 of each of TIMES as keys of metrics.json; None of what was never measured."""
    return {f"{name}_{label}_s": value for name in TIMES
            for label, value in zip(("p50", "p99"), _p50_and_p99(times[name]), strict=True)}


def _p50_and_p99(values: Sequence[float]) -> Sequence[float | None]:
    return np.quantile(values, (0.5, 0.99)).tolist() if len(values) else (None, None)
