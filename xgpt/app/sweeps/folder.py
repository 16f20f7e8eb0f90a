"""A sweep's folder: rows appended as points are planned, taken up again, and put in order."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xgpt.core.errors import wrong
from xgpt.core.json_values import write_json
from xgpt.core.sweep_file import SweepSpec
from xgpt.core.whole_file import json_text, why_no_folder, write_atomically
from xgpt.report.sweep_rows import (
    EARLIER_FILE,
    ROWS_FILE,
    SWEEP_FILE,
    VERSION,
    Row,
    columns_with,
    read_rows,
)


class SweepFolder:
    """The files of one sweep. A row is written whole and at once: a killed sweep loses at most the
    one that it was writing."""

    def __init__(self, spec: SweepSpec) -> None:
        """Makes the folder. Raises InputError where it cannot be written to."""
        self._spec, self.path = spec, spec.output
        if (allowed := why_no_folder(self.path)) is not None:
            raise wrong(spec.source, "output", str(self.path), allowed)

    def take_up(self, fingerprints: Mapping[str, str]) -> tuple[dict[str, Row], int]:
        """Rows of earlier sweeps for these points (key -> fingerprint), and how many there are of
        them that another xgpt or profile made. What is of no use now is kept in earlier.jsonl, and
        comes back with its point."""
        before = {**read_rows(self.path / EARLIER_FILE), **read_rows(self.path / ROWS_FILE)}
        kept = {key: before[key] for key in fingerprints if key in before
                and before[key].get("fingerprint") == fingerprints[key]}
        outdated = sum(key in before and key not in kept for key in fingerprints)
        left = [row for key, row in before.items() if key not in kept]
        if left:
            self._write(EARLIER_FILE, left)
        self._write(ROWS_FILE, kept.values())
        return kept, outdated

    def spent_s(self) -> float:
        """Seconds that earlier calls of this sweep took, as far as these ended in good order."""
        path = self.path / SWEEP_FILE
        return float(json.loads(path.read_text("utf-8"))["seconds"]) if path.is_file() else 0.0

    def append(self, row: Row) -> None:
        """Adds a row, or a newer one of its point."""
        with (self.path / ROWS_FILE).open("a", encoding="utf-8") as file:
            file.write(_line(row))

    def put_in_order(self, keys: Sequence[str]) -> list[Row]:
        """All rows in the order of the grid, one a point; also in the file."""
        rows = read_rows(self.path / ROWS_FILE)
        ordered = [rows[key] for key in keys if key in rows]
        self._write(ROWS_FILE, ordered)
        return ordered

    def describe(self, state: str, rows: Sequence[Row], seconds: float, *, is_run: bool) -> None:
        """Writes what the sweep is, and how far."""
        spec = self._spec
        axes = [{"name": axis.name, "key": axis.key, "title": axis.title, "values": values}
                for axis, values in spec.axes]
        write_json(self.path / SWEEP_FILE, {
            "version": VERSION, "name": spec.name, "source": spec.source, "horizon": spec.horizon,
            "has_margin": spec.has_margin, "state": state, "points": len(spec.points),
            "done": len(rows), "ok": sum(row["status"] == "ok" for row in rows),
            "seconds": round(seconds, 3), "is_run": is_run, "axes": axes,
            "columns": [{"name": column.name, "group": column.group, "title": column.title,
                         "unit": column.unit} for column in columns_with(axes)]})

    def _write(self, name: str, rows: Iterable[Row]) -> None:
        write_atomically(self.path / name, "".join(map(_line, rows)))


def _line(row: Mapping[str, Any]) -> str:
    return json_text(row, ensure_ascii=False, separators=(",", ":")) + "\n"
