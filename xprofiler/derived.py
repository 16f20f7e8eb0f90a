"""Times of a layout of the cores that was not measured, from the two that lie farthest apart: a
rank for each core, and one rank of them all.

A rank of t threads takes T(t) = a + b / t (a part that threads divide, and one that they do not).
T(1) and T(C) are measured, with every core at work in both; that gives T of any t between them.
Messages and the host's cost of a step are those of the many ranks: no fewer ranks have slower ones.
What this may be off by is told by another law through the same two points, a power of t."""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray
from xprofiler.profile import Profile, ProfileMetadata, Sample
from xprofiler.profile_timing import ProfileTiming
from xprofiler.timing import Operator

_OPERATORS = frozenset(operator.value for operator in Operator)


class Derived(NamedTuple):
    """`error`: how far off its times may be, relative, for the law that they follow."""

    profile: Profile
    error: float


def derived(narrow: Profile, wide: Profile, wanted: ProfileMetadata) -> Derived:
    """The profile `wanted`. narrow: one thread a rank; wide: one rank of all threads."""
    threads, cores = wanted.threads_per_rank, wide.metadata.threads_per_rank
    assert narrow.metadata.threads_per_rank == 1 < threads < cores, f"{threads = } {cores = }"
    one, all_of_them = ProfileTiming(narrow), ProfileTiming(wide)
    tables, errors = {}, [np.zeros(1)]
    for key, points in narrow.tables.items():
        if key.tp_degree > wanted.ranks or (key.name == Operator.KV_COMPACTION.value
                                            and not wide.table(key.name)):
            continue
        if key.link or key.name not in _OPERATORS:
            tables[key] = points
            continue
        operator = Operator(key.name)
        x, y = np.array([p.x for p in points]), np.array([p.y for p in points])
        ratio = all_of_them.operator_s(operator, x, y) / one.operator_s(operator, x, y)
        known = np.isfinite(ratio) & (ratio > 0)
        factors = _divided(np.where(known, ratio, 1 / cores), threads, cores)
        powers = np.where(known, ratio, 1 / cores) ** (math.log(threads) / math.log(cores))
        errors.append(np.log(factors / powers)[known])
        tables[key] = tuple(
            Sample(x=p.x, y=p.y, samples_s=tuple(float(f) * s for s in p.samples_s))
            for p, f in zip(points, factors, strict=True))
    labels = " and ".join(f"{of.metadata.ranks}x{of.metadata.threads_per_rank}"
                          for of in (wide, narrow))
    return Derived(
        profile=replace(narrow, metadata=replace(wanted, origin=f"derived from {labels}"),
                        tables=tables, spent_s=0.0, peaks=None, learned=(),
                        starts_s=()),
        error=float(np.sqrt(np.mean(np.concatenate(errors) ** 2))))


def _divided(ratio: FloatArray, threads: int, cores: int) -> FloatArray:
    """T(threads) / T(1), where T(cores) / T(1) is `ratio`."""
    return np.asarray(1 - (1 - ratio) * (1 - 1 / threads) / (1 - 1 / cores))
