"""What a head tells its stages of a decided step, for each use of slots."""

from __future__ import annotations

from collections.abc import Sequence

from xrunner.engine.roster import ActiveQuery, Roster, Vocabulary
from xrunner.query import PreparedQuery
from xrunner.rules.rra import RraRule
from xrunner.rules.slots import SlotUse, Span
from xrunner.rules.steps import Chunk, Step, StepKind

VOCABULARY = Vocabulary(eos_ids=frozenset(), decode_text=lambda ids: " ".join(map(str, ids)))


def roster_of(use: SlotUse, count: int, *, start_token: int | None = None) -> Roster:
    """Query i has the input i, 10 + i, 20 + i and at most 5 tokens of output."""
    roster = Roster(use, start_token)
    for i in range(count):
        roster.add(PreparedQuery(index=i, id=f"q{i}", input_ids=(i, 10 + i, 20 + i),
                                 max_new_tokens=5))
    return roster


def step(kind: StepKind, joined: Sequence[int] = (), **other: tuple[int | Chunk, ...]) -> Step:
    return Step(kind=kind, group=0, phase=0, iteration=0, joined=tuple(joined), **other)


def indices(given: Sequence[ActiveQuery]) -> list[int]:
    return [active.query.index for active in given]


def give(roster: Roster, tokens: dict[int, int]) -> None:
    for index, token in tokens.items():
        roster.active[index].take(token, 1.0, VOCABULARY)


def test_slots_of_who_is_done_are_compacted_before_the_next_step():
    roster = roster_of(SlotUse.COMPACTED, 4)
    message, inputs, given = roster.compose(step(StepKind.ENCODE, [0, 1, 2]), 0.5)
    assert inputs.tolist() == [0, 10, 20, 1, 11, 21, 2, 12, 22] and indices(given) == [0, 1, 2]
    assert not message.spans and [j.input_tokens for j in message.joined] == [3, 3, 3]
    give(roster, {0: 50, 1: 51, 2: 52})
    assert [active.query.index for active in roster.finish(0, [0])] == [0]
    message, inputs, given = roster.compose(step(StepKind.DECODE), 1.0)
    assert message.removed == (0,) and indices(given) == [2, 1], "the last moves into the hole"
    assert inputs.tolist() == [52, 51]
    message, _, _ = roster.compose(step(StepKind.DECODE), 2.0)
    assert not message.removed and roster.has_work


def test_who_joins_takes_a_free_slot_and_who_was_evicted_comes_with_its_output():
    roster = roster_of(SlotUse.REUSED, 3)
    roster.compose(step(StepKind.ENCODE, [0, 1]), 0.5)
    give(roster, {0: 50, 1: 51})
    message, _, given = roster.compose(step(StepKind.DECODE, evicted=(0,)), 1.0)
    assert message.removed == (0,) and indices(given) == [1]
    give(roster, {1: 61})
    roster.finish(0, [1])
    message, inputs, given = roster.compose(step(StepKind.ENCODE, [0]), 2.0)
    assert message.replaced == (0,) and message.spans == (Span(0, 0, 4, True),)
    assert inputs.tolist() == [0, 10, 20, 50] and indices(given) == [0]
    assert message.joined[0].input_tokens == 4


def test_an_input_that_is_encoded_in_part_rests_beside_those_who_decode():
    roster = roster_of(SlotUse.REUSED, 2)
    roster.compose(step(StepKind.ENCODE, [0], chunks=(Chunk(query=0, first=0, tokens=3),)), 0.0)
    give(roster, {0: 50})
    message, inputs, given = roster.compose(step(
        StepKind.MIXED, chunks=(Chunk(query=1, first=0, tokens=2),)), 1.0)
    assert inputs.tolist() == [50, 1, 11] and indices(given) == [0]
    assert message.spans == (Span(1, 0, 2, False),) and not message.resting
    give(roster, {0: 60})
    message, inputs, given = roster.compose(step(
        StepKind.MIXED, [1], chunks=(Chunk(query=1, first=2, tokens=1),)), 2.0)
    assert message.resting == (1,) and message.spans == (Span(1, 2, 1, True),)
    assert inputs.tolist() == [60, 21] and indices(given) == [0, 1]


def test_rows_of_a_static_batch_are_fed_until_it_is_done():
    roster = roster_of(SlotUse.KEPT, 3)
    roster.compose(step(StepKind.ENCODE, [0, 1]), 0.0)
    give(roster, {0: 50, 1: 51})
    assert not roster.finish(0, [0])
    _, inputs, given = roster.compose(step(StepKind.DECODE), 1.0)
    assert inputs.tolist() == [50, 51] and indices(given) == [0, 1]
    assert [active.query.index for active in roster.finish(0, [1])] == [0, 1]
    message, inputs, _ = roster.compose(step(StepKind.ENCODE, [2]), 2.0)
    assert message.removed == (0, 1) and inputs.tolist() == [2, 12, 22]


def test_who_comes_from_another_pool_is_fed_what_it_has():
    roster = roster_of(SlotUse.COMPACTED, 0, start_token=7)
    query = PreparedQuery(index=4, id="q", input_ids=(), max_new_tokens=2)
    roster.add(ActiveQuery(query, 0.25, input_tokens=9))
    roster.in_vain.append(3)
    message, inputs, given = roster.compose(step(StepKind.DECODE, [4]), 1.0)
    assert message.joined[0].input_tokens == 9 and message.ended == (3,)
    assert inputs.tolist() == [7] and indices(given) == [4] and not roster.in_vain
    assert roster.active[4].encode_start_s == 0.25


def test_a_group_gets_no_more_slots_than_there_are_queries():
    rule = RraRule(encode_batch=4, decode_iterations=5, num_groups=2, max_active=12, kv_tokens=999)
    few, many = (roster_of(SlotUse.COMPACTED, count).start_message(rule, 0) for count in (5, 50))
    assert few.slots == 5 and many.slots == rule.group_max_active == 6
    assert few.capacity == 3 + 5, "input and most output of a query"
