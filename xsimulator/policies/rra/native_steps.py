"""What RRA's native calls ask of the timing source by degree: a layer's attention, and what
moving rows of its cache takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xsimulator.envelope import PairEnvelope
from xsimulator.layer_times import LayerTimes, is_compaction_timed
from xsimulator.policies.rra.native_tables import PlanRows


class Envelopes(Protocol):
    """Those of rra.least_steps, by degree."""

    @property
    def attention_of(self) -> Callable[[int], PairEnvelope]: ...

    @property
    def compaction_of(self) -> Callable[[int], PairEnvelope]: ...


class Call(NamedTuple):
    """Configurations by plan, in falling order of their blocks within each."""

    order: IntArray
    plans: PlanRows
    column: IntArray
    begin: IntArray
    total: int
    groups: FloatArray
    batch: FloatArray


class Loaded(NamedTuple):
    """What decodes and is encoded: [2, blocks of all], [blocks of all], [configs]."""

    words: IntArray
    table: IntArray
    facts: FloatArray
    queries: FloatArray
    context: FloatArray
    rows: FloatArray
    tokens: FloatArray  # [2, configs]
    encoded: FloatArray
    most: FloatArray  # queries
    largest: FloatArray | None  # queries of a group in the largest batch


def by_degree(call: Call) -> dict[int, tuple[LayerTimes, slice | IntArray]]:
    """Whose layers, and which blocks of all are of plans with groups of a degree."""
    found: dict[int, tuple[LayerTimes, list[slice]]] = {}
    ends = [*call.begin[[rows.start for _, rows in call.plans[1:]]].tolist(), call.total]
    begin = 0
    for (plan, _), end in zip(call.plans, ends, strict=True):
        for degree in plan.times.degrees:
            found.setdefault(degree, (plan.times.layers, []))[1].append(slice(begin, end))
        begin = end
    return {degree: (layers, _joined(parts)) for degree, (layers, parts) in found.items()}


def layer_s(least: Envelopes | None, layers: LayerTimes, degree: int, loaded: Loaded,
            at: slice | IntArray, *, is_latency: bool) -> tuple[FloatArray, FloatArray | None]:
    """[2, blocks of all] a layer's attention, and [blocks of all] its compaction."""
    total = loaded.queries.shape[1]
    queries, context = loaded.queries[:, at], loaded.context[:, at]
    seconds = layers.decode_attention_s(queries, context, degree)
    if least is not None:
        seconds = seconds * least.attention_of(degree).factor(
            queries, context, of_more=is_latency)
    work, moved = np.empty((2, total)), None
    work[:, at] = seconds
    if is_compaction_timed(layers.timing, degree):
        rows = loaded.rows[at]
        seconds = layers.compaction_s(rows, context[1], degree)
        if least is not None:
            seconds = seconds * least.compaction_of(degree).factor(
                rows, context[1], of_more=is_latency)
        moved = np.empty(total)
        moved[at] = seconds
    return work, moved


def _joined(parts: Sequence[slice]) -> slice | IntArray:
    if all(a.stop == b.start for a, b in zip(parts[:-1], parts[1:], strict=True)):
        return slice(parts[0].start, parts[-1].stop)
    return np.concatenate([np.arange(part.start, part.stop) for part in parts])
