"""What the launcher looks at while ranks work, besides how far they are: whether they go on,
whether they stop when they are asked to, and whether their output folder is there."""

import time
from pathlib import Path

from xgpt.app.stall import StallWatch
from xgpt.core.errors import StoppedEarly, XgptError
from xrunner.files.lock import StopRequest

_GRACE_S = 20.0  # at least, between a request to stop and the end of who does not hear it
_LOOK_S = 0.5


class Guard:
    """`look` is called often. Raises what ends the ranks: StoppedEarly, RanksHang, XgptError."""

    def __init__(self, output: Path, stall: StallWatch | None) -> None:
        """`stall` None: the ranks do not tell what they do."""
        self._output, self._stall, self._stop = output, stall, StopRequest(output)
        self._place, self._looked_s = _place(output), time.monotonic()
        self._asked_s: float | None = None

    @property
    def silent(self) -> str | None:
        """Which rank has told nothing for long, in a few words."""
        return None if self._stall is None else self._stall.silent

    def look(self) -> None:
        now = time.monotonic()
        if now - self._looked_s < _LOOK_S:
            return
        self._looked_s = now
        if _place(self._output) != self._place:
            raise XgptError(
                f"{self._output} was removed or renamed while a run wrote in it. A renamed folder "
                "has all that was done: give it its name back, and the same command goes on from "
                "there")
        if self._stop.is_made:
            self._asked_s = now if self._asked_s is None else self._asked_s
            # a run stops after the steps under way, which may be long
            grace_s = max(_GRACE_S, 0.0 if self._stall is None else 3 * self._stall.longest_step_s)
            if now - self._asked_s > grace_s:
                raise StoppedEarly(
                    f"asked to stop, and the ranks did not within {grace_s:.0f} s: they were "
                    "ended. What is done is kept, and the same command goes on from there")
        elif self._stall is not None:
            self._stall.look()


def _place(folder: Path) -> tuple[int, int] | None:
    """What the path names; None for nothing."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
