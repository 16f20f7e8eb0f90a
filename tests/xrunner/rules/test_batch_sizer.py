"""The decode batch led back to its mean: how far, where not at all, and that it comes back."""

import math
from dataclasses import replace

import numpy as np
import pytest
from holding import drive, holding
from hypothesis import given
from hypothesis import strategies as st
from replays import estimated

from xgpt.core import catalog
from xgpt.core.constraint import latency_constraint
from xgpt.core.controls import Adjustment, EvenBatches, FixedSchedule
from xgpt.core.problem import Problem
from xrunner.rules.batch_sizer import LEAST_ADJUSTED, BatchSizer
from xrunner.rules.rra import RraRule, rra_rule
from xrunner.rules.steps import StepKind
from xrunner.rules.waa import WaaEncodeRule, waa_rules

MEAN = 20.0
SIZER = BatchSizer(mean_input=MEAN, adjustment=0.1)


@given(inputs=st.lists(st.integers(1, 60), min_size=1, max_size=60), batch=st.integers(1, 25),
       correction=st.integers(-30, 30))
def test_a_batch_that_leads_stays_within_the_band_or_where_it_was(inputs, batch, correction):
    usual, led = SIZER.count(inputs, batch), SIZER.count(inputs, batch, correction)
    if batch < LEAST_ADJUSTED or len(inputs) < batch:
        assert led == usual, "too few to share out, or the job's last"
    assert 1 <= led <= min(SIZER.most(batch), len(inputs))
    assert 0 <= (led - usual) * np.sign(correction) <= abs(correction)
    if led != usual:
        assert abs(sum(inputs[:led]) - batch * MEAN) <= 0.1 * batch * MEAN + 1e-9


def encode_sizes(target_active: float, output: int) -> list[int]:
    """Queries encoded in each phase of a single group, of 1,000 with so many tokens of output."""
    steps = drive(rule_of(target_active, 1000), dict.fromkeys(range(1000), output))
    return [len(step.joined) for step in steps if step.kind is StepKind.ENCODE]


def rule_of(target_active: float, count: int) -> RraRule:
    rule = RraRule(encode_batch=20, decode_iterations=1, num_groups=1, max_active=1000,
                   kv_tokens=10**9, even=EvenBatches(
                       adjustment=SIZER.adjustment, mean_input_tokens=SIZER.mean_input,
                       target_active=target_active))
    return holding(rule, count, 100, int(MEAN))


def test_longer_outputs_than_planned_shrink_the_encode_batch_and_shorter_ones_grow_it():
    # planned: outputs of 6 tokens, so that four encodings' worth are active when a phase begins
    planned, longer, shorter = (encode_sizes(80.0, output) for output in (6, 8, 4))
    assert set(encode_sizes(0.0, 8)) == {20}
    assert planned[8:-2] == [20] * len(planned[8:-2])
    assert longer[20:-3] == [18] * len(longer[20:-3]), "the band allows 10 % less"
    assert shorter[4:-3] == [22] * len(shorter[4:-3])


def problem_of(adjustment: Adjustment) -> Problem:
    return Problem(
        model=catalog.model("opt-13b"), cluster=catalog.cluster("a40-4"), lengths=catalog.task("S"),
        dtype="float16", num_queries=None, fixed=FixedSchedule(), default_max_tokens=80,
        constraint=latency_constraint(latency_s=math.inf), adjustment=adjustment)


@pytest.mark.parametrize(("adjustment", "rra_leads", "waa_leads", "share"), [
    (Adjustment(), True, False, 0.1), (Adjustment(steers=False), False, False, 0.1),
    (Adjustment(steers=True, share=0.05), True, True, 0.05), (Adjustment(share=0.0), False, False,
                                                             0.0)])
def test_what_the_job_says_reaches_the_rules(adjustment, rra_leads, waa_leads, share):
    problem = problem_of(adjustment)
    found = estimated("rra", problem, encode_batch=24, decode_iterations=8)
    target = rra_rule(found).controls.target_active
    assert (target > 0) == rra_leads and found.controls.even.adjustment == share
    if rra_leads:  # B_E are encoded; those with more to do are the decode batch
        assert target == pytest.approx(found.figures.decode_batch - 24, rel=0.01)
    waa = estimated("waa-c", problem, encode_batch=8)
    target = waa.controls.even.target_active
    assert waa.controls.even.adjustment == share
    assert (target == waa.figures.decode_batch) == waa_leads and (target > 0) == waa_leads


def waa_rule(target_active: float) -> WaaEncodeRule:
    found = estimated("waa-c", problem_of(Adjustment()), encode_batch=20)
    roomy = tuple(replace(pool, kv_tokens=10**9) for pool in found.deployment.pools)
    found = found.changed(mean_input_tokens=MEAN, target_active=target_active, max_in_system=1000,
                          pools=roomy)
    return holding(waa_rules(found)[0], 500, 100, int(MEAN))


def test_waas_encode_batch_follows_the_decode_batch_where_asked_to():
    for target_active, expected in ((0.0, [20, 20, 20, 20]), (40.0, [22, 22, 20, 18])):
        rule, sizes = waa_rule(target_active), []
        for _ in range(4):  # handed over at once, and none is done: 0, 22, 44, 64 are decoding
            step = rule.decide()
            sizes.append(len(step.joined))
            for query in step.joined:
                rule.finish(query)
        assert sizes == expected
