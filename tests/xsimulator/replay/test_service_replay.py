"""Arriving requests on several replicas: times by hand, closed loops, and what all rules keep."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from problems import roofline_of, toy_problem

from xgpt.core.controls import ARRIVAL_ROUTINGS, Adjustment, FixedSchedule
from xgpt.core.problem import QueryLengths
from xrunner.rules.arrival_routing import ArrivalRouter, router_of
from xrunner.rules.iteration import OrcaRule
from xrunner.rules.routing import Window
from xsimulator.replay.event_replay import ReplicaPlan, RoutedReplay, run_routed
from xsimulator.replay.job import planned_queries
from xsimulator.replay.pool import PoolPlan
from xsimulator.replay.queries import Queries
from xsimulator.replay.replicas import merge_results
from xsimulator.replay.service_replay import ServiceReplayer
from xsimulator.replay.step_clock import StepSizes
from xsimulator.rough.formulas import fixed_estimate

SLOT = Window(waiting=0, present=1)  # lacks a request when it has none


class Second:
    """A clock whose every step takes a second."""

    def seconds(self, sizes: StepSizes) -> list[float]:
        return [1.0]


def on_two(routing: str, arrival_s: list[float], outputs: list[int]) -> RoutedReplay:
    """Requests on two replicas of one slot each: a second for the input, and one a token after."""
    lengths = QueryLengths(inputs=np.full(len(outputs), 8), outputs=np.array(outputs),
                           most_outputs=np.array(outputs))
    plans = [ReplicaPlan([PoolPlan(name="all", stages=(0,), kv_tokens=99, clock=Second(),
                                   rule=OrcaRule(num_groups=1, max_active=1, kv_tokens=99))])
             for _ in range(2)]
    return run_routed(Queries(lengths, encode_gives_token=True, arrival_s=arrival_s), plans,
                      router_of(routing, tokens=outputs, windows=[SLOT] * 2, seed=0))


@pytest.mark.parametrize(("routing", "starts_s"), [
    ("least-queries", [0, 0.1, 1, 2]), ("least-tokens", [0, 0.1, 1, 2]),
    ("round-robin", [0, 0.1, 1, 1.1]), ("deferred", [0, 0.1, 1, 1.1]),
    ("fixed", [0, 0.1, 1, 1.1])])
def test_two_replicas_by_hand(routing, starts_s):
    """At 1.05 s both have one request, of which the second replica's ends sooner: who waits at the
    router goes there."""
    found = on_two(routing, [0, 0.1, 0.2, 1.05], [1] * 4)
    times = merge_results(found.results, found.rows).times
    assert times.start_s.tolist() == starts_s
    assert times.last_token_s == pytest.approx(np.add(starts_s, 1))


def test_a_client_sends_its_next_request_when_an_answer_ends():
    found = on_two("least-queries", [0, 0, np.inf, np.inf], [1, 2, 1, 1])
    times = merge_results(found.results, found.rows).times
    assert times.arrival_s.tolist() == times.start_s.tolist() == [0, 0, 1, 2]
    assert times.last_token_s.tolist() == [1, 2, 2, 3]


class Recorded(ArrivalRouter):
    """A router whose calls are recorded, with what came of each."""

    def __init__(self, own: ArrivalRouter) -> None:
        self._own, self.log = own, list[tuple[str, tuple[Any, ...], Any]]()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name == "log":
            return super().__getattribute__(name)
        found = getattr(self._own, name)

        def called(*given: Any) -> Any:
            result = found(*given)
            self.log.append((name, tuple(list(one) if isinstance(one, list) else one
                                         for one in given), result))
            return result
        return called if callable(found) else found


class Service(ServiceReplayer):
    """A service whose routers are recorded."""

    def router(self, lengths: QueryLengths) -> Recorded:
        self.last = Recorded(super().router(lengths))
        return self.last


CASES = [("sarathi", FixedSchedule(max_active=6, token_budget=60)),
         ("waa-c", FixedSchedule(encode_batch=2)),
         ("rra", FixedSchedule(encode_batch=4, decode_iterations=6))]


@pytest.mark.parametrize("routing", ARRIVAL_ROUTINGS)
@pytest.mark.parametrize(("policy", "config"), CASES)
def test_what_every_rule_keeps(policy, config, routing):
    problem = replace(toy_problem(), adjustment=Adjustment(routing=routing))
    timing, count = roofline_of(problem), 80
    one = fixed_estimate(policy, problem, timing, config)
    inputs, outputs = problem.lengths.sample(count, np.random.default_rng(3))
    lengths = planned_queries(problem, inputs, np.where(np.arange(count) % 3, outputs, 1))
    apart = one.beside((one.in_copies(2),))  # equal replicas, as two shapes
    for arrival_s, clients in ((np.cumsum(np.full(count, 0.6 / one.figures.throughput_qps)), None),
                               (np.zeros(count), 7)):
        service = Service(problem, timing, one.in_copies(3))
        found, other = (own.run(lengths, arrival_s, concurrency=clients) for own in (
            service, Service(problem, timing, apart)))
        times = found.times
        assert np.array_equal(np.sort(np.concatenate(found.replicas)), np.arange(count))
        assert (times.start_s >= times.arrival_s).all() and len(found.replicas) == 3
        for name in ("arrival_s", "start_s", "first_token_s", "last_token_s"):
            assert np.array_equal(getattr(times, name), getattr(other.times, name))
        if clients is not None:  # as many are there as clients, until none is left to send
            ends_s = np.sort(times.last_token_s)[:count - clients]
            assert np.array_equal(times.arrival_s, np.append(np.zeros(clients), ends_s))
        again = ServiceReplayer.router(service, lengths)
        assert [getattr(again, name)(*given) for name, given, _ in service.last.log] == [
            result for *_, result in service.last.log], "a recorded run is routed alike"
