"""RRA's rule: order, quotas, chunks. Its variables change between phases: nothing is lost, no limit
broken, and a replay that is told of the changes takes the run's steps."""

import json
import math
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from examples import examples, some
from holding import drive, holding, rule_of
from hypothesis import example, given
from hypothesis import strategies as st
from replays import answers_of, estimated, generated, problem_for, replayed, steps_of, whole_steps
from toy_runs import Collector, run_in_process
from toys import random_queries

from xgpt.core.controls import EvenBatches
from xrunner.files.launcher_link import ChangeOrder, LauncherLink, read_observed
from xrunner.query import FinishedQuery
from xrunner.rules.rra import PhaseControls, RraRule, phase_controls, rra_rule
from xrunner.rules.steps import Step, StepKind


def phases_of(steps: list[Any]) -> dict[int, tuple[int, int]]:
    """phase -> (queries encoded, decode iterations)"""
    found: dict[int, tuple[int, int]] = {}
    for step in steps:
        joined, last = found.get(step.phase, (0, 0))
        found[step.phase] = joined + len(step.joined), max(last, step.iteration)
    return found


@pytest.mark.parametrize(("groups", "chunk", "other_chunk"), [(2, 0, 0), (1, 16, 16), (2, 16, 48)])
def test_a_change_holds_from_its_phase_on(groups, chunk, other_chunk):
    rule = holding(rule_of("rra", groups=groups, batch=40, encode=4, iterations=6, chunk=chunk),
                   40, 60, 12)
    rule.make_room(30)
    for phase, encode, iterations in ((3, 6, 5), (5, 2, 2)):
        rule.change(PhaseControls(encode_batch=encode, decode_iterations=iterations,
                                  group_max_active=30, group_kv_tokens=2000,
                                  encode_chunk=other_chunk), phase=phase)
    steps = drive(rule, dict.fromkeys(range(40), 9))
    phases = phases_of(steps)
    assert [phases[p] for p in range(8)] == [(4, 6)] * 3 + [(6, 5)] * 2 + [(2, 2)] * 3
    for of_phases, most in ((range(3), chunk), (range(3, 5), other_chunk)):
        tokens = [sum(part.tokens for part in step.chunks) for step in steps
                  if step.phase in of_phases]
        assert max(tokens) <= most
    with pytest.raises(AssertionError):  # past phases, and chunks where there were none
        rule.change(PhaseControls(encode_batch=1, decode_iterations=1, group_max_active=1,
                                  group_kv_tokens=1000, encode_chunk=16), phase=1 if chunk else 99)


@st.composite
def changes(draw: st.DrawFn, capacity: int, slots: int) -> list[tuple[int, PhaseControls]]:
    phases = sorted(draw(st.lists(st.integers(1, 12), max_size=4, unique=True)))
    return [(phase, PhaseControls(
        encode_batch=draw(st.integers(1, 12)), decode_iterations=draw(st.integers(1, 9)),
        group_max_active=draw(st.integers(1, slots)),
        group_kv_tokens=draw(st.integers(20, capacity)))) for phase in phases]


@examples(80)
@given(data=st.data(), num_groups=st.integers(1, 3), encode_batch=st.integers(1, 9),
       iterations=st.integers(1, 7),
       outputs=st.lists(st.integers(1, 20), min_size=1, max_size=50))
def test_every_query_ends_and_no_limit_is_broken_whatever_changes(
        data, num_groups, encode_batch, iterations, outputs):
    slots = 10
    rule = RraRule(encode_batch=encode_batch, decode_iterations=iterations, num_groups=num_groups,
                   max_active=5 * num_groups, kv_tokens=60 * num_groups)
    rule.make_room(slots)
    for query, reserve in enumerate(outputs):
        assert rule.submit(query, reserve)
    for phase, controls in data.draw(changes(90, slots)):
        rule.change(controls, phase=phase)
    decide = rule.decide

    def watched() -> Any:
        before, step = rule.reserved_tokens, decide()
        if step is not None and step.joined:
            assert before < rule.reserved_tokens <= num_groups * max(
                rule.controls.group_kv_tokens, 60, 90)
            assert rule.controls.group_max_active <= slots
        return step

    rule.decide = watched
    steps = drive(rule, dict(enumerate(outputs)))
    order = [query for step in steps for query in step.joined]
    assert order == sorted(order) and Counter(order) == Counter(range(len(outputs)))
    assert rule.next_group() is None and rule.reserved_tokens == 0


