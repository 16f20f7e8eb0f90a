"""A timing source with longer times in one table. It shows how much a figure rests on the table."""

from dataclasses import replace
from functools import lru_cache

from numpy.typing import ArrayLike

from xgpt.core.cluster import Link
from xgpt.core.lengths import FloatArray
from xgpt.core.policies import Role
from xprofiler.profile import HANDOVER, HANDOVER_DIRECT, STEP_OVERHEAD, TableKey
from xprofiler.timing import MessageKind, Operator, TimingSource, of_role


class Raised:
    """`source` with the times of one table multiplied by `factor`."""

    def __init__(self, source: TimingSource, what: TableKey, factor: float) -> None:
        if what.name == HANDOVER_DIRECT:
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
        return self._factor if key == self._what else 1.0


def raised(source: TimingSource, what: TableKey, factor: float) -> Raised:
    """The `Raised` source of these arguments; the same object for the same arguments, so that
    figures derived from it are shared."""
    return _raised(source, what, factor)  # type: ignore[arg-type]  # a source is hashable


_raised = lru_cache(maxsize=256)(Raised)
