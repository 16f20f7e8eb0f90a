"""The request to stop: a file in the output folder, which rank 0 looks for."""

from pathlib import Path

STOP_FILE = "stop"


class StopRequest:
    """Of a signal to the launcher the file is empty. One that a user makes (`xgpt stop`) says so:
    it ends a job of Slurm's, which goes back to the queue after a warning of its time limit."""

    def __init__(self, output: Path) -> None:
        self._path = output / STOP_FILE

    @property
    def is_made(self) -> bool:
        return self._path.exists()

    @property
    def is_by_user(self) -> bool:
        return self._path.is_file() and self._path.stat().st_size > 0

    def make(self) -> None:
        """Asks the run to stop; a request that there is stays as it is."""
        self._path.touch()

    def make_by_user(self) -> None:
        self._path.write_text("by xgpt stop\n", encoding="utf-8")

    def withdraw(self) -> None:
        self._path.unlink(missing_ok=True)