class Changing(Collector):
    """A sink that hands the rule one estimate after the other, once so many queries are done."""

    def __init__(self, rule: RraRule, estimates: dict[int, Any]) -> None:
        super().__init__()
        self._rule, self._estimates = rule, estimates
        self.taken: list[tuple[int, PhaseControls]] = []

    def progress(self, elapsed_s: float, output_tokens: int) -> None:
        done = [count for count in self._estimates if len(self.results) >= count]
        for count in done:
            controls = phase_controls(self._estimates.pop(count), slots=self._rule.group_max_active)
            self.taken.append((self._rule.next_phase, controls))
            self._rule.change(controls, phase=self._rule.next_phase)


@pytest.mark.parametrize(("stages", "family"), some(
    [(1, "llama"), (1, "t5"), (2, "llama"), (2, "t5")],
    lambda case: case == (2, "llama")))
def test_a_run_that_changes_is_exact_and_its_replay_takes_the_same_steps(made, family, stages):
    directory, model = made(family)
    queries = [replace(q, max_new_tokens=q.max_new_tokens + 5)
               for q in random_queries(30, seed=12, longest=40)]
    expected = generated(model, queries)
    outputs = [len(expected[q.index]) for q in queries]
    problem = problem_for(directory, queries, outputs, stages)
    begin, later, last = (estimated(
        "rra", problem, encode_batch=batch, decode_iterations=iterations,
        decode_micro_batches=2).changed(kv_tokens=kv)
        for batch, iterations, kv in ((2, 9, 400), (9, 3, 900), (4, 6, 300)))
    rule, again = rra_rule(begin), rra_rule(begin)
    rule.make_room(20)
    again.make_room(20)
    sink = Changing(rule, {5: later, 18: last})
    _, executors = run_in_process(directory, queries, stages=begin.deployment.stages, rule=rule,
                                  sink=sink)
    assert answers_of(sink) == expected and len(sink.taken) == 2
    for phase, controls in sink.taken:
        again.change(controls, phase=phase)
    steps = whole_steps(replayed(problem, begin, queries, outputs, rules=[again]).pools[0])
    assert all(steps_of(executor.log) == steps for executor in executors)
    lengths = {step[2]: step[3] for step in steps}
    assert {lengths[p] for p in range(sink.taken[0][0])} == {9}
    assert 3 in lengths.values() and 6 in lengths.values()


def result(index: int, tokens: int, *, latency_s: float = 1.0, **more: Any) -> FinishedQuery:
    (query,) = random_queries(1, longest=2)
    return FinishedQuery(query=replace(query, index=index, input_ids=(7, 8)), text="",
                         output_ids=(9,) * tokens, finish_reason="stop", encode_start_s=0.0,
                         first_token_s=0.5, last_token_s=latency_s, **more)


def seen_after(link: LauncherLink, folder: Path, *results: FinishedQuery) -> Any:
    """What the launcher reads once these are done."""
    for one in results:
        link.finished(one)
    link.look(1.0)
    state = read_observed(folder)
    assert state is not None
    return state


