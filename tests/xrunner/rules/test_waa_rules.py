"""WAA's two rules driven together, as the replay and the runner do, without a model: back-pressure,
budgets, even groups, encode batches near their tokens, and an end in every case."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st

from xrunner.rules.batch_sizer import LEAST_ADJUSTED, BatchSizer
from xrunner.rules.steps import Step, StepKind
from xrunner.rules.waa import WaaDecodeRule, WaaEncodeRule

MEAN_INPUT = 20.0


def encoder(*, encode_batch: int = 4, num_groups: int = 2, max_in_system: int = 12,
            kv_tokens: int = 10_000, encode_kv_tokens: int = 10_000,
            adjustment: float = 0.0) -> WaaEncodeRule:
    return WaaEncodeRule(
        encode_batch=encode_batch, num_groups=num_groups, max_in_system=max_in_system,
        kv_tokens=kv_tokens, encode_kv_tokens=encode_kv_tokens,
        sizer=BatchSizer(mean_input=MEAN_INPUT, adjustment=adjustment))


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Tokens; `output` with the first, which the encoding gives."""

    input: int
    output: int

    @property
    def reserve(self) -> int:
        return self.input + self.output


@dataclass(slots=True, kw_only=True)
class Pools:
    """Both rules and what lies between them; moves are drawn, so pools run at any pace."""

    encode: WaaEncodeRule
    decode: WaaDecodeRule
    queries: list[Query]
    refused: list[int] = field(default_factory=list)
    encodes: list[Step] = field(default_factory=list)
    most_active: int = 0
    most_in_system: int = 0
    on_their_way: list[int] = field(default_factory=list)  # encoded, not yet handed over
    left: dict[int, int] = field(default_factory=dict)  # decode iterations still to do
    active: list[list[int]] = field(default_factory=list)
    in_system: set[int] = field(default_factory=set)

    def run(self, seed: int) -> Pools:
        rng = random.Random(seed)
        self.active = [[] for _ in range(self.decode.num_groups)]
        for index, query in enumerate(self.queries):
            if not self.encode.submit(index, query.reserve, query.input):
                self.refused.append(index)
        for _ in range(200_000):
            moves = [move for move, is_open in (
                (self._encode, self.encode.next_group() is not None),
                (self._hand_over, bool(self.on_their_way)),
                (self._decode, self.decode.next_group() is not None)) if is_open]
            if not moves:
                return self
            rng.choice(moves)()
            self._check()
        raise AssertionError("no end")

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
        self.left[query] = self.queries[query].output - 1
        if self.left[query]:
            assert self.decode.submit(query, self.queries[query].reserve)
        else:
            self._release(query)

    def _decode(self) -> None:
        group = self.decode.next_group()
        assert group is not None
        for query in [q for q in self.active[group] if self.left[q] == 0]:
            self.active[group].remove(query)
            self.decode.finish(query)
            self._release(query)
        step = self.decode.decide()
        if step is None:
            assert not self.active[group]
            return
        assert step.kind is StepKind.DECODE and step.group == group
        self.active[group] += step.joined
        for query in self.active[group]:
            self.left[query] -= 1
        self.most_active = max(self.most_active, len(self.active[group]))

    def _release(self, query: int) -> None:
        self.encode.release(query)
        self.in_system.remove(query)

    def _check(self) -> None:
        self.most_in_system = max(self.most_in_system, len(self.in_system))
        held = sum(self.queries[q].input for q in self.on_their_way)
        assert self.encode.reserved_tokens == held <= self.encode.encode_kv_tokens
        assert sum(self.queries[q].reserve for q in self.in_system) <= self.encode.kv_tokens
        assert self.decode.reserved_tokens <= self.encode.kv_tokens


lists_of_queries = st.lists(st.builds(
    Query, input=st.integers(1, 60), output=st.integers(1, 12)), max_size=50)


@examples(150)
@given(queries=lists_of_queries, encode_batch=st.integers(1, 9), encode_groups=st.integers(1, 4),
       groups=st.integers(1, 4), in_system=st.integers(1, 40), kv=st.integers(1, 400),
       encode_kv=st.integers(1, 200), adjustment=st.sampled_from([0.0, 0.15, 0.5]),
       seed=st.integers(0, 9))
