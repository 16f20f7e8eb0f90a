"""Percentiles of FT's latencies, from which the paper takes its limits, beside hand arithmetic."""

import numpy as np
import pytest
from problems import roofline_of, toy_problem

from xgpt.core.errors import InfeasibleError
from xprofiler.timing import Operator, Reach, TimingFacts
from xscheduler.ft_latency import BATCHES, ft_latency_s
from xsimulator.memory import capacity_bytes
from xsimulator.rough.formulas import Formulas

FIVE_TOKENS = np.array([[10, 5]])


class HeadAlone:
    """A millisecond for each request at the output head; nothing else takes time."""

    facts = TimingFacts(step_overhead_s=0.0, is_padded=False)

    def operator_s(self, operator, x, y=0.0, *, tp_degree=1):
        rows = np.broadcast_arrays(np.asarray(x, float), y)[0]
        return rows * 1e-3 if operator is Operator.HEAD else 0.0 * rows

    def message_s(self, kind, num_bytes, link, *, tp_degree=1):
        return np.zeros(np.shape(num_bytes))

    def reach(self, operator, tp_degree):
        return Reach(np.inf, np.inf)

    def provenance(self):
        return "by hand"


@pytest.mark.parametrize("devices", [1, 2])
def test_limits_are_as_by_hand(devices):
    """A request takes its share of the step of the first token and of four steps for the others."""
    problem = toy_problem(per_node=devices, pairs=FIVE_TOKENS, memory=250_000_000)
    plan, timing = (devices, devices if devices > 1 else 0), HeadAlone()
    found = Formulas(problem, timing).of("ft").rough(plan, np.array([[b, 1] for b in BATCHES]))
    most = max(np.array(BATCHES)[found.memory_bytes <= capacity_bytes(problem.cluster.device)])
    assert 40 < most < BATCHES[-1]
    for percent in (10, 30, 70):
        batch = round(4 + percent / 100 * (most - 4))
        assert ft_latency_s(problem, timing, percent) == pytest.approx(batch * (1 + 4) * 1e-3)


@pytest.mark.parametrize("changes", [{"per_node": 3}, {"memory": 60_000_000}])
def test_ft_without_a_batch_is_refused(changes):
    problem = toy_problem(**changes)
    with pytest.raises(InfeasibleError, match="give the latency limit in seconds"):
        ft_latency_s(problem, roofline_of(problem), 10)
