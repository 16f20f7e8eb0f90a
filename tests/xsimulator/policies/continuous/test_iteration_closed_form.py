"""ORCA, vLLM and Sarathi: closed form against the replay of a long job, memory, basic laws."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from problems import problem_of, roofline_of
from representative import some

from xgpt.core import catalog
from xgpt.core.lengths import JointLengths, empirical, joint_empirical
from xprofiler.made_sources import Raised
from xprofiler.profile import TableKey
from xprofiler.timing import Reach
from xrunner.rules.iteration import orca_rule
from xrunner.rules.paged import sarathi_rule, vllm_rule
from xsimulator.policies import geometric
from xsimulator.policies.continuous import load
from xsimulator.policies.continuous.closed_form import orca, sarathi, vllm
from xsimulator.policies.continuous.config import ContinuousConfig
from xsimulator.policies.continuous.in_flight import intervals, least_intervals
from xsimulator.policies.continuous.paged_walk import WalkedQueries, equally_likely, walk
from xsimulator.policies.continuous.query_sizes import SIZES, QuerySizes
from xsimulator.policies.continuous.walk_table import WalkTable
from xsimulator.replay.job import planned_queries, replay_job
from xsimulator.replay.steady import steady_figures

POLICIES = {"orca": (orca, orca_rule), "vllm": (vllm, vllm_rule),
            "sarathi": (sarathi, sarathi_rule)}


def policy_of(name, problem, *, padded=True):
    return POLICIES[name][0](problem, roofline_of(problem, padded=padded))


def replayed(name, problem, found, num_queries, *, padded, seed=0):
    inputs, outputs = problem.lengths.sample(num_queries, np.random.default_rng(seed))
    result = replay_job(problem, roofline_of(problem, padded=padded), found,
                        planned_queries(problem, inputs, outputs),
                        rules=(POLICIES[name][1](found),))
    return result, outputs


CASES = [
    ("orca", "opt-13b", "a40-4", "S", ContinuousConfig(max_active=40), False),
    ("orca", "opt-13b", "a40-4", "T", ContinuousConfig(
        max_active=64, tp_degree=4, tp_gpus=4), True),
    ("orca", "t5-11b", "a40-8", "C1", ContinuousConfig(max_active=30), False),
    ("vllm", "opt-13b", "a40-4", "T", ContinuousConfig(max_active=200), False),
    ("vllm", "opt-13b", "a40-4", "G", ContinuousConfig(
        max_active=1500, tp_degree=4, tp_gpus=4), False),
    ("vllm", "opt-13b", "a40-4", "S", ContinuousConfig(
        max_active=120, tp_degree=2, tp_gpus=4), True),
    ("sarathi", "opt-13b", "a40-4", "S", ContinuousConfig(
        max_active=300, tp_degree=4, tp_gpus=4, token_budget=512), False),
    ("sarathi", "opt-13b", "a40-4", "T", ContinuousConfig(max_active=80, token_budget=1024), True),
]


@pytest.mark.parametrize(("name", "model", "cluster", "task", "config", "padded"), some(
    CASES, lambda case: CASES.index(case) in (1, 3, 7)))  # every policy, padded or not
def test_agrees_with_the_replay_of_a_long_job(name, model, cluster, task, config, padded):
    problem = problem_of(model, cluster, task)
    found = policy_of(name, problem, padded=padded).estimate(config)
    count = max(9000, int(14 * found.figures.decode_batch))
    result, outputs = replayed(name, problem, found, count,
                               padded=padded)
    start = result.times.start_s
    begin, end = np.quantile(start, [0.4, 0.8])
    steady = (start >= begin) & (start < end)
    assert found.figures.throughput_qps == pytest.approx(steady.sum() / (end - begin), rel=0.06)
    longest = problem.lengths.outputs.quantile(0.99)
    alike = steady & (np.abs(outputs - longest) <= 0.03 * longest)
    assert found.figures.latency_s == pytest.approx(result.latency_s[alike].mean(), rel=0.08)


QUERIES_CASES = [
    ("orca", 60, 0), ("vllm", 90, 2048), ("sarathi", 90, 512),
]


@pytest.mark.parametrize("quantile", [0.5, 0.95])
@pytest.mark.parametrize(("name", "max_active", "token_budget"), QUERIES_CASES)
def test_latency_of_all_queries_agrees_with_the_replay(name, max_active, token_budget, quantile):
    problem = problem_of(kind="queries", quantile=quantile)
    found = policy_of(name, problem).estimate(ContinuousConfig(
        max_active=max_active, tp_degree=4, tp_gpus=4, token_budget=token_budget))
    result, _ = replayed(name, problem, found, 3000, padded=True)
    steady = steady_figures(result, problem.constraint, problem.lengths.outputs)
    assert steady is not None
    assert found.figures.latency_s == pytest.approx(steady.latency_s, rel=0.06)


# all groups encode in the same rounds: 0.67 to 0.93 of the replay's throughput before
@pytest.mark.parametrize(("model", "pair", "max_active"), [
    ("opt-13b", (900, 188), 40), ("gpt3-39b", (300, 60), 14),
    ("t5-11b", (179, 90), 135), ("gpt3-39b", (818, 110), 11)])
def test_orcas_queries_of_equal_lengths_are_encoded_in_step(model, pair, max_active):
    problem = problem_of(model, lengths=joint_empirical(np.array([pair] * 5)), quantile=0.95)
    timing, config = roofline_of(problem), ContinuousConfig(max_active=max_active, token_budget=0)
    form = orca(problem, timing)
    found = form.estimate(config)
    result = replay_job(problem, timing, found, planned_queries(
        problem, *problem.lengths.sample(3000, np.random.default_rng(1))))
    steady = steady_figures(result, problem.constraint, problem.lengths.outputs)
    assert found.figures.throughput_qps == pytest.approx(steady.throughput_qps, rel=0.03)
    assert found.figures.latency_s == pytest.approx(steady.latency_s, rel=0.03)
    most_qps, least_s = form.limits([config])
    assert found.figures.throughput_qps <= most_qps[0] * (1 + 1e-9)
    assert found.figures.latency_s >= least_s[0]


@pytest.mark.parametrize("name", POLICIES)
def test_what_fits_never_holds_more_than_its_budget(name):
    problem = problem_of()
    policy = policy_of(name, problem)
    for max_active in (3, 5000):
        found = policy.estimate(ContinuousConfig(max_active=max_active, tp_degree=2, tp_gpus=2))
        figures = found.figures
        assert figures.fits and max(figures.memory_bytes) <= figures.memory_capacity_bytes
        result, _ = replayed(name, problem, found, 600, padded=True)
        assert 0 < result.pools[0].memory_tokens.max() <= found.deployment.kv_tokens


@pytest.mark.parametrize("name", POLICIES)
def test_a_model_that_leaves_no_room_does_not_fit(name):
    problem = problem_of("gpt3-175b", "a40-8", "C2")
    found = policy_of(name, problem).estimate(ContinuousConfig(max_active=4))
    figures = found.figures
    assert not figures.fits and max(figures.memory_bytes) > figures.memory_capacity_bytes


@pytest.mark.parametrize("name", POLICIES)
def test_arrays_equal_one_configuration_at_a_time(name):
    policy = policy_of(name, problem_of())
    configs = [ContinuousConfig(max_active=m, tp_degree=t, tp_gpus=g, token_budget=512)
               for m in (1, 7, 900) for t, g in ((1, 0), (2, 2), (4, 4))]
    together = policy.evaluate(configs)
    for row, config in enumerate(configs):
        alone = policy.estimate(config)
        assert together.throughput_qps[row] == pytest.approx(alone.figures.throughput_qps, rel=1e-9)
        assert together.latency_s[row] == pytest.approx(alone.figures.latency_s, rel=1e-9)
        assert together.fits[row] == alone.figures.fits


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_betters_its_limits(name):
    policy = policy_of(name, problem_of())
    configs = [ContinuousConfig(max_active=m, tp_degree=t, tp_gpus=g, token_budget=b)
               for m in (1, 3, 9, 40, 200, 900) for t, g in ((1, 0), (2, 2), (4, 4))
               for b in (300, 2000)]
    figures, (qps, latency_s) = policy.evaluate(configs), policy.limits(configs)
    assert (figures.throughput_qps[figures.fits] <= 1.001 * qps[figures.fits]).all()
    assert (figures.latency_s[figures.fits] >= 0.999 * latency_s[figures.fits]).all()
    assert np.median(figures.throughput_qps / qps) > 0.8, "limits that rule something out"


@pytest.mark.parametrize("name", POLICIES)
def test_sizes_beyond_those_measured_are_said_and_beyond_four_times_refused(name):
    policy = policy_of(name, problem_of())
    config = ContinuousConfig(max_active=64, tp_degree=4, tp_gpus=4)
    plain = policy.estimate(config)
    for most, is_refused in ((40.0, False), (10.0, True)):
        policy = policy_of(name, problem_of())
        policy.timing.reach = lambda operator, tp_degree, most=most: Reach(
            x=most if operator.value == "decode_attention" else math.inf, y=math.inf)
        found, arrays = policy.estimate(config), policy.evaluate([config])
        assert arrays.stretch[0] == pytest.approx(64 / most, rel=0.1)
        assert any("extrapolated" in note for note in found.notes)
        assert found.figures.throughput_qps == (0 if is_refused else plain.figures.throughput_qps)
        assert found.figures.latency_s == (math.inf if is_refused else plain.figures.latency_s)
    assert not any("extrapolated" in note for note in plain.notes)


@pytest.mark.parametrize("name", POLICIES)
def test_one_query_at_a_time_takes_the_sum_of_its_steps(name):
    lengths = JointLengths(inputs=empirical([40]), outputs=empirical([6]))
    problem = problem_of(lengths=lengths)
    found = policy_of(name, problem).estimate(
        ContinuousConfig(max_active=1, tp_degree=4, tp_gpus=4))
    result, _ = replayed(name, problem, found, 5, padded=True)
    assert found.figures.latency_s == pytest.approx(result.latency_s.mean(), rel=0.01)
    assert found.figures.throughput_qps == pytest.approx(5 / result.makespan_s, rel=0.01)


@pytest.mark.parametrize("name", POLICIES)
def test_the_grid_holds_what_fits_and_ends_where_memory_does(name):
    problem = problem_of()
    policy = policy_of(name, problem)
    grid = policy.grid(100_000, [(1, 0), (4, 4)])
    assert all(policy.evaluate(grid).fits)
    for degree in (1, 4):
        most = max(config.max_active for config in grid if config.tp_degree == degree)
        assert 100 < most < 100_000
    assert {c.max_active for c in policy.grid(12, [(4, 4)])} == set(range(1, 13))


@pytest.mark.parametrize("name", POLICIES)
def test_of_outputs_of_one_token_nobody_decodes_and_the_grid_has_what_inputs_fill(name):
    """What fits was divided by a context of none, which numpy warns of."""
    lengths = JointLengths(inputs=empirical([40, 90]), outputs=empirical([1]))
    policy = policy_of(name, problem_of(lengths=lengths))
    grid = policy.grid(100_000, [(1, 0)])
    found = policy.evaluate(grid)
    assert max(config.max_active for config in grid) > 100
    assert found.fits.all() and (found.throughput_qps > 0).all()


@pytest.mark.parametrize("name", POLICIES)
def test_more_reserved_for_an_output_costs_orca_places_alone(name):
    """Paged KV takes what is used, ORCA what could be."""
    plain = problem_of(lengths="T")
    config = ContinuousConfig(max_active=5000, tp_degree=4, tp_gpus=4)
    small, large = (policy_of(name, p).estimate(config).figures.decode_batch
                    for p in (plain, replace(plain, default_max_tokens=4000)))
    if name == "orca":
        assert large < 0.9 * small
    else:
        assert large == pytest.approx(small, rel=0.01)


def test_sizes_are_geometric_and_end_at_the_most():
    sizes = geometric(1000)
    assert sizes[0] == 1 and sizes[-1] == 1000 and sizes == sorted(set(sizes))
    assert all(b <= max(a + 1, 1.1 * a) for a, b in zip(sizes, sizes[1:], strict=False))


def test_equal_steps_in_flight_wait_for_the_slowest_stage_or_for_their_tokens():
    plain = np.array([[1.0, 2.0, 1.0]] * 3)
    found = intervals(plain, plain[:, None].repeat(24, axis=1), np.array([0.0, 0.3, 1.0]),
                      np.array([3, 3, 1]))
    assert found.any_s == pytest.approx([6.0, 6.0, 4.0])


def test_unequal_steps_in_flight_hold_each_other_up():
    plain = np.ones((2, 4))
    long = np.full((2, 24, 4), 5.0)
    found = intervals(plain, long, np.array([0.25, 0.25]), np.array([4, 1]))
    mean = 4 * (0.75 * 1 + 0.25 * 5)
    assert found.any_s[1] == pytest.approx(mean, rel=0.01), "alone: the mean step"
    assert 1.1 * mean < found.any_s[0] < 20, "in flight: more, but less than if all were long"


def test_no_order_of_steps_is_quicker_than_the_least():
    rng = np.random.default_rng(0)
    plain, encode = rng.uniform(1, 2, (40, 3)), rng.uniform(1, 9, (40, 24, 3))
    share, groups = rng.uniform(0, 1, 40), rng.integers(1, 7, 40)
    args = (plain, encode, share, groups, [0, 1, 1, 1, 1, 2])
    found, least = intervals(*args), least_intervals(*args)
    assert (found.any_s >= 0.99 * least.any_s).all()
    alone = groups == 1
    assert found.any_s[alone] == pytest.approx(least.any_s[alone])
    own = intervals(plain[:, args[4]], encode[:, :, args[4]], share, groups)
    assert found.any_s == pytest.approx(own.any_s), "kinds are stages that cost the same"


def test_places_are_as_many_as_fit_in_the_mean():
    rng = np.random.default_rng(0)
    sizes = np.cumsum(rng.normal(100, 30, (4000, 60)), axis=1)
    for room in (950.0, 3000.0):
        expected = (sizes <= room).sum(axis=1).mean()
        found = load.most_that_fit(np.array([1e9]), np.array([room]), 100.0, 30.0)
        assert found[0] == pytest.approx(expected, rel=0.01)
    assert load.most_that_fit(np.array([7.5]), np.array([1e6]), 100.0, 30.0)[0] == 7.5


def test_encoding_one_at_a_time_against_a_simulation():
    rng = np.random.default_rng(0)
    for places, chance in ((1, 0.1), (6, 0.1), (12, 0.1), (40, 0.1)):
        busy, joined, steps = 0, 0, 20_000
        for _ in range(steps):
            busy -= rng.binomial(busy, chance)
            if busy < places:
                busy += 1
                joined += 1
        # a busy place lasts geometric(chance) steps from the one after it joined
        found = load.one_at_a_time(np.array([float(places)]), 1 / chance)
        assert found[0] == pytest.approx(joined / steps, rel=0.12)


def test_batches_have_the_exact_mean():
    flow = QuerySizes(catalog.task("S"), is_encoder_decoder=False, reserved_outputs=80)
    for present in (1.0, 9.5, 300.0, 3000.0):
        chance, counts = load.ends_per_step(np.array([present]), np.array([0.03]))
        assert chance[0] * counts.mean() == pytest.approx(present * 0.03)
        tokens = flow.batch_tokens(counts)
        assert tokens.mean() == pytest.approx(counts.mean() * flow.lengths.inputs.mean)


def test_a_batch_of_one_is_no_smaller_an_input_than_others():
    """Where one step in eight encodes two inputs, the largest inputs come alone as well."""
    flow = QuerySizes(catalog.task("S"), is_encoder_decoder=False, reserved_outputs=80)
    tokens = flow.batch_tokens(np.array([1.0] * 21 + [2.0] * 3))
    inputs = flow.lengths.inputs
    singles, doubles = tokens[:21], tokens[21:]
    assert singles.mean() == pytest.approx(inputs.mean, rel=0.01)
    assert singles.std() == pytest.approx(inputs.std, rel=0.05)
    assert doubles.mean() == pytest.approx(2 * inputs.mean, rel=0.02)


def test_steps_become_equally_likely_sizes_with_the_same_mean():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 4, (5, 200)) * rng.integers(1, 90, (5, 200)).astype(float)
    share, sizes, _ = equally_likely(tokens, tokens > 0, 24)
    assert share == pytest.approx((tokens > 0).mean(axis=1))
    assert share * sizes.mean(axis=1) == pytest.approx(tokens.mean(axis=1))
    assert (np.diff(sizes, axis=1) >= 0).all()


def walked_queries(*, is_chunked):
    sizes = QuerySizes(catalog.task("S"), is_encoder_decoder=False, reserved_outputs=80)
    return WalkedQueries(
        iterations=sizes.present.iterations, held=float(load.blocks_tokens(
            sizes.present.context - 1)), input_sizes=sizes.input_sizes,
        last_sizes=sizes.last_sizes, is_chunked=is_chunked)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_walks_between_points_of_the_table_are_as_if_walked(is_chunked):
    queries = walked_queries(is_chunked=is_chunked)
    held = queries.held
    rng = np.random.default_rng(0)
    holds = np.exp(rng.uniform(np.log(5), np.log(300), 50))
    sizes = (np.rint(holds * rng.uniform(0.8, 3, 50)), holds * held, rng.uniform(200, 3000, 50))
    direct, found = walk(queries, *sizes, SIZES), WalkTable(queries, SIZES)(*sizes, np.ones(50))
    error = np.abs(found.running / direct.running - 1)
    assert np.median(error) < 0.01 and error.max() < 0.06
    encoded = [w.share * w.tokens.mean(axis=1) for w in (direct, found)]
    assert np.median(np.abs(encoded[1] / encoded[0] - 1)) < 0.03
    assert (found.running <= 1.01 * sizes[1] / held + 4).all()


@pytest.mark.parametrize("name", ["vllm", "sarathi"])
def test_groups_short_of_memory_encode_whom_others_evict(name):
    """Each of 48 groups holds nine queries: by itself one would encode in every sixth step."""
    problem = problem_of("gpt3-341b", "a40-48", "S")
    policy = policy_of(name, problem, padded=False)
    config = ContinuousConfig(max_active=700, token_budget=1247)
    found = policy.estimate(config)
    result, _ = replayed(name, problem, found, 5000, padded=False)
    steady = steady_figures(result, problem.constraint, problem.lengths.outputs)
    assert found.figures.throughput_qps == pytest.approx(steady.throughput_qps, rel=0.05)
    assert found.figures.latency_s == pytest.approx(steady.latency_s, rel=0.06)
    pool, load = result.pools[0], policy._held([config])[0].load
    encodes = (pool.tokens > 0)[len(pool.steps) // 4:-len(pool.steps) // 4]
    assert result.preemptions > 200
    assert load.share[0] == pytest.approx(encodes.mean(), rel=0.06)
    alone = policy.filling.load(*(np.array([x]) for x in (
        700 / 48, found.deployment.kv_tokens // 48, 1247.0, 1.0)))
    assert alone.share[0] < 0.93 * load.share[0], "one group has no others to take up"
    assert load.waits[0] < alone.waits[0] / 4, "whom others take waits a turn, not a step"


def test_a_budget_below_what_decodes_encodes_nothing_meanwhile():
    queries = walked_queries(is_chunked=True)
    slots, budget = np.array([40.0, 40.0]), np.array([5.0, 3000.0])
    found = walk(queries, slots, slots * queries.held, budget, SIZES)
    assert 0 < found.running[0] <= 5 < found.running[1]
    assert (found.share * found.tokens.mean(axis=1))[0] <= 5


@pytest.mark.parametrize("name", POLICIES)
def test_what_a_schedule_holds_is_found_once_for_all_times(
        name, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of("opt-13b", "a40-4", "S")
    config = ContinuousConfig(max_active=60)
    form = policy_of(name, problem)
    asked, real = [], type(form.filling).load
    monkeypatch.setattr(type(form.filling), "load", lambda *given: (
        asked.append(given), real(*given))[1])
    expected = form.evaluate([config])
    raised = POLICIES[name][0](problem, Raised(
        form.timing, TableKey("layer_rest", 1), 1.01))
    assert raised.evaluate([config]).latency_s[0] > expected.latency_s[0]
    assert len(asked) == 1
    form.evaluate([replace(config, max_active=61)])
    assert len(asked) == 2, "another configuration holds something else"
    pair = form.evaluate([config, config])
    assert len(asked) == 3 and pair.latency_s[1] == pytest.approx(expected.latency_s[0])
