"""What csrc/planning_rra.cpp finds of RRA's points is what arrays find, within 1e-9."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from compilers import has_compiler
from problems import problem_of, roofline_of
from toy_jobs import roofline_of as toy_roofline
from toy_jobs import toy_problem

from xgpt.core.lengths import IntArray, JointLengths, truncated_normal
from xprofiler.timing import Operator, Reach
from xscheduler.tensor_plans import tensor_plans
from xsimulator import pipeline
from xsimulator.native import native
from xsimulator.policies.figures import EstimateArrays
from xsimulator.policies.rra import closed_form, phase_blocks
from xsimulator.policies.rra.config import RraConfigs

COUNT, NEAR = 40, 1e-9


pytestmark = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")


class Limited:
    """A source that has measured up to some sizes and refuses what is four times as large."""

    def __init__(self, source, most: float) -> None:
        self._source, self._most = source, most
        self.facts = source.facts

    def __getattr__(self, name):
        return getattr(self._source, name)

    def operator_s(self, operator, x, y=0.0, *, tp_degree=1):
        seconds = self._source.operator_s(operator, x, y, tp_degree=tp_degree)
        return np.where(np.asarray(x, float) > 4 * self._most, np.inf, seconds)

    def reach(self, operator: Operator, tp_degree: int) -> Reach:
        self._source.reach(operator, tp_degree)
        return Reach(self._most, np.inf)


class Case(NamedTuple):
    model: str
    cluster: str
    task: str
    padded: bool = False
    groups: int | None = None
    most: float = np.inf
    kind: str = "sequence"


CASES = [Case("opt-13b", "a40-4", "S", padded=True), Case("opt-13b", "a40-4", "S", most=300.0),
         Case("opt-13b", "a40-8", "C2", groups=12), Case("t5-11b", "a40-8", "T"),
         Case("gpt3-175b", "a40-16", "G", kind="queries")]


class Both(NamedTuple):
    """The same points of a problem, natively and by arrays."""

    natively: closed_form.Rra
    arrays: closed_form.Rra
    configs: RraConfigs


@pytest.fixture
def by_arrays() -> Callable:
    """Calls a function where there is no library."""
    def call(function):
        with pytest.MonkeyPatch.context() as patch:
            for module in (pipeline, phase_blocks, closed_form):
                patch.setattr(module, "native", lambda: None)
            return function()

    return call


def both(case: Case, call: Callable, seed: int = 0) -> Both:
    problem = problem_of(case.model, case.cluster, case.task, kind=case.kind)
    problem = replace(problem, fixed=replace(problem.fixed, decode_micro_batches=case.groups))
    source = roofline_of(problem, padded=case.padded)
    timing = source if np.isinf(case.most) else Limited(source, case.most)
    plans = tensor_plans(problem, timing)
    natively = closed_form.Rra(problem, timing)
    arrays = call(lambda: closed_form.Rra(problem, timing))
    # tables of phases are a flow's: these are to be derived by arrays too
    flow = arrays.flow
    arrays.blocks = call(lambda: phase_blocks.BlockTable(
        flow, padded=timing.facts.is_padded, seen_iterations=arrays.seen_iterations))
    assert natively.native is not None and arrays.native is None
    rng = np.random.default_rng(seed)

    def drawn(most: float) -> IntArray:
        return np.minimum(np.exp(rng.uniform(0, np.log(most + 1), COUNT)), most).astype(np.int64)

    iterations, batch = drawn(flow.max_iterations), drawn(2000)
    iterations[:4] = 1, 2, 3, flow.max_iterations
    plan = np.array(plans)[rng.integers(0, len(plans), COUNT)]
    return Both(natively, arrays, RraConfigs(
        encode_batch=batch, decode_iterations=iterations, tp_degree=plan[:, 0], tp_gpus=plan[:, 1],
        decode_micro_batches=np.full(COUNT, case.groups or 0)))


@pytest.mark.parametrize("case", CASES)
def test_points_are_the_same(case: Case, by_arrays: Callable) -> None:
    own = both(case, by_arrays)
    mine = own.natively.evaluate(own.configs)
    theirs = by_arrays(lambda: own.arrays.evaluate(own.configs))
    for name in EstimateArrays.__slots__:
        np.testing.assert_allclose(getattr(mine, name), getattr(theirs, name), rtol=NEAR,
                                   err_msg=name)
    is_timed = theirs.throughput_qps > 0
    assert is_timed.any() and is_timed.all() == np.isinf(case.most)


def test_every_size_of_a_call_is_reached(by_arrays: Callable) -> None:
    """A batch far larger than those asked for before makes tables anew."""
    own = both(CASES[2], by_arrays)
    small, large = (replace(own.configs.take(np.zeros(1, np.int64)),
                            encode_batch=np.array([size]), decode_iterations=np.array([20]))
                    for size in (2, 1 << 18))
    for configs in (small, large, small):
        mine = own.natively.evaluate(configs)
        theirs = by_arrays(lambda configs=configs: own.arrays.evaluate(configs))
        np.testing.assert_allclose(mine.latency_s, theirs.latency_s, rtol=NEAR)


def test_lengths_that_are_nearly_one_need_their_memory(by_arrays: Callable) -> None:
    """What is left of their variance by rounding was below 0 and has no root: a million queries
    had room natively, and the plan ended in an error."""
    lengths = JointLengths(inputs=truncated_normal(30, 0.01, 30),
                           outputs=truncated_normal(53, 0.2, 106))
    problem = replace(toy_problem(per_node=1), lengths=lengths, default_max_tokens=106)
    none = np.zeros(2, np.int64)
    configs = RraConfigs(encode_batch=np.array([1, 1_000_000]), decode_iterations=none + 5,
                         tp_degree=none + 1, tp_gpus=none, decode_micro_batches=none)

    def figures() -> EstimateArrays:
        return closed_form.Rra(problem, toy_roofline(problem)).evaluate(configs)

    mine, theirs = figures(), by_arrays(figures)
    np.testing.assert_allclose(mine.kv_tokens, theirs.kv_tokens, rtol=NEAR)
    assert mine.fits.tolist() == theirs.fits.tolist() == [True, False]


@cache
def lines(seed: int) -> tuple[list[pipeline.StageWork], IntArray, np.ndarray]:
    rng = np.random.default_rng(seed)
    configs, most = int(rng.integers(1, 40)), int(rng.integers(1, 14))
    blocks = np.sort(rng.integers(1, most + 1, configs))[::-1].astype(np.int64)
    kinds = [pipeline.StageWork(
        encode_s=rng.uniform(0, 5, configs), encode_rest_s=rng.uniform(0, 9, configs),
        decode_s=rng.uniform(0, 1, (most, configs)), decode_rest_s=rng.uniform(
            0, 5, (most, configs))) for _ in range(3)]
    work = [kinds[0], *(kinds[k] for k in rng.integers(0, 3, int(rng.integers(0, 16))))]
    return work, blocks, rng.integers(0 if most == 1 else 1, 40, (most, configs)).astype(float)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("is_even", [False, True])
def test_timelines_are_the_same(seed: int, is_even: bool, by_arrays: Callable) -> None:
    work, blocks, widths = lines(seed)
    given = None if is_even else widths
    mine = pipeline.sorted_timeline(work, blocks, given)
    theirs = by_arrays(lambda: pipeline.sorted_timeline(work, blocks, given))
    np.testing.assert_allclose(mine.period_s, theirs.period_s, rtol=NEAR)
    np.testing.assert_allclose(mine.encoded_s, theirs.encoded_s, rtol=NEAR)
    is_own = np.arange(widths.shape[0]) < blocks[:, None]
    np.testing.assert_allclose(mine.finish_s[is_own], theirs.finish_s[is_own], rtol=NEAR)
    assert native() is not None
