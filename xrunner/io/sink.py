"""Where rank 0's head reports: results, progress and the wish to stop, as files of the output
folder."""

from __future__ import annotations

import math
import time

from xrunner.io.launcher_link import LauncherLink
from xrunner.io.progress import ProgressFile
from xrunner.io.results import Answered, ResultWriter
from xrunner.io.tally import Tally
from xrunner.plan import RunPlan
from xrunner.query import FinishedQuery

STOP_FILE = "stop"  # its presence in the output folder asks the run to end early
_LOOK_S = 0.1  # between looks for it: a folder that other machines share answers slowly


class RunSink:
    """Results, progress and the wish to stop, as files of the output folder."""

    def __init__(self, plan: RunPlan, *, num_queries: int, before: Answered) -> None:
        """`before`: what earlier runs answered, after which this one goes on."""
        self.output, self._stop_path = plan.output, plan.output / STOP_FILE
        self._writer = ResultWriter(plan.output / "results.jsonl", first_index=before.written,
                                    model=plan.model_name)
        self._progress = ProgressFile(plan.output / "progress.json", total=num_queries,
                                      done_before=before.total)
        self._looked_s, self._is_to_stop = -math.inf, False
        self.launcher: LauncherLink | None = None  # where the launcher follows the output lengths
        self.tally = Tally()

    def finished(self, result: FinishedQuery) -> None:
        self._writer.write(result)
        self.tally.add(result)
        self._progress.add(result.latency_s)
        if self.launcher is not None:
            self.launcher.finished(result)

    def progress(self, elapsed_s: float, output_tokens: int) -> None:
        self._progress.tick(elapsed_s, output_tokens)
        if self.launcher is not None:
            self.launcher.look(elapsed_s)

    def should_stop(self) -> bool:
        now = time.monotonic()
        if not self._is_to_stop and now - self._looked_s >= _LOOK_S:
            self._looked_s, self._is_to_stop = now, self._stop_path.exists()
        return self._is_to_stop

    @property
    def num_held(self) -> int:
        """How many results wait for one before them."""
        return self._writer.num_held

    def close(self, wall_s: float, state: str) -> None:
        """`state`: "done" or "stopped"."""
        self._writer.close()
        self._progress.tick(wall_s, self.tally.output_tokens, state)
