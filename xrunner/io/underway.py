"""Which queries are under way, for whoever finds the ranks dead: underway.jsonl, to which rank 0
adds those that begin, a line a step. It is read with the results beside it, and is worth nothing
after a power cut."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import IO

UNDERWAY_FILE = "underway.jsonl"


class Underway:
    """Rank 0's end of it."""

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
