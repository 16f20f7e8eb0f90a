"""What RRA's native calls point to: tables of steps, and what plans hold, as the C structures of
csrc/planning_rra.h and planning_room.cpp. All fields have eight bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.problem import Problem
from xsimulator import memory
from xsimulator.addresses import address_of
from xsimulator.layer_times import TOGETHER
from xsimulator.occupancy import QueryFlow
from xsimulator.plans import PlanSource, StagePlan
from xsimulator.policies.rra.phase_blocks import BlockTable
from xsimulator.policies.rra.phases import EncodeTokens
from xsimulator.step_table import SizeTable, StepTable

MOST_DEGREES = 16
PlanRows = list[tuple[StagePlan, slice]]  # plans, and the rows of each


class RraParts(Protocol):
    """What is asked of an Rra (rra.closed_form)."""

    problem: Problem
    plans: PlanSource
    flow: QueryFlow
    blocks: BlockTable
    encode_tokens: EncodeTokens
    adjustment: float
    seen_iterations: int
    capacity_bytes: int


class Described(NamedTuple):
    """A table of steps as the C structure Plan; `held`: what it points to."""

    words: IntArray
    held: list[Any]
    nodes: tuple[FloatArray, ...]  # of its tables, which are made anew to grow


class StepStructures:
    """Tables of steps as the C structure Plan; `slots` numbers the degrees of their groups, in
    whose order `shares` [degrees, 3, TOGETHER] has a query's attention when it is encoded, the
    least of fewer together, and of more."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        self.shares: FloatArray = np.zeros((MOST_DEGREES, 3, len(TOGETHER)))
        self._described: dict[int, Described] = {}

    def of(self, steps: StepTable, plan: StagePlan, sizes: Sequence[float]) -> Described:
        """The structure of a table of steps that reaches these sizes of its tables."""
        decode, encode, ends = tables = steps.decode_rows, steps.encode_rows, steps.ends
        for table, own in zip(tables, sizes, strict=True):
            table.reach(own)
        known = self._described.get(id(steps))
        if known is None or known.nodes[0] is not decode.nodes or (
                known.nodes[1] is not encode.nodes or known.nodes[2] is not ends.nodes):
            known = self._described[id(steps)] = self._describe(steps, plan, tables)
        return known

    def _describe(self, steps: StepTable, plan: StagePlan,
                  tables: Sequence[SizeTable]) -> Described:
        for degree in steps.degrees:
            if degree not in self.slots:
                slot = self.slots[degree] = len(self.slots)
                own = plan.times.layers.mean_attention_s(np.asarray(TOGETHER, float), degree)
                self.shares[slot] = (own, np.minimum.accumulate(own),
                                      np.minimum.accumulate(own[::-1])[::-1])
        kind_of = np.array(steps.kind_of, np.int64)
        held: list[Any] = [kind_of, np.bincount(kind_of).astype(np.int64),
                np.array([self.slots[degree] for degree in steps.degrees], np.int64),
                *(np.ascontiguousarray(own, float) for own in steps.layers)]
        nodes = tuple(table.nodes for table in tables)
        words = [len(held[1]), len(kind_of), int(steps.is_encoder_decoder),
                 *(address_of(own) for own in held)]
        for table in tables:
            held += [table.nodes, table.rises, steps]
            words += [address_of(table.nodes), address_of(table.rises), table.nodes.shape[1]]
        return Described(np.array(words, np.int64), held, nodes)


class RoomStructures:
    """What each plan holds, as the C structure Held, and what all share, as Room."""

    def __init__(self, rra: RraParts) -> None:
        self._rra = rra
        self._memory: dict[int, tuple[IntArray, list[Any]]] = {}

    def of(self, plans: PlanRows) -> IntArray:
        """[configs] the addresses of what each one's plan holds."""
        pointers, problem = np.empty(plans[-1][1].stop, np.int64), self._rra.problem
        for plan, rows in plans:
            if id(plan) not in self._memory:
                token = memory.kv_bytes(problem, plan.stages, 1.0)
                fixed, row, head = (memory.step_bytes(problem, plan.stages, rows=one, heads=other)
                                    for one, other in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)))
                held = [np.ascontiguousarray(own, float)
                        for own in (plan.weight_bytes, token, row - fixed, fixed)]
                last = np.array([head[-1] - fixed[-1]])
                self._memory[id(plan)] = np.array(
                    [len(plan.stages), *(address_of(own) for own in held),
                     int(last.view(np.int64)[0])], np.int64), [*held, plan]
            pointers[rows] = address_of(self._memory[id(plan)][0])
        return pointers

    def facts(self, most_present: float = np.inf) -> tuple[IntArray, list[FloatArray]]:
        """The C structure Room, and what it points to."""
        rra, packed = self._rra, self._rra.blocks.packed
        inputs, most = rra.problem.lengths.inputs, rra.problem.num_queries or np.inf
        sizes = np.array([
            rra.flow.max_reserve_tokens, memory.KV_QUANTILE_Z, most, most_present,
            inputs.mean, inputs.std, inputs.max, memory.ACTIVATION_QUANTILE_Z, rra.capacity_bytes])
        held = list(packed.singles)
        return np.append(sizes.view(np.int64), [address_of(own) for own in held]), held
