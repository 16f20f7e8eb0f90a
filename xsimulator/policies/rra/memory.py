"""Bytes on the ranks of RRA's one pool (xsimulator.memory)."""

from __future__ import annotations

from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem
from xsimulator import memory
from xsimulator.plans import Plan
from xsimulator.policies.rra.phase_batches import PhaseBatches


class RraMemory:
    """It says what the configurations of one problem need."""

    def __init__(self, problem: Problem, longest_query_tokens: int) -> None:
        """`longest_query_tokens` is what the longest query reserves at admission."""
        self._problem, self._longest = problem, longest_query_tokens

    def kv_tokens(self, batches: PhaseBatches) -> FloatArray:
        """So many tokens [configs] are reserved over all groups."""
        return memory.reserved_tokens(batches.queries, batches.group_batch, batches.groups,
                                      self._longest, self._problem.num_queries)

    def by_stage(self, plan: Plan, batches: PhaseBatches,
                 kv_tokens: FloatArray) -> FloatArray:
        """Each rank of a stage holds so many bytes [configs, stages]."""
        problem = self._problem
        return (plan.weight_bytes
                + memory.kv_bytes(problem.model, plan.stages, problem.dtype, kv_tokens)
                + memory.activation_bytes(
                    problem.model, plan.stages, problem.dtype, inputs=problem.lengths.inputs,
                    encode_batch=batches.encode_batch / batches.encode_groups,
                    decode_batch=batches.group_batch * batches.queries.mean_phases,
                    is_cpu=problem.cluster.device.kind == "cpu"))