def test_the_head_tells_what_it_sees_and_takes_each_change_up_once(tmp_path):
    rule = RraRule(encode_batch=4, decode_iterations=2, num_groups=1, max_active=8, kv_tokens=900)
    rule.make_room(12)
    rule.submit(9, 50)
    link = LauncherLink(tmp_path, rule=rule, first_query=0, at_work=lambda: {2: (5, 3), 3: (6, 1)})
    link.look(0.1)
    assert read_observed(tmp_path) is None, "not yet"
    state = seen_after(link, tmp_path, result(0, 4), result(1, 2))
    assert state.finished == {0: (2, 4), 1: (2, 2)} and state.active == {2: (5, 3), 3: (6, 1)}
    assert not link.changes
    controls = {"encode_batch": 6, "decode_iterations": 3, "group_max_active": 12,
                "group_kv_tokens": 800}
    ChangeOrder(revision=1, controls=PhaseControls(**controls)).save(tmp_path)
    for at_s in (2.0, 3.0, 4.0):
        link.look(at_s)
    assert link.changes == [{"revision": 1, "elapsed_s": 2.0, "phase": 1, **controls,
                           "target_active": 0.0, "encode_chunk": 0}]
    assert json.loads(json.dumps(link.changes)) == link.changes


def test_it_counts_what_is_over_the_bound(tmp_path):
    link = LauncherLink(tmp_path, first_query=3, at_work=dict, limit_s=2.0)
    state = seen_after(link, tmp_path, *(
        result(index, 2, latency_s=took_s) for index, took_s in enumerate((1.0, 2.0, 2.1, 5.0), 3)),
        result(7, 0, latency_s=9.0, error="too long"))
    assert state.kept == (3, 4, 2, 1), "an error record has no latency"


def test_only_the_latest_queries_are_told_of(tmp_path, monkeypatch):
    monkeypatch.setattr("xrunner.files.launcher_link._LEAST_KEPT", 50)
    link = LauncherLink(tmp_path, first_query=0, at_work=lambda: {3: (5, 90), 299: (6, 1)})
    for index in range(298):
        if index != 3:
            link.finished(result(index, 2))
        link.look(float(index))
    state = read_observed(tmp_path)
    assert min(state.finished) == state.first > 150
    assert state.active == {3: (5, 90), 299: (6, 1)} and max(state.finished) == 297
    assert len(state.finished) == 298 - state.first


def test_queries_taken_in_another_order_are_told_of_by_their_places(tmp_path):
    """Of 300 queries in random order the 64 first may have any index; what is told is how many."""
    link = LauncherLink(tmp_path, first_query=2, at_work=lambda: {150: (6, 1)})
    link.begin([7, 299, 4, 150])
    state = seen_after(link, tmp_path, result(299, 3), result(7, 3))
    assert state.finished == {2: (2, 3), 3: (2, 3)} and state.active == {5: (6, 1)}


def test_where_nobody_knows_who_is_at_work_only_a_whole_beginning_is_told(tmp_path):
    link = LauncherLink(tmp_path, first_query=10)
    for index, tokens in ((11, 3), (12, 5), (14, 2), (10, 30)):
        link.look(math.inf)
        link._last_s = -math.inf
        state = read_observed(tmp_path)
        assert not state.finished and not state.active
        link.finished(result(index, tokens))
    assert seen_after(link, tmp_path).finished == {10: (2, 30), 11: (2, 3), 12: (2, 5)}


def test_a_phase_encodes_every_group_then_decodes_each_in_turn():
    rule = holding(RraRule(encode_batch=4, decode_iterations=2, num_groups=2, max_active=20,
                   kv_tokens=1000), 8, 10)
    steps = drive(rule, dict.fromkeys(range(8), 4))
    first = [(s.kind.value, s.group, s.iteration) for s in steps[:6]]
    assert first == [("encode", 0, 0), ("encode", 1, 0), ("decode", 0, 1), ("decode", 1, 1),
                     ("decode", 0, 2), ("decode", 1, 2)]
    assert [s.joined for s in steps[:2]] == [(0, 1), (2, 3)]
    assert [s.joined for s in steps[6:8]] == [(4, 5), (6, 7)] and steps[6].phase == 1


@given(encode_batch=st.integers(1, 40), num_groups=st.integers(1, 8), phase=st.integers(0, 30))
def test_quotas_of_a_phase_sum_to_the_encode_batch_and_stay_even(encode_batch, num_groups, phase):
    rule = RraRule(encode_batch=encode_batch, decode_iterations=1, num_groups=num_groups,
                   max_active=99, kv_tokens=99)
    quotas = [rule.quota(group, phase) for group in range(num_groups)]
    assert sum(quotas) == encode_batch and max(quotas) - min(quotas) <= 1
    over_time = [sum(rule.quota(g, p) for p in range(num_groups)) for g in range(num_groups)]
    assert set(over_time) == {encode_batch}


