"""What a run said and what became of it, kept in its output folder, so that `xgpt top` and `status`
show it in another terminal."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from xgpt.app.telling import Teller
from xgpt.core.errors import StoppedEarly, XgptError
from xgpt.core.whole_file import write_atomically
from xrunner.files.beat import BEATS
from xrunner.files.sink import STARTING, read_progress, write_progress

MESSAGES_FILE = "messages.log"  # of the last run alone: a line each, with its time
DOING_FILE = "doing"  # the present state of what takes a while, in one line; there as long as it is
_INTERVAL_S = 1.0
_FAILED = "failed: "


class KeptTeller:
    """Passes everything on to another Teller, and keeps it. A folder that cannot be written to is
    told of where results are."""

    def __init__(self, tell: Teller, output: Path) -> None:
        self._tell, self._output, self._written_s = tell, output, 0.0
        with suppress(OSError):
            (output / MESSAGES_FILE).write_text("", encoding="utf-8")
            (output / DOING_FILE).unlink(missing_ok=True)  # of one that was killed

    def say(self, message: str) -> None:
        self._tell.say(message)
        stamp = time.strftime("%H:%M:%S")
        lines = [f"{stamp} {line}\n" for line in message.splitlines() if line.strip()]
        with suppress(OSError), (self._output / MESSAGES_FILE).open("a", encoding="utf-8") as file:
            file.writelines(lines)

    def progress(self, line: str, *, is_last: bool = False) -> None:
        self._tell.progress(line, is_last=is_last)
        now = time.monotonic()
        if now - self._written_s >= _INTERVAL_S:
            self._written_s = now
            with suppress(OSError):
                write_atomically(self._output / DOING_FILE, line + "\n",
                                 is_durable=False)

    def end_progress(self) -> None:
        self._tell.end_progress()
        with suppress(OSError):
            (self._output / DOING_FILE).unlink(missing_ok=True)


@contextmanager
def end_kept(output: Path) -> Iterator[None]:
    """What becomes of a run, from before its ranks start: its terminal may be gone by the time that
    somebody asks. progress.json says that it starts, that it was stopped, or that it is planned and
    waits for its turn; what it fails with stands behind what it said."""
    shutil.rmtree(output / BEATS, ignore_errors=True)  # of ranks of an earlier run
    with suppress(OSError):  # told of where results are written
        write_progress(output / "progress.json", STARTING)
    try:
        yield
        _ended(output, "planned", of=("starting",))
    except (StoppedEarly, KeyboardInterrupt):
        _ended(output, "stopped", of=("starting", "loading", "running"))
        raise
    except XgptError as error:
        with suppress(OSError), (output / MESSAGES_FILE).open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {_FAILED}{' '.join(str(error).split())}\n")
        raise


def _ended(output: Path, state: str, of: tuple[str, ...]) -> None:
    now = read_progress(output / "progress.json") or STARTING
    if now.state in of:
        with suppress(OSError):
            write_progress(output / "progress.json", replace(now, state=state))


def failure(output: Path) -> str | None:
    """What the last run failed with; None where it did not, or could not say so."""
    said = [line.partition(" ")[2] for line in last_messages(output, 1)]
    return said[0].removeprefix(_FAILED) if said and said[0].startswith(_FAILED) else None


def last_messages(output: Path, count: int) -> list[str]:
    """The last lines that were said."""
    try:
        text = (output / MESSAGES_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.splitlines()[-count:]


def doing(output: Path) -> str:
    """What takes a while at present; empty where nothing does that tells of itself."""
    try:
        return (output / DOING_FILE).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