def test_every_query_that_can_ever_fit_is_encoded_once_in_order_and_ends(
        queries: list[Query], encode_batch: int, encode_groups: int, groups: int, in_system: int,
        kv: int, encode_kv: int, adjustment: float, seed: int) -> None:
    encode = encoder(encode_batch=encode_batch, num_groups=encode_groups, max_in_system=in_system,
                     kv_tokens=kv, encode_kv_tokens=encode_kv, adjustment=adjustment)
    decode = WaaDecodeRule(num_groups=groups, kv_tokens=kv,
                           group_max_active=-(-in_system // groups))
    done = Pools(encode=encode, decode=decode, queries=queries).run(seed)
    too_large = [i for i, q in enumerate(queries) if q.reserve > kv or q.input > encode_kv]
    assert done.refused == too_large
    served = [query for step in done.encodes for query in step.joined]
    assert served == [i for i in range(len(queries)) if i not in too_large]
    assert not any(done.left.values()) and not done.in_system and encode.next_group() is None
    assert encode.reserved_tokens == decode.reserved_tokens == 0
    # a single batch may be larger than the limit: it goes alone, or nothing would ever move
    assert done.most_in_system <= max(in_system, encode.group_max_active)
    assert [step.group for step in done.encodes] == [
        i % encode_groups for i in range(len(done.encodes))]


def test_no_batch_starts_until_all_of_it_has_room_in_the_system() -> None:
    rule = encoder(encode_batch=4, max_in_system=10)
    for query in range(12):
        assert rule.submit(query, 30, 20)
    assert [rule.decide() is not None for _ in range(3)] == [True, True, False]
    for query in range(8):
        rule.finish(query)
    assert rule.next_group() is None, "handing over makes no room: the decode pool has them now"
    rule.release(0)
    assert rule.next_group() is None, "two and one are not four"
    rule.release(1)
    step = rule.decide()
    assert step is not None and step.joined == (8, 9, 10, 11)


def test_the_last_queries_do_not_wait_for_a_whole_batch() -> None:
    rule = encoder(encode_batch=4)
    rule.submit(0, 30, 20)
    step = rule.decide()
    assert step is not None and step.joined == (0,) and rule.next_group() is None


@pytest.mark.parametrize(("budgets", "freed_by"), [
    ({"kv_tokens": 149}, "release"), ({"encode_kv_tokens": 99}, "finish")])
def test_a_full_cache_of_either_pool_holds_the_encoding_back(
        budgets: dict[str, int], freed_by: str) -> None:
    rule = encoder(encode_batch=2, max_in_system=99, **budgets)
    for query in range(6):
        rule.submit(query, 30, 20)
    assert [rule.decide() is not None for _ in range(3)] == [True, True, False]
    for query in (0, 1):
        getattr(rule, "finish" if freed_by == "release" else "release")(query)
    assert rule.next_group() is None, "the other pool's memory is not what lacks"
    for query in (0, 1):
        getattr(rule, freed_by)(query)
    assert rule.next_group() is not None


def test_a_batch_larger_than_the_system_goes_alone() -> None:
    rule = encoder(encode_batch=4, max_in_system=2)
    for query in range(8):
        rule.submit(query, 30, 20)
    step = rule.decide()
    assert step is not None and step.joined == (0, 1, 2, 3)
    for query in range(4):
        rule.finish(query)
        assert rule.next_group() is None
        rule.release(query)
    assert rule.next_group() is not None


def test_a_batch_that_no_budget_could_ever_hold_is_cut() -> None:
    rule = encoder(encode_batch=4, kv_tokens=70)
    for query in range(4):
        rule.submit(query, 30, 20)
    step = rule.decide()
    assert step is not None and step.joined == (0, 1)
    assert not rule.submit(9, 71, 20) and rule.submit(9, 70, 20)


@given(count=st.integers(1, 60), num_groups=st.integers(1, 7))
def test_groups_are_even_when_queries_arrive_together(count: int, num_groups: int) -> None:
    rule = WaaDecodeRule(num_groups=num_groups, kv_tokens=10_000, group_max_active=count)
    for query in range(count):
        rule.submit(query, 10)
    sizes = [0] * num_groups
    for _ in range(num_groups):
        step = rule.decide()
        if step is not None:
            sizes[step.group] += len(step.joined)
    assert sum(sizes) == count and max(sizes) == -(-count // num_groups)


@given(queries=st.integers(30, 60), num_groups=st.integers(2, 4), seed=st.integers(0, 5))
@examples(30)
def test_no_group_grows_beyond_its_share_of_the_system(
        queries: int, num_groups: int, seed: int) -> None:
    most = 12
    rule = WaaDecodeRule(num_groups=num_groups, kv_tokens=999,
                         group_max_active=-(-most // num_groups))
    pools = Pools(encode=encoder(encode_batch=3, max_in_system=most), decode=rule,
                  queries=[Query(input=20, output=2 + i % 9) for i in range(queries)]).run(seed)
    assert pools.most_active <= rule.group_max_active and pools.most_in_system <= most


@example(inputs=[1] * 80, batch=5, adjustment=0.15)
@example(inputs=[12] * 80, batch=5, adjustment=0.15)
@given(inputs=st.lists(st.integers(1, 400) | st.integers(1, 30), min_size=1, max_size=80),
       batch=st.integers(1, 20), adjustment=st.sampled_from([0.05, 0.15, 0.5]))
def test_a_batch_keeps_near_its_tokens_as_whole_queries_allow(
        inputs: list[int], batch: int, adjustment: float) -> None:
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


def test_without_adjustment_the_number_is_kept_whatever_the_tokens() -> None:
    sizer = BatchSizer(mean_input=MEAN_INPUT)
    assert sizer.most(5) == 5
    assert sizer.count([400] * 9, 5) == sizer.count([1] * 9, 5) == 5
    assert sizer.count([1] * 3, 5) == 3
