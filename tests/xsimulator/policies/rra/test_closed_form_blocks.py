"""Blocks of iterations and tables of times against every iteration and every question asked."""

from __future__ import annotations

import numpy as np
import pytest
from problems import problem_of, roofline_of
from timelines import phase_timeline

from xgpt.core import catalog
from xgpt.core.lengths import JointLengths, empirical
from xprofiler.roofline import Roofline
from xprofiler.timing import Operator
from xsimulator.occupancy import QueryFlow
from xsimulator.plans import StagePlans
from xsimulator.policies.rra.closed_form import Rra
from xsimulator.policies.rra.config import RraConfig, RraConfigs
from xsimulator.policies.rra.phase_blocks import BlockTable, block_ends
from xsimulator.stage_times import stage_kinds
from xsimulator.step_table import SizeTable, StepTable

EVERY_ITERATION = 10**6
RAGGED = JointLengths(inputs=empirical([5, 80, 700]), outputs=empirical([2, 9, 9, 40, 41, 150]))


class Counting:
    """A timing source that counts the sizes it is asked for."""

    def __init__(self, source):
        self._source = source
        self.asked = 0

    def __getattr__(self, name):
        return getattr(self._source, name)

    def operator_s(self, operator, x, y=0.0, *, tp_degree=1):
        self.asked += np.broadcast(np.asarray(x), np.asarray(y)).size
        return self._source.operator_s(operator, x, y, tp_degree=tp_degree)


@pytest.mark.parametrize(("model", "cluster", "task", "padded", "within"), [
    ("opt-13b", "a40-4", "S", True, 0.003), ("opt-13b", "a40-4", "T", False, 0.003),
    ("gpt3-341b", "a40-48", "C2", True, 0.003), ("t5-11b", "a40-8", "C1", True, 0.003),
    ("opt-13b", "a40-4", None, True, 0.006)])
def test_blocks_are_as_good_as_every_iteration(model, cluster, task, padded, within):
    problem = problem_of(model, cluster, RAGGED if task is None else catalog.task(task))
    roofline = roofline_of(problem, padded=padded)
    configs = [RraConfig(encode_batch=b, decode_iterations=n, tp_degree=t, tp_gpus=g)
               for b in (1, 2, 5, 16, 60, 400) for t, g in ((1, 0), (2, 4))
               for n in sorted({11, 17, 40, 79, problem.lengths.outputs.max - 1})]
    few, every = (Rra(problem, roofline, **options).evaluate(configs)
                  for options in ({}, {"exact_iterations": EVERY_ITERATION}))
    assert few.throughput_qps == pytest.approx(every.throughput_qps, rel=within)
    assert few.latency_s == pytest.approx(every.latency_s, rel=within)
    assert few.memory_bytes.tolist() == every.memory_bytes.tolist()


