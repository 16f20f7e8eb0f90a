"""Published closed loops of a shape that was left out of the fit, predicted by a calibration with
three of them.

    python benchmarks/calibrated.py [--data ../shared/data] [--draws 8] [--out benchmarks/results]

Constants are fitted without any loop of the model. Three loops of a group are drawn, and the
factors of `xgpt calibrate` are fitted to them. The other loops of the group are then predicted
without the factors and with them. A group is an engine, GPU, model and dtype of the weights, once
with loops of all degrees and once with those of one degree. Groups of fewer than six loops are left
out. *Ratio* is the second error over the first. *Floor* is that ratio where factors are fitted to
all loops of the group, those that are predicted among them. *Kept* is the share of loops within
what a plan promises with 90 % by its level of doubt."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from published.left_out import HostFit, with_host
from published.runs import model_of, serving_points
from runner import about, options, table, today, write

from xgpt.core import catalog
from xgpt.core.lengths import FloatArray
from xprofiler.calibration import LEAST_ROWS
from xprofiler.doubt import level_between
from xprofiler.profile_timing import Factor
from xsimulator.closed_loop import LoopTimes
from xsimulator.loop_factors import fitted_loops
from xsimulator.measured_loops import ServingPoint, cell_of, errors_of

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
SEED, LEAST = 20, 6  # chosen: seed of the draws; fewest loops of a group
LEVELS = catalog.accuracy()["levels"]
PROMISED = dict(LEVELS["same cell"]["quantiles"])[0.9]


class Group(NamedTuple):
    """Errors of a group's loops, over all draws. `least`: where factors were fitted to all of
    them. `kept`: share of them within the promise."""

    name: str
    loops: int
    before: float
    after: float
    least: float
    kept: float

    @property
    def ratios(self) -> tuple[float, float]:
        return self.after / self.before, self.least / self.before


class LeftOutShapes:
    """Predictions by constants that were fitted without a point's model."""

    def __init__(self, points: Sequence[ServingPoint]) -> None:
        self._points, fit = points, HostFit(points)
        self._constants: Mapping[str, FloatArray] = {
            model: fit.fitted(np.array([point.model != model for point in points]))
            for model in dict.fromkeys(point.model for point in points)}

    def times(self, point: ServingPoint, factors: Mapping[str, Factor] | None = None) -> LoopTimes:
        return with_host(point, self._constants[point.model], factors)

    def typical(self, point: ServingPoint) -> float:
        """The error that a plan states without a calibration."""
        measured = [cell_of(other, model_of(other)) for other in self._points
                    if other.model != point.model]
        error: float = LEVELS[level_between(cell_of(point, model_of(point)), measured)]["mean"]
        return error


def group_of(name: str, own: Sequence[ServingPoint], shapes: LeftOutShapes, draws: int) -> Group:
    drawn, logs = np.random.default_rng(SEED), list[tuple[float, float, bool]]()
    alone = {point: shapes.times(point).latency_s for point in own}
    for _ in range(draws):
        used = [own[at] for at in drawn.choice(len(own), LEAST_ROWS, replace=False)]
        typical = shapes.typical(used[0])
        factors, _, left_s = fitted_loops(used, shapes.times, typical=typical,
                                          scatter=LEVELS["same cell"]["mean"])
        promised = PROMISED * max(left_s / LEVELS["same cell"]["mean"], 1.0)
        for point in own:
            if point not in used:
                found_s = shapes.times(point, factors).latency_s
                logs.append((alone[point] / point.latency_s - 1, found_s / point.latency_s - 1,
                             point.latency_s <= found_s * np.exp(promised)))
    before, after, kept = np.abs(np.array(logs, float)).mean(axis=0).tolist()
    factors = fitted_loops(own, shapes.times, typical=math.inf, scatter=1.0).factors
    least = errors_of([shapes.times(point, factors).latency_s for point in own],
                      [point.latency_s for point in own]).mean
    return Group(name, len(own), before, after, least, kept)


def groups_of(points: Sequence[ServingPoint], shapes: LeftOutShapes, draws: int, *,
              by_degree: bool) -> list[Group]:
    groups = defaultdict[str, list[ServingPoint]](list)
    for point in points:
        degree = f", TP {point.tp_degree}" * by_degree
        groups[f"{point.row}, {point.device}, {point.model} {point.weight_dtype or '16 bits'}"
               f"{degree}"].append(point)
    return [group_of(name, own, shapes, draws) for name, own in sorted(groups.items())
            if len(own) >= LEAST]


def rows_of(groups: Sequence[Group]) -> Iterator[str]:
    yield from table(("group", "loops", "before", "after", "ratio", "floor", "kept of 90 %"))
    mean = Group("**mean**, and median of the ratios", sum(one.loops for one in groups), *(
        float(np.mean([getattr(one, key) for one in groups])) for key in Group._fields[2:]))
    middle = np.median([one.ratios for one in groups], axis=0)
    for one, ratios in (*((one, one.ratios) for one in groups), (mean, middle)):
        yield (f"| {one.name} | {one.loops} | {one.before:.1%} | {one.after:.1%} | "
               f"{' | '.join(f'{ratio:.2f}' for ratio in ratios)} | {one.kept:.0%} |")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--draws", type=int, default=8)
    arguments = parser.parse_args()
    points = serving_points(arguments.data / "silicon" / "serving_points.csv")
    shapes = LeftOutShapes(points)
    write("calibrated", "\n".join([
        "# Calibrated by three loops", "", *about(__doc__).splitlines(), "",
        "## Three loops of one degree, and the others of that degree", "",
        *rows_of(groups_of(points, shapes, arguments.draws, by_degree=True)), "",
        "## Three loops of any degree, and the others of all degrees", "",
        *rows_of(groups_of(points, shapes, arguments.draws, by_degree=False)), "",
        f"{arguments.draws} draws each, with one seed. Times are computed, {today()}."]),
        arguments.out)


if __name__ == "__main__":
    main()
