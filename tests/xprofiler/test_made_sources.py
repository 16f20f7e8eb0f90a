"""Timing sources made of another one: what they change, and that all else is the other's."""

from typing import Any

import numpy as np
import pytest

from xgpt.core import catalog
from xprofiler.made_sources import MOST_SIZES, Raised, Remembered
from xprofiler.profile import HANDOVER_DIRECT, STEP_OVERHEAD, TableKey
from xprofiler.roofline import Roofline
from xprofiler.timing import MessageKind, Operator, TimingSource

LINK = catalog.link("nvlink3")


class Counting:
    """The roofline of a small model, and how often it was asked."""

    def __init__(self) -> None:
        self._source = Roofline(catalog.model("opt-125m"), catalog.device("A40"), "float16")
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def operator_s(self, *of: Any, **options: Any) -> Any:
        self.asked += 1
        return self._source.operator_s(*of, **options)

    def message_s(self, *of: Any, **options: Any) -> Any:
        self.asked += 1
        return self._source.message_s(*of, **options)


def all_answers(source: TimingSource) -> dict[Any, float]:
    """By the table of a profile that would say it."""
    answers = {TableKey(op.value, degree): float(source.operator_s(op, 5, 7, tp_degree=degree))
               for op in Operator for degree in (1, 2)}
    answers |= {TableKey(kind.value, degree, LINK.name): float(
        source.message_s(kind, 1e6, LINK, tp_degree=degree))
        for kind, degree in ((MessageKind.TRANSFER, 1), (MessageKind.HANDOVER, 1),
                             (MessageKind.ALL_REDUCE, 2))}
    return {**answers, TableKey(STEP_OVERHEAD): source.facts.step_overhead_s}


def test_an_answer_is_remembered_and_not_to_be_written_to() -> None:
    source = Counting()
    once = Remembered(source)
    expected = all_answers(Counting())
    assert all_answers(once) == expected
    asked = source.asked
    assert all_answers(once) == expected and source.asked == asked
    sizes = np.arange(4.0)
    answer = once.operator_s(Operator.HEAD, sizes)
    assert once.operator_s(Operator.HEAD, sizes.copy()) is answer
    assert once.operator_s(Operator.HEAD, sizes, tp_degree=2) is not answer
    with pytest.raises(ValueError, match="read-only"):
        answer[0] = 1.0


def test_large_arrays_are_asked_for_again() -> None:
    source = Counting()
    once, sizes = Remembered(source), np.ones(MOST_SIZES + 1)
    for _ in range(2):
        once.operator_s(Operator.HEAD, sizes)
    assert source.asked == 2


def test_what_is_not_changed_is_the_sources_own() -> None:
    source = Counting()
    for made in (Remembered(source), Raised(source, TableKey("head"), 2.0)):
        assert made.facts == source.facts and made.provenance() == source.provenance()
        assert made.reach(Operator.HEAD, 1) == source.reach(Operator.HEAD, 1)


@pytest.mark.parametrize("key", [*all_answers(Counting()), TableKey(HANDOVER_DIRECT, 1, LINK.name)],
                         ids=str)
def test_raised_times_are_those_of_one_table(key: TableKey) -> None:
    plain, raised = all_answers(Counting()), all_answers(Raised(Counting(), key, 1.5))
    # of two ways of handing over the quicker is what is answered for both
    own = key._replace(name="kv_handover") if key.name == HANDOVER_DIRECT else key
    assert raised == {other: (1.5 if other == own else 1.0) * s for other, s in plain.items()}


def test_who_asks_for_the_same_longer_times_is_given_the_same_source() -> None:
    source = Remembered(Counting())
    head = source.raised(TableKey("head"), 1.01)
    assert source.raised(TableKey("head"), 1.01) is head
    assert source.raised(TableKey("head"), 1.02) is not head
    plain, raised = (float(one.operator_s(Operator.HEAD, 5)) for one in (source, head))
    assert raised == 1.01 * plain
