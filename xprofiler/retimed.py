"""A timing source whose times have turned out otherwise: scaled by what steps were seen to take.

A step's kind says which operators it is made of, and its rows where on their curves it lies. So
attention is scaled by the kinds that have it, and what depends on rows by the factor seen at as
many rows; between the rows of two kinds the factor goes over along their logarithm, beyond them it
stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.cluster import Link
from xgpt.core.lengths import FloatArray
from xprofiler.timing import MessageKind, Operator, Reach, TimingFacts, TimingSource

ENCODE, DECODE, MIXED = "encode", "decode", "mixed"  # xrunner.rules.steps.StepKind
_ENCODED = frozenset({Operator.ENCODE_ATTENTION, Operator.ENCODER_REST, Operator.CROSS_KV})
_DECODED = frozenset({Operator.DECODE_ATTENTION, Operator.CROSS_ATTENTION, Operator.KV_COMPACTION})


class Factor(NamedTuple):
    """Steps of `rows` tokens take `factor` times as long."""

    rows: float
    factor: float


class Retimed:
    """`source`, its times multiplied by what steps of each kind take against them."""

    def __init__(self, source: TimingSource, factors: Mapping[str, Factor]) -> None:
        """`factors`: by kind of step, at least one."""
        assert factors and all(own.factor > 0 for own in factors.values()), f"{factors = }"
        self.source, self.factors = source, dict(factors)
        nodes = sorted(factors.values())
        self._rows = np.log([max(node.rows, 1.0) for node in nodes])
        self._factors = np.log([node.factor for node in nodes])
        self._encode, self._decode = (
            next(factors[kind].factor for kind in (own, MIXED, other) if kind in factors)
            for own, other in ((ENCODE, DECODE), (DECODE, ENCODE)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def operator_s(self, operator: Operator, x: ArrayLike, y: ArrayLike = 0.0, *,
                   tp_degree: int = 1) -> FloatArray:
        """See TimingSource."""
        seconds = self.source.operator_s(operator, x, y, tp_degree=tp_degree)
        if operator in _ENCODED:
            return seconds * self._encode
        if operator in _DECODED:
            return seconds * self._decode
        rows = np.log(np.maximum(np.asarray(x, float), 1.0))
        return np.asarray(seconds * np.exp(np.interp(rows, self._rows, self._factors)))

    def message_s(self, kind: MessageKind, num_bytes: ArrayLike, link: Link, *,
                  tp_degree: int = 1) -> FloatArray:
        """See TimingSource. All-reduces are part of steps, other messages are not."""
        seconds = self.source.message_s(kind, num_bytes, link, tp_degree=tp_degree)
        return seconds * self._decode if kind is MessageKind.ALL_REDUCE else seconds

    def reach(self, operator: Operator, tp_degree: int) -> Reach:
        """See TimingSource."""
        return self.source.reach(operator, tp_degree)

    def provenance(self) -> str:
        """See TimingSource."""
        scaled = ", ".join(f"{kind} steps x {own.factor:.2f}"
                           for kind, own in sorted(self.factors.items()))
        return f"{self.source.provenance()}; as steps were seen to take: {scaled}"

    @property
    def facts(self) -> TimingFacts:
        """See TimingSource."""
        facts = self.source.facts
        return replace(facts, step_overhead_s=facts.step_overhead_s * self._decode)
