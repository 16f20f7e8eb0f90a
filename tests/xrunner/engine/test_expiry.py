"""Requests whose deadline passes before they begin get no answer; those that have begun end as
they would. Each request is given out once, by one head, by two pools and by replicas."""

import time
from dataclasses import replace

import pytest
from replicated import ANSWERS, CONFIGS, Job, Told
from toy_runs import Collector, run_in_process, run_waa_in_process, toy_waa_rules, waa_pools
from toys import generate, random_queries

from xrunner.query import EXPIRED

DEADLINE, ENOUGH = 10.0, 3  # on the test's clock: passed once so many results are there


def due(queries):
    """`queries`, every third of which has the deadline."""
    return [replace(query, expires_at=DEADLINE) if query.index % 3 else query
            for query in queries]


def check(results, count, answers):
    """Each request once; those without a deadline, and some with one, are answered."""
    assert sorted(one.query.index for one in results) == list(range(count))
    gone = {one.query.index for one in results if one.finish_reason == EXPIRED}
    assert gone and all(index % 3 for index in gone)
    assert len(gone) < sum(index % 3 > 0 for index in range(count)), "those begun have ended"
    assert all(list(one.output_ids) == answers[one.query.index]
               for one in results if one.finish_reason != EXPIRED)


@pytest.fixture
def passes(monkeypatch):
    """Lets the deadline pass once a sink has enough results."""
    def once(sink):
        monkeypatch.setattr(time, "time", lambda: 2 * DEADLINE * (len(sink.results) >= ENOUGH))
        return sink

    return once


@pytest.mark.parametrize("pools", [1, 2])
def test_what_has_not_begun_expires(made, passes, pools):
    directory, model = made("llama")
    queries = random_queries(26, seed=5)
    answers = {query.index: generate(model, query) for query in queries}
    sink = passes(Collector())
    if pools == 1:
        run_in_process(directory, due(queries), num_stages=1, encode_batch=2, max_active=4,
                       sink=sink)
    else:
        run_waa_in_process(directory, due(queries), waa_pools(directory, (1,), (1,)),
                           toy_waa_rules(1, encode_batch=2, max_in_system=4), sink=sink)
    check(sink.results, 26, answers)


@pytest.mark.parametrize(("policy", "config"), CONFIGS)
def test_replicas_tell_rank_zero_of_what_expired(made, passes, policy, config):
    job, sink = Job(made, policy, config), passes(Told())
    job.queries = due(job.queries)
    job.run(sink)
    assert sink.is_complete
    check(sink.results, len(job.queries), ANSWERS)
