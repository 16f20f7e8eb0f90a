"""Rules of the baselines: ORCA's encodes one query a step, static batches decode as a whole, vLLM's
and Sarathi's take blocks, evict, and keep a budget; every query is served once, also by RRA's."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

import pytest
from examples import examples
from holding import drive, holding, rule_of
from hypothesis import given
from hypothesis import strategies as st

from xgpt.core.controls import Admission, AdmissionRule, Forecasting
from xrunner.rules.iteration import OrcaRule, slot_shares
from xrunner.rules.paged import BLOCK_TOKENS, PagedRule, lightllm, mixed, sarathi, vllm
from xrunner.rules.room import Rooms
from xrunner.rules.rra import RraRule
from xrunner.rules.static import StaticRule
from xrunner.rules.steps import Step, StepKind


def test_two_groups_take_turns_and_encode_one_query_a_step():
    rule = holding(OrcaRule(num_groups=2, max_active=4, kv_tokens=1000), 5, 10)
    steps = drive(rule, dict.fromkeys(range(5), 3))
    seen = [(s.kind.value, s.group, s.joined) for s in steps[:8]]
    assert seen == [
        ("encode", 0, (0,)), ("encode", 1, (1,)), ("mixed", 0, (2,)), ("mixed", 1, (3,)),
        ("decode", 0, ()), ("decode", 1, ()), ("mixed", 0, (4,)), ("decode", 1, ())]
    assert [s.phase for s in steps if s.group == 0][:4] == [0, 1, 2, 3]


@given(num_groups=st.integers(1, 8), more=st.integers(0, 40))
def test_slots_are_shared_evenly(num_groups, more):
    shares = slot_shares(num_groups + more, num_groups)
    assert sum(shares) == num_groups + more and max(shares) - min(shares) <= 1
    assert max(shares) == shares[0] and min(shares) >= 1


@examples(120)
@given(policy=st.sampled_from(["orca", "rra"]), encode=st.integers(1, 9),
       iterations=st.integers(1, 7), groups=st.integers(1, 4), more=st.integers(0, 12),
       capacity=st.integers(40, 200),
       outputs=st.lists(st.integers(1, 20), min_size=1, max_size=40))
def test_every_query_is_encoded_once_and_ends_whatever_the_limits(
        policy, encode, iterations, groups, more, capacity, outputs):
    rule = rule_of(policy, groups=groups, batch=groups + more, kv_tokens=capacity, encode=encode,
                   iterations=iterations)
    wanted = {q: n for q, n in enumerate(outputs) if rule.submit(q, n + 5)}
    most = capacity // groups
    assert all(outputs[q] + 5 > most for q in set(range(len(outputs))) - set(wanted))
    steps = drive(rule, wanted)
    order = [q for s in steps for q in s.joined]
    assert order == sorted(wanted), "each once; admission keeps the input's order"
    assert rule.next_group() is None and rule.reserved_tokens == 0
    if policy == "orca":
        assert all(len(s.joined) <= 1 and (s.kind is StepKind.DECODE) == (not s.joined)
                   for s in steps)
    for phase in {s.phase for s in steps} if policy == "rra" else ():
        assert sum(len(s.joined) for s in steps if s.phase == phase) <= encode


@pytest.mark.parametrize(("policy", "capacity", "together"), [
    ("orca", 100, 2), ("orca", 40, 1), ("rra", 100, 2)])
def test_reserved_tokens_never_exceed_a_groups_share(policy, capacity, together):
    rule = rule_of(policy, groups=2, batch=50, kv_tokens=capacity, encode=10, iterations=3)
    assert not rule.submit(99, capacity // 2 + 1), "can never fit: told at once"
    holding(rule, 12, 20)
    most, finish = [], rule.finish

    def watch(query: int) -> None:
        most.append(rule.reserved_tokens)
        finish(query)

    rule.finish = watch
    drive(rule, dict.fromkeys(range(12), 5))
    assert max(most) == 2 * together * 20


def static(batch: int, groups: int, encodes: int | None = None, kv: int = 10_000) -> StaticRule:
    return StaticRule(encode_batch=batch, num_groups=groups, kv_tokens=kv,
                      encode_micro_batches=encodes or groups)


def drive_static(rule: StaticRule, outputs: dict[int, int]) -> list[Step]:
    """Runs the rule to its end; query q needs outputs[q] tokens, the first from its encoding. Rows
    that are done stay in their group until their batch is."""
    steps: list[Step] = []
    made: Counter[int] = Counter()
    rows: list[list[int]] = [[] for _ in range(rule.num_groups)]
    pending: list[deque[Step]] = [deque() for _ in range(rule.num_groups)]
    while (group := rule.next_group()) is not None:
        if rule.needs_tokens:
            while pending[group]:
                step = pending[group].popleft()
                if step.phase != steps[-1].phase:
                    continue  # superfluous steps of the last batch
                for query in step.joined or rows[group]:
                    made[query] += 1
                    if made[query] == outputs[query]:
                        rule.finish(query)
        step = rule.decide()
        if step is None:
            continue
        if not steps or step.phase != steps[-1].phase:
            rows = [[] for _ in range(rule.num_groups)]
        steps.append(step)
        pending[group].append(step)
        rows[group] += step.joined
        assert len(rows[group]) <= rule.group_max_active
        assert rule.reserved_tokens <= rule.group_kv_tokens * rule.num_groups
        assert len(steps) < 100_000
    assert all(made[query] >= wanted for query, wanted in outputs.items())
    return steps


def words(steps: list[Step]) -> str:
    return " ".join(f"{s.kind.value[0].upper()}{s.group}" for s in steps)


def test_ft_encodes_all_micro_batches_and_decodes_them_in_turn():
    rule = holding(static(4, 2), 8, 10)
    steps = drive_static(rule, dict.fromkeys(range(8), 4))
    one = "E0 E1 D0 D1 D0 D1 D0 D1 D0"  # the last: group 1's last token is not there yet
    assert words(steps) == f"{one} {one}"
    assert [s.joined for s in steps if s.kind is StepKind.ENCODE] == [(0, 1), (2, 3), (4, 5),
                                                                      (6, 7)]
    assert [s.iteration for s in steps[:9]] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert {s.phase for s in steps[:9]} == {0} and {s.phase for s in steps[9:]} == {1}


def test_dsi_encodes_each_decode_group_in_parts_without_waiting():
    rule = holding(static(8, 2, 4), 8, 10)
    for _ in range(4):
        assert rule.next_group() is not None and not rule.needs_tokens
        assert len(rule.decide().joined) == 2
    assert rule.next_group() == 0 and rule.needs_tokens

    rule = holding(static(8, 2, 4), 8, 10)
    steps = drive_static(rule, dict.fromkeys(range(8), 3))
    assert words(steps) == "E0 E0 E1 E1 D0 D1 D0 D1 D0"


def test_every_row_reserves_the_batchs_longest_output():
    rule = static(6, 2, kv=100)  # 50 a group
    assert not rule.submit(9, 51, 1), "can never fit: told at once"
    for query, (inputs, reserve) in enumerate([(5, 10), (5, 10), (5, 10), (5, 25), (5, 10)]):
        assert rule.submit(query, reserve, inputs)
    assert rule.next_group() == 0
    step = rule.decide()
    # with query 3's 20 tokens of output, the three before it would reserve 75: it has to wait
    assert step is not None and step.joined == (0, 1, 2)
    assert rule.reserved_tokens == 30


@examples(60)
@given(batch=st.integers(1, 20), groups=st.integers(1, 4), parts=st.integers(1, 4),
       kv=st.integers(40, 300), outputs=st.lists(st.integers(1, 20), min_size=1, max_size=40))
def test_static_batches_are_encoded_once_and_end_whatever_the_limits(
        batch, groups, parts, kv, outputs):
    rule = static(batch, groups, groups * parts, kv)
    wanted = {q: n for q, n in enumerate(outputs) if rule.submit(q, n + q % 7, q % 7)}
    steps = drive_static(rule, wanted)
    order = [query for step in steps for query in step.joined]
    assert order == sorted(wanted), "each once, in the input's order"
    assert rule.next_group() is None and rule.reserved_tokens == 0
    for phase in {step.phase for step in steps}:
        of_batch = [step for step in steps if step.phase == phase]
        encodes = [step for step in of_batch if step.kind is StepKind.ENCODE]
        assert of_batch[:len(encodes)] == encodes and len(encodes) <= groups * parts
        assert sum(len(step.joined) for step in encodes) <= batch
        longest = max(wanted[query] for step in encodes for query in step.joined)
        assert max((step.iteration for step in of_batch), default=0) in (longest - 1, longest)


@dataclass
class Cached:
    """What an engine knows of each query, kept the plain way: tokens in the cache by query."""

    inputs: list[int]
    iterations: list[int]
    made: dict[int, int] = field(default_factory=dict)  # tokens generated so far
    held: dict[int, int] = field(default_factory=dict)  # running: tokens in the cache
    partial: dict[int, int] = field(default_factory=dict)  # being encoded: tokens done
    group_of: dict[int, int] = field(default_factory=dict)
    evictions: int = 0

    def to_encode(self, query: int) -> int:
        return self.inputs[query] + self.made.get(query, 0)

    def tokens(self, unit: int) -> int:
        """Tokens of all queries in whole units; one being encoded holds those of all its input."""
        return unit * (sum(-(-held // unit) for held in self.held.values())
                       + sum(-(-self.to_encode(q) // unit) for q in self.partial))

    def take(self, step: Step) -> None:
        for query in step.evicted:
            if query in self.partial:  # it begins at its first chunk again
                del self.partial[query]
            else:
                del self.held[query]
                self.evictions += 1
        if step.kind is not StepKind.ENCODE:
            for query in [q for q in self.held if self.group_of[q] == step.group]:
                self.held[query] += 1
                self.made[query] += 1
        for chunk in step.chunks:
            if chunk.first == 0:
                assert chunk.query not in self.partial, "its row is still held"
                self.partial[chunk.query] = 0
            self.group_of[chunk.query] = step.group
            assert chunk.first == self.partial[chunk.query] and chunk.tokens > 0
            self.partial[chunk.query] += chunk.tokens
        for query in step.joined:
            self.group_of[query] = step.group
            if step.chunks:
                assert self.partial.pop(query) == self.to_encode(query)
            self.held[query] = self.to_encode(query)
            self.made[query] = self.made.get(query, 0) + 1


def drive_paged(rule: PagedRule | OrcaRule | RraRule, inputs: list[int], iterations: list[int],
                forecasts: Sequence[int] = ()) -> tuple[list[Step], Cached]:
    """Runs the rule to its end over a plain model of the cache. Forecasts are in output tokens."""
    model, steps, room = Cached(inputs, iterations), [], rule.rooms.of_group[0]
    for query, tokens in enumerate(inputs):
        assert rule.submit(query, tokens + max(iterations) + 1, tokens,
                           forecasts[query] if forecasts else 0)
    while (group := rule.next_group()) is not None:
        for query in [q for q in model.held if model.group_of[q] == group]:
            assert model.made[query] <= iterations[query] + 1
            if model.made[query] == iterations[query] + 1:
                del model.held[query]
                rule.finish(query)
        step = rule.decide()
        if step is None:
            continue
        steps.append(step)
        model.take(step)
        held = model.tokens(room.unit)
        assert rule.reserved_tokens == held or (room.rule == "reserve" and (
            rule.reserved_tokens >= held))
        assert all(one.held <= one.tokens for one in rule.rooms.of_group)
        running = Counter(model.group_of[q] for q in (*model.held, *model.partial))
        assert all(count <= rule.group_max_active for count in running.values())
        assert len(steps) < 100_000
    assert not model.held and not model.partial and rule.reserved_tokens == 0
    assert [model.made[q] for q in range(len(inputs))] == [n + 1 for n in iterations]
    return steps, model


def test_vllm_encodes_before_it_decodes_and_as_many_as_the_budget_holds():
    rule = vllm(num_groups=1, max_active=4, kv_tokens=1600, token_budget=100)
    steps, _ = drive_paged(rule, [40, 40, 40, 10, 30], [3, 1, 3, 3, 2])
    seen = [(s.kind.value, s.joined) for s in steps[:5]]
    assert seen == [("encode", (0, 1)), ("encode", (2, 3)), ("decode", ()), ("encode", (4,)),
                    ("decode", ())]


def test_vllm_evicts_the_latest_admitted_when_blocks_run_out():
    rule = vllm(num_groups=1, max_active=9, kv_tokens=4 * BLOCK_TOKENS, token_budget=100)
    steps, model = drive_paged(rule, [16, 16], [40, 3])
    # after 1 decode step each holds 2 blocks: 4 in all; the first query's third one is not there
    assert model.evictions == 0
    rule = vllm(num_groups=1, max_active=9, kv_tokens=4 * BLOCK_TOKENS, token_budget=100)
    steps, model = drive_paged(rule, [16, 16], [40, 20])
    evicting = next(s for s in steps if s.evicted)
    assert evicting.evicted == (1,) and evicting.kind is StepKind.DECODE
    assert steps.index(evicting) == 17, "one encode step and 16 decode steps before"
    assert [s.joined for s in steps if s.kind is StepKind.ENCODE] == [(0, 1), (1,)]


def test_sarathi_fills_a_step_with_chunks_beside_the_running_queries():
    rule = sarathi(num_groups=1, max_active=8, kv_tokens=1600, token_budget=32)
    steps, _ = drive_paged(rule, [20, 50, 5], [4, 1, 1])
    chunks = [[(c.query, c.first, c.tokens) for c in s.chunks] for s in steps[:4]]
    assert chunks == [[(0, 0, 20), (1, 0, 12)], [(1, 12, 31)], [(1, 43, 7), (2, 0, 5)], []]
    assert [s.kind.value for s in steps[:4]] == ["encode", "mixed", "mixed", "decode"]
    assert [s.joined for s in steps[:3]] == [(0,), (), (1, 2)]


def test_mixed_steps_take_whole_inputs_within_the_budget_and_a_longer_one_alone():
    rule = mixed(num_groups=1, max_active=8, kv_tokens=1600, token_budget=32)
    steps, _ = drive_paged(rule, [20, 13, 32, 40, 5], [1, 2, 0, 1, 1])
    assert [(s.kind.value, s.joined) for s in steps] == [
        ("encode", (0,)), ("mixed", (1,)), ("decode", ()), ("decode", ()), ("encode", (2,)),
        ("encode", (3,)), ("mixed", (4,)), ("decode", ())]


def test_lightllm_encodes_alone_after_ten_decode_steps_or_if_nobody_decodes():
    rule = lightllm(num_groups=1, max_active=2, kv_tokens=1600, token_budget=100)
    steps, _ = drive_paged(rule, [9, 8, 7, 6], [25, 3, 14, 1])
    assert [(at, s.joined) for at, s in enumerate(steps) if s.kind is StepKind.ENCODE] == [
        (0, (0, 1)), (11, (2,)), (27, (3,))]


@pytest.mark.parametrize(("kv_tokens", "joined"), [(17, (0, 1, 2)), (16, (0, 1))])
def test_lightllm_admits_what_its_peak_leaves_a_token_to_spare_for(kv_tokens, joined):
    rule = lightllm(num_groups=1, max_active=9, kv_tokens=kv_tokens, token_budget=100)
    for query, (tokens, left) in enumerate(((6, 3), (2, 1), (4, 4))):
        assert rule.submit(query, tokens + left + 1, tokens, left)
    assert rule.decide().joined == joined


@pytest.mark.parametrize("kind", ["vllm", "sarathi", "mixed", "lightllm"])
@examples(60)
@given(num_groups=st.integers(1, 3), more=st.integers(0, 9), blocks=st.integers(5, 14),
       budget=st.integers(8, 90), data=st.data(),
       inputs=st.lists(st.integers(1, 40), min_size=1, max_size=25))
def test_every_query_gets_its_tokens_within_blocks_slots_and_budget(
        kind, num_groups, more, blocks, budget, data, inputs):
    make = {"vllm": vllm, "sarathi": sarathi, "mixed": mixed, "lightllm": lightllm}[kind]
    kv_tokens = num_groups * blocks * BLOCK_TOKENS
    rule = make(num_groups=num_groups, max_active=num_groups + more, kv_tokens=kv_tokens,
                token_budget=budget)
    iterations = data.draw(st.lists(st.integers(0, 39), min_size=len(inputs), max_size=len(inputs)))
    steps, _ = drive_paged(rule, inputs, iterations)
    assert rule.next_group() is None
    for step in steps:
        assert sum(chunk.tokens for chunk in step.chunks) <= budget
        is_mixed = step.kind is StepKind.MIXED
        if kind != "sarathi" and (is_mixed or len(step.joined) > 1):
            assert sum(inputs[q] for q in step.joined) + is_mixed <= budget
        assert kind != "lightllm" or not step.evicted


def test_memory_that_binds_leads_to_evictions_and_plenty_to_none():
    """Guards the test above: its cases do reach the path that evicts."""
    for make in (vllm, sarathi):
        evictions = []
        for blocks in (8, 80):
            rule = make(num_groups=1, max_active=8, kv_tokens=blocks * BLOCK_TOKENS,
                        token_budget=64)
            evictions.append(drive_paged(rule, [20] * 20, [30] * 20)[1].evictions)
        assert evictions[0] > 0 and evictions[1] == 0
        rule = make(num_groups=2, max_active=4, kv_tokens=64, token_budget=8)
        assert rule.submit(0, 32, 20) and not rule.submit(1, 33, 20), "can never fit: told at once"


@pytest.mark.parametrize("kind", ["rra", "rra in chunks", "orca", "vllm", "sarathi"])
@examples(60)
@given(admission=st.sampled_from([*get_args(AdmissionRule)]), groups=st.integers(1, 3),
       room=st.integers(6, 14), batch=st.integers(1, 12), data=st.data(),
       inputs=st.lists(st.integers(1, 40), min_size=1, max_size=25))
def test_no_admission_loses_a_query_or_exceeds_its_room_whatever_was_forecast(
        kind, admission, groups, room, batch, data, inputs):
    count = len(inputs)
    iterations = data.draw(st.lists(st.integers(0, 39), min_size=count, max_size=count))
    forecasts = data.draw(st.lists(st.integers(1, 50), min_size=count, max_size=count))
    asked, tokens = Admission(rule=admission, forecast=Forecasting(kind="known")), (
        groups * room * BLOCK_TOKENS)
    if kind.startswith("rra"):
        rule = rule_of("rra", groups=groups, batch=groups + batch, kv_tokens=tokens,
                       encode=batch, iterations=batch, chunk=9 * (kind != "rra"))
        rule.rooms = Rooms.even(groups, tokens, asked)
    elif kind == "orca":
        rule = OrcaRule(num_groups=groups, max_active=groups + batch, kv_tokens=tokens,
                        admission=asked)
    else:
        rule = (vllm if kind == "vllm" else sarathi)(
            num_groups=groups, max_active=groups + batch, kv_tokens=tokens, token_budget=50,
            admission=asked)
    steps, model = drive_paged(rule, inputs, iterations, forecasts)
    assert sum(len(step.joined) for step in steps) == count + model.evictions
    if not rule.rooms.evicts:
        assert model.evictions == 0


@pytest.mark.parametrize("chunk", [0, 9])
def test_outgrown_forecasts_lead_to_evictions_and_caps_to_none(chunk):
    """Guards the test above."""
    evictions = []
    for forecast in (5, 0):
        rule = rule_of("rra", batch=20, kv_tokens=300, encode=6, iterations=4, chunk=chunk)
        rule.rooms = Rooms.even(1, 300, Admission(
            rule="future-peak", forecast=Forecasting(kind="known" if forecast else "cap")))
        evictions.append(drive_paged(rule, [20] * 20, [30] * 20, [forecast] * 20)[1].evictions)
    assert evictions[0] > 0 and evictions[1] == 0
