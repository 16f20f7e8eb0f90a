"""Published closed loops of a shape that was left out of the fit, predicted by a calibration with
three of them.

    python benchmarks/calibrated.py [--data ../shared/data] [--draws 100] [--out benchmarks/results]

Constants are fitted without any loop of the model. Three loops of a group are drawn, and the
factor of `xgpt calibrate` is fitted to them. The other loops of the group are then predicted
without the factor and with it. A group is an engine, GPU, model and dtype of the weights, once
with loops of all degrees and once with those of one degree. Groups of fewer than six loops are left
out. *Ratio* is the second error over the first. *Floor* is that ratio where the factor is fitted to
all loops of the group, those that are predicted among them. *Kept* is the share of loops within
what a plan promises with 90 % by its level of doubt."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from published.left_out import predictions
from published.runs import model_of, serving_points
from runner import about, options, table, today, write

from xgpt.core import catalog
from xprofiler.calibration import LEAST_ROWS
from xprofiler.doubt import level_between
from xsimulator.closed_loop import LoopTimes
from xsimulator.measured_loops import ServingPoint, cell_of, errors_of, fitted_factor

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
SEED, LEAST = 20, 6  # chosen: seed of the draws; fewest loops of a group
LEVELS = catalog.accuracy()["levels"]
SCATTER = LEVELS["same cell"]["mean"]
PROMISED = dict(LEVELS["same cell"]["quantiles"])[0.9]


class Group(NamedTuple):
    """Errors of a group's loops, over all draws. `least`: where the factor was fitted to all of
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


def group_of(name: str, own: Sequence[ServingPoint], times: Mapping[ServingPoint, LoopTimes],
             draws: int) -> Group:
    drawn, found = np.random.default_rng(SEED), list[tuple[float, float, bool]]()
    others = {cell_of(point, model_of(point)) for point in times if point.model != own[0].model}
    ratios = {point: times[point].latency_s / point.latency_s for point in own}
    for _ in range(draws):
        used = [own[at] for at in drawn.choice(len(own), LEAST_ROWS, replace=False)]
        level = level_between(cell_of(used[0], model_of(used[0])), others)
        factor, _, left = fitted_factor(used, times, typical=LEVELS[level]["mean"],
                                        scatter=SCATTER)
        promised = math.exp(PROMISED * max(left / SCATTER, 1.0))
        found += [(abs(ratio - 1), abs(factor * ratio - 1), factor * ratio * promised >= 1)
                  for point, ratio in ratios.items() if point not in used]
    factor, *_ = fitted_factor(own, times, typical=math.inf, scatter=SCATTER)
    least = errors_of([factor * ratio for ratio in ratios.values()], np.ones(len(own))).mean
    before, after, kept = np.array(found, float).mean(axis=0).tolist()
    return Group(name, len(own), before, after, least, kept)


def groups_of(times: Mapping[ServingPoint, LoopTimes], draws: int, *,
              by_degree: bool) -> list[Group]:
    groups = defaultdict[str, list[ServingPoint]](list)
    for point in times:
        degree = f", TP {point.tp_degree}" * by_degree
        groups[f"{point.row}, {point.device}, {point.model} {point.weight_dtype or '16 bits'}"
               f"{degree}"].append(point)
    return [group_of(name, own, times, draws) for name, own in sorted(groups.items())
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
    parser.add_argument("--draws", type=int, default=100)
    arguments = parser.parse_args()
    times = predictions(serving_points(arguments.data / "silicon" / "serving_points.csv"), "shape")
    write("calibrated", "\n".join([
        "# Calibrated by three loops", "", *about(__doc__).splitlines(), "",
        "## Three loops of one degree, and the others of that degree", "",
        *rows_of(groups_of(times, arguments.draws, by_degree=True)), "",
        "## Three loops of any degree, and the others of all degrees", "",
        *rows_of(groups_of(times, arguments.draws, by_degree=False)), "",
        f"{arguments.draws} draws each, with one seed. Times are computed, {today()}."]),
        arguments.out)


if __name__ == "__main__":
    main()
