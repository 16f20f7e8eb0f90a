"""Static batches that know lengths and deadlines: the figures of UELLM's paper, its released logs,
its orders on drawn jobs, and laws of every batch."""

import math

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from xgpt.core.controls import Batches
from xgpt.core.systems import SYSTEMS
from xrunner.rules.room import Waiting
from xrunner.rules.static import OVERHEAD, BatchFormer, StaticRule, padding
from xrunner.rules.steps import StepKind, withdraw_waiting


def formed(batches, outputs, inputs=None, deadlines_s=(), *, most=1000, groups=1, kv=10**9):
    """The batches of known lengths, as lists of requests."""
    former = BatchFormer(batches, most=most, num_groups=groups, group_kv_tokens=kv)
    former.deadlines_s = deadlines_s or None
    inputs = [1] * len(outputs) if inputs is None else inputs
    former.note(max(inputs), max(outputs))
    lengths = enumerate(zip(inputs, outputs, strict=True))
    line = former.line([Waiting(query, tokens + output, tokens, 0, output)
                        for query, (tokens, output) in lengths])
    found = []
    while line:
        end = former.take(line)
        found.append([one.query for one in line[:end]])
        line = line[end:]
    return found


# --- the three requests of figure 3 -----------------------------------------------------------

INPUTS, OUTPUTS = [7, 5, 3], [58, 8, 8]


def cost(batches):
    """(padded input tokens, generated tokens) of batches of the three requests."""
    found = [padding(*([own[query] for query in batch] for own in (INPUTS, OUTPUTS)))
             for batch in batches]
    return sum(one[0] for one in found), sum(OUTPUTS) + sum(one[1] for one in found)


def test_in_input_order_three_requests_are_one_batch_of_174_tokens():
    batches = formed(SYSTEMS["fifo"].settings, OUTPUTS, INPUTS)
    assert batches == [[0, 1, 2]] and cost(batches) == (6, 174)


@pytest.mark.parametrize("growth", [True, False])
def test_by_length_the_long_one_is_a_batch_of_its_own(growth):
    batches = formed(Batches(threshold=100.0, growth=growth), OUTPUTS, INPUTS)
    assert batches == [[1, 2], [0]] and cost(batches) == (2, 74)


def test_a_threshold_of_200_merges_all_by_growth_but_not_by_sums():
    merged, apart = (formed(Batches(threshold=200.0, growth=growth), OUTPUTS, INPUTS)
                     for growth in (True, False))
    assert merged == [[1, 2, 0]] and cost(merged) == (6, 174)
    assert apart == [[1, 2], [0]]


# --- the released logs ------------------------------------------------------------------------

TRIALS = (
    (126.12, (511, 283, 203, 343, 406, 504, 330, 518, 315, 349), 0.219),
    (136.95, (351, 1003, 267, 342, 585, 686, 322, 498, 284, 384), 0.305),
    (121.60, (470, 338, 253, 299, 966, 446, 351, 458, 330, 343), 0.214))
RANGES = ((220, 250), (180, 220), (150, 180), (100, 120), (90, 100))


def missed(trial_s, lengths, name, seed):
    """Share of 100 requests that miss their deadlines in batches of ten by the system `name`."""
    rng = np.random.default_rng(seed)
    deadlines_s = np.concatenate([rng.integers(least, most + 1, 20) for least, most in RANGES])
    batches = formed(SYSTEMS[name].settings, [500] * 100, deadlines_s=deadlines_s.tolist())
    assert [len(batch) for batch in batches] == [10] * 10
    ends_s = trial_s * np.cumsum(lengths) / sum(lengths)
    return np.mean([deadlines_s[query] < end for batch, end in zip(batches, ends_s, strict=True)
                    for query in batch])


@pytest.mark.parametrize(("trial_s", "lengths", "expected"), TRIALS)
def test_missed_deadlines_of_the_authors_logs(trial_s, lengths, expected):
    found = np.mean([missed(trial_s, lengths, "fifo", seed) for seed in range(2000)])
    assert found == pytest.approx(expected, abs=0.01)
    assert not any(missed(trial_s, lengths, "uellm-deadline", seed) for seed in range(200))


# --- orders of drawn jobs ---------------------------------------------------------------------


def outcome(name, seed):
    """(makespan in seconds, number of missed deadlines) of a drawn job of 200 requests."""
    rng = np.random.default_rng(seed)
    outputs = rng.lognormal(5.0, 0.7, 200).clip(5, 1024).astype(int)
    inputs = rng.lognormal(3.0, 0.5, 200).clip(4, 256).astype(int)
    deadlines_s = rng.integers(1, 351, 200)
    now_s, late = 0.0, 0
    for batch in formed(SYSTEMS[name].settings, outputs.tolist(), inputs.tolist(),
                        deadlines_s.tolist()):
        now_s += 20e-6 * len(batch) * inputs[batch].max() + 27.5e-3 * outputs[batch].max()
        late += int((now_s > deadlines_s[batch]).sum())
    return now_s, late


def test_both_is_between_the_orders_in_time_and_misses_fewer_deadlines():
    for seed in range(20):
        by_input, by_length, by_deadline, both = (outcome(name, seed) for name in (
            "fifo", "uellm-length", "uellm-deadline", "uellm"))
        assert by_length[0] < both[0] < by_deadline[0], seed
        assert both[1] < by_input[1] and both[1] < by_length[1], seed


