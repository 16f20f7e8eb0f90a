"""The order of events, and replays of requests with arrival times, on any number of pools."""

import numpy as np
import pytest

from xgpt.core.errors import XgptError
from xgpt.core.problem import QueryLengths
from xrunner.rules.batch_sizer import BatchSizer
from xrunner.rules.iteration import OrcaRule
from xrunner.rules.rra import RraRule
from xrunner.rules.waa import SystemLimits, WaaDecodeRule, WaaEncodeRule
from xsimulator.replay.event_replay import run
from xsimulator.replay.kernel import ARRIVAL, TURN, Kernel
from xsimulator.replay.pool import HandoverPlan, PoolPlan
from xsimulator.replay.queries import Queries
from xsimulator.replay.step_clock import StepSizes

MUCH = 10**6


class Unit:
    """A clock whose every step takes a second on every stage."""

    def __init__(self, stages: int = 1) -> None:
        self._stages = stages

    def seconds(self, sizes: StepSizes) -> list[float]:
        return [1.0] * self._stages


def queries(arrival_s, tokens=3, *, encode_gives_token=True) -> Queries:
    count = len(arrival_s)
    lengths = QueryLengths(inputs=np.full(count, 8), outputs=np.full(count, tokens),
                           most_outputs=np.full(count, tokens))
    return Queries(lengths, arrival_s=arrival_s, encode_gives_token=encode_gives_token)


def both(name="both", stage=0, kv_tokens=MUCH, batch=1):
    return PoolPlan(name=name, clock=Unit(), stages=(stage,), kv_tokens=kv_tokens, rule=RraRule(
        encode_batch=batch, decode_iterations=2, num_groups=1, max_active=4, kv_tokens=kv_tokens))


def waa(name, stages, capacity=4):
    """An encode pool, a decode pool and the handover between them."""
    encode = WaaEncodeRule(SystemLimits(encode_batch=1, max_in_system=capacity), num_groups=2,
                           kv_tokens=MUCH, encode_kv_tokens=MUCH, sizer=BatchSizer(mean_input=8))
    decode = WaaDecodeRule(num_groups=1, kv_tokens=10_000, group_max_active=capacity)
    pools = [PoolPlan(name=f"{role} {name}", role=role, rule=rule, clock=Unit(), stages=(stage,),
                      kv_tokens=MUCH)
             for role, rule, stage in zip(("encode", "decode"), (encode, decode), stages,
                                          strict=True)]
    return pools, HandoverPlan(seconds=lambda tokens: 0.5, release=encode.release,
                               source=pools[0].name, target=pools[1].name)


def test_events_at_one_time_come_by_priority_and_then_as_they_were_made():
    kernel, seen = Kernel(), []
    for name, time_s, priority in (("c", 1.0, TURN), ("a", 1.0, ARRIVAL), ("d", 1.0, TURN),
                                   ("b", 1.0, ARRIVAL), ("first", 0.5, TURN)):
        kernel.at(time_s, priority, lambda now, name=name: seen.append((name, now)))
    assert kernel.is_free_until(0.4) and not kernel.is_free_until(0.5)
    kernel.run()
    assert seen == [("first", 0.5), ("a", 1.0), ("b", 1.0), ("c", 1.0), ("d", 1.0)]
    assert kernel.is_free_until(2.0)


def test_what_an_event_asks_for_comes_in_its_place():
    kernel, seen = Kernel(), []
    kernel.at(0.0, TURN, lambda now: kernel.at(now, ARRIVAL, seen.append))
    kernel.at(0.0, TURN, lambda now: seen.append("turn"))
    kernel.run()
    assert seen == [0.0, "turn"]


def test_a_query_is_begun_when_it_comes_and_the_pool_is_free():
    result = run(queries([5.0, 2.0, 5.0, 30.0]), [both()])
    times = result.times
    assert times.arrival_s.tolist() == [5.0, 2.0, 5.0, 30.0]
    # the second comes first: encoded from 2 to 3, decoded until 5, when the others come
    assert times.start_s.tolist() == [5.0, 2.0, 8.0, 30.0]
    assert times.first_token_s.tolist() == [6.0, 3.0, 9.0, 31.0]
    assert times.last_token_s.tolist() == [8.0, 5.0, 11.0, 33.0]
    assert result.latency_s.tolist() == [3.0] * 4
    assert result.makespan_s == 31.0, "from the first arrival on"


def test_an_encoder_decoder_models_first_token_is_its_first_iterations():
    times = run(queries([1.0], encode_gives_token=False), [both()]).times
    # encoded from 1 to 2, an iteration each until 4; the third one after an empty encoding
    assert times.first_token_s.tolist() == [3.0]
    assert times.last_token_s.tolist() == [5.0]


def test_requests_go_to_pools_of_their_own_in_turn():
    alone = run(queries([0.0, 0.0]), [both()])
    result = run(queries([0.0] * 4), [both("left"), both("right", 1)])
    assert [pool.name for pool in result.pools] == ["left", "right"]
    for pool, members in zip(result.pools, ({0, 2}, {1, 3}), strict=True):
        assert {query for step in pool.steps for query in step.joined} == members
        assert pool.end_s.tolist() == alone.pools[0].end_s.tolist()
    assert result.makespan_s == alone.makespan_s


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("gives_token", [True, False])
def test_two_pairs_of_pools_work_as_two_jobs(tokens, gives_token):
    (pools, link), (others, other_link) = waa("a", (0, 1)), waa("b", (2, 3))
    result = run(queries([0.0] * 12, tokens, encode_gives_token=gives_token), [*pools, *others],
                 [link, other_link])
    pair, own = waa("c", (0, 1))
    alone = run(queries([0.0] * 6, tokens, encode_gives_token=gives_token), pair, [own])
    for first in (0, 1):
        times = (result.times.start_s, result.times.first_token_s, result.times.last_token_s)
        assert [t[first::2].tolist() for t in times] == [
            alone.times.start_s.tolist(), alone.times.first_token_s.tolist(),
            alone.times.last_token_s.tolist()]
    assert [link.source for link in result.handovers] == ["encode a", "encode b"]
    if tokens > 1 or not gives_token:
        assert all(link.end_s.tolist() == alone.handovers[0].end_s.tolist()
                   for link in result.handovers)


