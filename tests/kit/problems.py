"""Problems and configurations that the tests of the simulator share."""

from __future__ import annotations

import math
from dataclasses import replace

from taken_as_true import TakenAsTrue

from xgpt.core import catalog
from xgpt.core.constraint import latency_constraint
from xgpt.core.job import FixedSchedule
from xgpt.core.lengths import JointLengths
from xgpt.core.problem import Problem
from xprofiler.roofline import Roofline

# The paper's models on its clusters (its Table 2).
PAPER = {"t5-11b": "a40-8", "opt-13b": "a40-4", "gpt3-39b": "a40-16", "gpt3-101b": "a100-16",
         "gpt3-175b": "a40-32", "gpt3-341b": "a40-48"}
TASKS = ("S", "T", "G", "C1", "C2")


def problem_of(model="opt-13b", cluster=None, lengths: JointLengths | str = "S", *,
               kind="sequence", quantile=0.99, latency_s=math.inf) -> Problem:
    """A paper model on its cluster unless another is named; `lengths`: a task's name, or given."""
    joint = catalog.task(lengths) if isinstance(lengths, str) else lengths
    return Problem(
        model=catalog.model(model), cluster=catalog.cluster(cluster or PAPER[model]),
        lengths=joint, dtype="float16", num_queries=None,
        constraint=latency_constraint(latency_s=latency_s, kind=kind, quantile=quantile),
        fixed=FixedSchedule(), default_max_tokens=joint.outputs.max)


def roofline_of(problem: Problem, *, padded=False) -> Roofline:
    """`padded`: with decode attention as of kernels that read padded caches."""
    roofline = TakenAsTrue(problem.model, problem.cluster.device, problem.dtype)
    roofline.facts = replace(roofline.facts, is_padded=padded)
    return roofline