# --- laws -------------------------------------------------------------------------------------


class Foresight:
    """Forecasts of short outputs, which requests outgrow by some tokens at a time."""

    def first(self, input_tokens, cap):
        return min(3 + input_tokens, cap)

    def beyond(self, input_tokens, written, cap):
        return min(written + 4, cap)

    def ended(self, input_tokens, written):
        pass


def served(rule, outputs):
    """Runs the rule to its end. Returns the batches with the tokens that their requests had."""
    batches, made, done = [], dict.fromkeys(outputs, 0), set()
    rows = [[] for _ in range(rule.num_groups)]
    pending = [[] for _ in range(rule.num_groups)]
    while (group := rule.next_group()) is not None:
        for query in pending[group] if rule.needs_tokens else ():
            made[query] += query not in done
            if query not in done and made[query] == outputs[query]:
                done.add(query)
                rule.finish(query)
        if rule.needs_tokens:
            pending[group] = []
        step = rule.decide()
        if step is None:
            continue
        if step.kind is StepKind.ENCODE and (not batches or step.phase != batches[-1][0]):
            rows = [[] for _ in range(rule.num_groups)]
            batches.append((step.phase, {}))
        assert not step.evicted or (step.kind is StepKind.ENCODE and not done & {*step.evicted})
        for query in step.joined:
            batches[-1][1][query] = made[query]
        rows[group] += step.joined
        pending[group] += step.joined or rows[group]
        assert rule.reserved_tokens <= rule.group_kv_tokens * rule.num_groups
    assert made == outputs and done == {*outputs}, "each is served once, to its end"
    return [own for _, own in batches]


settings = st.builds(
    Batches, most=st.integers(1, 12), growth=st.booleans(), length=st.floats(0.1, 2),
    threshold=st.one_of(st.just(math.inf), st.floats(1, 1000)),
    deadline=st.sampled_from([0.0, 1.0]), pack=st.one_of(st.none(), st.integers(1, 200)))


@examples(150)
@given(batches=settings, groups=st.integers(1, 3), room=st.integers(70, 400),
       evicts=st.booleans(), seed=st.integers(0, 1000), count=st.integers(1, 40))
def test_no_batch_is_above_its_limits_and_each_request_ends(
        batches, groups, room, evicts, seed, count):
    rng = np.random.default_rng(seed)
    inputs, outputs = (rng.integers(1, most, count).tolist() for most in (20, 40))
    rule = StaticRule(encode_batch=100, num_groups=groups, encode_micro_batches=groups,
                      kv_tokens=groups * room, batches=batches, evicts=evicts)
    rule.former.deadlines_s = rng.uniform(1, 100, count).tolist()
    if evicts:
        rule.forecaster = Foresight()
    for query in range(count):
        rule.submit(query, inputs[query] + 40, inputs[query], 0 if evicts else outputs[query])
    for batch in served(rule, dict(enumerate(outputs))):
        members = [Waiting(query, inputs[query] + 40, inputs[query] + written, written, 0 if (
            evicts and not written) else written + 4 if evicts else outputs[query])
            for query, written in batch.items()]
        lengths = [rule.former.output_of(one) for one in members]
        assert len(batch) <= batches.most
        assert math.ceil(len(batch) / groups) * (
            max(one.tokens for one in members) + max(lengths)) <= room or len(batch) == 1
        assert len(batch) == 1 or sum(lengths) <= (batches.pack or math.inf)
        for place in range(1, len(batch)):
            longest, sign = max(lengths[:place]), -1 if batches.growth else 1
            due = [rule.former.deadlines_s[one.query] for one in members[:place + 1]]
            t_d = (due[-1] + max(due[:-1])) * (place + 1) * OVERHEAD
            t_l = (lengths[place] + sign * longest) * (place + 1) * OVERHEAD
            assert batches.deadline * t_d + batches.length * t_l <= batches.threshold * (1 + 1e-9)


@examples(60)
@given(batches=settings, count=st.integers(1, 40), output=st.integers(1, 30))
def test_equal_requests_keep_the_inputs_order(batches, count, output):
    found = formed(batches, [output] * count, deadlines_s=[7.0] * count)
    assert [query for batch in found for query in batch] == [*range(count)]


def test_of_one_request_at_a_time_each_is_a_batch():
    for row in SYSTEMS.values():
        found = formed(row.settings, [5, 3, 9], most=1)
        assert sorted(map(len, found)) == [1, 1, 1]


def test_a_request_without_a_deadline_is_last_and_costs_none():
    batches = Batches(deadline=1.0, length=0.1, threshold=100.0)
    assert formed(batches, [5, 5, 5, 5], deadlines_s=[math.inf, 20.0, math.inf, 10.0]) == [
        [3, 1, 0, 2]]


def test_who_has_begun_is_not_given_to_another_replica():
    rule = StaticRule(encode_batch=2, num_groups=1, encode_micro_batches=1, kv_tokens=1000,
                      batches=Batches(most=2), evicts=True)
    for query in range(4):
        rule.submit(query, 60, 5, 3)
    for _ in range(4):  # an encoding, two iterations, and the end of the forecast
        rule.next_group()
        rule.decide()
    assert [(one.query, one.written) for one in rule.waiting] == [(0, 3), (1, 3), (2, 0), (3, 0)]
    assert withdraw_waiting(rule, 10) == [2, 3]
    assert [one.query for one in rule.waiting] == [0, 1]
