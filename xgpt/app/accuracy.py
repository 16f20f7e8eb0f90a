"""`xgpt models --accuracy`: how far computed times are off, by GPU and engine.

The published part is packaged with the catalog (benchmarks/validated.py makes it)."""

from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from xsimulator.measured_loops import (
    ServingPoint,
    choices,
    errors_of,
    margin_of,
    own_points,
    predicted,
    share_kept,
)

CONFIDENCE = 0.9  # chosen: of the margin that is shown beside one's own loops
OPERATORS = {"TPOT": "tpot_s", "TTFT": "ttft_s", "request": "latency_s"}


def published_errors() -> dict[str, Any]:
    """`rows`: errors by source, gpu, engine, operator and half; `choosers`; `kept`: pairs of
    (confidence promised, share of the latencies kept)."""
    text = resources.files("xgpt.core.catalog").joinpath("accuracy.yaml").read_text("utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def of_own_loops(path: Path) -> dict[str, Any]:
    """The same of a user's file of closed loops. Raises InputError with every mistake of it."""
    points = own_points(path)
    times = {point: predicted(point) for point in points}
    places = dict.fromkeys((point.device, point.row) for point in points)
    rows = []
    for gpu, engine in places:
        own = [point for point in points if (point.device, point.row) == (gpu, engine)]
        rows += [{"source": path.stem, "gpu": gpu, "engine": engine, "operator": operator,
                  "half": "", **errors_of([getattr(times[point], name) for point in own],
                                          [getattr(point, name) for point in own])._asdict()}
                 for operator, name in OPERATORS.items()]

    def margin(point: ServingPoint) -> float:
        return margin_of(point, times[point], CONFIDENCE)

    choosers = [{"half": "", "margin": name, **choices(points, times, of)._asdict()}
                for name, of in (("none", lambda _: 1.0), (f"confidence {CONFIDENCE:g}", margin))]
    return {"rows": rows, "choosers": [one for one in choosers if one["cases"]],
            "kept": [[CONFIDENCE, share_kept(points, times, CONFIDENCE)]]}
