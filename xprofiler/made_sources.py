"""Timing sources that are made of another one: one of which a table's times are longer (what that
changes shows how much a figure rests on the table), and one that remembers what it was asked (many
plans have layers of the same degree)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.cluster import Link
from xgpt.core.lengths import FloatArray
from xgpt.core.policies import Role
from xprofiler.profile import HANDOVER, HANDOVER_DIRECT, STEP_OVERHEAD, TableKey
from xprofiler.source_errors import OperatorGroup, group_of
from xprofiler.timing import MessageKind, Operator, TimingSource, of_role

MOST_SIZES = 4096  # of an array that is remembered
MOST_ANSWERS = 4096  # after that it begins anew
_latest: list[tuple[TimingSource, Remembered]] = []


class Raised:
    """`source`, with the times of a table, or of all tables of a group, multiplied by `factor`."""

    def __init__(self, source: TimingSource, what: TableKey | OperatorGroup,
                 factor: float) -> None:
        if isinstance(what, TableKey) and what.name == HANDOVER_DIRECT:
            what = what._replace(name=HANDOVER)  # the quicker way counts
        self._source, self._what, self._factor = source, what, factor
        self.reach, self.provenance = source.reach, source.provenance
        overhead_s = source.facts.step_overhead_s * self._of(TableKey(STEP_OVERHEAD))
        self.facts = replace(source.facts, step_overhead_s=overhead_s)

    def operator_s(self, operator: Operator, x: ArrayLike, y: ArrayLike = 0.0, *,
                   tp_degree: int = 1) -> FloatArray:
        """See TimingSource."""
        return self._of(TableKey(operator.value, tp_degree)) * self._source.operator_s(
            operator, x, y, tp_degree=tp_degree)

    def message_s(self, kind: MessageKind, num_bytes: ArrayLike, link: Link, *,
                  tp_degree: int = 1) -> FloatArray:
        """See TimingSource."""
        return self._of(TableKey(kind.value, tp_degree, link.name)) * self._source.message_s(
            kind, num_bytes, link, tp_degree=tp_degree)

    def of_role(self, role: Role) -> TimingSource:
        """See xprofiler.timing.of_role."""
        own = of_role(self._source, role)
        return self if own is self._source else Raised(own, self._what, self._factor)

    def _of(self, key: TableKey) -> float:
        is_meant = (group_of(key.name) is self._what if isinstance(self._what, OperatorGroup) else
                    key == self._what)
        return self._factor if is_meant else 1.0


def remembering(source: TimingSource) -> Remembered:
    """The latest source asked for: policies that are planned together share the answers."""
    for known, remembered in tuple(_latest):  # a job that runs is planned anew in a thread
        if known is source:
            return remembered
    found = Remembered(source)
    _latest[:] = [(source, found)]
    return found


class Remembered:
    """`source`, asked once for each array of sizes. Answers must not be written to."""

    def __init__(self, source: TimingSource) -> None:
        self._source = source
        self.facts, self.provenance = source.facts, source.provenance
        self.reach = cache(source.reach)
        self._answers: dict[Hashable, FloatArray] = {}
        self._raised: dict[tuple[TableKey | OperatorGroup, float], Raised] = {}

    def raised(self, what: TableKey | OperatorGroup, factor: float) -> Raised:
        """The same with longer times, one source for all who ask: what they derive from it they
        share."""
        key = what, factor
        if key not in self._raised:
            self._raised[key] = Raised(self, what, factor)
        return self._raised[key]

    def operator_s(self, operator: Operator, x: ArrayLike, y: ArrayLike = 0.0, *,
                   tp_degree: int = 1) -> FloatArray:
        """See TimingSource."""
        return self._once((operator, tp_degree), lambda: self._source.operator_s(
            operator, x, y, tp_degree=tp_degree), x, y)

    def message_s(self, kind: MessageKind, num_bytes: ArrayLike, link: Link, *,
                  tp_degree: int = 1) -> FloatArray:
        """See TimingSource."""
        return self._once((kind, tp_degree, link), lambda: self._source.message_s(
            kind, num_bytes, link, tp_degree=tp_degree), num_bytes)

    def of_role(self, role: Role) -> TimingSource:
        """See xprofiler.timing.of_role."""
        own = of_role(self._source, role)
        return self if own is self._source else own

    def _once(self, what: Hashable, ask: Callable[[], FloatArray], *sizes: ArrayLike) -> FloatArray:
        arrays = [np.asarray(size, float) for size in sizes]
        if sum(array.size for array in arrays) > MOST_SIZES:
            return ask()
        key = (what, *((array.shape, array.tobytes()) for array in arrays))
        answer = self._answers.get(key)
        if answer is None:
            if len(self._answers) >= MOST_ANSWERS:
                self._answers.clear()
            answer = np.asarray(ask(), float)
            answer.setflags(write=False)
            self._answers[key] = answer
        return answer
