"""The closed form's occupancy against RRA's own rule in the replay, for the five tasks."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from problems import TASKS
from representative import some

from xgpt.core import catalog
from xgpt.core.queries import QueryLengths
from xrunner.rules.rra import RraRule
from xrunner.rules.steps import StepKind
from xsimulator.occupancy import QueryFlow
from xsimulator.replay.flow import run
from xsimulator.replay.pool import PoolPlan
from xsimulator.replay.queries import Queries

BATCH, PHASES = 120, 120
SEED = 11


class Instant:
    """Steps whose length does not matter here."""

    def seconds(self, sizes):
        return [1.0]


ITERATIONS = [4, 7, 13, 16, 32, 64]


# each task and each number of iterations with a part of the others
@pytest.mark.parametrize(("task", "iterations"), some(
    product(TASKS, ITERATIONS),
    lambda case: (list(TASKS).index(case[0]) + ITERATIONS.index(case[1])) % 3 == 0))
def test_decode_batch_over_encode_batch(task, iterations):
    lengths = catalog.task(task)
    stay = -(-lengths.outputs.max // iterations)  # phases until the pool is as full as it gets
    rng = np.random.default_rng([SEED, iterations])
    inputs, outputs = lengths.sample(BATCH * (stay + PHASES), rng)
    rule = RraRule(encode_batch=BATCH, decode_iterations=iterations, num_groups=2,
                   max_active=10**9, kv_tokens=10**9)
    pool = PoolPlan(name="both", rule=rule, clock=Instant(), stages=(0,), kv_tokens=10**9)
    queries = QueryLengths(inputs=inputs, outputs=outputs, most_outputs=outputs)
    result = run(Queries(queries, encode_gives_token=True), [pool])
    phase = np.array([step.phase for step in result.pools[0].steps])
    first = np.array([step.kind is StepKind.DECODE and step.iteration == 1
                      for step in result.pools[0].steps])
    steady = (phase >= stay) & (phase < stay + PHASES)
    decode_batch = result.pools[0].decoded[first & steady].sum() / PHASES
    found = QueryFlow(lengths, is_encoder_decoder=False).occupancy(iterations, padded=False)
    assert decode_batch / BATCH == pytest.approx(found.mean_phases, rel=0.01)
