"""Predicted beside measured times: what a comparison is, and how far off it is."""

from dataclasses import dataclass, replace

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray
from xsimulator import measured_loops
from xsimulator.measured_loops import Errors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compared:
    """[cases] seconds predicted and measured of one operator, or of whole requests. `left_out`:
    cases of the source that were not compared, with `why`. `half`: "fit" or "test", where constants
    are fitted to one half of a source's cases; "" else."""

    source: str
    model: str
    gpu: str
    engine: str
    operator: str
    predicted_s: FloatArray
    measured_s: FloatArray
    left_out: int = 0
    why: str = ""
    half: str = ""

    def of(self, rows: BoolArray, half: str) -> "Compared":
        """The cases of one half."""
        return replace(self, predicted_s=self.predicted_s[rows], measured_s=self.measured_s[rows],
                       half=half)


def errors_of(found: Compared) -> Errors:
    return measured_loops.errors_of(found.predicted_s, found.measured_s)


def joined(parts: list[Compared]) -> Compared:
    """Several comparisons as one, which bears the name of what they have in common."""
    names = {key: next(iter(values)) if len(values) == 1 else "all" for key in (
        "source", "model", "gpu", "engine", "operator", "half")
        if (values := {getattr(part, key) for part in parts})}
    return Compared(
        **names, predicted_s=np.concatenate([part.predicted_s for part in parts]),
        measured_s=np.concatenate([part.measured_s for part in parts]),
        left_out=sum(part.left_out for part in parts),
        why="; ".join(dict.fromkeys(part.why for part in parts if part.why)))
