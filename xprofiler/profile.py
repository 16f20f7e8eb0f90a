"""The Profile: measured seconds per operator as a readable file, and a `TimingSource` over it.

Torch-free: measuring is xprofiler.measure's, reading and interpolating happens anywhere.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xgpt.cluster import Link
from xgpt.errors import InputError, Mistake, XgptError
from xprofiler.timing import Operator

# History of the file format.
#   1: first version; tensor-parallel degree 1 only
PROFILE_VERSION = 1

SPREAD_LIMIT = 0.10  # a point whose quartiles lie further apart is called noisy


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileMetadata:
    """What must be equal for a profile to speak of a run: device, dtype, kernels, and how many
    ranks shared the machine while it was measured (they compete for its memory)."""

    model_shape: str  # fingerprint of the layer's shape
    device: str
    dtype: str
    ranks: int
    threads_per_rank: int
    torch_version: str
    kernels: str  # fingerprint of the timed code
    date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured point: raw seconds, each the mean over one calibrated repetition."""

    x: float
    y: float
    samples_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        if len(self.samples_s) < 3 or self.median_s == 0:
            return 0.0
        low, high = np.quantile(self.samples_s, (0.25, 0.75))
        return float(high - low) / self.median_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured points by table name: an Operator's value, "transfer" (x = bytes), or
    "step_overhead" (one point)."""

    metadata: ProfileMetadata
    tables: dict[str, tuple[Sample, ...]]

    def verdict(self) -> str:
        """How far these numbers can be trusted, in a sentence."""
        points = [p for table in self.tables.values() for p in table]
        noisy = [p for p in points if p.spread > SPREAD_LIMIT]
        if len(noisy) * 5 <= len(points):
            steady = len(points) - len(noisy)
            return f"good: {steady} of {len(points)} points within {SPREAD_LIMIT:.0%}"
        return (f"noisy: {len(noisy)} of {len(points)} points spread by more than "
                f"{SPREAD_LIMIT:.0%}; is something else running here?")


def save_profile(profile: Profile, path: Path) -> None:
    tables = {name: [[p.x, p.y, [float(f"{s:.4g}") for s in p.samples_s]] for p in points]
              for name, points in profile.tables.items()}
    head = {"version": PROFILE_VERSION, "metadata": asdict(profile.metadata),
            "verdict": profile.verdict(), "columns": ["x", "y", "samples_s"]}
    # one point a line, so that two profiles can be compared with diff
    rows = ",\n".join(
        f'  "{name}": [\n' + ",\n".join(f"   {json.dumps(row)}" for row in table) + "\n  ]"
        for name, table in tables.items())
    text = json.dumps(head, indent=1)[:-2] + ',\n "tables": {\n' + rows + "\n }\n}\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def load_profile(path: Path) -> Profile:
    """Raises InputError for a file that is no profile of a known version."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        version = raw["version"]
        if version != PROFILE_VERSION:
            raise _bad(path, "version", version, f"this xgpt reads version {PROFILE_VERSION}")
        tables = {name: tuple(Sample(x=x, y=y, samples_s=tuple(s)) for x, y, s in rows)
                  for name, rows in raw["tables"].items()}
        return Profile(metadata=ProfileMetadata(**raw["metadata"]), tables=tables)
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise _bad(path, "profile", None, f"not a readable profile: {cause}") from None


class ProfileTiming:
    """TimingSource by piecewise linear interpolation: exact at the measured points, linear in
    tokens beyond the last. Between 0 and the first point it falls to 0 with x, as the expected
    time of a step that only sometimes happens does."""

    tp_degrees = (1,)

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._grids = {op: Grid(profile.tables[op.value]) for op in Operator}
        self._transfer = profile.tables.get("transfer", ())
        self._overhead_s = profile.tables["step_overhead"][0].median_s

    def operator_s(self, operator: Operator, x: ArrayLike, y: ArrayLike = 0.0, *,
                   tp_degree: int = 1) -> NDArray[np.float64]:
        if tp_degree != 1:
            raise XgptError(f"this profile has no tensor-parallel degree {tp_degree}, only 1")
        return self._grids[operator](np.asarray(x, float), np.asarray(y, float))

    def all_reduce_s(self, num_bytes: ArrayLike, tp_degree: int, link: Link) -> NDArray[np.float64]:
        if tp_degree != 1:
            raise XgptError(f"this profile has no tensor-parallel degree {tp_degree}, only 1")
        return np.zeros_like(np.asarray(num_bytes, float))

    def transfer_s(self, num_bytes: ArrayLike, link: Link) -> NDArray[np.float64]:
        if not self._transfer:
            return np.zeros_like(np.asarray(num_bytes, float))
        xs = np.array([p.x for p in self._transfer])
        seconds = np.array([p.median_s for p in self._transfer])
        return _line(np.asarray(num_bytes, float), xs, seconds, through_zero=False)

    def step_overhead_s(self) -> float:
        return self._overhead_s

    def provenance(self) -> str:
        m = self.profile.metadata
        return (f"measured on {m.device}, {m.dtype}, {m.ranks} ranks x "
                f"{m.threads_per_rank} threads, {m.date}")


class Grid:
    """A table as values over (x) or (x, y), made monotone (more work never takes less time)."""

    def __init__(self, points: Sequence[Sample]) -> None:
        self.xs = np.array(sorted({p.x for p in points}))
        self.ys = np.array(sorted({p.y for p in points}))
        assert len(points) == len(self.xs) * len(self.ys), "a table is a full grid"
        values = np.empty((len(self.ys), len(self.xs)))
        for p in points:
            values[np.searchsorted(self.ys, p.y), np.searchsorted(self.xs, p.x)] = p.median_s
        self.values = np.maximum.accumulate(np.maximum.accumulate(values, axis=0), axis=1)

    def __call__(self, x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
        if len(self.ys) == 1:
            return _line(x + 0 * y, self.xs, self.values[0], through_zero=True)
        x, y = np.broadcast_arrays(x, y)
        at = np.clip(np.searchsorted(self.ys, y), 1, len(self.ys) - 1)
        share = (y - self.ys[at - 1]) / (self.ys[at] - self.ys[at - 1])
        # one line per row of the grid, then between the two rows that enclose y (both ends linear)
        rows = np.stack([_line(x, self.xs, row, through_zero=True) for row in self.values])
        low = np.take_along_axis(rows, (at - 1)[None], 0)[0]
        high = np.take_along_axis(rows, at[None], 0)[0]
        times: NDArray[np.float64] = np.maximum(low + np.maximum(share, 0.0) * (high - low), 0.0)
        return times


def _line(x: NDArray[np.float64], xs: NDArray[np.float64], values: NDArray[np.float64], *,
          through_zero: bool) -> NDArray[np.float64]:
    """Piecewise linear through (xs, values), continued with the last slope."""
    if through_zero and xs[0] > 0:
        xs, values = np.concatenate([[0.0], xs]), np.concatenate([[0.0], values])
    inside = np.interp(x, xs, values)
    if len(xs) < 2:
        return inside
    slope = (values[-1] - values[-2]) / (xs[-1] - xs[-2])
    return np.where(x > xs[-1], values[-1] + slope * (x - xs[-1]), inside)


def _bad(path: Path, key: str, value: object, allowed: str) -> InputError:
    return InputError([Mistake(file=str(path), line=None, key=key, value=value, allowed=allowed)])