def test_two_encode_pools_hand_over_to_one_decode_pool():
    pools, link = waa("a", (0, 1), capacity=2)
    others, other = waa("b", (2, 3), capacity=2)
    target = PoolPlan(name="decode a", role="decode", clock=Unit(), stages=(1,), kv_tokens=MUCH,
                      rule=WaaDecodeRule(num_groups=1, kv_tokens=10_000, group_max_active=4))
    result = run(queries([0.0] * 10), [pools[0], others[0], target], [
        link, HandoverPlan(seconds=other.seconds, release=other.release, source="encode b",
                           target="decode a")])
    assert [len(pool.steps) for pool in result.pools[:2]] == [5, 5]
    assert result.pools[2].decoded.max() == 4
    assert np.isfinite(result.times.last_token_s).all()


def test_a_request_that_never_fits_is_refused_when_it_comes():
    rule = OrcaRule(num_groups=1, max_active=2, kv_tokens=10)
    with pytest.raises(XgptError, match="request 0 reserves 11 tokens"):
        run(queries([4.0]), [PoolPlan(name="both", rule=rule, clock=Unit(), stages=(0,),
                                      kv_tokens=10)])


# --- the timelines of the paper's Figures 1 (ORCA) and 4, in units of one stage's time --------


class Units:
    """A clock: an encoded request takes `encode` on every stage, a decoded one `decode`."""

    def __init__(self, stages: int, *, encode: float = 1.0, decode: float = 1.0) -> None:
        self._stages, self._encode, self._decode = stages, encode, decode

    def seconds(self, sizes: StepSizes) -> list[float]:
        took = len(sizes.spans) * self._encode + sizes.decoded * self._decode
        return [took] * self._stages


def pool_of(name, rule, clock, stages):
    return PoolPlan(name=name, role=name, rule=rule, clock=clock, stages=stages, kv_tokens=10**6)


@pytest.mark.parametrize(("groups", "stage_times"), [(1, 7.0), (3, 3 + 2 / 3)])
def test_figure_4_decoder_micro_batches(groups, stage_times):
    """One encoder stage, three decoder stages, a batch that takes one unit on each stage, two
    tokens: 1 + 2 * 3 units; in three micro-batches the last one is there after 3 2/3."""
    encode = WaaEncodeRule(SystemLimits(encode_batch=3, max_in_system=3), num_groups=1,
                           kv_tokens=10**6, encode_kv_tokens=10**6, sizer=BatchSizer(mean_input=8))
    decode = WaaDecodeRule(num_groups=groups, kv_tokens=10_000, group_max_active=3)
    third = 1 / 3
    result = run(queries([0.0] * 3, 2, encode_gives_token=False),
                 [pool_of("encode", encode, Units(1, encode=third), (0,)),
                  pool_of("decode", decode, Units(3, decode=third), (1, 2, 3))],
                 [HandoverPlan(seconds=lambda tokens: 0.0, release=encode.release)])
    assert result.makespan_s == pytest.approx(stage_times)
    assert result.latency_s.max() == pytest.approx(stage_times)


def boxes(result, stage):
    """(what, group, start, end) of each step on a stage."""
    pool = result.pools[0]
    return [(step.kind.value[0].upper(), step.group, round(float(start), 6), round(float(end), 6))
            for step, start, end in zip(pool.steps, pool.start_s[:, stage], pool.end_s[:, stage],
                                        strict=True)]


def test_figure_1_orca():
    """At most one encoding per iteration, beside all decoding. Iterations of unequal length leave
    bubbles on the second worker."""
    rule = OrcaRule(num_groups=2, max_active=4, kv_tokens=10**6)
    result = run(queries([0.0] * 4), [
        pool_of("both", rule, Units(2, encode=2.0, decode=0.5), (0, 1))])
    kinds = [(what, group) for what, group, _, _ in boxes(result, 0)]
    assert kinds == [("E", 0), ("E", 1), ("M", 0), ("M", 1), ("D", 0), ("D", 1), ("D", 0),
                     ("D", 1)]
    pool = result.pools[0]
    assert pool.encoded.max() == 1, "never more than one encoding an iteration"
    assert pool.decoded.tolist() == [0, 0, 1, 1, 2, 2, 1, 1]
    assert boxes(result, 0) == [
        ("E", 0, 0, 2), ("E", 1, 2, 4), ("M", 0, 4, 6.5), ("M", 1, 6.5, 9), ("D", 0, 9, 10),
        ("D", 1, 11.5, 12.5), ("D", 0, 12.5, 13), ("D", 1, 13.5, 14)]
    assert boxes(result, 1) == [
        ("E", 0, 2, 4), ("E", 1, 4, 6), ("M", 0, 6.5, 9), ("M", 1, 9, 11.5), ("D", 0, 11.5, 12.5),
        ("D", 1, 12.5, 13.5), ("D", 0, 13.5, 14), ("D", 1, 14, 14.5)]
    # unequal steps leave bubbles on the second worker: before the first mixed step
    gaps = pool.start_s[1:, 1] - pool.end_s[:-1, 1]
    assert gaps.max() == pytest.approx(0.5)
