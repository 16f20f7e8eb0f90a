"""Compares computed times with others' measurements; writes the page, the catalog's figures and the
points of docs/pictures/accuracy.svg.

    python benchmarks/validated.py [--data ../shared/data] [--html FILE] [--by-model] [--check]

The page's words above the table are kept from the page that is there. `--check` writes nothing: it
fails where a figure of the catalog is not the one computed, and says so where there is nothing to
compare with. `--html` draws predicted against measured, `--by-model` prints each model in a row of
its own; neither writes anything else. docs/accuracy.md says how all of it is read."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from published.compared import Compared, errors_of, joined
from published.left_out import (
    TABLES as LEFT_OUT,
)
from published.left_out import (
    LeftOut,
    cell_rows,
    kept,
    left_out,
    level_rows,
    of_bloom,
    of_engines,
    of_jobs,
    predictions,
    promised,
)
from published.offline import of_offline
from published.page import write_page
from published.runs import (
    fitted_cells,
    model_of,
    of_fastertransformer,
    of_serving,
    of_splitwise,
    serving_points,
    simulated,
)
from published.table import chooser_table, levels_table, validation_table
from published.tables import of_aiconfigurator, of_vidur

from xgpt.app.models import CONFIDENCE
from xgpt.core import catalog
from xgpt.core.system.whole_file import write_atomically
from xprofiler.doubt import Cell
from xsimulator.closed_loop import LoopTimes
from xsimulator.measured_loops import Choices, ServingPoint, cell_of, choices

ROOT = Path(__file__).resolve().parent
PAGE = ROOT / "results" / "validate.md"
DATA = ROOT.parents[1] / "shared" / "data"
FIGURES = Path(catalog.__file__).with_name("accuracy.yaml")
POINTS = ROOT.parent / "docs" / "pictures" / "accuracy.json"
KEYS = ("source", "gpu", "engine", "operator", "left_out")
# what tells that a source is there, its folder, and what reads it
TABLES = (("vidur/compute", "vidur", of_vidur),
          ("aiconfigurator", "aiconfigurator", of_aiconfigurator),
          ("fastertransformer/gpt_latency.csv", "fastertransformer", of_fastertransformer),
          ("splitwise-sim/perf_model.csv", "splitwise-sim", of_splitwise),
          ("trtllm-perf/offline_throughput.csv", "trtllm-perf", of_offline))
CONFIDENCES = (0.5, 0.7, 0.8, CONFIDENCE, 0.95, 0.99)
DIGITS = 4  # fewer than what YAML reads as text: 5e-05
SAME, SLACK = 0.02, 2e-4  # chosen: a figure is the same if it differs by less, on any machine


class Chooser(NamedTuple):
    """The choices by one margin, where these groups were left out of the fit."""

    left_out: str
    margin: str
    choices: Choices


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """`errors`: of runs that were left out of the fit. `cells`: what it was fitted to."""

    compared: tuple[Compared, ...]
    choosers: tuple[Chooser, ...] = ()
    errors: tuple[LeftOut, ...] = ()
    cells: frozenset[Cell] = frozenset()

    @property
    def kept(self) -> dict[str, list[tuple[float, float]]]:
        """By what was left out: (confidence promised, share of the latencies that kept it)."""
        return {table: kept(self.errors, table, CONFIDENCES)
                for table in LEFT_OUT if self.errors}

    def requests(self) -> list[dict[str, Any]]:
        """Seconds of each request of a closed loop, measured and predicted without its shape."""
        return [{"gpu": part.gpu, "engine": part.engine, "model": part.model,
                 "measured_s": float(f"{measured:.4g}"), "predicted_s": float(f"{predicted:.4g}")}
                for part in self.compared if (part.operator, part.left_out) == ("request", "shape")
                for measured, predicted in zip(part.measured_s, part.predicted_s, strict=True)]

    def figures(self) -> dict[str, Any]:
        """The catalog's figures: the models of a source together."""
        groups: dict[tuple[str, ...], list[Compared]] = {}
        for part in self.compared:
            if len(part.measured_s):
                groups.setdefault(tuple(getattr(part, key) for key in KEYS), []).append(part)
        return {
            "rows": [{**dict(zip(KEYS, key, strict=True)), **_rounded(errors_of(joined(own)))}
                     for key, own in groups.items()],
            "choosers": [{"left_out": c.left_out, "margin": c.margin, **_rounded(c.choices)}
                         for c in self.choosers],
            "levels": level_rows(self.errors, CONFIDENCES) if self.errors else {},
            "kept": {table: [[promised, round(share, DIGITS)] for promised, share in rows]
                     for table, rows in self.kept.items()},
            "cells": cell_rows(self.cells)}


def _rounded(values: Any) -> dict[str, Any]:
    return {name: round(value, DIGITS) for name, value in values._asdict().items()}


