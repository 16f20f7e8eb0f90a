"""Replicas replayed together: their requests, and the cost of a slow replica."""

from dataclasses import replace

import numpy as np
import pytest
from problems import roofline_of, toy_problem
from slow_replicas import SlowReplica

from xgpt.core.controls import FIXED, LEAST_TOKENS, FixedSchedule
from xgpt.core.problem import QueryLengths
from xsimulator.replay.event_replay import RoutedReplay
from xsimulator.replay.job import Replayer, planned_queries
from xsimulator.replay.records import PoolRecords
from xsimulator.replay.replicas import replay_routed
from xsimulator.rough.formulas import fixed_estimate

CASES = [("rra", FixedSchedule(encode_batch=12, decode_iterations=12)),
         ("rra", FixedSchedule(encode_batch=12, decode_iterations=12, encode_chunk=64)),
         ("ft", FixedSchedule(encode_batch=32, decode_micro_batches=4)),
         ("sarathi", FixedSchedule(max_active=32, token_budget=200)),
         ("vllm", FixedSchedule(max_active=32, token_budget=2000)),
         ("waa-c", FixedSchedule(encode_batch=4))]


def made(policy: str, config: object, count: int = 300) -> tuple[Replayer, QueryLengths]:
    problem = replace(toy_problem(), num_queries=count)
    timing = roofline_of(problem)
    estimate = fixed_estimate(policy, problem, timing, config)
    inputs, outputs = problem.lengths.sample(count, np.random.default_rng(3))
    return Replayer(problem, timing, estimate), planned_queries(problem, inputs, outputs)


def steps(pool: PoolRecords) -> list[tuple[object, ...]]:
    return [(step.kind, step.group, step.phase, step.iteration, encoded, decoded)
            for step, encoded, decoded in zip(pool.steps, pool.encoded.tolist(),
                                              pool.decoded.tolist(), strict=True)]


def makespan(replay: RoutedReplay) -> float:
    return max(result.makespan_s for result in replay.results)


@pytest.mark.parametrize(("policy", "config"), CASES)
def test_a_replica_takes_the_steps_that_it_takes_alone(policy, config):
    replayer, queries = made(policy, config)
    replay = replay_routed([replayer] * 2, queries, FIXED)
    assert sorted(place for own in replay.rows for place in own) == list(range(300))
    assert replay.num_taken_back == 0
    for own, result in zip(replay.rows, replay.results, strict=True):
        alone = replayer.run(queries.take(np.array(sorted(own))))
        assert [steps(pool) for pool in result.pools] == [steps(pool) for pool in alone.pools]
        assert result.makespan_s == pytest.approx(alone.makespan_s, rel=1e-9)


@pytest.mark.parametrize(("policy", "config"), [
    pytest.param(*case, marks=[pytest.mark.slow] * (place % 2))
    for place, case in enumerate(CASES)])
def test_a_slow_replica_loses_requests_that_it_has_not_begun(policy, config):
    replayer, queries = made(policy, config)
    slow_downs = (1.0, 3.0)
    copies = [replayer, SlowReplica(replayer, roofline_of(replayer.problem), 3.0)]
    replay = replay_routed(copies, queries, LEAST_TOKENS)
    kept = replay_routed(copies, queries, FIXED)
    assert sorted(place for own in replay.rows for place in own) == list(range(300))
    assert replay.num_taken_back > 0
    # the best of all ways to divide the job beforehand, each replica's part spread evenly over it
    best_s = min(max(share_s(replayer, queries, count, slow_downs)) for count in range(200, 300, 4))
    # who has begun cannot be moved: it may be there until its life in a slow replica is over
    life_s = float(np.quantile(kept.results[1].latency_s, 0.5))
    assert makespan(replay) < best_s + life_s < makespan(kept)


def share_s(replayer: Replayer, queries: QueryLengths, count: int,
            slow_downs: tuple[float, float]) -> list[float]:
    own = np.zeros(300, bool)
    own[np.linspace(0, 299, count).astype(int)] = True
    return [slow * replayer.run(queries.take(np.flatnonzero(mask))).makespan_s
            for mask, slow in zip((own, ~own), slow_downs, strict=True)]


@pytest.mark.parametrize(("policy", "config"), CASES[:3])
def test_equal_replicas_exchange_hardly_any_request(policy, config):
    replayer, queries = made(policy, config)
    replay = replay_routed([replayer] * 3, queries, LEAST_TOKENS)
    assert replay.num_taken_back <= 12
    assert max(map(len, replay.rows)) < 1.3 * min(map(len, replay.rows))
