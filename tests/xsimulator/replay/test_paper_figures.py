"""The timelines that the paper draws in Figures 1 (ORCA; FT and DSI are in
test_static_closed_form) and 4, in units of one stage's time."""

from __future__ import annotations

import numpy as np
import pytest

from xgpt.core.problem import QueryLengths
from xrunner.rules.batch_sizer import BatchSizer
from xrunner.rules.iteration import OrcaRule
from xrunner.rules.waa import WaaDecodeRule, WaaEncodeRule
from xsimulator.replay import flow
from xsimulator.replay.pool import HandoverPlan, PoolPlan
from xsimulator.replay.queries import Queries
from xsimulator.replay.step_clock import StepSizes


class Units:
    """A clock: an encoded query takes `encode` on every stage, a decoded one `decode`."""

    def __init__(self, stages: int, *, encode: float = 1.0, decode: float = 1.0) -> None:
        self._stages, self._encode, self._decode = stages, encode, decode

    def seconds(self, sizes: StepSizes) -> list[float]:
        took = len(sizes.spans) * self._encode + sizes.decoded * self._decode
        return [took] * self._stages


def run(pools, queries, tokens, *, encode_gives_token=True, handovers=()):
    lengths = QueryLengths(inputs=np.full(queries, 8), outputs=np.full(queries, tokens),
                           most_outputs=np.full(queries, tokens))
    return flow.run(Queries(lengths, encode_gives_token=encode_gives_token), pools, handovers)


def pool_of(name, rule, clock, stages):
    return PoolPlan(name=name, role=name, rule=rule, clock=clock, stages=stages, kv_tokens=10**6)


@pytest.mark.parametrize(("groups", "stage_times"), [(1, 7.0), (3, 3 + 2 / 3)])
def test_figure_4_decoder_micro_batches(groups, stage_times):
    """One encoder stage, three decoder stages, a batch that takes one unit on each stage, two
    tokens: 1 + 2 * 3 units; in three micro-batches the last one is there after 3 2/3."""
    encode = WaaEncodeRule(encode_batch=3, num_groups=1, max_in_system=3, kv_tokens=10**6,
                           encode_kv_tokens=10**6, sizer=BatchSizer(mean_input=8))
    decode = WaaDecodeRule(num_groups=groups, kv_tokens=10_000, group_max_active=3)
    third = 1 / 3
    result = run(
        [pool_of("encode", encode, Units(1, encode=third), (0,)),
         pool_of("decode", decode, Units(3, decode=third), (1, 2, 3))],
        3, 2, encode_gives_token=False,
        handovers=[HandoverPlan(seconds=lambda tokens: 0.0, release=encode.release)])
    assert result.makespan_s == pytest.approx(stage_times)
    assert result.latency_s.max() == pytest.approx(stage_times)


def boxes(result, stage):
    """(what, group, start, end) of each step on a stage."""
    pool = result.pools[0]
    return [(step.kind.value[0].upper(), step.group, round(float(start), 6), round(float(end), 6))
            for step, start, end in zip(pool.steps, pool.start_s[:, stage], pool.end_s[:, stage],
                                        strict=True)]


def test_figure_1_orca():
    """At most one encoding an iteration, with whatever is decoded: iterations of unequal length
    leave bubbles on the second worker."""
    rule = OrcaRule(num_groups=2, max_active=4, kv_tokens=10**6)
    result = run([pool_of("both", rule, Units(2, encode=2.0, decode=0.5), (0, 1))], 4, 3)
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
