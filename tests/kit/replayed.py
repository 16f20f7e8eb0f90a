"""A run's problem, and the steps that the run and its replay took, to be compared."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from toys import spec_of

from xgpt.core import catalog
from xgpt.core.cluster import Cluster
from xgpt.core.constraint import latency_constraint
from xgpt.core.controls import FixedSchedule
from xgpt.core.lengths import joint_empirical
from xgpt.core.problem import Problem
from xrunner.engine.stage import StageExecutor


def problem_of(directory: Path, pairs: np.ndarray, devices: int) -> Problem:
    cluster: Cluster = replace(catalog.cluster("a40-4"), num_nodes=1, devices_per_node=devices)
    joint = joint_empirical(pairs)
    return Problem(model=spec_of(directory), cluster=cluster, lengths=joint, dtype="float32",
                   num_queries=len(pairs), default_max_tokens=joint.outputs.max,
                   constraint=latency_constraint(latency_s=math.inf, kind="sequence",
                                                 quantile=0.99),
                   fixed=FixedSchedule())


def run_steps(executor: StageExecutor) -> list[tuple[object, ...]]:
    return [(r.kind, r.group, r.phase, r.iteration, r.queries) for r in executor.log
            if r.kind != "cross_kv"]
