"""Jobs drawn at random, and a check that the native replay of one equals that by events."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from problems import TakenAsTrue, problem_of

from xgpt.core.controls import EvenBatches, FixedSchedule
from xgpt.core.errors import XgptError
from xgpt.core.lengths import joint_empirical
from xgpt.core.problem import QueryLengths
from xprofiler.timing import Operator
from xrunner.rules.iteration import OrcaRule
from xrunner.rules.paged import lightllm, mixed, sarathi, vllm
from xrunner.rules.room import Rooms
from xrunner.rules.rra import RraRule
from xsimulator.replay import native_replay
from xsimulator.replay.records import ReplayResult
from xsimulator.rough.formulas import fixed_estimate

LONGEST = 320  # tokens of a request with its output
PLANS = {"a40-4": [(1, 0), (2, 4), (4, 4)], "a40-8": [(1, 0), (2, 4), (4, 8)],
         "a40-16": [(1, 0), (2, 8)]}
POOL = ("decoded", "encoded", "tokens", "context", "memory_tokens", "memory_s", "start_s", "end_s")
TIMES = ("arrival_s", "start_s", "first_token_s", "last_token_s")


class Times(TakenAsTrue):
    """The roofline's times in whole units of `unit` (0: unchanged), so that events of both pools
    coincide; infinite beyond `most` rows, and refused beyond `refused`."""

    unit, most, refused = 0.0, np.inf, np.inf

    def operator_s(self, operator, x, y=0.0, *, tp_degree=1):
        if operator is Operator.DECODE_ATTENTION and np.max(x) > self.refused:
            raise XgptError("nobody knows")
        seconds = self._whole(super().operator_s(operator, x, y, tp_degree=tp_degree))
        return np.where(np.asarray(x) > self.most, np.inf, seconds)

    def message_s(self, kind, num_bytes, link, *, tp_degree=1):
        return self._whole(super().message_s(kind, num_bytes, link, tp_degree=tp_degree))

    def _whole(self, seconds):
        return np.ceil(seconds / self.unit) * self.unit if self.unit else seconds


def drawn(rng, model, policy, sizes, *, cluster="a40-4", of_one=0.2, facts=None, plans=None,
          **config):
    """(problem, timing, estimate, lengths) of a job whose number of requests is drawn from `sizes`.
    of_one: share of requests with one output token."""
    size = int(rng.integers(*sizes))
    inputs, outputs = rng.integers(1, 200, size), rng.integers(1, LONGEST - 200, size)
    outputs[rng.random(size) < of_one] = 1
    problem = problem_of(model, cluster, joint_empirical(np.stack([inputs, outputs], axis=1)))
    timing = Times(problem.model, problem.cluster.device, problem.dtype)
    if facts is not None:
        timing.facts = facts
    plans = plans or PLANS[cluster]
    degree, gpus = plans[rng.integers(len(plans))]
    estimate = fixed_estimate(policy, problem, timing, FixedSchedule(
        tp_degree=degree, tp_gpus=gpus, **config))
    return problem, timing, estimate, QueryLengths(inputs=inputs, outputs=outputs,
                                                   most_outputs=outputs)


def arriving(rng, timing, count):
    """[count] seconds of arrival: all together, by a Poisson process, or in bursts. Those are at
    whole seconds, as the beginnings of all steps then are, so that some coincide."""
    kind = rng.integers(3)
    if kind == 0:
        return np.full(count, 2.5)
    if kind == 1:
        return rng.permutation(np.cumsum(rng.exponential(10.0**rng.uniform(-3, 0.5), count)))
    timing.unit, timing.facts = 1.0, replace(timing.facts, step_overhead_s=0.0)
    return np.asarray(rng.integers(0, 1 + count // 2, count) * rng.integers(1, 300), float)


def same_both_ways(monkeypatch: pytest.MonkeyPatch,
                   replayed: Callable[[], ReplayResult]) -> ReplayResult:
    """The result of both replays, after a check that they are equal to the bit."""
    quick = replayed()
    with monkeypatch.context() as patched:
        patched.setattr(native_replay, "native", lambda: None)
        by_rule = replayed()
    for result, is_by_rule in ((quick, False), (by_rule, True)):
        assert isinstance(result.pools[0].steps, list) == is_by_rule, "else both are the same"
    assert quick.preemptions == by_rule.preemptions
    parts = [(quick.times, by_rule.times, TIMES)]
    for pool, other in zip(quick.pools, by_rule.pools, strict=True):
        assert pool.name == other.name and pool.steps == list(other.steps)
        parts.append((pool, other, POOL))
    parts += [(*links, ("step", "start_s", "end_s")) for links in zip(
        quick.handovers, by_rule.handovers, strict=True)]
    for one, other, names in parts:
        for name in names:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)
    return quick


def rra_of(rng, mean_input, *, has_chunks):
    """A function that makes the same RRA rule each time."""
    groups, even = int(rng.integers(1, 6)), EvenBatches()
    if rng.random() < 0.6:
        even = EvenBatches(adjustment=rng.uniform(0.02, 0.22), mean_input_tokens=mean_input,
                           target_active=rng.integers(3) * rng.uniform(0.5, 30.0))
    return partial(
        RraRule, encode_batch=int(rng.integers(1, 41)), decode_iterations=int(rng.integers(1, 61)),
        num_groups=groups, max_active=groups * int(rng.integers(1, 41)), even=even,
        kv_tokens=groups * int(rng.integers(LONGEST, 6000)),
        encode_chunk=int(rng.integers(1, 90)) if has_chunks else 0)


def orca_of(rng, mean_input):
    """A function that makes the same ORCA rule each time."""
    groups = int(rng.integers(1, 6))
    return partial(OrcaRule, num_groups=groups, max_active=groups + int(rng.integers(60)),
                   kv_tokens=groups * int(rng.integers(LONGEST, 3000)))


RULES = {"rra": partial(rra_of, has_chunks=False), "chunks": partial(rra_of, has_chunks=True),
         "orca": orca_of}
PAGED = {"sarathi": sarathi, "vllm": vllm, "mixed": mixed, "lightllm": lightllm}


def tight_of(name, rng, mean_input, admission):
    """A rule whose requests hardly fit."""
    if name in RULES:
        rule = RULES[name](rng, mean_input)()
        tokens = rule.num_groups * int(rng.integers(LONGEST, 1000))
        rule.rooms = Rooms.even(rule.num_groups, tokens, admission)
        return rule
    groups = int(rng.integers(1, 5))
    return PAGED[name](num_groups=groups, admission=admission,
                       max_active=groups + int(rng.integers(60)),
                       kv_tokens=groups * int(rng.integers(340, 1000)),
                       token_budget=int(rng.integers(20, 400)))
