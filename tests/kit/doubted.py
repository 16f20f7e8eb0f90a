"""Problems whose lengths were observed, and the doubts that come of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from toy_jobs import roofline_of

from xgpt.core.lengths import empirical
from xgpt.core.problem import Problem
from xprofiler.timing import TimingSource
from xscheduler.evaluator import Evaluator
from xscheduler.uncertainty import Doubts

CONFIG = {"encode_batch": 12, "decode_iterations": 6}


def observed(problem: Problem, count: int, seed: int = 0) -> Problem:
    """The problem with outputs known from so many queries."""
    outputs = empirical(problem.lengths.outputs.sample(count, np.random.default_rng(seed)))
    return replace(problem, lengths=replace(problem.lengths, outputs=outputs))


def doubts_of(problem: Problem, timing: TimingSource | None = None) -> Doubts:
    return Doubts(problem, Evaluator(problem, timing or roofline_of(problem)))

