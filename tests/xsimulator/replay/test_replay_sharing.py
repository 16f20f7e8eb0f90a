"""More ranks than cores: a rank that works alone is not slowed down, one that never does is in
full."""

from dataclasses import replace

import numpy as np
import pytest
from problems import problem_of

from xgpt.core.controls import FixedSchedule
from xgpt.core.deployment import StageAssignment
from xgpt.core.problem import QueryTimes
from xprofiler.roofline import Roofline
from xrunner.rules.steps import Step, StepKind
from xsimulator.replay.job import planned_queries, replay_job, slow_downs
from xsimulator.replay.records import PoolRecords, ReplayResult
from xsimulator.rough.formulas import fixed_estimate

SHARING = 2.0


class Shared(Roofline):
    """The roofline on a core that `SHARING` ranks share: seconds with all of them at work."""

    def __init__(self, *of, sharing=SHARING):
        super().__init__(*of)
        self.facts = replace(self.facts, sharing=sharing,
                             step_overhead_s=SHARING * self.facts.step_overhead_s)

    def operator_s(self, operator, x, y=0.0, *, tp_degree=1):
        return SHARING * super().operator_s(operator, x, y, tp_degree=tp_degree)


def recorded(start_s, end_s) -> ReplayResult:
    """[steps][stages]"""
    none = np.zeros(0)
    steps = tuple(Step(kind=StepKind.DECODE, group=0, phase=0, iteration=i + 1)
                  for i in range(len(start_s)))
    pool = PoolRecords(
        name="both", role="both", stages=(0, 1), steps=steps, decoded=none, encoded=none,
        tokens=none, context=none, start_s=np.array(start_s, float), end_s=np.array(end_s, float),
        memory_s=none, memory_tokens=none, kv_tokens=1)
    times = QueryTimes(arrival_s=none, start_s=none, first_token_s=none, last_token_s=none)
    return ReplayResult(pools=(pool,), handovers=(), times=times, output_tokens=none,
                        preemptions=0)


def stages(degrees) -> list[StageAssignment]:
    return [StageAssignment(index=i, ranks=tuple(range(sum(degrees[:i]), sum(degrees[:i + 1]))),
                            first_layer=i, num_layers=1) for i in range(len(degrees))]


def test_only_time_spent_together_is_slow():
    # stage 0 works from 0 to 2, stage 1 from 1 to 5: together for one second
    result = recorded([[0.0, 1.0]], [[2.0, 5.0]])
    assert slow_downs(result, stages([1, 1]), cores=1)[0] == pytest.approx([2 / 1.5, 4 / 3.5])
    assert slow_downs(result, stages([1, 1]), cores=2)[0] == [1.0, 1.0]
    # a group of two ranks shares a core with itself, and with the other stage
    assert slow_downs(result, stages([2, 1]), cores=1)[0] == pytest.approx(
        [2 / (1 / 2 + 1 / 3), 4 / (1 / 3 + 3)])


def replays(config, task="S", **changes):
    """(makespan with own cores, with all ranks slowed down as if all worked, with shared cores)."""
    problem = problem_of("opt-13b", "a40-4", task)
    device = problem.cluster.device
    own, shared = Roofline(problem.model, device, problem.dtype), Shared(
        problem.model, device, problem.dtype)
    estimate = fixed_estimate("rra" if config.decode_iterations else "waa-c", problem,
                           own, config)
    estimate = estimate.changed(**changes)
    inputs, outputs = problem.lengths.sample(300, np.random.default_rng(0))
    queries = planned_queries(problem, inputs, outputs)
    jobs = [replay_job(problem, timing, estimate, queries).makespan_s for timing in (own, shared)]
    slowed = Shared(problem.model, device, problem.dtype, sharing=1.0)
    return jobs[0], replay_job(problem, slowed, estimate, queries).makespan_s, jobs[1]


def test_stages_that_take_turns_have_the_cores_for_themselves():
    """One group on four stages: one stage works at a time, though four stages share two cores."""
    own, _, shared = replays(FixedSchedule(encode_batch=20, decode_iterations=8,
                                       decode_micro_batches=1))
    assert shared == pytest.approx(own, rel=0.02)


def test_stages_that_always_work_are_slowed_down_in_full():
    own, slowed, shared = replays(FixedSchedule(encode_batch=64, decode_iterations=8,
                                            decode_micro_batches=8))
    assert own < shared <= slowed * 1.001
    assert shared > 0.85 * slowed


def test_a_pool_that_waits_leaves_its_cores_to_the_other():
    own, slowed, shared = replays(FixedSchedule(encode_batch=2, decode_micro_batches=2))
    assert own * 1.02 < shared < slowed * 0.98
