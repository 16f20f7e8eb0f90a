"""The page of `benchmarks/validated.py --html`: predicted against measured seconds, a plot for
each source and operator, a colour for each GPU and engine. A point on the diagonal was predicted
exactly."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from published.compared import Compared, errors_of, joined
from xgpt.core.lengths import FloatArray
from xgpt.report.chart import PALETTE, Axis, Chart, Series
from xgpt.report.html_page import write_chart_page
from xgpt.report.words import counted

MOST_POINTS = 400  # of a colour in one plot; of more, so many drawn with a fixed seed
_SEED = 5
_FACTORS = ((1.0, "predicted exactly"), (0.8, "a fifth too quick"), (1.25, "a quarter too slow"))


def write_page(compared: Sequence[Compared], choosers: Sequence[Any],
               kept: Mapping[str, Sequence[tuple[float, float]]], path: Path) -> None:
    """Raises MissingExtraError without jinja2."""
    charts = validation_charts(compared)
    if kept:
        charts.append(_calibration(kept))
    if choosers:
        charts.append(_chosen(choosers))
    write_chart_page(charts, path, "Predicted against measured")


def validation_charts(compared: Sequence[Compared]) -> list[Chart]:
    """A plot for each source, operator and way of leaving out that has cases."""
    groups: dict[tuple[str, str, str], list[Compared]] = defaultdict(list)
    for part in compared:
        if len(part.measured_s):
            groups[part.source, part.operator, part.left_out].append(part)
    return [_chart(place, key, own) for place, (key, own) in enumerate(groups.items())]


def _chart(place: int, key: tuple[str, str, str], parts: Sequence[Compared]) -> Chart:
    source, operator, left_out = key
    by_engine: dict[str, list[Compared]] = defaultdict(list)
    for part in parts:
        by_engine[f"{part.gpu}, {part.engine}"].append(part)
    every = joined(list(parts))
    ends = np.array([every.measured_s.min(), every.measured_s.max()])
    errors = errors_of(every)
    lines = [Series(label=label, x=ends.tolist(), y=(factor * ends).tolist(), colour="muted",
                    is_dashed=factor != 1.0) for factor, label in _FACTORS]
    return Chart(
        name=f"compared-{place}", title=", ".join(filter(None, (
            source, operator, left_out and f"{left_out} left out"))),
        x=Axis(label="measured, seconds", is_log=True),
        y=Axis(label="predicted, seconds", is_log=True), height=360,
        series=[*lines, *(_points(label, own, PALETTE[i % len(PALETTE)])
                          for i, (label, own) in enumerate(by_engine.items()))],
        caption=f"{counted(errors.cases, 'case')}: mean error {errors.mean:.1%}, median "
                f"{errors.median:.1%}, bias {errors.bias:+.1%}, ninth decile {errors.p90:.1%}.")


def _points(label: str, parts: list[Compared], colour: str) -> Series:
    models = np.concatenate([np.full(len(part.measured_s), part.model) for part in parts])
    whole = joined(parts)
    shown = np.arange(len(models))
    if len(models) > MOST_POINTS:
        shown = np.random.default_rng(_SEED).choice(shown, MOST_POINTS, replace=False)
        label += f" ({MOST_POINTS} of {len(models):,})"
    off: FloatArray = whole.predicted_s[shown] / whole.measured_s[shown] - 1
    return Series(
        label=label, kind="dots", colour=colour, x=whole.measured_s[shown].tolist(),
        y=whole.predicted_s[shown].tolist(),
        notes=[f"{model}, {value:+.1%}" for model, value in zip(models[shown], off, strict=True)])


def _calibration(kept: Mapping[str, Sequence[tuple[float, float]]]) -> Chart:
    promised = [confidence for confidence, _ in next(iter(kept.values()))]
    return Chart(
        name="calibration", title="Confidence promised and kept",
        x=Axis(label="promised", as_percent=True), y=Axis(label="kept", as_percent=True),
        series=[Series(label="as promised", x=promised, y=promised, colour="muted"),
                *(Series(label=f"{name} left out", kind="line+dots", x=promised,
                         y=[share for _, share in rows], colour=PALETTE[place % len(PALETTE)])
                  for place, (name, rows) in enumerate(kept.items()))],
        caption="Share of the latencies that were within prediction and margin.")


def _chosen(choosers: Sequence[Any]) -> Chart:
    names = [f"{chooser.left_out or 'all fitted'}, {chooser.margin}" for chooser in choosers]
    return Chart(
        name="choosers", title="As a chooser within a bound", y=Axis(label="share",
                                                                     as_percent=True),
        x=Axis(label="points, margin", names=names),
        series=[Series(label=label, kind="bars", x=names, colour=PALETTE[place],
                       y=[getattr(chooser.choices, field) for chooser in choosers])
                for place, (field, label) in enumerate((
                    ("none", "no answer"), ("broken", "bound broken"), ("regret", "regret")))],
        caption="No answer: of the cases. Broken: of the answers. Regret: throughput that answers "
                "which keep their bound miss.")