def validate(folder: Path) -> Validation:
    """All that is there."""
    compared = [part for there, name, read in TABLES if (folder / there).exists()
                for part in read(folder / name)]
    path = folder / "silicon" / "serving_points.csv"
    points = serving_points(path) if path.is_file() else []
    if not points:
        return Validation(compared=tuple(compared))
    times = {"": {point: simulated(point) for point in points},
             **{table: predictions(points, table) for table in LEFT_OUT}}
    cells = frozenset(cell_of(point, model_of(point)) for point in points)
    errors = [one for table in LEFT_OUT for one in left_out(
        points, table, times[table], times[""])]
    return Validation(
        compared=(*compared, *(part for table, own in times.items()
                               for part in of_serving(points, own, table)
                               if not table or part.operator == "request")),
        choosers=tuple(_choosers(points, {name: times[name] for name in ("", "shape")}, errors)),
        errors=(*errors, *of_bloom(compared), *of_engines(folder, points), *of_jobs(folder, cells)),
        cells=cells | {*fitted_cells(folder)})


def _choosers(points: Sequence[ServingPoint],
              times: Mapping[str, Mapping[ServingPoint, LoopTimes]],
              errors: Sequence[LeftOut]) -> Iterator[Chooser]:
    for table, own in times.items():
        shown = table or "workload"
        limits = promised(errors, shown, CONFIDENCE)
        factors = {point: math.exp(limits[one.group, one.level]) for point, one in zip(
            points, (one for one in errors if one.table == shown), strict=True)}
        yield Chooser(table, "none", choices(points, own, lambda _: 1.0))
        yield Chooser(table, f"confidence {CONFIDENCE:g}", choices(
            points, own, factors.__getitem__))


def differing(found: Mapping[str, Any], packaged: Mapping[str, Any]) -> list[str]:
    """A sentence for each figure that the catalog has otherwise, or not."""
    now, then = (dict(_flat(figures)) for figures in (found, packaged))
    return [f"{name}: {then.get(name, 'nothing')} in the catalog, {now.get(name, 'nothing')} found"
            for name in sorted(now.keys() | then.keys())
            if not math.isclose(now.get(name, math.nan), then.get(name, math.nan),
                                rel_tol=SAME, abs_tol=SLACK)]


def _flat(figures: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for part in ("rows", "choosers"):
        for row in figures[part]:
            of = [value for value in row.values() if isinstance(value, str)]
            yield from ((" | ".join((*of, name)), value) for name, value in row.items()
                        if not isinstance(value, str))
    for table, rows in figures["kept"].items():
        yield from ((f"{table} left out, kept of {promised:g}", share) for promised, share in rows)
    for level, row in figures["levels"].items():
        yield from ((f"{level} {name}", row[name]) for name in ("cases", "mean", "bias", "fitted"))
        yield from ((f"{level} at {chance:g}", log) for chance, log in row["quantiles"])


def check(data: Path) -> int:
    """0 where the catalog has what is computed, or there are no measurements."""
    if not data.is_dir():
        print(f"(NOT COMPARED: no measurements under {data})")
        return 0
    figures = validate(data).figures()
    found = differing(figures, catalog.accuracy())
    print("\n".join(found) or f"{len(figures['rows'])} groups are predicted as the catalog says")
    if found:
        print("where that is meant: python benchmarks/validated.py, which writes them anew")
    return int(bool(found))


def written(figures: Mapping[str, Any]) -> str:
    """The catalog's file: a line for each row."""
    lines = ["# Errors of computed times: of |computed / measured - 1|. Made by "
             "benchmarks/validated.py; docs/accuracy.md explains it."]
    for part, rows in figures.items():
        lines.append(f"{part}:")
        lines += ([f"- {json.dumps(row)}" for row in rows] if isinstance(rows, list) else
                  [f"  {name}: {json.dumps(row)}" for name, row in rows.items()])
    return "\n".join(lines) + "\n"


def written_points(found: Validation) -> str:
    """The points that docs/pictures/accuracy.py draws, one for each request."""
    figures = found.figures()
    rows = ",\n".join(json.dumps(row) for row in found.requests())
    return (f'{{"choosers": {json.dumps(figures["choosers"])},\n'
            f'"kept": {json.dumps(figures["kept"])},\n"requests": [\n{rows}]}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--html", type=Path)
    parser.add_argument("--by-model", action="store_true")
    arguments = parser.parse_args()
    if arguments.check:
        raise SystemExit(check(arguments.data))
    found = validate(arguments.data)
    if arguments.html:
        write_page(found.compared, found.choosers, found.kept, arguments.html)
    words = validation_table(found.compared, by_model=arguments.by_model)
    if found.choosers:
        words += "\n\n" + chooser_table(found.choosers) + "\n\n" + levels_table(found.figures())
    if arguments.html or arguments.by_model:
        print(words)
        return
    head = PAGE.read_text(encoding="utf-8").split("```")[0]
    write_atomically(PAGE, f"{head}```\n{words}\n```\n")
    write_atomically(FIGURES, written(found.figures()))
    write_atomically(POINTS, written_points(found))
    print(PAGE, FIGURES, POINTS, sep="\n")


if __name__ == "__main__":
    main()
