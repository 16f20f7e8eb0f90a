"""Every moment of four requests whose steps take 10 ms and 1 ms a token, on one stage, counted by
hand."""

from functools import partial

import numpy as np
import pytest

from xgpt.core.problem import QueryLengths
from xrunner.rules.iteration import OrcaRule
from xrunner.rules.paged import lightllm, mixed, sarathi, vllm
from xrunner.rules.static import StaticRule
from xsimulator.replay.event_replay import run
from xsimulator.replay.pool import PoolPlan
from xsimulator.replay.queries import Queries
from xsimulator.replay.step_clock import StepSizes

INPUTS, OUTPUTS = (6, 2, 4, 3), (4, 2, 3, 1)
# rule of two slots; first and last token of each request, in ms
TRACES = {
    "vllm": (partial(vllm, max_active=2, token_budget=99), [18, 18, 44, 81], [68, 30, 68, 81]),
    "sarathi": (partial(sarathi, max_active=2, token_budget=4),
                [28, 28, 66, 80], [66, 40, 91, 80]),
    "orca": (partial(OrcaRule, max_active=2), [16, 29, 56, 70], [56, 41, 81, 70]),
    "ft": (partial(StaticRule, encode_batch=2, encode_micro_batches=1),
           [18, 18, 71, 71], [54, 54, 95, 95]),
    "mixed": (partial(mixed, max_active=2, token_budget=99), [18, 18, 45, 71], [57, 30, 71, 71]),
    # the third and the fourth wait until nobody decodes
    "lightllm": (partial(lightllm, max_active=2, token_budget=99),
                 [18, 18, 69, 69], [52, 30, 91, 69])}


class PerToken:
    """A clock of one stage."""

    def seconds(self, sizes: StepSizes) -> list[float]:
        return [10.0 + sizes.tokens + sizes.decoded]


@pytest.mark.parametrize("policy", TRACES)
def test_each_token_comes_when_it_is_due(policy):
    make, first, last = TRACES[policy]
    inputs, outputs = np.array(INPUTS), np.array(OUTPUTS)
    lengths = QueryLengths(inputs=inputs, outputs=outputs, most_outputs=outputs)
    plan = PoolPlan(name="all", rule=make(num_groups=1, kv_tokens=999), clock=PerToken(),
                    stages=(0,), kv_tokens=999)
    times = run(Queries(lengths, encode_gives_token=True), [plan]).times
    assert times.first_token_s.tolist() == first and times.last_token_s.tolist() == last
