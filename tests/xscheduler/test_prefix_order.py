"""The order that is chosen where requests share prefixes, by replay."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from problems import TOY, problem_of, roofline_of, schedule_of, toy_problem
from slow_replicas import SlowReplica

from xgpt.core.constraint import latency_constraint
from xgpt.core.controls import LEAST_TOKENS, ROUND_ROBIN, SHARING_ORDERS, Adjustment, FixedSchedule
from xgpt.core.prefixes import Prefixes
from xgpt.core.problem import Problem, QueryLengths
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import from_json, to_json
from xrunner.rules.order import run_order
from xscheduler.evaluator import evenly_spread, replays_of
from xscheduler.ordering import in_chosen_order, with_order
from xsimulator.replay.job import Replayer
from xsimulator.replay.replicas import ReplicasReplayer, replay_routed
from xsimulator.rough.formulas import fixed_estimate

COUNT = 500
CONFIGS = {
    "rra": FixedSchedule(encode_batch=8, decode_iterations=8),
    "rra in chunks": FixedSchedule(encode_batch=8, decode_iterations=8, encode_chunk=64),
    "orca": FixedSchedule(max_active=16), "sarathi": FixedSchedule(max_active=16, token_budget=200),
    "vllm": FixedSchedule(max_active=16, token_budget=2000)}


@cache
def job_of(name: str, num_prefixes: int = 20, **asked) -> tuple[Problem, Schedule]:
    """500 shuffled requests of prefixes of 100 to 600 tokens, with memory for five of these and 16
    requests, and a schedule in the input's order."""
    rng = np.random.default_rng(1)
    ends = rng.integers(100, 601, num_prefixes)
    nodes = rng.permutation(np.arange(COUNT) % num_prefixes)
    prefixes = Prefixes(parents=np.full(num_prefixes, -1), ends=ends, nodes=nodes, block_tokens=16)
    inputs = prefixes.shared + rng.integers(50, 151, COUNT)
    outputs = rng.integers(5, 21, COUNT)
    problem = toy_problem(pairs=np.stack([inputs, outputs], axis=1), per_node=1, num_queries=COUNT,
                          model=replace(TOY, max_positions=1024))
    problem = replace(problem, adjustment=Adjustment(**asked), queries=QueryLengths(
        inputs=inputs, most_outputs=outputs, outputs=outputs, prefixes=prefixes))
    estimate = fixed_estimate(name.split()[0], problem, roofline_of(problem), CONFIGS[name])
    return problem, schedule_of(problem, estimate, kv_tokens=5 * 350 + 16 * 112)


def replayed(problem: Problem, schedule: Schedule):
    found = replays_of(in_chosen_order(problem, schedule), roofline_of(problem), schedule.estimate)
    assert found is not None
    return next(found.results)


def encoded(problem: Problem, schedule: Schedule) -> float:
    return sum(pool.tokens.sum() for pool in replayed(problem, schedule).pools)


def ideal(problem: Problem) -> float:
    own = problem.queries
    return (own.inputs - own.prefixes.shared).sum() + own.prefixes.own_tokens.sum()


@pytest.mark.parametrize("name", CONFIGS)
def test_shuffled_prefixes_are_encoded_once(name):
    problem, schedule = job_of(name)
    found = with_order(problem, roofline_of(problem), schedule)
    assert found.order in SHARING_ORDERS and found.window == 0 and found.order_gain > 0.3
    assert encoded(problem, found) < 1.02 * ideal(problem) < 0.6 * encoded(problem, schedule)


