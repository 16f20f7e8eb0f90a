"""Requests that arrive over time, by a clock of the test's: a step takes a second, sleep passes.
Replicas are threads, with a real clock."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from replicated import ANSWERS, CONFIGS, Job, Told
from toy_runs import (
    Collector,
    executor_of,
    extent_of,
    head_of,
    run_waa_in_process,
    toy_waa_rules,
    waa_pools,
)

from xgpt.core.controls import ARRIVAL_ROUTINGS, FixedSchedule
from xgpt.core.problem import QueryLengths
from xrunner.comm.point_to_point import local_comms
from xrunner.engine.arrival_supplies import FromArrivals
from xrunner.engine.arrivals import Arriving, RoutedArrivals
from xrunner.engine.head import PoolLink
from xrunner.engine.pipeline import SINGLE_RANK, Neighbours
from xrunner.query import PreparedQuery
from xrunner.rules.arrival_routing import router_of
from xrunner.rules.routing import Load, Window
from xrunner.rules.steps import rules_for
from xsimulator.replay.event_replay import run
from xsimulator.replay.pool import PoolPlan
from xsimulator.replay.queries import Queries

CONTINUOUS = FixedSchedule(max_active=3, token_budget=64)
POLICIES = [*CONFIGS, *((policy, CONTINUOUS) for policy in ("vllm", "orca", "mixed", "lightllm"))]


class Unit:
    """A clock of the replay: every step takes a second."""

    def seconds(self, sizes):
        return [1.0]


class Clock:
    """A clock of the run."""

    def __init__(self):
        self.now, self.slept = 0.0, []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


class Client(Collector):
    """Sends the next request when an answer comes."""

    arriving: Arriving

    def finished(self, result):
        super().finished(result)
        self.arriving.answered()


def worked(job, **arrivals):
    """(results by request, clock, head) of the job on one rank."""
    clock, sink = Clock(), Client()
    executor = executor_of(job.directory, job.one.deployment.stages[0])
    execute, executor.heartbeat = executor.execute, SimpleNamespace(
        note="", waiting=0, output_tokens=0, give_up=None)

    def timed(message, inputs):
        assert not executor.heartbeat.note, "it works"
        out = execute(message, inputs)
        clock.now += 1
        return out

    executor.execute = timed
    sink.arriving = Arriving(iter(range(len(job.queries))), clock, **arrivals)
    head = head_of(job.directory, Neighbours(local_comms(1)[0], SINGLE_RANK), executor,
                   rules_for(job.one)[0], sink, PoolLink(FromArrivals(
                       job.queries, sink.arriving, clock.sleep)))
    head.clock = clock
    head.requests.extent = extent_of(job.queries)
    head.start()
    assert head.run()
    job.check_answers(sink.results)
    return sorted(sink.results, key=lambda one: one.query.index), clock


@pytest.mark.parametrize(("policy", "config"), POLICIES)
def test_a_run_has_the_four_moments_of_the_replay_of_its_arrivals(made, policy, config):
    job = Job(made, policy, config)
    arrival_s = np.cumsum(np.random.default_rng(7).exponential(9, len(job.queries)))
    results, clock = worked(job, arrival_s=arrival_s)
    lengths = QueryLengths(
        inputs=np.array([len(q.input_ids) for q in job.queries]), outputs=job.outputs,
        most_outputs=np.array([q.max_new_tokens for q in job.queries]))
    times = run(Queries(lengths, arrival_s=arrival_s, encode_gives_token=True), [PoolPlan(
        name="all", clock=Unit(), stages=(0,), kv_tokens=20_000, rule=rules_for(job.one)[0])]).times
    for name, expected in (("arrival_s", times.arrival_s), ("encode_start_s", times.start_s),
                           ("first_token_s", times.first_token_s),
                           ("last_token_s", times.last_token_s)):
        assert [getattr(one, name) for one in results] == pytest.approx(expected.tolist()), name
    assert results[0].encode_start_s == pytest.approx(arrival_s[0]), "it slept until then exactly"
    assert max(clock.slept) <= 0.1, "it looks for a stop"
    assert [one.latency_s for one in results] == pytest.approx(
        [one.last_token_s - own for one, own in zip(results, arrival_s, strict=True)])


def test_each_client_of_a_closed_loop_waits_for_its_answer(made):
    results, clock = worked(Job(made, *CONFIGS[2]), concurrency=2)
    assert not clock.slept
    arrivals, ends = ([getattr(one, name) for one in results]
                      for name in ("arrival_s", "last_token_s"))
    assert arrivals[2:] == sorted(ends)[:-2] and arrivals[:2] == [0, 0]


def test_two_pools_answer_what_arrives(made):
    job, clock = Job(made, *CONFIGS[0]), time.perf_counter
    arrival_s = clock() + 0.02 * np.arange(len(job.queries))
    arriving = Arriving(iter(range(len(job.queries))), clock, arrival_s=arrival_s)
    sink, _ = run_waa_in_process(
        job.directory, job.queries, waa_pools(job.directory, (1,), (1,)), toy_waa_rules(1),
        supply=FromArrivals(job.queries, arriving))
    job.check_answers(sink.results)
    assert sink.is_complete and all(
        one.arrival_s == arrival_s[one.query.index] <= one.encode_start_s for one in sink.results)


@pytest.mark.parametrize("place", range(len(ARRIVAL_ROUTINGS)))
def test_replicas_answer_what_arrives(made, place):
    routing = ARRIVAL_ROUTINGS[place]
    job, sink = Job(made, *CONFIGS[place % len(CONFIGS)]), Told()
    begins_s = time.perf_counter()
    job.run(sink, routing=routing, arrival_s=begins_s + 0.005 * np.arange(len(job.queries)))
    assert sink.is_complete
    job.check_answers(sink.results)
    assert {one.replica for one in sink.results} == {0, 1}
    assert all(one.arrival_s <= one.encode_start_s for one in sink.results)
    assert {one.query.index: one.arrival_s for one in sink.results} == pytest.approx(
        {index: begins_s + 0.005 * index for index in ANSWERS})


def test_requests_of_a_lost_replica_are_routed_again():
    clock = Clock()
    arriving = Arriving(iter([5, 7, 9]), clock, arrival_s=np.zeros(10))
    windows = [Window(waiting=9)] * 2
    routed = RoutedArrivals(router_of("least-queries", tokens=[1] * 3, windows=windows, seed=0),
                            arriving, [5, 7, 9], windows)
    given = {0: [], 1: []}

    def give(replica):
        given[replica] += routed.top_up(replica, Load(0, 0))

    def loads():
        return [Load(len(given[replica]), 0) for replica in (0, 1)]

    routed.route(loads, give)
    assert given == {0: [0, 2], 1: [1]} and routed.is_done
    routed.note_begun(0, 1)
    lost, given[0] = given[0], []
    routed.give_back(0, lost, [1])
    assert not routed.is_done
    routed.route(loads, give)
    assert given == {0: [], 1: [1, 0, 2]} and routed.is_done
    routed.away.discard(0)
    assert routed.arrived_s == {0: 0.0, 1: 0.0, 2: 0.0}
    routed.note_done(1, 7)
    assert routed.arrived_s == {0: 0.0, 2: 0.0}


def test_a_deadline_counts_from_the_arrival(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    query = PreparedQuery(index=0, id="q", input_ids=(1,), max_new_tokens=1, expires_at=5.0)
    assert query.arrived(10.0, 12.0).expires_at == 1003.0


def test_requests_may_begin_in_another_order_than_they_came():
    windows = [Window(waiting=9)]
    arriving = Arriving(iter(range(3)), Clock(), arrival_s=np.zeros(3))
    routed = RoutedArrivals(router_of("least-queries", tokens=[1] * 3, windows=windows, seed=0),
                            arriving, range(3), windows)
    routed.route(lambda: [Load(0, 0)], lambda replica: routed.top_up(replica, Load(0, 0)))
    routed.note_begun(0, 1)  # the last one, in a batch of its own
    routed.note_done(0, 2)
    routed.note_begun(0, 2)
    for index in (0, 1):
        routed.note_done(0, index)
    assert routed.is_done and not routed.arrived_s
