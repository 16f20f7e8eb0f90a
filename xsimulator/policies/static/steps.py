"""What the steps of a static batch hold, and the bytes that takes on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, Lengths
from xgpt.core.problem import Problem
from xsimulator import memory
from xsimulator.occupancy import expected_maximum_z
from xsimulator.plans import Plan
from xsimulator.policies.static.config import StaticConfig


class StaticSteps(NamedTuple):
    """The steps of batches [configs] have these sizes."""

    batch: FloatArray
    groups: FloatArray  # decode groups that are not empty
    encodes: FloatArray  # encode steps that are not empty
    parts: FloatArray  # of the first group
    encode_queries: FloatArray  # of an encode step, in the mean
    tokens: FloatArray  # of an encode step, in the mean
    most_tokens: FloatArray  # of the largest
    rows: FloatArray  # of a decode step, in the mean
    most_rows: FloatArray  # of the largest


def static_steps(configs: Sequence[StaticConfig], inputs: Lengths) -> StaticSteps:
    """The batches' queries have inputs of these lengths."""
    batch = np.array([c.encode_batch for c in configs], float)
    groups = np.minimum([c.decode_micro_batches for c in configs], batch)
    parts = np.minimum([c.encode_parts or 1 for c in configs], np.ceil(batch / groups))
    encodes = np.minimum(groups * parts, batch)
    queries = batch / encodes
    odd = queries - np.floor(queries)  # that share of the steps encodes one query more
    tokens = queries * inputs.mean
    spread = np.sqrt(queries * inputs.std**2 + odd * (1 - odd) * inputs.mean**2)
    most = np.minimum(tokens + expected_maximum_z(encodes) * spread, np.ceil(queries) * inputs.max)
    rows = batch / groups
    return StaticSteps(batch, groups, encodes, parts, queries, tokens, most, rows, np.ceil(rows))


class StaticMemory:
    """It says what the configurations of one problem need."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def kv_tokens(self, steps: StaticSteps) -> FloatArray:
        """Each group reserves its rows' inputs at a high quantile, and the most output for each;
        the tokens [configs] are those of all groups."""
        inputs = self._problem.lengths.inputs
        output = max(self._problem.lengths.outputs.max, self._problem.default_max_tokens)
        rows = steps.most_rows
        spread = memory.KV_QUANTILE_Z * inputs.std * np.sqrt(rows)
        most = np.minimum(rows * inputs.mean + spread, rows * inputs.max)
        group = np.maximum(np.ceil(most), inputs.max) + rows * output
        tokens: FloatArray = group * steps.groups
        return tokens

    def by_stage(self, plan: Plan, steps: StaticSteps) -> FloatArray:
        """Each rank of a stage holds so many bytes [configs, stages]."""
        problem = self._problem
        return (plan.weight_bytes
                + memory.kv_bytes(problem.model, plan.stages, problem.dtype, self.kv_tokens(steps))
                + memory.activation_bytes(
                    problem.model, plan.stages, problem.dtype, inputs=problem.lengths.inputs,
                    encode_batch=np.ceil(steps.encode_queries), decode_batch=steps.most_rows,
                    is_cpu=problem.cluster.device.kind == "cpu"))