def test_the_first_results_are_announced():
    problem, schedule = job_of("orca")
    found = with_order(problem, roofline_of(problem), schedule)
    told = found.reordered
    assert told is not None
    order = run_order(found.order, found.window, problem.queries, 0)
    ends_s = replayed(problem, found).times.last_token_s[np.argsort(order)]
    assert told.first_s == pytest.approx(ends_s[:COUNT // 100].max())
    assert told.first_s > 5 * told.input_first_s
    assert told.input_saved == pytest.approx(
        1 - encoded(problem, schedule) / problem.queries.inputs.sum())
    assert from_json(to_json(found)) == found and "reordered" not in to_json(schedule)
    asked = replace(problem, adjustment=Adjustment(order="prefix"))
    given = with_order(asked, roofline_of(problem), schedule)
    assert (given.order, given.window, given.order_gain) == ("prefix", 0, 0)
    assert given.reordered.input_saved == told.input_saved


def test_a_latency_limit_that_the_inputs_order_keeps_is_kept():
    """Prefill-first has more requests at a time if they share more, and each takes longer."""
    problem, schedule = job_of("vllm")
    latency_s = {one.order: np.quantile(replayed(problem, one).latency_s, 0.99) for one in (
        schedule, schedule.changed(order="prefix", window=0),
        schedule.changed(order="blend", window=0))}
    most_s = min(latency_s["prefix"], latency_s["blend"])
    assert most_s > 1.01 * latency_s["input"]
    for limit_s, is_wide in ((1.001 * latency_s["input"], False), (1.001 * most_s, True)):
        bound = latency_constraint(latency_s=limit_s, kind="queries", quantile=0.99)
        limited = replace(problem, constraint=bound)
        found = with_order(limited, roofline_of(problem), replace(schedule, bounds=bound.bounds))
        assert np.quantile(replayed(problem, found).latency_s, 0.99) <= limit_s
        assert (found.order in SHARING_ORDERS) == is_wide


def test_a_system_prompt_needs_no_other_order():
    problem, schedule = job_of("orca", num_prefixes=1)
    found = with_order(problem, roofline_of(problem), schedule)
    assert found.order not in SHARING_ORDERS and found.reordered is None


def test_a_policy_that_shares_nothing_weighs_no_order_of_prefixes():
    problem, _ = job_of("orca")
    estimate = fixed_estimate("ft", problem, roofline_of(problem), FixedSchedule(
        encode_batch=4, decode_micro_batches=1))
    assert not estimate.shares_prefixes
    found = with_order(problem, roofline_of(problem), schedule_of(problem, estimate))
    assert found.order not in SHARING_ORDERS
    asked = replace(problem, adjustment=Adjustment(order="blend"))
    found = with_order(asked, roofline_of(problem), schedule_of(problem, estimate))
    assert (found.order, found.window, found.reordered) == ("blend", 0, None)


@pytest.mark.parametrize("name", ["orca", "sarathi"])
def test_two_replicas_encode_hardly_a_prefix_twice(name):
    """Dealt in turn, both encode every prefix. A replica that is thrice as slow loses requests."""
    problem, schedule = job_of(name)
    queries = problem.queries.take(run_order("prefix", 0, problem.queries, 0))
    replayer = Replayer(problem, roofline_of(problem), schedule.estimate)

    def times_encoded(results) -> float:
        return sum(pool.tokens.sum() for one in results for pool in one.pools) / ideal(problem)

    for other in (replayer, SlowReplica(replayer, roofline_of(problem), 3.0)):
        found = replay_routed([replayer, other], queries, LEAST_TOKENS)
        assert times_encoded(found.results) < 1.02
        ends_s = [one.makespan_s for one in found.results]
        assert max(ends_s) < 1.1 * min(ends_s)
        assert times_encoded(replay_routed([replayer] * 2, queries, ROUND_ROBIN).results) > 1.1
    assert times_encoded([ReplicasReplayer(replayer, 2).run(queries)]) < 1.02


def test_a_part_of_a_long_job_shows_its_prefixes():
    """Prefixes of 8 samples, and one of all: the part shares as much as the whole."""
    count = 40_000
    nodes = np.random.default_rng(0).permutation(np.arange(count) // 8) + 1
    prefixes = Prefixes(parents=np.append(-1, np.zeros(count // 8, int)), nodes=nodes,
                        ends=np.append(50, np.full(count // 8, 400)))
    ones = np.full(count, 1)
    own = evenly_spread(problem_of(), QueryLengths(
        inputs=ones * 420, most_outputs=ones, prefixes=prefixes), 2000)
    assert 1500 < len(own.inputs) <= 2100
    groups = np.unique(own.prefixes.nodes, return_counts=True)[1]
    assert (groups == 8).mean() > 0.95
