"""Runs that are done in pieces, for a machine that is quiet for a few minutes at a time: many jobs
by one command, in order, with times that were measured into a cache of their own.

    FOLDER/cache          the compiled operators, and the profiles that the first command measures
    FOLDER/NAME-03        the third run of a job: job.yaml, out/schedule.json, out/metrics.json
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import load_schedule
from xprofiler.profile_file import load_profile
from xrunner.checkpoint.source import cache_dir

XGPT = [sys.executable, "-c", "from xgpt.cli.main import main; main()"]
DISTURBED = 0.05  # share of the cores that others used, above which a run does not count
_NO_SCHEDULE = 3  # the exit code where none keeps the bound


class Run(NamedTuple):
    schedule: Schedule
    metrics: dict[str, Any]
    place: Path  # its folder

    @property
    def words(self) -> str:
        """The policy and the control variables that are set."""
        variables = self.schedule.estimate.variables
        copies = self.schedule.deployment.replicas
        words = [f"{copies} copies"] * (copies > 1)
        words += [f"{name} {value}" for name, value in variables.items()
                  if isinstance(value, int) and value and name not in ("tp_degree", "tp_gpus")]
        return f"{self.schedule.estimate.policy}: {', '.join(words)}"


class SeveralRuns:
    """The folder of a round."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._cache = folder, folder / "cache"
        compiled = cache_dir() / "native"
        (self._cache / "xgpt").mkdir(parents=True, exist_ok=True)
        if compiled.is_dir() and not (self._cache / "xgpt" / "native").is_dir():
            shutil.copytree(compiled, self._cache / "xgpt" / "native")

    def submit(self, jobs: Iterable[tuple[str, int, Mapping[str, Any]]], *,
               most: int | None = None) -> None:
        """Runs those of (name, turn, job) that were not run to their end, in one command; `most`:
        the first so many of them. A job that was cut off is begun anew: of half a run nothing is
        predicted. Ends the program where one failed, but for a bound that no schedule keeps."""
        waiting = []
        for name, turn, job in jobs:
            if most is not None and len(waiting) >= most:
                break
            own = self._place(name, turn)
            if not (own / "out" / "metrics.json").is_file() and not self.keeps_no_bound(name):
                shutil.rmtree(own, ignore_errors=True)
                own.mkdir(parents=True)
                (own / "job.yaml").write_text(
                    yaml.safe_dump({"output": "out", **job, "name": f"{name}-{turn:02d}"}), "utf-8")
                waiting.append(own)
        if not waiting:
            return
        done = self.xgpt("submit", *(str(own / "job.yaml") for own in waiting), "--json")
        facts = json.loads(done.stdout)
        told = facts.get("jobs", [facts])
        for own, fact in zip(waiting, told, strict=True):
            if fact.get("exit_code") == _NO_SCHEDULE:
                (own / "none").write_text(str(fact.get("error", "")), encoding="utf-8")
            elif fact.get("exit_code") or not (own / "out" / "metrics.json").is_file():
                sys.exit(f"{own.name}: exit code {done.returncode}\n{done.stderr[-2000:]}")

    def xgpt(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command with the round's cache."""
        return subprocess.run([*XGPT, *words], capture_output=True, text=True, check=False,
                              env={**os.environ, "XDG_CACHE_HOME": str(self._cache)})

    def peak_bytes_per_s(self) -> float:
        """Of the memory of a rank's device, as the round's profile has it; 0 before one."""
        profiles = map(load_profile, sorted((self._cache / "xgpt" / "profiles").glob("*-*.json")))
        return max((profile.peaks.bandwidth_bytes_per_s for profile in profiles
                    if profile.peaks is not None), default=0.0)

    def keeps_no_bound(self, name: str) -> bool:
        """Whether a run of it was refused: no schedule keeps the job's bound."""
        return any(self._folder.glob(f"{name}-[0-9][0-9]/none"))

    def runs(self, name: str) -> list[Run]:
        """Those that came to their end, in turn."""
        return [Run(load_schedule(path.with_name("schedule.json")),
                    json.loads(path.read_text(encoding="utf-8")), path.parents[1])
                for path in sorted(self._folder.glob(f"{name}-[0-9][0-9]/out/metrics.json"))]

    def _place(self, name: str, turn: int) -> Path:
        return self._folder / f"{name}-{turn:02d}"


def is_quiet(run: Run) -> bool:
    """Whether others left it alone."""
    return (run.metrics.get("others_cpu_share") or 0.0) <= DISTURBED


def range_words(values: Iterable[str]) -> str:
    """One after the other, each once, in their order."""
    return "; ".join(dict.fromkeys(values))
