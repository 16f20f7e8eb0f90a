"""Timing sources made of another one: what they change, and that all else is the other's."""

from __future__ import annotations

from typing import Any

import pytest

from xgpt.core import catalog
from xprofiler.profile import HANDOVER_DIRECT, STEP_OVERHEAD, TableKey
from xprofiler.raised import Raised, raised
from xprofiler.roofline import Roofline
from xprofiler.timing import MessageKind, Operator, TimingSource

LINK = catalog.link("nvlink3")


def roofline() -> Roofline:
    """The roofline of a small model."""
    return Roofline(catalog.model("opt-125m"), catalog.device("A40"), "float16")


def all_answers(source: TimingSource) -> dict[Any, float]:
    """By the table of a profile that would say it."""
    answers = {TableKey(op.value, degree): float(source.operator_s(op, 5, 7, tp_degree=degree))
               for op in Operator for degree in (1, 2)}
    answers |= {TableKey(kind.value, degree, LINK.name): float(
        source.message_s(kind, 1e6, LINK, tp_degree=degree))
        for kind, degree in ((MessageKind.TRANSFER, 1), (MessageKind.HANDOVER, 1),
                             (MessageKind.ALL_REDUCE, 2))}
    return {**answers, TableKey(STEP_OVERHEAD): source.facts.step_overhead_s}


def test_what_is_not_changed_is_the_sources_own() -> None:
    source = roofline()
    made = Raised(source, TableKey("head"), 2.0)
    assert made.facts == source.facts and made.provenance() == source.provenance()
    assert made.reach(Operator.HEAD, 1) == source.reach(Operator.HEAD, 1)


@pytest.mark.parametrize("key", [*all_answers(roofline()), TableKey(HANDOVER_DIRECT, 1, LINK.name)],
                         ids=str)
def test_raised_times_are_those_of_one_table(key: TableKey) -> None:
    plain, longer = all_answers(roofline()), all_answers(Raised(roofline(), key, 1.5))
    # of two ways of handing over the quicker is what is answered for both
    own = key._replace(name="kv_handover") if key.name == HANDOVER_DIRECT else key
    assert longer == {other: (1.5 if other == own else 1.0) * s for other, s in plain.items()}


def test_who_asks_for_the_same_longer_times_is_given_the_same_source() -> None:
    source, key = roofline(), TableKey("head")
    assert raised(source, key, 1.01) is raised(source, key, 1.01)
    assert raised(source, key, 1.02) is not raised(source, key, 1.01)
