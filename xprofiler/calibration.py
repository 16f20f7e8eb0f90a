"""Calibrations: a factor on computed step times, fitted to runs that a user measured, as a file."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from xgpt.core import catalog
from xgpt.core.cluster import Link
from xgpt.core.errors import Mistake, refuse, wrong
from xgpt.core.system.whole_file import read_text, write_atomically
from xprofiler.doubt import Cell, Doubt, Shape
from xprofiler.profile_timing import MIXED, Factor, Retimed
from xprofiler.roofline import Roofline

LEAST_ROWS = 3  # chosen: measured runs of a tensor-parallel degree, for it to count as measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A factor on the times of one model, GPU and engine, and what it comes from. One for all steps
    keeps what the search relies on: times grow with size, and times per token do not.

    `source`: names of the measured files, with `sha256` of their contents, and `rows` used of them.
    `tp_degrees`: those with LEAST_ROWS rows. `before`, `after`: mean error of a row's latency
    without a factor, and with that of the other rows."""

    version: Literal[1] = 1
    source: str
    sha256: str
    date: str
    rows: int
    model: str
    shape: Shape
    engine: str
    device: str
    weight_dtype: str
    tp_degrees: tuple[int, ...]
    factor: float
    before: float
    after: float

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Conditions that the user has measured."""
        return tuple(Cell(self.engine, self.device, self.shape, self.weight_dtype, degree)
                     for degree in self.tp_degrees)

    def widened(self, doubt: Doubt) -> Doubt:
        """The doubt, with larger errors where the own rows were further off than a measured
        cell's: as much larger at every level, so that a measured layout stays surer than others."""
        wider = max(self.after / catalog.accuracy()["levels"]["same cell"]["mean"], 1.0)
        return replace(doubt, typical=wider * doubt.typical, quantiles=tuple(
            (chance, wider * log) for chance, log in doubt.quantiles))

    def refuse_foreign(self, cell: Cell, model: str, path: Path) -> None:
        """Raises InputError if the calibration is not of the cell's engine, GPU and shape; `model`
        is the name of the planned one."""
        both = {"model": (self.model, model, self.shape == cell.shape),
                "device": (self.device, cell.gpu, self.device == cell.gpu),
                "engine": (self.engine, cell.engine, self.engine == cell.engine)}
        refuse(Mistake(file=str(path), line=None, key=key, value=own,
                       allowed=f"the planned {key}, {planned}: runs of another do not calibrate it")
               for key, (own, planned, is_same) in both.items() if not is_same)


class Calibrated(Retimed):
    """Computed times, scaled by a user's calibration."""

    source: Roofline

    def __init__(self, roofline: Roofline, calibration: Calibration, path: Path) -> None:
        super().__init__(roofline, {MIXED: Factor(1.0, calibration.factor)})
        self.calibration, self._path = calibration, path

    def doubt(self, tp_degree: int = 1, stages: int = 1, link: Link | None = None) -> Doubt:
        """The doubt about these times, where the calibration's cells were measured too."""
        return self.calibration.widened(
            self.source.doubt(tp_degree, stages, link, self.calibration.cells))

    @property
    def words(self) -> str:
        """The factor and where it comes from."""
        own = self.calibration
        return f"x {own.factor:.2f} by {own.rows} rows of {own.source} ({self._path.name})"

    def provenance(self) -> str:
        """See TimingSource."""
        return f"{self.source.provenance()}; {self.words}"


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Writes the calibration to `path`, whole or not at all."""
    held = asdict(calibration)
    write_atomically(path, json.dumps({**held, "checksum": _checksum(held)}, indent=1) + "\n")


def load_calibration(path: Path) -> Calibration:
    """The Calibration in a file. Raises InputError for a file that is none, or whose content was
    changed after `xgpt calibrate` wrote it."""
    try:
        held = json.loads(read_text(path))
        found = held.pop("checksum")
        if found == _checksum(held):
            return TypeAdapter(Calibration).validate_python(held)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as cause:
        raise wrong(path, "file", None, f"a calibration by `xgpt calibrate`: {cause!r}") from None
    raise wrong(path, "checksum", found, "that of the content, which was edited or damaged: make "
                "it anew by `xgpt calibrate`")


def _checksum(held: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()
