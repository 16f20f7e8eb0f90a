"""What csrc/planning_least.cpp finds of lines' least steps is what arrays find, to the bit."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from compilers import has_compiler
from problems import problem_of
from problems import roofline_of as paper_roofline
from problems_suite import captured, noisy_profile, planted, roofline_of, toy_problem
from representative import some

from xscheduler.spaces.continuous import ContinuousSpace
from xscheduler.tensor_plans import tensor_plans
from xsimulator.policies.continuous import bounds
from xsimulator.policies.continuous.bounds import Lines

POLICIES = ("orca", "vllm", "sarathi")
TIMES = {"smooth": lambda problem: roofline_of(problem),
         "bumpy": lambda problem: planted(np.random.default_rng(4), roofline_of(problem)),
         "noisy": lambda problem: noisy_profile(np.random.default_rng(2), problem, noise=0.1),
         "captured": lambda problem: captured(roofline_of(problem))}
TOYS = {"fast": {}, "tight memory": {"memory": 1.2e8}, "a token at most": {
    "pairs": np.array([[30, 1]])}, "short": {"outputs": (2.0, 0.8, 4), "quantile": 0.5}}


pytestmark = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")


def assert_same(problem, timing, policy: str, monkeypatch) -> int:
    """Steps and latencies of some lines of every plan, at rates up to the largest; how often there
    was a native answer."""
    space, rng = ContinuousSpace(policy, problem, timing, tensor_plans(problem, timing)), (
        np.random.default_rng(7))
    served = 0
    for key in space.plans:
        lines = [line for line in space.lines if space.plans[line.plan] == key]
        held = space.bounds.held(space.form.plans.both(*key), Lines(
            np.full(len(lines), 1000.0), *(np.array([own[place] for own in lines], float)
                                           for place in (2, 3))))
        some_lines = np.arange(len(lines))[::2]
        rates = held.top[some_lines, None] * np.append(rng.uniform(0, 1, 30)**3, (1.0, 1e-5))
        for ask in (space.bounds.interval_s, space.bounds.least_latency_s):
            with monkeypatch.context() as patch:
                patch.setattr(bounds, "native", lambda: None)
                by_arrays = ask(held, some_lines, rates)
            with monkeypatch.context() as patch:
                for name in ("_interval_s", "_least_latency_s"):
                    patch.setattr(bounds.ContinuousBounds, name, None)
                try:
                    found = ask(held, some_lines, rates)
                except TypeError:  # arrays have to serve
                    continue
            served += 1
            np.testing.assert_array_equal(found, by_arrays)
    return served


@pytest.mark.parametrize(("toy", "times", "policy"), some(
    product(TOYS, TIMES, POLICIES), lambda case: case[0] == "tight memory"))
def test_least_steps_are_the_same_to_the_bit(toy, times, policy, monkeypatch):
    problem = toy_problem(**TOYS[toy])
    served = assert_same(problem, TIMES[times](problem), policy, monkeypatch)
    assert served > 0


@pytest.mark.parametrize(("model", "task", "policy"), some(
    product(("t5-11b", "gpt3-101b"), ("S", "C2"), POLICIES), lambda case: case[2] == "sarathi"))
def test_so_are_those_of_long_pipelines(model, task, policy, monkeypatch):
    """Stages of several kinds, encoder-decoder models too."""
    problem = problem_of(model, lengths=task)
    assert assert_same(problem, paper_roofline(problem), policy, monkeypatch) > 0


def test_where_a_table_refuses_sizes_arrays_serve():
    problem = toy_problem()
    timing = roofline_of(problem)
    space = ContinuousSpace("sarathi", problem, timing, tensor_plans(problem, timing))
    plan = space.form.plans.both(*space.plans[0])
    held = space.bounds.held(plan, Lines(*(np.full(1, value) for value in (64.0, 1.0, 300.0))))
    given = held, np.arange(1), held.top[:, None]
    own = space.bounds.interval_s(*given)
    plan.least_steps.decode_rows.is_finite = False
    assert space.bounds._natively(*given, None) is None
    assert space.bounds.interval_s(*given) == own
