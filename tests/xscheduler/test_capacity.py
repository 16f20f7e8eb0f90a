"""Capacity of servers with a fixed time for each request, against the exact tail of M/D/1."""

import math

import numpy as np
import pytest

from xgpt.core.arrivals import Arrivals
from xgpt.core.constraint import Bound, Constraint
from xgpt.core.problem import QueryLengths, QueryTimes
from xscheduler.capacity import Trials, highest_rate

NO_LIMIT = Constraint(bounds=(Bound(limit_s=math.inf),))


class SingleTokens:
    """Requests of one token, which arrive at random."""

    def __init__(self, seed):
        self.seed, self.arrivals, self.clients = seed, Arrivals(), None

    def at(self, rate, count):
        ones = np.ones(count, int)
        return (QueryLengths(inputs=ones, most_outputs=ones, outputs=ones),
                self.arrivals.at_rate(rate, count, self.seed))


def server(each_s, replicas=1):
    """A replay: each request takes `each_s` at the replica that is free first. With equal times
    that is each in turn, and a request begins when it is there and the one before it is done."""
    def replay(lengths, arrival_s, clients):
        start_s = np.empty(len(arrival_s))
        for first in range(replicas):
            own = arrival_s[first::replicas]
            before = each_s * np.arange(len(own))
            start_s[first::replicas] = before + np.maximum.accumulate(own - before)
        return QueryTimes(arrival_s=arrival_s, start_s=start_s, first_token_s=start_s + each_s,
                          last_token_s=start_s + each_s)

    return replay


def found(each_s, replicas=1, *, seeds=range(12), constraint=NO_LIMIT, slower=1.0, requests=16000):
    return [highest_rate(Trials(
        replay=server(each_s, replicas), load=SingleTokens(seed), constraint=constraint,
        requests=requests, slower=slower, saturated_qps=replicas / each_s / slower))
        for seed in seeds]


def mean(every):
    return float(np.mean([one.qps for one in every]))


def test_capacity_is_that_of_the_exact_tail_of_the_queue():
    one, slow, two = found(0.1), found(0.2), found(0.1, 2)
    assert mean(one) == pytest.approx(9.64, abs=0.1)  # the exact tail: 9.55
    assert mean(slow) == pytest.approx(4.57, abs=0.05)
    assert mean(slow) < 0.98 * mean(one) / 2  # a queue of half as many waits as long
    assert mean(two) > 2 * mean(one)
    assert mean(found(0.1, seeds=range(3), requests=None)) == pytest.approx(9.5, abs=0.2)


def test_few_requests_are_not_settled():
    few = found(0.1, requests=1000)
    assert max(one.qps for one in few) > 10  # more than the server can do
    assert not all(one.is_settled for one in few)
    one, = found(0.1, requests=20, seeds=[0])  # they hold at any rate
    assert one == (pytest.approx(10), False)
    assert all(one.is_settled for one in found(0.1, seeds=range(3), requests=None))


def limited(limit_s, **others):
    return Constraint(bounds=(Bound(limit_s=math.inf), Bound(
        metric="ttft", limit_s=limit_s, kind="queries", quantile=0.9)), **others)


def test_longer_steps_and_looser_limits():
    """Times and limits k times as long divide capacity by k; looser limits never lower it."""
    bare = found(0.1, seeds=range(2), constraint=limited(0.5))
    assert mean(found(0.3, seeds=range(2), constraint=limited(1.5))) == pytest.approx(
        mean(bare) / 3)
    doubtful = found(0.1, seeds=range(2), constraint=limited(1.5), slower=3.0)
    assert mean(doubtful) == pytest.approx(mean(bare) / 3)
    rates = [mean(found(0.1, seeds=range(2), constraint=limited(limit)))
             for limit in (0.11, 0.2, 0.4, 0.8)]
    assert rates == sorted(rates) and rates[0] < rates[-1]
    assert mean(found(0.1, seeds=range(2), constraint=limited(0.09))) == 0
    joint = found(0.1, seeds=range(2), constraint=limited(0.5, attainment=0.9))
    assert mean(joint) == mean(bare)  # one limit: its own share and the joint one are the same
