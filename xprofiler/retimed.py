"""A timing source whose times have turned out otherwise: scaled by what steps were seen to take.

A step's kind says which operators it is made of, and its rows where on their curves it lies. So
attention is scaled by the kinds that have it, and what depends on rows by the factor seen at as
many rows; between the rows of two kinds the factor goes over along their logarithm, beyond them it
stays. A pool that works one phase alone has steps of that kind alone (and mixed ones, where it
decodes), whatever their rows: of WAA's pools one may be on a core that another program shares, and
the other not.

Of a kind that was not seen there are two opinions. During a run it is taken to be as the others:
what slows a machine slows everything. What is learned for later jobs leaves it as it was: a table
that is off for one kind of step says nothing of another's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.cluster import Link
from xgpt.core.lengths import FloatArray
from xgpt.core.policies import Role
from xprofiler.timing import (
    MessageKind,
    Operator,
    Reach,
    TimingFacts,
    TimingSource,
    of_role,
)

ENCODE, DECODE, MIXED = "encode", "decode", "mixed"  # xrunner.rules.steps.StepKind
_ENCODED = frozenset({Operator.ENCODE_ATTENTION, Operator.ENCODER_REST, Operator.CROSS_KV})
_DECODED = frozenset({Operator.DECODE_ATTENTION, Operator.DECODE_REST, Operator.CROSS_ATTENTION,
                      Operator.KV_COMPACTION})
_UNSEEN_RATIO = 4.0  # see Factors: a choice, for nobody saw what lies between


class Factor(NamedTuple):
    """Steps of `rows` tokens take `factor` times as long."""

    rows: float
    factor: float


class Factors:
    """What steps of each kind take, against a source's times, as a factor on each operator's."""

    def __init__(self, by_kind: Mapping[str, Factor], *, leaves_unseen: bool = False) -> None:
        """`by_kind`: of step, at least one. `leaves_unseen`: whether encoding, or decoding, keeps
        a factor of 1 where neither steps of its own nor mixed ones are among them. What depends on
        rows alone then goes back to 1 within _UNSEEN_RATIO times the rows towards the kind that is
        missing: encode steps have more rows than decode steps."""
        assert by_kind and all(own.factor > 0 for own in by_kind.values()), f"{by_kind = }"
        self.by_kind = dict(by_kind)
        nodes = sorted(by_kind.values())
        if leaves_unseen and len(by_kind) == 1 and MIXED not in by_kind:
            (own,) = nodes
            ratio = _UNSEEN_RATIO if DECODE in by_kind else 1 / _UNSEEN_RATIO
            nodes = sorted((own, Factor(max(own.rows, 1.0) * ratio, 1.0)))
            by_kind = {ENCODE: Factor(own.rows, 1.0), DECODE: Factor(own.rows, 1.0), **by_kind}
        self._rows = np.log([max(node.rows, 1.0) for node in nodes])
        self._factors = np.log([node.factor for node in nodes])
        self.encode, self.decode = (
            next(by_kind[kind].factor for kind in (own, MIXED, other) if kind in by_kind)
            for own, other in ((ENCODE, DECODE), (DECODE, ENCODE)))

    def of(self, operator: Operator, x: ArrayLike) -> FloatArray | float:
        """The factor on the seconds of `operator` at x."""
        if operator in _ENCODED:
            return self.encode
        if operator in _DECODED:
            return self.decode
        rows = np.log(np.maximum(np.asarray(x, float), 1.0))
        return np.asarray(np.exp(np.interp(rows, self._rows, self._factors)))

    @property
    def words(self) -> str:
        return ", ".join(f"{kind} steps x {own.factor:.2f}"
                         for kind, own in sorted(self.by_kind.items()))


class Retimed:
    """`source`, its times multiplied by what steps of each kind take against them."""

    def __init__(self, source: TimingSource, factors: Mapping[str, Factor]) -> None:
        """`factors`: by kind of step, at least one."""
        self.source, self.factors = source, Factors(factors)

    def of_role(self, role: Role) -> TimingSource:
        """What steps of a pool of this role take (xprofiler.timing.of_role)."""
        kinds = {ENCODE: (ENCODE,), DECODE: (DECODE, MIXED)}.get(role, ())
        own = {kind: self.factors.by_kind[kind] for kind in kinds if kind in self.factors.by_kind}
        return Retimed(of_role(self.source, role), own) if own else self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def operator_s(self, operator: Operator, x: ArrayLike, y: ArrayLike = 0.0, *,
                   tp_degree: int = 1) -> FloatArray:
        """See TimingSource."""
        seconds = self.source.operator_s(operator, x, y, tp_degree=tp_degree)
        return np.asarray(seconds * self.factors.of(operator, x))

    def message_s(self, kind: MessageKind, num_bytes: ArrayLike, link: Link, *,
                  tp_degree: int = 1) -> FloatArray:
        """See TimingSource. All-reduces are part of steps, other messages are not."""
        seconds = self.source.message_s(kind, num_bytes, link, tp_degree=tp_degree)
        return seconds * self.factors.decode if kind is MessageKind.ALL_REDUCE else seconds

    def reach(self, operator: Operator, tp_degree: int) -> Reach:
        """See TimingSource."""
        return self.source.reach(operator, tp_degree)

    def provenance(self) -> str:
        """See TimingSource."""
        return f"{self.source.provenance()}; as steps were seen to take: {self.factors.words}"

    @property
    def facts(self) -> TimingFacts:
        """See TimingSource."""
        facts = self.source.facts
        return replace(facts, step_overhead_s=facts.step_overhead_s * self.factors.decode)
