"""Laws of every replay, for any policy, lengths and stages."""

import math

import numpy as np
import pytest
from examples import examples
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from problems import problem_of, roofline_of

from xgpt.core.constraint import latency_constraint
from xgpt.core.controls import FixedSchedule
from xgpt.core.errors import InputError
from xgpt.core.lengths import empirical, joint_empirical, truncated_normal
from xgpt.core.policies import policy_names
from xgpt.core.problem import QueryTimes
from xrunner.rules.steps import StepKind
from xsimulator.replay.job import Replayer, planned_queries
from xsimulator.replay.records import PoolRecords, ReplayResult
from xsimulator.replay.steady_state import steady_figures
from xsimulator.rough.formulas import fixed_estimate

CLUSTERS = {"opt-13b": "a40-4", "t5-11b": "a40-4"}
EXAMPLES = examples(50, derandomize=True,
                    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


@st.composite
def replays(draw, policy):
    """(problem, estimate, inputs, outputs, result) of a random small job that fits. Its requests
    are there at the start, or arrive over time."""
    model = draw(st.sampled_from(sorted(CLUSTERS)))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    longest = draw(st.sampled_from([1, 2, 5, 40, 150]))
    pairs = np.stack([rng.integers(1, draw(st.sampled_from([2, 60, 400])) + 1, size=40),
                      rng.integers(1, longest + 1, size=40)], axis=1)
    problem = problem_of(model, CLUSTERS[model], joint_empirical(pairs))
    degree = draw(st.sampled_from([1, 2, 4]))
    batch = draw(st.integers(1, 30))
    groups = draw(st.integers(1, 4))
    controls = FixedSchedule(
        encode_batch=batch, decode_iterations=draw(st.integers(1, longest)),
        decode_micro_batches=groups, encode_micro_batches=groups * draw(st.integers(1, 3)),
        max_active=draw(st.integers(4, 60)), token_budget=draw(st.sampled_from([512, 900, 4000])),
        tp_degree=degree, tp_gpus=0 if degree == 1 else degree * draw(st.integers(1, 4 // degree)))
    try:
        found = fixed_estimate(policy, problem, roofline_of(problem), controls)
    except InputError:
        assume(False)
    assume(found.figures.fits)
    inputs, outputs = problem.lengths.sample(draw(st.integers(1, 120)), rng)
    gaps_s = draw(st.sampled_from([0.0, 0.02, 2.0])) * rng.exponential(size=len(inputs))
    result = Replayer(problem, roofline_of(problem), found).run(
        planned_queries(problem, inputs, outputs), arrival_s=np.cumsum(gaps_s) - gaps_s[0])
    return problem, found, inputs, outputs, result


LAWS = []


def law(check):
    """Registers a law that every replay is checked against."""
    LAWS.append(check)
    return check


@law
def every_query_goes_in_and_comes_out_once(case):
    _, _, inputs, outputs, result = case
    assert len(result.latency_s) == len(inputs)
    times = result.times
    assert times.arrival_s[0] == 0 and (times.start_s >= times.arrival_s).all()
    assert (times.first_token_s > times.start_s).all()
    assert (times.last_token_s >= times.first_token_s).all()
    joined = [query for step in result.pools[0].steps for query in step.joined]
    assert sorted(set(joined)) == list(range(len(inputs)))
    assert len(joined) == len(inputs) + result.preemptions
    assert result.makespan_s == pytest.approx(result.times.last_token_s.max())


@law
def as_many_tokens_are_made_as_were_asked_for(case):
    problem, found, _, outputs, result = case
    made = sum(int(pool.decoded.sum()) for pool in result.pools)
    if not problem.model.is_encoder_decoder:
        made += int(result.pools[0].encoded.sum())
    if found.policy in ("ft", "dsi"):  # dead rows go on to the end of their batch
        assert made >= outputs.sum()
    else:
        assert made == outputs.sum()


@law
def as_many_tokens_are_encoded_as_came_in(case):
    _, found, inputs, _, result = case
    encoded = int(result.pools[0].tokens.sum())
    if result.preemptions:
        assert encoded > inputs.sum()
    elif found.policy == "sarathi":  # an input cut off in the middle begins again
        assert encoded >= inputs.sum()
    else:
        assert encoded == inputs.sum()


@law
def a_stage_does_one_thing_at_a_time_and_steps_pass_the_stages_in_order(case):
    *_, result = case
    for pool in result.pools:
        tolerance = 1e-9 * max(result.makespan_s, 1.0)
        assert (pool.start_s[1:] >= pool.end_s[:-1] - tolerance).all()
        assert (pool.start_s[:, 1:] >= pool.end_s[:, :-1] - tolerance).all()
        assert (pool.end_s > pool.start_s).all()
    assert (result.utilisation() <= 1 + 1e-9).all()


@law
def memory_stays_within_the_budget_and_holds_what_is_read(case):
    *_, result = case
    for pool in result.pools:
        assert (pool.memory_tokens >= 0).all()
        assert pool.memory_tokens.max(initial=0) <= pool.kv_tokens
        assert not len(pool.memory_tokens) or pool.memory_tokens[-1] == 0, "all is freed at the end"
    last = result.pools[-1]
    if len(result.pools) == 1 and len({step.group for step in last.steps}) == 1:
        # one group: what a step reads is what is held, and that is reserved
        read = last.decoded * last.context
        # a start is reckoned back from its end: a little later, lest rounding finds the turn before
        at_s = last.start_s[:, 0] + 1e-9 * result.makespan_s
        held = last.memory_tokens[np.searchsorted(last.memory_s, at_s, "right") - 1]
        decodes = np.array([step.kind is StepKind.DECODE for step in last.steps])
        assert (read[decodes] <= held[decodes] + 1e-6).all()


@law
def littles_law(case):
    """Mean number in the system = throughput x mean latency. The number is counted from the steps:
    every request is in each from its first to its last one."""
    *_, result = case
    times = np.concatenate([result.times.start_s, result.times.last_token_s])
    change = np.repeat([1, -1], len(result.latency_s))
    order = np.lexsort((-change, times))
    present = np.cumsum(change[order])
    mean = float((present[:-1] * np.diff(times[order])).sum()) / result.makespan_s
    throughput = len(result.latency_s) / result.makespan_s
    assert mean == pytest.approx(throughput * result.latency_s.mean())
    assert present.min() >= 0 and present[-1] == 0


@law
def no_cluster_is_faster_than_its_arithmetic(case):
    """Floating-point operations of the layers alone, over the peak of all devices."""
    problem, _, inputs, outputs, result = case
    model, device = problem.model, problem.cluster.device
    per_input = model.encoder_layer_params * model.num_encoder_layers if (
        model.is_encoder_decoder) else model.decoder_layer_params * model.num_layers
    tokens = outputs.sum() - (0 if model.is_encoder_decoder else len(outputs))
    flops = 2 * (per_input * inputs.sum()
                 + model.decoder_layer_params * model.num_layers * tokens)
    peak = dict(device.flops_per_s)[problem.dtype] * problem.cluster.num_devices
    # cross-attention's keys and values are projected for inputs, not for every output token
    share = 0.7 if model.is_encoder_decoder else 1.0
    assert result.makespan_s >= share * flops / peak


@pytest.mark.parametrize("policy", policy_names())
def test_every_law_holds_for_every_replay(policy):
    def check(case):
        for one in LAWS:
            one(case)
    EXAMPLES(given(replays(policy))(check))()


def test_a_job_without_a_beginning_in_the_steady_window_has_no_steady_state():
    """One static batch, with its last requests long after the others: nothing begins in between."""
    start_s = np.array([0.0] * 500 + [18.0])
    latency_s = np.array([5.0] + [10.0] * 497 + [16.0, 17.0] + [2.0])
    times = QueryTimes(arrival_s=np.zeros(501), start_s=start_s, first_token_s=start_s + 1,
                       last_token_s=start_s + latency_s)
    result = ReplayResult(pools=(), handovers=(), times=times, preemptions=0,
                          output_tokens=np.ones(501, np.int64))
    constraint = latency_constraint(latency_s=math.inf, kind="queries", quantile=0.99)
    assert steady_figures(result, constraint, empirical(np.ones(3, np.int64))) is None


# --- the steady state within a replay ---------------------------------------------------------


@pytest.mark.parametrize("kind", ["sequence", "queries"])
def test_requests_that_end_in_the_drain_do_not_count(kind):
    """One request per second, each active for 40 s. Once none arrives, steps are twice as quick."""
    start_s = np.arange(400.0)
    in_drain_s = np.maximum(start_s + 40 - 400, 0.0)
    zeros, last_s = np.zeros(400), start_s + 40 - in_drain_s / 2
    none, numbers = np.zeros((0, 1)), np.zeros(0, np.int64)
    idle = PoolRecords(
        name="all", role="both", stages=(0,), steps=(), decoded=numbers, encoded=numbers,
        tokens=numbers, context=np.zeros(0), start_s=none, end_s=none, memory_s=np.zeros(0),
        memory_tokens=numbers, kv_tokens=1)
    result = ReplayResult(
        pools=(idle,), handovers=(), output_tokens=np.full(400, 20), preemptions=0,
        times=QueryTimes(arrival_s=zeros, start_s=start_s, first_token_s=start_s + 1,
                         last_token_s=last_s))
    figures = steady_figures(result, latency_constraint(
        latency_s=math.inf, kind=kind, quantile=0.9), truncated_normal(18, 3, 20))
    assert figures is not None
    assert figures.latency_s == pytest.approx(40.0, rel=1e-6)
    assert figures.throughput_qps == pytest.approx(1.0, rel=0.02)
