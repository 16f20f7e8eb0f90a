"""WAA's two rules driven together, as the replay and the runner do, without a model: back-pressure,
budgets, even groups, encode batches near their tokens, inputs left to the decode pool, and an end
in every case."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from examples import examples
from holding import holding
from hypothesis import example, given
from hypothesis import strategies as st

from xgpt.core.controls import Admission
from xrunner.rules.batch_sizer import LEAST_ADJUSTED, BatchSizer
from xrunner.rules.steps import Step, StepKind
from xrunner.rules.waa import SystemLimits, WaaDecodeRule, WaaEncodeRule

MEAN_INPUT = 20.0
AHEAD = Admission(rule="future-peak")


def encoder(*, encode_batch: int = 4, num_groups: int = 2, max_in_system: int = 12,
            kv_tokens: int = 10_000, encode_kv_tokens: int = 10_000,
            adjustment: float = 0.0, admission: Admission | None = None,
            **aim: int) -> WaaEncodeRule:
    return WaaEncodeRule(
        SystemLimits(encode_batch=encode_batch, max_in_system=max_in_system, **aim),
        num_groups=num_groups, kv_tokens=kv_tokens, encode_kv_tokens=encode_kv_tokens,
        sizer=BatchSizer(mean_input=MEAN_INPUT, adjustment=adjustment), admission=admission)


@dataclass(frozen=True, slots=True)
class Query:
    """Tokens; `output` with the first, which the encoding gives; `spare`: fewer than it may be."""

    input: int
    output: int
    spare: int = 0

    @property
    def reserve(self) -> int:
        return self.input + self.output + self.spare


@dataclass(slots=True, kw_only=True)
class Pools:
    """Both rules and what lies between them; moves are drawn, so pools run at any pace."""

    encode: WaaEncodeRule
    decode: WaaDecodeRule
    queries: list[Query]
    fewer: int = 1  # tokens that encoding gives; 0: an encoder's
    is_late: bool = False  # reports to the encode pool come when they may
    reports: deque[Callable[[], None]] = field(default_factory=deque)
    refused: list[int] = field(default_factory=list)
    encodes: list[Step] = field(default_factory=list)
    most_active: int = 0
    most_in_system: int = 0
    on_their_way: list[int] = field(default_factory=list)  # encoded, not yet handed over
    left: dict[int, int] = field(default_factory=dict)  # decode iterations still to do
    active: list[list[int]] = field(default_factory=list)
    in_system: set[int] = field(default_factory=set)
    held: dict[int, int] = field(default_factory=dict)  # KV tokens in the decode pool
    given: list[int] = field(default_factory=list)  # left to the decode pool
    encoded: dict[int, int] = field(default_factory=dict)  # tokens of these
    most_tokens: int = 0  # of a chunk
    most_decoding: int = 0  # at work in the decode pool when a query was left to it

    def run(self, seed: int) -> Pools:
        rng = random.Random(seed)
        self.active = [[] for _ in range(self.decode.num_groups)]
        for index, query in enumerate(self.queries):
            if not self.encode.submit(index, query.reserve, query.input):
                self.refused.append(index)
        for _ in range(200_000):
            self._give()
            moves = [move for move, is_open in (
                (self._encode, self.encode.next_group() is not None),
                (self._hand_over, bool(self.on_their_way)),
                (self._decode, self.decode.next_group() is not None),
                (self._hear, bool(self.reports))) if is_open]
            if not moves:
                return self
            rng.choice(moves)()
            self._check()
        raise AssertionError("no end")

    def _give(self) -> None:
        for waiting in self.encode.share_inputs():
            query = self.queries[waiting.query]
            assert (waiting.reserve, waiting.tokens) == (query.reserve, query.input)
            self.most_decoding = max(self.most_decoding, self.at_work)
            self.decode.submit_input(waiting)
            self.given.append(waiting.query)
            self.in_system.add(waiting.query)

    def _tell(self, note: Callable[..., None], *what: Any) -> None:
        self.reports.append(partial(note, *what))
        if not self.is_late:
            self._hear()

    def _hear(self) -> None:
        self.reports.popleft()()

    @property
    def at_work(self) -> int:
        """In the decode pool, begun or handed over."""
        return len(self.in_system) - len(self.on_their_way) - len(self.given) + len(self.encoded)

    def _encode(self) -> None:
        group = self.encode.next_group()
        step = self.encode.decide()
        assert step is not None and step.kind is StepKind.ENCODE and step.group == group
        assert step.joined and len(step.joined) <= self.encode.group_max_active
        self.encodes.append(step)
        self.on_their_way += step.joined
        self.in_system.update(step.joined)

    def _hand_over(self) -> None:
        query = self.on_their_way.pop(0)
        self.encode.finish(query)
        self.left[query] = self.queries[query].output - self.fewer
        if self.left[query]:
            own = self.queries[query]
            assert self.decode.submit(query, own.reserve, own.input)
            self.held[query] = own.input
        else:
            self._release(query)

    def _decode(self) -> None:
        group = self.decode.next_group()
        for query in [q for q in self.active[group] if self.left[q] == 0]:
            self.active[group].remove(query)
            self.decode.finish(query)
            del self.held[query]
            self._release(query)
        step = self.decode.decide()
        if step is None:
            assert not self.active[group]
            return
        assert step.group == group
        self.active[group] += step.handed
        if self.decode.tells_joined and (step.handed or step.joined):
            self._tell(self.encode.system.note_joined, (*step.handed, *step.joined), step.phase)
        assert step.kind is (StepKind.DECODE if not step.chunks else StepKind.MIXED
                             if self.active[group] else StepKind.ENCODE)
        for query in self.active[group]:
            self.left[query] -= 1
            self.held[query] += 1
        for part in step.chunks:
            assert part.first == self.encoded.get(part.query, 0)
            self.held[part.query] = self.encoded[part.query] = part.first + part.tokens
        self._tell(self.encode.note_begun,
                   [part.query for part in step.chunks if part.first == 0])
        self.most_tokens = max(self.most_tokens, sum(part.tokens for part in step.chunks))
        for query in step.joined:
            assert self.encoded[query] == self.queries[query].input
            self.left[query] = self.queries[query].output - 1
        self.active[group] += step.joined
        self.most_active = max(self.most_active, len(self.active[group]))

    def _release(self, query: int) -> None:
        self._tell(self.encode.release, query)
        self.in_system.remove(query)

    def _check(self) -> None:
        self.most_in_system = max(self.most_in_system, len(self.in_system))
        held = sum(self.queries[q].input for q in self.on_their_way)
        assert self.encode.reserved_tokens == held <= self.encode.encode_kv_tokens
        if not self.decode.tells_joined:
            assert sum(self.queries[q].reserve for q in self.in_system) <= self.encode.kv_tokens
        assert sum(self.held.values()) <= self.decode.reserved_tokens <= self.encode.kv_tokens


lists_of_queries = st.lists(st.builds(
    Query, input=st.integers(1, 60), output=st.integers(1, 12),
    spare=st.just(0) | st.integers(0, 9)), max_size=50)


# a group has grown, another has not yet freed who ended: a token more counts for each
@example(queries=[Query(2, 2), Query(1, 1), Query(2, 5)], encode_batch=1, encode_groups=1, groups=2,
         in_system=9, kv=12, encode_kv=200, adjustment=0.0, chunk=0, seed=7, planned=1, stock=1,
         admission=AHEAD, fewer=0, is_late=False)
@examples(250)
@given(queries=lists_of_queries, encode_batch=st.integers(1, 9), encode_groups=st.integers(1, 4),
       groups=st.integers(1, 4), in_system=st.integers(1, 40), kv=st.integers(1, 400),
       encode_kv=st.integers(1, 200), adjustment=st.sampled_from([0.0, 0.15, 0.5]),
       chunk=st.just(0) | st.integers(1, 70), seed=st.integers(0, 9),
       planned=st.integers(1, 30), stock=st.integers(1, 200),
       admission=st.sampled_from([None, AHEAD]), fewer=st.integers(0, 1), is_late=st.booleans())
def test_every_query_that_can_ever_fit_is_encoded_once_in_order_and_ends(
        queries, encode_batch, encode_groups, groups, in_system, kv, encode_kv, adjustment, chunk,
        seed, planned, stock, admission, fewer, is_late):
    """By the encode pool, or, where inputs are left to it, by the decode pool; whenever the encode
    pool hears of it, the decode pool never holds more tokens than its budget."""
    encode = encoder(encode_batch=encode_batch, num_groups=encode_groups, max_in_system=in_system,
                     kv_tokens=kv, encode_kv_tokens=encode_kv, adjustment=adjustment,
                     admission=admission,
                     **({"planned_active": planned, "stock_tokens": stock} if chunk else {}))
    own = {"encode_chunk": chunk, "planned_active": planned} if chunk else {}
    decode = WaaDecodeRule(num_groups=groups, kv_tokens=kv,
                           group_max_active=-(-in_system // groups), admission=admission, **own)
    done = Pools(encode=encode, decode=decode, queries=queries, is_late=is_late,
                 fewer=1 if chunk else fewer).run(seed)
    too_large = [i for i, q in enumerate(queries) if q.reserve > kv or q.input > encode_kv]
    assert done.refused == too_large
    served = [query for step in done.encodes for query in step.joined]
    assert served == sorted(served) and done.given == sorted(done.given)
    assert sorted(served + done.given) == [i for i in range(len(queries)) if i not in too_large]
    assert not any(done.left.values()) and not done.in_system and encode.next_group() is None
    assert encode.reserved_tokens == decode.reserved_tokens == 0
    # a single batch may be larger than the limit: it goes alone, or nothing would ever move
    assert done.most_in_system <= max(in_system, encode.group_max_active)
    assert done.most_active <= max(decode.group_max_active, encode.group_max_active)
    assert [step.group for step in done.encodes] == [
        i % encode_groups for i in range(len(done.encodes))]
    assert done.encoded == {query: queries[query].input for query in done.given}
    assert done.most_tokens <= chunk
    assert done.most_decoding < planned if chunk else not done.given


def test_no_more_lies_ready_than_the_stock_and_none_while_enough_decode():
    rule = holding(encoder(encode_batch=1, max_in_system=99, planned_active=4, stock_tokens=30),
                   20, 30, 20)
    assert [one.query for one in rule.share_inputs()] == [0, 1], "the second exceeds 30 tokens"
    rule.note_begun([0])
    assert [one.query for one in rule.share_inputs()] == [2]
    rule.note_begun([1, 2])
    assert [one.query for one in rule.share_inputs()] == [3, 4]
    rule.note_begun([3])
    assert rule.share_inputs() == [], "four are at work, as planned"
    rule.release(0)
    assert [one.query for one in rule.share_inputs()] == [5]


def test_no_batch_starts_until_all_of_it_has_room_in_the_system():
    rule = holding(encoder(encode_batch=4, max_in_system=10), 12, 30, 20)
    assert [rule.decide() is not None for _ in range(3)] == [True, True, False]
    for query in range(8):
        rule.finish(query)
    assert rule.next_group() is None, "handing over makes no room: the decode pool has them now"
    rule.release(0)
    assert rule.next_group() is None, "two and one are not four"
    rule.release(1)
    assert rule.decide().joined == (8, 9, 10, 11)


@pytest.mark.parametrize(("budgets", "freed_by"), [
    ({"kv_tokens": 149}, "release"), ({"encode_kv_tokens": 99}, "finish")])
def test_a_full_cache_of_either_pool_holds_the_encoding_back(budgets, freed_by):
    rule = holding(encoder(encode_batch=2, max_in_system=99, **budgets), 6, 30, 20)
    assert [rule.decide() is not None for _ in range(3)] == [True, True, False]
    for query in (0, 1):
        getattr(rule, "finish" if freed_by == "release" else "release")(query)
    assert rule.next_group() is None, "the other pool's memory is not what lacks"
    for query in (0, 1):
        getattr(rule, freed_by)(query)
    assert rule.next_group() is not None


@pytest.mark.parametrize(("own", "count", "joined"), [
    ({}, 1, (0,)),  # the last queries do not wait for a whole batch
    ({"max_in_system": 2}, 8, (0, 1, 2, 3)),  # larger than the system: it goes alone
    ({"kv_tokens": 70}, 4, (0, 1))])  # that no budget could ever hold: it is cut
def test_the_first_of_batches_that_do_not_fit(own, count, joined):
    rule = holding(encoder(encode_batch=4, **own), count, 30, 20)
    assert rule.decide().joined == joined
    for query in joined:
        rule.finish(query)
        assert rule.next_group() is None, "others are still in the system"
        rule.release(query)
        assert (rule.next_group() is not None) == (query == joined[-1] and count > len(joined))
    assert rule.submit(9, 71, 20) == ("kv_tokens" not in own) and rule.submit(10, 70, 20)


@given(count=st.integers(1, 60), num_groups=st.integers(1, 7))
def test_groups_are_even_when_queries_arrive_together(count, num_groups):
    rule = WaaDecodeRule(num_groups=num_groups, kv_tokens=10_000, group_max_active=count)
    for query in range(count):
        rule.submit(query, 10)
    sizes = [0] * num_groups
    for _ in range(num_groups):
        step = rule.decide()
        if step is not None:
            sizes[step.group] += len(step.handed)
    assert sum(sizes) == count and max(sizes) == -(-count // num_groups)


@example(inputs=[1] * 80, batch=5, adjustment=0.15)
@example(inputs=[12] * 80, batch=5, adjustment=0.15)
@given(inputs=st.lists(st.integers(1, 400) | st.integers(1, 30), min_size=1, max_size=80),
       batch=st.integers(1, 20), adjustment=st.sampled_from([0.05, 0.15, 0.5]))
def test_a_batch_keeps_near_its_tokens_as_whole_queries_allow(inputs, batch, adjustment):
    sizer = BatchSizer(mean_input=MEAN_INPUT, adjustment=adjustment)
    count, target = sizer.count(inputs, batch), batch * MEAN_INPUT
    assert 1 <= count <= min(sizer.most(batch), len(inputs))
    away = [abs(sum(inputs[:n]) - target) for n in range(1, min(2 * batch, len(inputs)) + 1)]
    if batch < LEAST_ADJUSTED:
        assert count == min(batch, len(inputs)), "one more or less would be too coarse"
    elif len(inputs) < batch:
        assert count == len(inputs), "the last queries do not wait"
    elif away[batch - 1] <= adjustment * target:
        assert count == batch, "no more and no fewer without need"
    else:
        assert away[count - 1] == min(away)
