"""Decode steps in which nothing changes but contexts, taken all at once: what comes of it is to the
bit what comes of taking them one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from problems import problem_of, roofline_of

from xgpt.core.lengths import joint_empirical
from xrunner.rules.steps import Step, StepKind
from xsimulator.policies import make_policy
from xsimulator.policies.rra.config import RraConfig
from xsimulator.replay import pool as pools
from xsimulator.replay import reserved_alone
from xsimulator.replay.job import planned_queries, replay_job
from xsimulator.replay.records import RowLog, StepLog

PAIRS = np.stack([np.arange(20, 60), 1 + 3 * (np.arange(40) * 7 % 40)], axis=1)


@pytest.mark.parametrize("model", ["opt-13b", "t5-11b"])
@pytest.mark.parametrize(("batch", "iterations", "degree"), [(3, 40, 4), (1, 200, 4), (8, 30, 1)])
def test_steps_taken_at_once_are_those_taken_one_by_one(monkeypatch, model, batch, iterations,
                                                        degree):
    problem = problem_of(model, "a40-4", joint_empirical(PAIRS))
    config = RraConfig(encode_batch=batch, decode_iterations=iterations, tp_degree=degree,
                       tp_gpus=0 if degree == 1 else 4, decode_micro_batches=1)
    estimate = make_policy("rra", problem, roofline_of(problem)).estimate(config)
    queries = planned_queries(problem, PAIRS[:, 0], PAIRS[:, 1])
    turns: list[int] = []
    usual = pools.PoolHead.turn

    def counted(self, *given):
        turns[-1] += 1
        return usual(self, *given)

    monkeypatch.setattr(reserved_alone, "native", lambda: None)
    monkeypatch.setattr(pools.PoolHead, "turn", counted)
    replayed = []
    for least in (2, 1 << 40):
        turns.append(0)
        monkeypatch.setattr(pools, "LEAST_AHEAD", least)
        replayed.append(replay_job(problem, roofline_of(problem), estimate, queries))
    at_once, one_by_one = (result.pools[0] for result in replayed)
    assert 2 * turns[0] < turns[1], turns
    assert at_once.steps == one_by_one.steps and len(at_once.steps) <= turns[1]
    for name in ("decoded", "encoded", "tokens", "context", "start_s", "end_s", "memory_s",
                 "memory_tokens"):
        np.testing.assert_array_equal(getattr(at_once, name), getattr(one_by_one, name), name)
    for name in ("start_s", "first_token_s", "last_token_s"):
        np.testing.assert_array_equal(*(getattr(result.times, name) for result in replayed), name)


def test_a_log_of_steps_has_those_of_its_runs():
    log = StepLog()
    first = Step(kind=StepKind.ENCODE, group=0, phase=2, iteration=0, joined=(4,))
    log.append(first)
    log.append(Step(kind=StepKind.DECODE, group=0, phase=2, iteration=1), 3)
    log.append(Step(kind=StepKind.DECODE, group=0, phase=2, iteration=4))
    assert len(log) == 5 and [step.iteration for step in log] == [0, 1, 2, 3, 4]
    assert [log[place] for place in range(-5, 5)] == 2 * list(log)
    assert log[1:3] == tuple(log)[1:3] and log == list(log) and log[0] is first
    with pytest.raises(IndexError):
        log[5]
    firsts = [replace(log[1], group=group, iteration=7) for group in (0, 2)]
    log.append_rounds(firsts, 5)  # of the last round one group's
    assert [(step.group, step.iteration) for step in log[5:]] == [
        (0, 7), (2, 7), (0, 8), (2, 8), (0, 9)]
    assert len(log) == 10 and [log[place] for place in range(10)] == list(log)


def test_a_log_of_rows_has_them_in_their_order():
    log = RowLog()
    assert log.array(2).shape == (0, 2)
    log.append([1.0, 2.0])
    log.extend(np.array([[3.0, 4.0], [5.0, 6.0]]))
    log.append([7.0, 8.0])
    np.testing.assert_array_equal(log.array(2), np.arange(1.0, 9.0).reshape(4, 2))