def test_blocks_cover_every_iteration_once_and_end_where_latency_is_read():
    flow = QueryFlow(catalog.task("T"), is_encoder_decoder=False)
    for n_d in (1, 10, 11, 60, 319):
        ends = block_ends(flow.occupancy(n_d, padded=False), last=n_d // 2, exact_iterations=10)
        assert (np.diff(ends, prepend=0) >= 1).all() and ends[-1] == n_d
        assert n_d // 2 + 1 in ends
        assert len(ends) == n_d if n_d <= 10 else len(ends) < min(n_d + 1, 40)


def test_blocks_hold_the_same_queries_as_the_phase():
    flow = QueryFlow(RAGGED, is_encoder_decoder=False)
    table = BlockTable(flow, padded=False, seen_iterations=100)
    for n_d in (3, 40, 149):
        where = table.columns(np.array([n_d]), np.array([50]))
        blocks, whole = table.take(where, np.array([12.5])), flow.occupancy(
            n_d, padded=False)
        assert blocks.widths.sum() == n_d
        assert (blocks.widths * blocks.active).sum() == pytest.approx(whole.active.sum())
        assert (blocks.widths * blocks.active * blocks.context).sum() == pytest.approx(
            whole.context.sum())
        assert blocks.phases_before[0] == 99 // n_d


def test_as_many_queries_end_as_are_encoded():
    flow = QueryFlow(catalog.task("S"), is_encoder_decoder=True)
    for n_d in (1, 7, 80):
        assert flow.occupancy(n_d, padded=False).removed.sum() == pytest.approx(1.0)


def test_equal_rounds_at_once_are_as_one_by_one():
    rng = np.random.default_rng(1)
    for _ in range(40):
        stages, widths = int(rng.integers(1, 7)), np.array([1, 1, *rng.integers(1, 9, 4)])
        groups = int(rng.choice([1, stages, 2 * stages]))
        encode, speed = rng.uniform(0.3, 9, stages), rng.uniform(0.3, 1.7, stages)
        blocks = np.linspace(1, rng.uniform(0.4, 1), len(widths))[:, None] * speed
        one_by_one = np.repeat(blocks, widths, axis=0)
        once, single = (phase_timeline(
            encode_s=encode[None], encode_rest_s=(groups - 1) * encode[None], decode_s=d[None],
            decode_rest_s=(groups - 1) * d[None], iterations=np.array([len(d)]), widths=w)
            for d, w in ((blocks, widths[None]), (one_by_one, None)))
        assert once.period_s == pytest.approx(single.period_s, rel=0.003)
        at_ends = single.finish_s[0, np.cumsum(widths) - 1]
        assert once.finish_s[0] == pytest.approx(at_ends, rel=0.01)


@pytest.mark.parametrize("configs", [3, 400])
def test_both_ways_through_the_stages_agree(configs):
    """Few configurations are advanced as whole arrays, many stage by stage."""
    rng = np.random.default_rng(2)
    shape, widths = (configs, 5, 4), rng.integers(1, 5, (configs, 5))
    times = {"encode_s": rng.random((configs, 4)), "encode_rest_s": rng.random((configs, 4)),
             "decode_s": rng.random(shape), "decode_rest_s": rng.random(shape)}
    together = phase_timeline(**times, iterations=np.full(configs, 5), widths=widths)
    first = phase_timeline(**{k: v[:1] for k, v in times.items()}, iterations=np.array([5]),
                           widths=widths[:1])
    assert together.period_s[0] == pytest.approx(first.period_s[0], rel=1e-12)
    assert together.finish_s[0] == pytest.approx(first.finish_s[0], rel=1e-12)


def test_times_are_asked_for_a_few_sizes_a_configuration():
    problem = problem_of("opt-13b", "a40-4", catalog.task("S"))
    timing = Counting(Roofline(problem.model, problem.cluster.device, problem.dtype))
    rra = Rra(problem, timing)
    batch, n_d = (axis.ravel() for axis in np.meshgrid(np.arange(16, 116), np.arange(1, 80)))
    same = np.ones_like(batch)
    configs = RraConfigs(encode_batch=batch, decode_iterations=n_d, tp_degree=same,
                         tp_gpus=0 * same, decode_micro_batches=0 * same)
    rra.evaluate(configs)
    timing.asked = 0
    rra.evaluate(configs)
    # attention of the slowest and of the other groups, and compaction, in each of 13 blocks
    assert timing.asked / len(configs) < 3 * 16


def test_tables_refuse_exactly_what_their_function_refuses():
    table = SizeTable(lambda n: np.where(n > 100, np.inf, 1.0 + n)[..., None] * [1.0, 3.0])
    sizes = np.array([0.25, 1.0, 37.3, 99.0, 100.0, 100.1, 5000.0])
    assert np.isfinite(table(sizes)).tolist() == 2 * [(sizes <= 100).tolist()]
    assert table(sizes)[1, :5] == pytest.approx(3 * (1 + sizes[:5]), rel=1e-4)


def test_stages_of_a_kind_cost_what_each_costs():
    problem = problem_of("gpt3-39b", "a40-16", catalog.task("S"))
    roofline = Roofline(problem.model, problem.cluster.device, problem.dtype)
    times = StagePlans(problem, roofline).both(2, 6).times
    tables = StepTable(stage_kinds(times))
    queries, context = np.array([[1.0, 7.3, 240.0]]), np.array([[90.0, 300.0, 310.0]])
    found = np.stack([tables.decode_s(queries, context)[kind] for kind in tables.kind_of], axis=-1)
    assert found == pytest.approx(times.decode_s(queries, context), rel=2e-4)
    assert len(set(tables.kind_of)) < len(times.stages)


def test_compaction_is_charged():
    class Free(Counting):
        def operator_s(self, operator, x, y=0.0, *, tp_degree=1):
            seconds = super().operator_s(operator, x, y, tp_degree=tp_degree)
            return 0.0 * seconds if operator is Operator.KV_COMPACTION else seconds

    problem = problem_of("opt-13b", "a40-4", catalog.task("S"))
    roofline = Roofline(problem.model, problem.cluster.device, problem.dtype)
    config = [RraConfig(encode_batch=40, decode_iterations=8)]
    charged, free = (Rra(problem, timing).evaluate(config).period_s[0]
                     for timing in (roofline, Free(roofline)))
    assert 1.0 < charged / free < 1.05
