"""Native replays admit and evict as the rules do, however far admission looks ahead."""

import time
from dataclasses import replace

import numpy as np
import pytest
from both_replays import LONGEST, PAGED, RULES, drawn, same_both_ways, tight_of
from compiled import has_compiler
from problems import TakenAsTrue, problem_of

from xgpt.core import catalog
from xgpt.core.controls import ADMISSION_RULES, Admission, FixedSchedule, Forecasting
from xgpt.core.lengths import joint_empirical
from xrunner.rules.forecast import forecaster_of
from xrunner.rules.steps import set_forecaster
from xsimulator.replay.job import Replayer, planned_queries
from xsimulator.rough.formulas import fixed_estimate

pytestmark = pytest.mark.skipif(not has_compiler(), reason="there is no compiler")

FORECASTS = (
    Forecasting(), Forecasting(kind="known"), Forecasting(kind="class", width=15, accuracy=0.6),
    Forecasting(kind="distribution", use="expected"), Forecasting(kind="distribution", use="least"),
    Forecasting(kind="mean", bins=3), Forecasting(kind="class", width=40, use="least"))


def looking_ahead(seed, name, admission, made, *, learns=False):
    """A function that replays a job by a rule of this admission, which it appends to `made`."""
    rng = np.random.default_rng(seed)
    problem, timing, estimate, queries = drawn(
        rng, ("opt-13b", "t5-11b")[seed % 5 == 4], "rra", (30, 160), encode_batch=4,
        decode_iterations=9)
    queries = replace(queries, most_outputs=np.minimum(
        queries.outputs + rng.integers(0, 90), LONGEST - queries.inputs))
    estimate = replace(estimate, controls=replace(estimate.controls, admission=admission))

    def replayed():
        made.append(tight_of(name, np.random.default_rng(seed), queries.inputs.mean(), admission))
        set_forecaster(made[-1], forecaster_of(problem, admission.forecast, learns=learns))
        return Replayer(problem, timing, estimate).run(queries, rules=[made[-1]])

    return replayed


@pytest.mark.parametrize("rule_name", ADMISSION_RULES)
@pytest.mark.parametrize("name", [*RULES, *PAGED])
def test_admission_that_looks_ahead(monkeypatch, name, rule_name):
    evicted = 0
    for seed, forecast in enumerate(FORECASTS):
        admission = Admission(rule=rule_name, forecast=forecast, after_free=bool(seed % 2))
        made = []
        quick = same_both_ways(monkeypatch, looking_ahead(seed, name, admission, made))
        budget = sum(room.tokens for room in made[0].rooms.of_group)
        assert quick.pools[0].memory_tokens.max() <= budget
        assert not np.isnan(quick.times.last_token_s).any()
        assert made[0].rooms.evicts or not quick.preemptions
        evicted += quick.preemptions
    assert evicted > 5 or rule_name in ("reserve", "reserve-static"), evicted


def test_forecasts_that_learn_are_made_by_the_rules_themselves():
    admission = Admission(rule="future-peak", forecast=Forecasting(kind="mean"))
    steps = [looking_ahead(0, "rra", admission, [], learns=learns)().pools[0].steps
             for learns in (False, True)]
    assert [isinstance(one, list) for one in steps] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["rra", "orca"])
def test_a_replay_that_looks_ahead_takes_less_than_five_times_as_long(policy):
    inputs, outputs = catalog.task("T").sample(4000, np.random.default_rng(0))
    problem = problem_of("opt-13b", "a40-4", joint_empirical(np.stack([inputs, outputs], axis=1)))
    timing = TakenAsTrue(problem.model, problem.cluster.device, problem.dtype)
    estimate = fixed_estimate(policy, problem, timing, FixedSchedule(
        encode_batch=96, decode_iterations=16, max_active=800))
    (pool,) = estimate.deployment.pools
    pool = replace(pool, kv_tokens=43_437 * pool.num_groups)  # for some 100 requests a group
    estimate = replace(estimate, deployment=replace(estimate.deployment, pools=(pool,)))
    queries = planned_queries(problem, inputs, outputs)
    replayers = [Replayer(problem, timing, replace(estimate, controls=replace(
        estimate.controls, admission=Admission(rule=rule)))) for rule in ("reserve", "future-peak")]
    seconds = []
    for _ in range(30):
        began = [time.process_time()]
        for replayer in replayers:
            assert replayer.native(queries) is not None
            began.append(time.process_time())
        seconds.append(np.diff(began))
    reserve_s, peak_s = np.median(seconds, axis=0)
    assert peak_s < 5 * reserve_s
