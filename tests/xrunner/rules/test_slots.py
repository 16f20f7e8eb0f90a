"""The account of slots: what the head tells its stages of a group's slots is what both then hold,
and whose result is due when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xrunner.rules.batch_sizer import MOST_CAPTURED, bucket_of
from xrunner.rules.slots import Departures, GroupSlots, SlotUse


@given(st.data(), st.booleans())
def test_a_stage_that_obeys_holds_what_the_head_does(data, is_reused):
    head, stage, present = GroupSlots[int](), GroupSlots[int](), set[int]()
    following = 0
    for _ in range(data.draw(st.integers(1, 12))):
        gone = data.draw(st.sets(st.sampled_from(sorted(present)))) if present else set()
        joining = list(range(following, following + data.draw(st.integers(0, 5))))
        following += len(joining)
        before = list(head.seats)
        head.vacate(gone)
        removed, replaced = head.seat(joining, is_reused=is_reused)
        moves = stage.compact(removed)
        stage.fill(joining, replaced)
        present = (present - gone) | set(joining)
        assert head.seats == stage.seats and sorted(head.seats) == sorted(present)
        assert {before[slot] for slot in (*removed, *replaced)} == gone
        assert len(replaced) == (min(len(gone), len(joining)) if is_reused else 0)
        assert len(moves) <= len(removed)


@pytest.mark.parametrize("use", [SlotUse.COMPACTED, SlotUse.REUSED])
def test_who_terminates_early_departs_at_once(use):
    departures = Departures(use)
    departures.join(3)
    assert list(departures.finish([2])) == [2] and list(departures.finish([])) == []


def test_a_static_batch_departs_as_a_whole_in_the_inputs_order():
    departures = Departures(SlotUse.KEPT)
    departures.join(2)
    departures.join(1)
    assert list(departures.finish([2])) == list(departures.finish([1])) == []
    assert list(departures.finish([0])) == [0, 1, 2]
    assert list(departures.finish([])) == []  # of a superfluous step
    departures.join(1)
    assert list(departures.finish([3])) == [3]


def test_a_bucket_holds_the_batch_and_little_more():
    sizes = {n: bucket_of(n) for n in range(1, MOST_CAPTURED + 1)}
    for count, size in sizes.items():
        assert size is not None and 0 <= size - count < max(8, count / 8, 1)
        assert sizes[size] == size, "a bucket is its own"
    ordered = list(sizes.values())
    assert ordered == sorted(ordered)
    assert sorted(set(ordered))[:8] == [1, 2, 4, 8, 16, 24, 32, 40] and len(set(ordered)) == 43
    assert bucket_of(MOST_CAPTURED + 1) is None, "larger batches are not captured"
