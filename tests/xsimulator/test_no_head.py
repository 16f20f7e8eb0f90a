"""An operator that a job does not have takes no time, and is not asked for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from problems import roofline_of, toy_problem

from xprofiler.timing import Operator
from xsimulator.layer_times import LayerTimes


def test_a_head_that_is_not_there_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that a profile refuses take for ever; that times zero is no number, and a warning."""
    problem = toy_problem()
    timing = roofline_of(problem)
    computed = timing.operator_s

    def refusing(operator: Operator, *sizes: object, **more: object) -> np.ndarray:
        seconds = computed(operator, *sizes, **more)
        return seconds * math.inf if operator is Operator.HEAD else seconds

    monkeypatch.setattr(timing, "operator_s", refusing)
    layers = LayerTimes.of(problem, timing)
    assert np.isinf(layers.head_s([1.0, 2.0], 1)).all()
    without = LayerTimes(problem.model, timing, problem.cluster.intra_link, problem.dtype,
                         problem.lengths.inputs, has_head=False)
    assert without.head_s([1.0, 2.0], 1).tolist() == [0.0, 0.0]
