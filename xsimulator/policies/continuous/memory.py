"""Bytes on the ranks of a continuously batching engine: its KV budget is all memory that weights
and activations leave, as those engines take it, but no more than `max_active` queries can need."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.problem import Problem
from xrunner.rules.paged import BLOCK_TOKENS, WATERMARK
from xsimulator import memory
from xsimulator.plans import Plan
from xsimulator.policies.figures import BoolArray


class Groups(NamedTuple):
    """Configurations [configs] of one plan divide their queries into groups."""

    number: IntArray  # one per stage, but never one without a query
    slots: FloatArray  # queries of each; fractional where they do not share evenly
    step_tokens: FloatArray  # most of one step


class ContinuousMemory:
    """It says what the configurations of one problem need."""

    def __init__(self, problem: Problem, longest_query_tokens: int) -> None:
        self._problem, self._longest = problem, longest_query_tokens

    @property
    def capacity_bytes(self) -> int:
        return memory.capacity_bytes(self._problem.cluster.device)

    def kv_tokens(self, plan: Plan, groups: Groups) -> tuple[FloatArray, BoolArray]:
        """The KV budget [configs] is that of all groups together; the flag says whether it holds
        the longest query in each."""
        problem = self._problem
        one = memory.kv_bytes(problem.model, plan.stages, problem.dtype, 1.0)
        left = self.capacity_bytes - plan.weight_bytes - self._activation_bytes(plan, groups)
        room = np.floor((left / one).min(axis=1) / groups.number / BLOCK_TOKENS)
        blocks = np.ceil(self._longest / BLOCK_TOKENS)
        most = np.ceil(groups.slots) * (blocks + 1) / (1 - WATERMARK)
        group_blocks = np.clip(np.ceil(most), blocks, np.maximum(room, blocks))
        return group_blocks * BLOCK_TOKENS * groups.number, room >= blocks

    def by_stage(self, plan: Plan, groups: Groups, kv_tokens: FloatArray) -> FloatArray:
        """Each rank of a stage holds so many bytes [configs, stages]."""
        problem = self._problem
        return (plan.weight_bytes + self._activation_bytes(plan, groups)
                + memory.kv_bytes(problem.model, plan.stages, problem.dtype, kv_tokens))

    def _activation_bytes(self, plan: Plan, groups: Groups) -> FloatArray:
        """The largest step has its tokens in a layer, and its logits [configs, stages]."""
        problem = self._problem
        return memory.step_bytes(
            problem.model, plan.stages, problem.dtype, rows=groups.step_tokens,
            heads=np.ceil(groups.slots) + 1, longest_input=problem.lengths.inputs.max,
            is_cpu=problem.cluster.device.kind == "cpu")
