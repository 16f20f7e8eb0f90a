"""`xgpt validate`: the planner's times against every measurement under a folder."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xgpt.app.telling import Teller
from xgpt.core.errors import wrong
from xprofiler.compared import Compared, errors_of
from xprofiler.compared_tables import of_aiconfigurator, of_vidur
from xsimulator.chooser import Choices, choices
from xsimulator.closed_loop import Served
from xsimulator.compared_runs import (
    ServingPoint,
    margin_of,
    of_fastertransformer,
    of_serving,
    of_splitwise,
    own_points,
    predicted,
    serving_points,
)

DEFAULT_FOLDER = Path("..") / "shared" / "data"
# a source's name, what tells that it is there, and what reads it
_TABLES = {"vidur": ("vidur/compute", of_vidur),
           "aiconfigurator": ("aiconfigurator", of_aiconfigurator),
           "fastertransformer": ("fastertransformer/gpt_latency.csv", of_fastertransformer),
           "splitwise": ("splitwise-sim/perf_model.csv", of_splitwise)}
_FOLDERS = {"splitwise": "splitwise-sim"}
SERVING = "serving"  # published closed loops, and those of measurements*.csv
SOURCES = (*_TABLES, SERVING)
CONFIDENCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
CHOOSER_CONFIDENCE = 0.9


class Chooser(NamedTuple):
    """What one margin makes of the choices among one half of the points."""

    half: str
    margin: str
    choices: Choices


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """`calibration`: (confidence promised, share of the test half's latencies that were kept).
    `margins`: by engine, the median factor for CHOOSER_CONFIDENCE."""

    folder: Path
    compared: tuple[Compared, ...]
    choosers: tuple[Chooser, ...] = ()
    calibration: tuple[tuple[float, float], ...] = ()
    margins: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "groups": [{
                "source": c.source, "model": c.model, "gpu": c.gpu, "engine": c.engine,
                "operator": c.operator, "half": c.half, **errors_of(c)._asdict(),
                "left_out": c.left_out, "why_left_out": c.why} for c in self.compared],
            "choosers": [{"half": c.half, "margin": c.margin, **c.choices._asdict()}
                         for c in self.choosers],
            "calibration": [{"promised": p, "kept": k} for p, k in self.calibration],
            "margins": {"confidence": CHOOSER_CONFIDENCE, **self.margins}}


def validate(folder: Path | None, tell: Teller, *, sources: Sequence[str] = (),
             measured: Path | None = None) -> Validation:
    """`sources`: some of SOURCES, all if none is named. `measured`: a user's file of closed loops.
    Raises InputError where there is nothing to compare with."""
    wanted = tuple(sources) or SOURCES
    given = folder or DEFAULT_FOLDER
    if not given.is_dir() and (folder is not None or measured is None):
        raise wrong("command line", "FOLDER", str(given), "a folder with others' measurements "
                    f"({', '.join(SOURCES)}), or --measured FILE with your own")
    points = _points(given, wanted, measured)  # first: a user's mistakes are told at once
    compared = list(_of_tables(given, wanted, tell))
    if not compared and not points:
        raise wrong("command line", "FOLDER", str(given), "no measurements there: a folder with "
                    f"one of {', '.join(path for path, _ in _TABLES.values())}, "
                    "silicon/serving_points.csv or measurements*.csv")
    if not points:
        return Validation(folder=given, compared=tuple(compared))
    tell.say(f"playing {len(points)} closed loops of requests")
    times = {point: predicted(point) for point in points}
    return Validation(
        folder=given, compared=(*compared, *of_serving(points, times)),
        choosers=tuple(_choosers(points, times)), margins=_median_margins(points, times),
        calibration=tuple((confidence, _kept(points, times, confidence))
                          for confidence in CONFIDENCES))


def _of_tables(folder: Path, wanted: Sequence[str], tell: Teller) -> Iterator[Compared]:
    for name, (there, read) in _TABLES.items():
        if name in wanted and (folder / there).exists():
            tell.say(f"comparing with {folder / there}")
            yield from read(folder / _FOLDERS.get(name, name))


def _points(folder: Path, wanted: Sequence[str], measured: Path | None) -> list[ServingPoint]:
    points: list[ServingPoint] = []
    if SERVING in wanted:
        published = folder / "silicon" / "serving_points.csv"
        points += serving_points(published) if published.is_file() else []
        for path in sorted(folder.glob("measurements*.csv")):
            points += own_points(path)
    return points + (own_points(measured) if measured is not None else [])


def _choosers(points: Sequence[ServingPoint],
              times: Mapping[ServingPoint, Served]) -> Iterator[Chooser]:
    """None of too few points to choose among."""
    for half, own in (("all", list(points)),
                      ("test", [point for point in points if not point.is_fitted])):
        found = (Chooser(half, "none", choices(own, times, lambda _: 1.0)),
                 Chooser(half, f"confidence {CHOOSER_CONFIDENCE:g}", choices(
                     own, times, lambda point: margin_of(point, times[point],
                                                         CHOOSER_CONFIDENCE))))
        yield from (chooser for chooser in found if chooser.choices.cases)


def _median_margins(points: Sequence[ServingPoint],
                    times: Mapping[ServingPoint, Served]) -> dict[str, float]:
    return {row: float(np.median([margin_of(point, times[point], CHOOSER_CONFIDENCE)
                                  for point in points if point.row == row]))
            for row in sorted({point.row for point in points})}


def _kept(points: Sequence[ServingPoint], times: Mapping[ServingPoint, Served],
          confidence: float) -> float:
    """Share of the test half's latencies that are within prediction and margin."""
    kept = [point.latency_s <= times[point].latency_s * margin_of(point, times[point], confidence)
            for point in points if not point.is_fitted]
    return float(np.mean(kept)) if kept else float("nan")
