# owner ta
"""Output folders as runs leave them while they work, and what commands say of them."""

from __future__ import annotations

from pathlib import Path

from job_folder import xgpt

from xgpt.app.teller import LogTeller
from xrunner.files.sink import Progress

RUNNING = Progress(state="running", total=400, done=120, output_tokens=4800, elapsed_s=60.0,
                   latency_p50_s=1.5, latency_p99_s=2.25)


class Told(LogTeller):
    """Keeps what is said, and the lines of progress."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.shown: list[str] = []
        self.ends = 0

    def say(self, message: str) -> None:
        self.lines.append(message)

    def progress(self, line: str) -> None:
        self.shown.append(line)

    def end_progress(self) -> None:
        self.ends += 1


def said(*words: object, of: Path | None = None) -> str:
    """What a command says on either stream, in one line. No line of it is wider than 80 columns,
    but for the folder `of`, which is called FOLDER then."""
    done = xgpt(*words)
    told = done.stdout + done.stderr
    if of is not None:
        told = told.replace(str(of), "FOLDER")
    assert max(map(len, told.splitlines()), default=0) <= 80, told
    return " ".join(told.split())


def write_results(out: Path, count: int, torn: str = "") -> None:
    """So many results, and the beginning of another one."""
    (out / "results.jsonl").write_text("".join(f'{{"index": {i}}}\n' for i in range(count)) + torn)
