"""FT and DSI: the paper's Figure 1, the closed form against the replay by their own rule, and laws
that need no replay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from problems import problem_of, roofline_of
from representative import some

from xgpt.core.lengths import JointLengths, empirical, truncated_normal
from xgpt.core.queries import QueryLengths
from xrunner.rules.static import StaticRule, static_rule
from xsimulator.policies.static.closed_form import dsi, ft
from xsimulator.policies.static.config import StaticConfig
from xsimulator.replay.flow import run
from xsimulator.replay.job import planned_queries, replay_job
from xsimulator.replay.pool import PoolPlan
from xsimulator.replay.queries import Queries


def policy_of(problem, policy=ft, *, padded=True):
    return policy(problem, roofline_of(problem, padded=padded))


def replayed(policy, estimate, num_batches, *, seed=0):
    """A job of whole batches, in a row."""
    inputs, outputs = policy.problem.lengths.sample(
        num_batches * estimate.figures.encode_batch, np.random.default_rng(seed))
    queries = planned_queries(policy.problem, inputs, outputs)
    result = replay_job(policy.problem, policy.timing, estimate, queries,
                        rules=[static_rule(estimate)])
    return result, outputs


class UnitClock:
    """Every step takes every one of two stages a second."""

    def seconds(self, sizes):
        return [1.0, 1.0]


def drawn(rule, num_queries, tokens):
    """Figure 1: [("E" or "D", group, start on each worker)]."""
    pool = PoolPlan(name="both", rule=rule, clock=UnitClock(), stages=(0, 1), kv_tokens=10_000)
    outputs = np.full(num_queries, tokens)
    queries = QueryLengths(inputs=np.full(num_queries, 5), outputs=outputs, most_outputs=outputs)
    result = run(Queries(queries, encode_gives_token=True), [pool])
    steps = [(step.kind.value[0].upper(), step.group) for step in result.pools[0].steps]
    return result, steps, result.pools[0].start_s


def test_figure_1_ft_two_workers_two_micro_batches():
    rule = StaticRule(encode_batch=4, num_groups=2, encode_micro_batches=2, kv_tokens=10_000)
    result, steps, start_s = drawn(rule, 8, tokens=5)
    one = [("E", 0), ("E", 1), *[("D", 0), ("D", 1)] * 4]
    assert steps[:10] == one
    assert start_s[:10].tolist() == [[t, t + 1] for t in range(10)], "neither worker waits"
    # the head learns of the batch's end in group 1's turn; group 0 was stepped once more by then
    assert steps[10:13] == [("D", 0), ("E", 0), ("E", 1)]
    assert start_s[11:13].tolist() == [[11, 12], [12, 13]]
    assert result.latency_s[:4].tolist() == [11, 11, 10, 10]


def test_figure_1_dsi_encodes_in_four_and_decodes_in_two():
    rule = StaticRule(encode_batch=4, num_groups=2, encode_micro_batches=4, kv_tokens=10_000)
    result, steps, start_s = drawn(rule, 4, tokens=4)
    assert steps[:10] == [("E", 0), ("E", 0), ("E", 1), ("E", 1), *[("D", 0), ("D", 1)] * 3]
    assert start_s[:10].tolist() == [[t, t + 1] for t in range(10)]
    joined = [step.joined for step in result.pools[0].steps[:4]]
    assert joined == [(0,), (1,), (2,), (3,)], "groups (1, 2) and (3, 4) of the figure"
    assert result.latency_s.tolist() == [11, 10, 9, 8]


@pytest.mark.parametrize("policy", [ft, dsi])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("cluster", ["a40-4", "a40-8"])
def test_exact_where_nothing_is_random(policy, groups, cluster):
    constant = JointLengths(inputs=truncated_normal(200, 0, 200),
                            outputs=truncated_normal(40, 0, 40))
    ours = policy_of(problem_of("t5-11b" if cluster == "a40-8" else "opt-13b", cluster,
                                lengths=constant), policy)
    config = StaticConfig(encode_batch=48, decode_micro_batches=groups,
                          encode_parts=None if policy is ft else 3)
    found = ours.estimate(config)
    result, _ = replayed(ours, found, 4)
    assert found.figures.throughput_qps == pytest.approx(4 * 48 / result.makespan_s, rel=0.005)
    assert found.figures.latency_s == pytest.approx(result.latency_s.mean(), rel=0.005)


CASES = [  # model, cluster, task, policy, config, padded, kind
    ("opt-13b", "a40-4", "S", ft, StaticConfig(encode_batch=64, decode_micro_batches=4), True,
     "sequence"),
    ("opt-13b", "a40-4", "S", ft, StaticConfig(encode_batch=9, decode_micro_batches=4), False,
     "queries"),
    ("opt-13b", "a40-4", "T", ft, StaticConfig(
        encode_batch=12, decode_micro_batches=1, tp_degree=4, tp_gpus=4), True, "queries"),
    ("opt-13b", "a40-4", "C1", dsi, StaticConfig(
        encode_batch=40, decode_micro_batches=2, encode_parts=4), True, "queries"),
    ("opt-13b", "a40-4", "S", dsi, StaticConfig(
        encode_batch=50, decode_micro_batches=3, encode_parts=3, tp_degree=2, tp_gpus=2), True,
     "sequence"),
    ("t5-11b", "a40-8", "C1", dsi, StaticConfig(
        encode_batch=64, decode_micro_batches=8, encode_parts=2), True, "queries"),
    ("t5-11b", "a40-8", "S", ft, StaticConfig(encode_batch=33, decode_micro_batches=12), False,
     "sequence"),
]


@pytest.mark.parametrize(
    ("model", "cluster", "task", "policy", "config", "padded", "kind"),
    some(CASES, lambda case: CASES.index(case) in (2, 4, 5)))
def test_agrees_with_the_replay_of_a_long_job(model, cluster, task, policy, config, padded, kind):
    ours = policy_of(problem_of(model, cluster, task, kind=kind), policy, padded=padded)
    found = ours.estimate(config)
    result, outputs = replayed(ours, found, max(3000 // config.encode_batch, 60))
    assert found.figures.throughput_qps == pytest.approx(len(outputs) / result.makespan_s, rel=0.03)
    latency_s = np.quantile(result.latency_s, 0.99)
    if kind == "sequence":
        longest = ours.problem.lengths.outputs.quantile(0.99)
        latency_s = result.latency_s[np.abs(outputs - longest) <= 1].mean()
    assert found.figures.latency_s == pytest.approx(latency_s, rel=0.05)


def test_decode_iterations_are_the_expected_longest_output_of_a_batch():
    ours = policy_of(problem_of(lengths="T"))
    draws = np.random.default_rng(0)
    for batch in (1, 7, 60):
        outputs = ours.problem.lengths.outputs.sample(batch * 4000, draws).reshape(-1, batch)
        found = ours.estimate(StaticConfig(encode_batch=batch, decode_micro_batches=1))
        assert found.figures.decode_iterations == pytest.approx(
            (outputs.max(axis=1) - 1).mean(), rel=0.02)


def test_the_budget_is_never_exceeded_and_holds_a_full_batch():
    ours = policy_of(problem_of(), dsi)
    found = ours.estimate(StaticConfig(encode_batch=60, decode_micro_batches=4, encode_parts=2))
    result, _ = replayed(ours, found, 40)
    pool = result.pools[0]
    assert pool.memory_tokens.max() <= found.deployment.kv_tokens
    phases = np.array([step.phase for step in pool.steps])
    full = [pool.encoded[phases == phase].sum() == 60 for phase in range(40)]
    assert np.mean(full) > 0.9, "the budget is short of a batch once in a while, not often"


def test_latency_bound_of_queries_lies_above_the_mean_and_grows_with_the_quantile():
    config = StaticConfig(encode_batch=8, decode_micro_batches=4)
    latencies = [policy_of(problem_of(
        kind="queries", quantile=q)).estimate(config).figures.latency_s
                 for q in (0.5, 0.9, 0.99, 1.0)]
    assert latencies == sorted(latencies) and latencies[0] < 0.9 * latencies[-1]


def test_single_token_outputs_need_no_decoding():
    ones = JointLengths(inputs=truncated_normal(100, 20, 200), outputs=empirical([1]))
    for kind in ("sequence", "queries"):
        ours = policy_of(problem_of(lengths=ones, kind=kind))
        config = StaticConfig(encode_batch=16, decode_micro_batches=4)
        found = ours.estimate(config)
        result, _ = replayed(ours, found, 50)
        assert found.figures.throughput_qps == pytest.approx(800 / result.makespan_s, rel=0.05)
        assert 0 < found.figures.latency_s < 1.2 * result.latency_s.max()


def test_grid_fits_memory_covers_every_plan_and_estimates_as_one_by_one():
    ours = policy_of(problem_of(), dsi)
    grid = ours.grid(3000, [(1, 0), (4, 4)])
    figures = ours.evaluate(grid)
    assert figures.fits.all() and (figures.throughput_qps > 0).all()
    assert {(c.tp_degree, c.tp_gpus) for c in grid} == {(1, 0), (4, 4)}
    assert len(set(grid)) == len(grid)
    largest = max((c for c in grid if c.encode_parts == 1 and c.decode_micro_batches == 1),
                  key=lambda c: c.encode_batch)
    more = replace(largest, encode_batch=int(largest.encode_batch * 1.11))
    assert not ours.evaluate([more]).fits[0], "the grid ends where memory does"
    for row in (0, len(grid) // 2, len(grid) - 1):
        one = ours.estimate(grid[row])
        assert one.figures.throughput_qps == pytest.approx(figures.throughput_qps[row])
        assert one.figures.latency_s == pytest.approx(figures.latency_s[row])


class Refusing:
    """A timing source that refuses more than a few rows."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def operator_s(self, operator, x, y=0.0, *, tp_degree=1):
        seconds = self._inner.operator_s(operator, x, y, tp_degree=tp_degree)
        return np.where(np.asarray(x, float) > 4000, np.inf, seconds)


@pytest.mark.parametrize("kind", ["sequence", "queries"])
def test_sizes_the_timing_source_refuses_have_no_throughput(kind):
    problem = problem_of(kind=kind)
    ours = ft(problem, Refusing(policy_of(problem).timing))
    figures = ours.evaluate([StaticConfig(encode_batch=batch, decode_micro_batches=1)
                             for batch in (4, 200)])
    assert figures.throughput_qps[0] > 0 and figures.throughput_qps[1] == 0
    assert np.isfinite(figures.latency_s[0]) and figures.latency_s[1] == np.inf
