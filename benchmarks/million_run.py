"""Memory of `xgpt submit` on a long file of requests, ranks and all: `python
benchmarks/million_run.py LINES [--minutes M] [--folder DIR]`.

The same requests as million.py makes, on a toy model of random weights, as a command with a real
rank; nothing in it is replaced but the times that it plans by (data sheets, so that nothing is
measured). With --minutes it works on them for so long, is asked to stop by `xgpt stop`, and asked
for its state by `xgpt status`. Prints, of launcher and rank 0, the most memory that was resident
(VmHWM, files of the spool that are mapped included) and the most that was their own, at the end of
each stage, beside a job of one line."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from faults import XGPT, ToyJob, below
from million import make

_LOOK_S = 0.25
_STEPS = "policy: rra, encode_batch: 256, decode_iterations: 4, replicas: 1"
_MAX_TOKENS = 3


class Watched:
    """The peaks of one process, in bytes."""

    def __init__(self, pid: int) -> None:
        self.pid, self.resident, self.own = pid, 0, 0

    def look(self) -> None:
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        except OSError:
            return
        sizes = {line.partition(":")[0]: 1024 * int(line.split()[1]) for line in lines
                 if line.startswith(("VmHWM", "RssAnon"))}
        self.resident = max(self.resident, sizes.get("VmHWM", 0))
        self.own = max(self.own, sizes.get("RssAnon", 0))


class Run:
    """A command at work, watched. `tell`: prints what it takes where a stage ends."""

    def __init__(self, job: ToyJob, *, tells: bool) -> None:
        self._job, self._tells, self._began_s = job, tells, time.monotonic()
        self._out = (job.folder / "said").open("w")
        self.process = subprocess.Popen([*XGPT, "submit", str(job.file)], stdout=self._out,
                                        stderr=self._out, start_new_session=True)
        self.launcher, self._stage = Watched(self.process.pid), ""
        self.rank: Watched | None = None

    def look(self) -> None:
        self.launcher.look()
        if ranks := below(self.process.pid)["rank"]:
            # one started ahead may give way to another
            if self.rank is None or self.rank.pid not in ranks:
                self.rank = Watched(ranks[0])
            self.rank.look()
        self._note()

    def _note(self) -> None:
        stage = ("ends" if (self._job.output / "measured.json").is_file()
                 else "answers" if self.count() else "loads" if (
                     self._job.output / "run.json").is_file() else "reads and plans")
        if stage != self._stage:
            self._say(f"{self._stage} -> {stage}")
            self._stage = stage

    def count(self) -> int:
        try:
            return int(json.loads((self._job.output / "progress.json").read_text())["done"])
        except (OSError, ValueError, KeyError):
            return 0

    @property
    def is_answering(self) -> bool:
        return self._stage == "answers"

    def _say(self, what: str) -> None:
        if self._tells:
            own = [self.launcher, *([self.rank] if self.rank is not None else [])]
            print(f"{time.monotonic() - self._began_s:7.0f} s {what}: "
                  + "; ".join(f"{one.resident / 1e6:.0f} MB, own {one.own / 1e6:.0f}"
                              for one in own), flush=True)

    def end(self) -> None:
        self._say(f"ended with {self.process.returncode}, {self.count():,} answers")
        self._out.close()


def command(*words: str) -> None:
    done = subprocess.run([*XGPT, *words], text=True, capture_output=True, check=False,
                          env={**os.environ, "COLUMNS": "80"})
    print(f"$ xgpt {words[0]}: exit code {done.returncode}\n{(done.stdout + done.stderr).rstrip()}",
          flush=True)


def run(lines: int, folder: Path, minutes: float | None, *, tells: bool) -> Run:
    job = make(folder, lines, schedule=_STEPS, max_tokens=_MAX_TOKENS)
    one, answering_s = Run(job, tells=tells), 0.0
    while one.process.poll() is None:
        one.look()
        time.sleep(_LOOK_S)
        answering_s += _LOOK_S if one.is_answering else 0.0
        if minutes is not None and answering_s > 60 * minutes:
            minutes = None
            command("status", str(job.file))
            command("stop", str(job.file))
    one.end()
    if tells:
        command("status", str(job.file))
    return one


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lines", type=int)
    parser.add_argument("--minutes", type=float, help="of answering, until it is asked to stop")
    parser.add_argument("--folder", type=Path, help="the job is kept there")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        empty = run(1, Path(name), None, tells=False)
    with tempfile.TemporaryDirectory() as name:
        found = run(asked.lines, asked.folder or Path(name), asked.minutes, tells=True)
    for who in ("launcher", "rank"):
        one, base = getattr(found, who), getattr(empty, who)
        print(f"{who}: {(one.resident - base.resident) / 1e6:.0f} MB above one line's "
              f"{base.resident / 1e6:.0f} MB (own: {(one.own - base.own) / 1e6:.0f} above "
              f"{base.own / 1e6:.0f})")


if __name__ == "__main__":
    main()
