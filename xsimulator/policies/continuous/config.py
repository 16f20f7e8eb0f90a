"""One configuration of a continuously batching engine, and the memory that many need."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xgpt.core.problem import Problem
from xrunner.rules.paged import BLOCK_TOKENS, WATERMARK
from xsimulator import memory
from xsimulator.plans import StagePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuousConfig:
    """`max_active` is the most queries at a time over all groups, `token_budget` the most tokens of
    one step (vLLM, Sarathi; 0 stands for the engine's default)."""

    max_active: int
    tp_degree: int = 1
    tp_gpus: int = 0
    token_budget: int = 0


class Groups(NamedTuple):
    """Configurations [configs] of one plan divide their queries into groups."""

    number: IntArray  # one per stage, but never one without a query
    slots: FloatArray  # queries of each; fractional where they do not share evenly
    step_tokens: FloatArray  # most of one step


class ContinuousMemory:
    """What configurations of one problem need: their KV budget is all memory that weights and
    activations leave, as those engines take it, but no more than `max_active` queries can need."""

    def __init__(self, problem: Problem, longest_query_tokens: int) -> None:
        self._problem, self._longest = problem, longest_query_tokens
        self._capacity_bytes = memory.capacity_bytes(problem.cluster.device)
        # by the plan's id, with the plan: while it is held, no other has that
        self._of_plans: dict[int, tuple[StagePlan, memory.StageBytes]] = {}

    def kv_tokens(self, plan: StagePlan, groups: Groups) -> tuple[FloatArray, BoolArray]:
        """The KV budget [configs] is that of all groups together; the flag says whether it holds
        the longest query in each."""
        one = self._bytes(plan).kv(1.0)
        left = self._capacity_bytes - plan.weight_bytes - self._activation_bytes(plan, groups)
        room = np.floor((left / one).min(axis=1) / groups.number / BLOCK_TOKENS)
        blocks = np.ceil(self._longest / BLOCK_TOKENS)
        most = np.ceil(groups.slots) * (blocks + 1) / (1 - WATERMARK)
        group_blocks = np.clip(np.ceil(most), blocks, np.maximum(room, blocks))
        return group_blocks * BLOCK_TOKENS * groups.number, room >= blocks

    def most_tokens(self, plan: StagePlan, number: int, step_tokens: FloatArray) -> FloatArray:
        """No KV budget of one of `number` groups [configs] is larger, where steps have so many
        tokens; 0 where it does not hold the longest query."""
        few = Groups(np.full(len(step_tokens), number), np.ones(len(step_tokens)), step_tokens)
        one = self._bytes(plan).kv(1.0)
        left = self._capacity_bytes - plan.weight_bytes - self._activation_bytes(plan, few)
        room = np.floor((left / one).min(axis=1) / number / BLOCK_TOKENS)
        return np.where(room >= np.ceil(self._longest / BLOCK_TOKENS), room * BLOCK_TOKENS, 0.0)

    def by_stage(self, plan: StagePlan, groups: Groups, kv_tokens: FloatArray) -> FloatArray:
        """Each rank of a stage holds so many bytes [configs, stages]."""
        return (plan.weight_bytes + self._activation_bytes(plan, groups)
                + self._bytes(plan).kv(kv_tokens))

    def _activation_bytes(self, plan: StagePlan, groups: Groups) -> FloatArray:
        """The largest step has its tokens in a layer, and its logits [configs, stages]."""
        return self._bytes(plan).step(groups.step_tokens, np.ceil(groups.slots) + 1)

    def _bytes(self, plan: StagePlan) -> memory.StageBytes:
        if id(plan) not in self._of_plans:
            self._of_plans[id(plan)] = plan, memory.StageBytes(self._problem, plan.stages)
        return self._of_plans[id(plan)][1]
