"""Rules that share prefixes, driven without a model: what each step reads must be in the cache."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from xgpt.core.controls import Admission, Forecasting
from xgpt.core.prefixes import Prefixes
from xrunner.rules.iteration import OrcaRule, StepLimits
from xrunner.rules.paged import sarathi, vllm
from xrunner.rules.prefixes import set_prefixes
from xrunner.rules.room import Rooms
from xrunner.rules.rra import RraRule
from xrunner.rules.steps import StepKind, withdraw_waiting

BLOCK = 16
MAKES = {
    "rra": partial(RraRule, encode_batch=5, decode_iterations=3, max_active=12),
    "rra in chunks": partial(RraRule, encode_batch=5, decode_iterations=3, max_active=12,
                             encode_chunk=40),
    "orca": partial(OrcaRule, max_active=9), "sarathi": partial(
        sarathi, max_active=9, token_budget=32),
    "prefill-first": partial(vllm, max_active=9, token_budget=200)}


def forest(rng, num_requests: int) -> Prefixes:
    """A random forest of at most three levels."""
    parents, ends = [], []
    for node in range(rng.integers(1, 9)):
        parent = int(rng.integers(-1, node)) if node else -1
        if parent >= 0 and parents[parent] >= 0 and parents[parents[parent]] >= 0:
            parent = -1
        parents.append(parent)
        ends.append((ends[parent] if parent >= 0 else 0) + int(rng.integers(1, 70)))
    return Prefixes(parents=np.array(parents), ends=np.array(ends), block_tokens=BLOCK,
                    nodes=rng.integers(-1, len(ends), num_requests))


class Driver:
    """Works requests by a rule, and checks what it decides."""

    def __init__(self, rule, prefixes: Prefixes | None, inputs, outputs, caps) -> None:
        self.rule, self.prefixes, self.outputs = rule, prefixes, outputs
        self.inputs, self.written = inputs, [0] * len(inputs)
        self.cached = {}  # of requests at work: their tokens in the cache
        self.lines = {}  # of living prefixes: tokens encoded
        self.group_of, self.decoding, self.encoded, self.steps = {}, {}, 0, []
        set_prefixes(rule, prefixes)
        for query, (tokens, cap) in enumerate(zip(inputs, caps, strict=True)):
            assert rule.submit(query, tokens + cap, tokens)

    def run(self) -> "Driver":
        idle = 0
        while (group := self.rule.next_group()) is not None:
            for query in [q for q, own in self.group_of.items() if own == group
                          and self.written[q] >= self.outputs[q]]:
                self.rule.finish(query)
                del self.group_of[query], self.decoding[query], self.cached[query]
            step = self.rule.decide()
            idle = 0 if step is not None else idle + 1
            assert idle < 1000, "the rule decides nothing any more"
            if step is not None:
                self.steps.append(step)
                self.execute(step)
            self.check_room()
        assert self.written == self.outputs
        return self

    def execute(self, step) -> None:
        for query in step.evicted:
            del self.cached[query]
            self.group_of.pop(query, None), self.decoding.pop(query, None)
        for node in step.released:
            del self.lines[node]
        if step.kind is not StepKind.ENCODE:
            for query, own in self.group_of.items():
                if own == step.group:
                    self.written[query] += 1
                    self.cached[query] += 1
        before = dict(self.lines)
        starts, now = {start.query: start for start in step.starts}, set()
        assert len(starts) == len(step.starts)
        for start in step.starts:
            for node, end in start.writes:
                assert node not in self.lines and end == self.prefixes.ends[node]
                self.lines[node] = 0
        for chunk in step.chunks:
            query, start = chunk.query, starts.get(chunk.query)
            if query not in self.cached:
                first = 0 if start is None else start.first
                self.check_shared(query, first, start, before, now)
                self.cached[query] = first
            assert chunk.first == self.cached[query] and chunk.tokens > 0
            self.cached[query] += chunk.tokens
            self.encoded += chunk.tokens
            for node in self.prefixes.chain(self.prefixes.nodes[query]):
                if self.cached[query] >= self.prefixes.ends[node] and not self.lines[node]:
                    self.lines[node] = int(self.prefixes.ends[node])
                    now.add(node)
        for query in step.joined:
            if self.prefixes is None:
                self.encoded += self.inputs[query] + self.written[query]
                self.cached[query] = self.inputs[query] + self.written[query]
            assert self.cached[query] == self.inputs[query] + self.written[query]
            self.written[query] += 1
            self.group_of[query], self.decoding[query] = step.group, True

    def check_shared(self, query, first, start, before, now) -> None:
        """Asserts that earlier steps, or this one in whole blocks, encode the shared tokens."""
        if not first:
            return
        chain = self.prefixes.chain(self.prefixes.nodes[query])
        assert start.node in chain and first <= self.prefixes.ends[start.node]
        assert before.get(start.node) or (start.node in now and first % BLOCK == 0)

    def check_room(self) -> None:
        rooms = self.rule.rooms
        if self.prefixes is None:
            return
        assert rooms.prefixes.tokens == sum(
            int(self.prefixes.own_tokens[node]) for node in rooms.prefixes.living)
        if not rooms.evicts:
            assert rooms.held <= rooms.budget.tokens
        assert set(rooms.prefixes.living) >= {
            node for query in self.cached
            for node in self.prefixes.chain(self.prefixes.nodes[query])}


def case(seed: int, name: str):
    rng = np.random.default_rng(seed)
    count, groups = int(rng.integers(1, 40)), int(rng.integers(1, 4))
    prefixes = forest(rng, count)
    inputs = (prefixes.shared + rng.integers(1, 60, count)).tolist()
    caps = rng.integers(1, 40, count).tolist()
    outputs = [int(rng.integers(1, cap + 1)) for cap in caps]
    most = max(a + b for a, b in zip(inputs, caps, strict=True))
    tokens = groups * -(-int(most * rng.uniform(1, 4)) // 16) * 16 + 16 * groups
    rule = MAKES[name](num_groups=groups, kv_tokens=tokens)
    kinds = ["reserve", "future-peak", "greedy", "reserve-dynamic", "reserve-static"]
    admission = Admission(rule=kinds[seed % 5], forecast=Forecasting(
        kind="distribution", use="expected") if seed % 2 else Forecasting())
    if name in ("rra", "rra in chunks", "orca"):
        rule.rooms = Rooms.even(groups, tokens, admission)
    return rule, prefixes, inputs, outputs, caps


@pytest.mark.parametrize("name", MAKES)
def test_what_a_step_reads_is_in_the_cache(name):
    for seed in range(150):
        Driver(*case(seed, name)).run()


@pytest.mark.parametrize("name", MAKES)
def test_with_room_for_all_each_prefix_is_encoded_once(name):
    prefixes = Prefixes(parents=np.array([-1, 0, 1]), ends=np.array([64, 128, 160]),
                        nodes=np.arange(24) % 4 - 1, block_tokens=BLOCK)
    inputs = (prefixes.shared + 10).tolist()
    rule = MAKES[name](num_groups=2, kv_tokens=16 * 1000)
    done = Driver(rule, prefixes, inputs, [5] * 24, [5] * 24).run()
    assert done.encoded == 24 * 10 + 160
    assert rule.rooms.held == rule.rooms.prefixes.tokens == 160, "there is room for them"


def test_of_two_idle_prefixes_the_one_needed_later_goes():
    prefixes = Prefixes(parents=np.array([-1, -1, -1]), ends=np.array([100, 100, 100]),
                        nodes=np.array([0, 1, 2, 1, 0]), block_tokens=BLOCK)
    rule = OrcaRule(num_groups=1, max_active=1, kv_tokens=230)
    done = Driver(rule, prefixes, [105] * 5, [2] * 5, [2] * 5).run()
    assert [step.released for step in done.steps if step.released] == [(0,), (2,)]
    assert done.encoded == 4 * 100 + 5 * 5, "prefix 0 is encoded twice"


class Restless(Driver):
    """Requests come late, some are withdrawn, and limits change; what lives is counted anew."""

    def __init__(self, rng, *job) -> None:
        rule, prefixes, self.inputs, self.outputs, self.caps = job
        super().__init__(rule, prefixes, [], [], [])
        self.rng, self.inputs, self.outputs = rng, job[2], job[3]
        self.written = [0] * len(self.inputs)
        self.coming, self.there = list(range(len(self.inputs))), set()

    def run(self) -> "Restless":
        turns = 0
        while self.coming or self.rule.next_group() is not None:
            self.come()
            self.check_line()
            group = self.rule.next_group()
            if group is None:
                continue
            turns += 1
            assert turns < 20_000, "the rule decides nothing any more"
            for query in [q for q, own in self.group_of.items() if own == group
                          and self.written[q] >= self.outputs[q]]:
                self.rule.finish(query)
                self.there.remove(query)
                del self.group_of[query], self.decoding[query], self.cached[query]
            if self.rng.random() < 0.05:
                self.change()
            step = self.rule.decide()
            if step is not None:
                self.execute(step)
        assert self.written == self.outputs
        assert self.rule.rooms.held == self.rule.rooms.prefixes.tokens
        return self

    def come(self) -> None:
        some = int(self.rng.integers(8)) if self.rng.random() < 0.5 else 0
        for query in self.coming[:some]:
            assert self.rule.submit(query, self.inputs[query] + self.caps[query],
                                    self.inputs[query])
            self.there.add(query)
        del self.coming[:some]
        if self.rng.random() < 0.1:
            taken = withdraw_waiting(self.rule, int(self.rng.integers(1, 8)))
            self.there -= {*taken}
            self.coming = taken + self.coming

    def change(self) -> None:
        rule = self.rule
        if not isinstance(rule, RraRule):
            return rule.change(StepLimits(
                max_active=int(self.rng.integers(rule.num_groups, 10)),
                token_budget=rule.token_budget and int(self.rng.integers(16, 33))),
                phase=rule.next_phase)
        most = max(a + b for a, b in zip(self.inputs, self.caps, strict=True))
        rule.change(replace(
            rule.controls, group_kv_tokens=int(self.rng.integers(most, 3 * most)),
            encode_batch=int(self.rng.integers(1, 8)),
            decode_iterations=int(self.rng.integers(1, 6))),
            phase=max([rule.next_phase, *[phase for phase, _ in rule.changes]]))

    def check_line(self) -> None:
        shared, at_work = self.rule.rooms.prefixes, set()
        for query in self.rule.rooms.room_of:
            at_work.update(self.prefixes.chain(self.prefixes.nodes[query]))
        assert at_work <= set(shared.living)
        assert shared.tokens == int(self.prefixes.own_tokens[[*shared.living]].sum())


@pytest.mark.parametrize("name", MAKES)
def test_whatever_comes_goes_and_changes_every_request_ends(name):
    for seed in range(100):
        Restless(np.random.default_rng(seed), *case(seed, name)).run()


def test_a_budget_below_the_prefixes_at_work_evicts_none_of_another_group():
    prefixes = Prefixes(parents=np.full(3, -1), ends=np.full(3, 200), nodes=np.arange(3),
                        block_tokens=BLOCK)
    rule = RraRule(encode_batch=3, decode_iterations=2, num_groups=3, max_active=3, kv_tokens=900)
    rule.rooms = Rooms.even(3, 900, Admission(rule="greedy"))
    rule.change(replace(rule.controls, group_kv_tokens=130), phase=1)
    done = Driver(rule, prefixes, [205] * 3, [9] * 3, [15] * 3).run()
    assert [(step.group, step.evicted) for step in done.steps if step.evicted] == [
        (0, (0,)), (1, (1,))]


def test_a_request_that_fits_only_without_its_prefix_shares_none():
    prefixes = Prefixes(parents=np.array([-1]), ends=np.array([40]), nodes=np.zeros(3, int),
                        block_tokens=BLOCK)
    rule = sarathi(num_groups=1, max_active=4, kv_tokens=320, token_budget=64)
    done = Driver(rule, prefixes, [300, 80, 70], [20, 9, 9], [20, 20, 20])
    done.prefixes = replace(prefixes, nodes=np.array([-1, 0, 0]))
    assert done.run().encoded == 300 + 80 + 30


def test_a_prefix_stays_while_no_request_of_it_waits():
    prefixes = Prefixes(parents=np.array([-1]), ends=np.array([100]), nodes=np.zeros(5, int),
                        block_tokens=BLOCK)
    rule, encoded = OrcaRule(num_groups=1, max_active=1, kv_tokens=300), 0
    set_prefixes(rule, prefixes)
    for query in range(5):  # a replica gets its requests a few at a time
        assert rule.submit(query, 107, 105)
        while rule.next_group() is not None:
            step = rule.decide()
            encoded += sum(chunk.tokens for chunk in step.chunks)
            if step.kind is StepKind.DECODE:
                rule.finish(query)
    assert encoded == 100 + 5 * 5


def test_a_steps_budget_counts_what_is_encoded_again_of_a_block():
    prefixes = Prefixes(parents=np.array([-1]), ends=np.array([79]), nodes=np.zeros(9, int),
                        block_tokens=80)
    rule = vllm(num_groups=1, max_active=9, kv_tokens=16 * 100, token_budget=100)
    done = Driver(rule, prefixes, [82] * 9, [2] * 9, [2] * 9).run()
    tokens = [sum(chunk.tokens for chunk in step.chunks) for step in done.steps]
    assert tokens[:2] == [82, 8 * 3], "none begins beside the first, which writes the prefix"
