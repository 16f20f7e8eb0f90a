"""Calibrates computed times by measured runs: a user's table of closed loops (docs/accuracy.md), or
results of `vllm bench serve --save-result`, one a file."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from xgpt.core import catalog
from xgpt.core.catalog.releases import row_named
from xgpt.core.errors import InputError, Mistake, XgptError, refuse, wrong
from xgpt.core.system.whole_file import read_text
from xgpt.report.table import fact
from xprofiler.calibration import LEAST_ROWS, Calibration
from xprofiler.doubt import Doubt, doubt_of, shape_of
from xsimulator.measured_loops import ServingPoint, cell_of, fitted_factor, own_points, predicted

MOST_OFF = 0.5  # chosen: mean error above which rows cannot be of what they say
_COMMON = ("model", "device", "engine", "weight_dtype")
_Count = Annotated[int, Field(ge=1)]
_Ms = Annotated[float, Field(gt=0, lt=1e9)]
# option -> the name in the catalog that it stands for
_NAMED: Mapping[str, Callable[[Any], Any]] = {
    "model": lambda name: (catalog.model_named(name) or catalog.model(name)).name,
    "device": lambda name: catalog.device(name).name, "engine": row_named, "tp": int}


@dataclass(frozen=True, kw_only=True)
class _Result:
    """Keys of a benchmark result that are read."""

    model_id: str = ""
    request_rate: Literal["inf"] = "inf"  # a closed loop: none waits to be sent
    max_concurrency: _Count
    completed: _Count
    failed: Literal[0] = 0
    total_input_tokens: _Count
    total_output_tokens: _Count
    mean_ttft_ms: _Ms
    mean_tpot_ms: _Ms


class Calibrating(NamedTuple):
    """A calibration with the doubt about its model's times before and after."""

    calibration: Calibration
    before: Doubt
    after: Doubt

    def __str__(self) -> str:
        own = self.calibration
        return "\n".join(fact(label, words) for label, words in (
            ("of", f"{own.model}{f' ({own.weight_dtype})' * bool(own.weight_dtype)}, {own.engine} "
                   f"on {own.device}, TP {', '.join(map(str, own.tp_degrees))}"),
            ("rows", f"{own.rows} of {own.source}"), ("times", f"x {own.factor:.2f}"),
            ("error", f"{own.before:.1%} of a request's time before; {own.after:.1%} by the factor "
                      "of the other rows"),
            ("before", self.before.words), ("now", self.after.words)))


def calibrate(paths: Sequence[Path], asked: Mapping[str, Any]) -> Calibrating:
    """The calibration by the measured rows of these files. `asked`: what a benchmark result does
    not say (model, device, engine, tp, weight_dtype), None where it was not given. Raises
    InputError with every mistake, also for rows of several models, GPUs or engines, and for too few
    of one degree."""
    points, mistakes = list[ServingPoint](), list[Mistake]()
    for path in paths:
        try:
            points += _rows_of(path, asked)
        except InputError as error:
            mistakes += [own for own in error.mistakes if own not in mistakes]
    refuse(mistakes)
    points = [*dict.fromkeys(points)]  # a copy is no measurement
    source, model = ", ".join(path.name for path in paths), catalog.model(points[0].model)
    refuse(Mistake(file=source, line=None, key=key, value=", ".join(values),
                   allowed=f"one: a calibration is of one {', '.join(_COMMON)}")
           for key in _COMMON if len(values := dict.fromkeys(
               getattr(point, key) or "16 bits" for point in points)) > 1)
    counts = Counter(sorted(point.tp_degree for point in points))
    if not (degrees := tuple(one for one, count in counts.items() if count >= LEAST_ROWS)):
        raise wrong(source, "rows", ", ".join(
            f"{count} of degree {degree}" for degree, count in counts.items()),
            f"at least {LEAST_ROWS} of one tensor-parallel degree")
    cell = cell_of(points[0], model)._replace(tp_degree=degrees[0])
    before = doubt_of(cell)
    factor, off, left = fitted_factor(
        points, {point: predicted(point) for point in points}, typical=before.typical,
        scatter=catalog.accuracy()["levels"]["same cell"]["mean"])
    if left > MOST_OFF:
        raise wrong(source, "rows", f"{left:.0%} off", f"at most {MOST_OFF:.0%} off by the factor "
                    "of the other rows: see that degree, device and units (milliseconds) are right")
    own = Calibration(
        source=source, sha256=hashlib.sha256(b"".join(map(Path.read_bytes, paths))).hexdigest(),
        date=date.today().isoformat(), rows=len(points), model=model.name, shape=shape_of(model),
        engine=cell.engine, device=cell.gpu, weight_dtype=cell.weights, tp_degrees=degrees,
        factor=round(factor, 4), before=round(off, 4), after=round(left, 4))
    return Calibrating(own, before, own.widened(doubt_of(cell, own=own.cells)))


def _rows_of(path: Path, asked: Mapping[str, Any]) -> list[ServingPoint]:
    if path.is_dir():
        raise wrong(path, "file", None, "a file of measured closed loops; the step times of a run "
                    f"of xgpt are planned with by `profile: {path / 'profile.json'}`")
    if path.suffix in (".csv", ".parquet"):
        refuse(_option(key, value, f"left out: {path.name} has a column of it")
               for key, value in asked.items() if value)
        return own_points(path)
    mistakes = list[Mistake]()
    try:
        one = TypeAdapter(_Result).validate_json(read_text(path), strict=True)
    except ValidationError as cause:
        refuse(Mistake(
            file=str(path), line=None, key=".".join(map(str, each["loc"])) or "result",
            value=None if each["type"] == "missing" else each["input"],
            allowed=f"{each['msg']}, as `vllm bench serve --save-result --max-concurrency N` "
                    "writes it") for each in cause.errors(include_url=False))
    except (OSError, ValueError) as cause:
        raise wrong(path, "file", None, f"a benchmark result: {cause}") from None
    named = dict[str, Any]()
    for key, value_of in _NAMED.items():
        try:
            named[key] = value_of(asked[key] or (one.model_id if key == "model" else ""))
        except (XgptError, ValueError) as cause:
            mistakes.append(_option(key, asked[key], "required with benchmark results, which do "
                                    "not say it" + f": {cause}" * (key != "tp")))
    refuse(mistakes)
    return [ServingPoint(
        source="benchmark", model=named["model"], device=named["device"], engine=named["engine"],
        tp_degree=named["tp"], weight_dtype=asked["weight_dtype"] or "",
        concurrency=min(one.max_concurrency, one.completed),
        input_tokens=max(round(one.total_input_tokens / one.completed), 1),
        output_tokens=max(round(one.total_output_tokens / one.completed), 1),
        ttft_s=one.mean_ttft_ms * 1e-3, tpot_s=one.mean_tpot_ms * 1e-3)]


def _option(key: str, value: object, allowed: str) -> Mistake:
    return Mistake(file="command line", line=None, key=f"--{key.replace('_', '-')}", value=value,
                   allowed=allowed)
