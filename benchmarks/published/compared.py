"""Predicted beside measured times: what a comparison is, and how far off it is."""

from dataclasses import dataclass

import numpy as np

from xgpt.core.lengths import FloatArray
from xsimulator import measured_loops
from xsimulator.measured_loops import Errors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compared:
    """[cases] seconds predicted and measured of one operator, or of whole requests. `skipped`:
    cases of the source that were not compared, with `why`. `left_out`: what was left out of the fit
    at a time; "" for nothing."""

    source: str
    model: str
    gpu: str
    engine: str
    operator: str
    predicted_s: FloatArray
    measured_s: FloatArray
    skipped: int = 0
    why: str = ""
    left_out: str = ""


def errors_of(found: Compared) -> Errors:
    return measured_loops.errors_of(found.predicted_s, found.measured_s)


def joined(parts: list[Compared]) -> Compared:
    """Several comparisons as one, which bears the name of what they have in common."""
    names = {key: next(iter(values)) if len(values) == 1 else "all" for key in (
        "source", "model", "gpu", "engine", "operator", "left_out")
        if (values := {getattr(part, key) for part in parts})}
    return Compared(
        **names, predicted_s=np.concatenate([part.predicted_s for part in parts]),
        measured_s=np.concatenate([part.measured_s for part in parts]),
        skipped=sum(part.skipped for part in parts),
        why="; ".join(dict.fromkeys(part.why for part in parts if part.why)))
