"""A timing source of which one table's times are longer: what that changes shows how much a figure
rests on the table."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xgpt.core.cluster import Link
from xprofiler.profile import HANDOVER, HANDOVER_DIRECT, STEP_OVERHEAD, TableKey
from xprofiler.timing import MessageKind, Operator, TimingSource


class Raised:
    """`source`, with the times of the table `key` multiplied by `factor`."""

    def __init__(self, source: TimingSource, key: TableKey, factor: float) -> None:
        name = HANDOVER if key.name == HANDOVER_DIRECT else key.name  # the quicker way counts
        self._source, self._key, self._factor = source, key._replace(name=name), factor
        self.reach, self.provenance = source.reach, source.provenance
        overhead_s = source.facts.step_overhead_s * self._of(TableKey(STEP_OVERHEAD))
        self.facts = replace(source.facts, step_overhead_s=overhead_s)

    def operator_s(self, operator: Operator, x: ArrayLike, y: ArrayLike = 0.0, *,
                   tp_degree: int = 1) -> NDArray[np.float64]:
        """See TimingSource."""
        return self._of(TableKey(operator.value, tp_degree)) * self._source.operator_s(
            operator, x, y, tp_degree=tp_degree)

    def message_s(self, kind: MessageKind, num_bytes: ArrayLike, link: Link, *,
                  tp_degree: int = 1) -> NDArray[np.float64]:
        """See TimingSource."""
        return self._of(TableKey(kind.value, tp_degree, link.name)) * self._source.message_s(
            kind, num_bytes, link, tp_degree=tp_degree)

    def _of(self, key: TableKey) -> float:
        return self._factor if key == self._key else 1.0