def rra_of(chunk: int, *, batch: int = 4, iterations: int = 8, groups: int = 1,
            max_active: int = 200, kv_tokens: int = 100_000) -> RraRule:
    return RraRule(encode_batch=batch, decode_iterations=iterations, num_groups=groups,
                   max_active=max_active, kv_tokens=kv_tokens, encode_chunk=chunk)


def encoded_in(steps: list[Step]) -> list[int]:
    return [sum(chunk.tokens for chunk in step.chunks) for step in steps]


def test_a_phases_inputs_are_spread_evenly_over_its_iterations():
    rule = holding(rra_of(chunk=30), 12, 60, 25)
    steps = drive(rule, dict.fromkeys(range(12), 21))
    phase = [step for step in steps if step.phase == 2]
    # 100 tokens in 8 iterations: chunks of 30 in every second one would hold 120
    assert [(step.iteration, count) for step, count in zip(phase, encoded_in(phase), strict=True)
            ] == [(1, 25), (2, 0), (3, 25), (4, 0), (5, 25), (6, 0), (7, 25), (8, 0)]
    assert [step.kind for step in phase[:2]] == [StepKind.MIXED, StepKind.DECODE]
    assert steps[0].kind is StepKind.ENCODE and steps[0].iteration == 1
    assert [step.joined for step in phase] == [(8,), (), (9,), (), (10,), (), (11,), ()]


def test_all_groups_encode_in_the_same_rounds():
    rule = rra_of(chunk=40, batch=6, iterations=12, groups=3)
    for query in range(60):
        assert rule.submit(query, 90, 11 + query % 7)
    steps = drive(rule, dict.fromkeys(range(60), 30))
    rounds = defaultdict(set)
    for step in steps:
        if step.chunks and 1 <= step.phase < 8:
            rounds[step.phase, step.iteration].add(step.group)
    assert rounds and all(groups == {0, 1, 2} for groups in rounds.values())


@examples(80)
@given(chunk=st.integers(1, 60), batch=st.integers(1, 9), iterations=st.integers(1, 9),
       groups=st.integers(1, 4), max_active=st.integers(1, 12), capacity=st.integers(160, 400),
       adjusted=st.booleans(), sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)),
                                              min_size=1, max_size=40))
@example(chunk=1, batch=1, iterations=1, groups=4, max_active=1, capacity=160, adjusted=False,
         sizes=[(21, 20)])  # refused: its 41 tokens are more than a group's 40
def test_every_query_is_encoded_whole_once_and_no_limit_is_broken(
        chunk, batch, iterations, groups, max_active, capacity, adjusted, sizes):
    even = EvenBatches(adjustment=0.1, mean_input_tokens=20.0, target_active=3.0)
    rule = RraRule(encode_batch=batch, decode_iterations=iterations, num_groups=groups,
                   max_active=max_active, kv_tokens=capacity, encode_chunk=chunk,
                   even=even if adjusted else EvenBatches())
    wanted = {q: outputs for q, (inputs, outputs) in enumerate(sizes)
              if rule.submit(q, inputs + outputs, inputs)}
    steps = drive(rule, wanted)
    assert Counter(q for s in steps for q in s.joined) == Counter(wanted.keys())
    assert max(encoded_in(steps), default=0) <= chunk  # where no query fits, none is encoded
    done: Counter[int] = Counter()
    for step in steps:
        for part in step.chunks:
            assert part.first == done[part.query]
            done[part.query] += part.tokens
        assert all(done[q] == sizes[q][0] for q in step.joined)
    for group in range(groups):
        order = [q for s in steps if s.group == group for q in s.joined]
        assert order == sorted(order), "a group keeps the input's order"
    assert rule.next_group() is None and rule.reserved_tokens == 0
