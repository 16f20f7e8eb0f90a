"""The replay of a pool that is alone and whose rule reserves a query's tokens when it admits it
(RRA's, with chunks and without, and ORCA's): what PoolHead decides with xrunner.rules.rra and
xrunner.rules.iteration, by csrc/planning_reserved.cpp."""

from __future__ import annotations

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xrunner.rules.iteration import OrcaRule
from xrunner.rules.rra import RraRule, reserve_facts
from xrunner.rules.slots import SlotUse
from xrunner.rules.steps import BatchingRule, ReserveFacts
from xsimulator.policies.continuous.native import Native, native
from xsimulator.replay.pool import PoolPlan
from xsimulator.replay.queries import Queries
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.told import ToldSteps, never_fits


def replay_reserved(plan: PoolPlan, queries: Queries) -> ReplayResult | None:
    """What xsimulator.replay.flow.replay_alone comes to; None where Python is to find it. Raises
    XgptError for a query that can never fit."""
    library = native()
    facts = _facts_of(plan.rule)
    if library is None or facts is None or not queries.gives_token:
        return None
    reserves = np.array(queries.reserve_tokens, np.int64)
    if len(rows := np.flatnonzero(reserves > facts.group_kv_tokens)):
        raise never_fits(queries, int(rows[0]))
    told, sizes = _replayed(
        library, facts, plan.rule.slot_use is SlotUse.COMPACTED,
        np.array(queries.inputs, np.int64), reserves, np.array(queries.left, np.int64))
    *labels, ended = told["labels"].T
    return ToldSteps(np.stack([*labels, np.zeros_like(ended), ended], axis=1), told["chunks"],
                     np.empty(0, np.int64), told["ended"],
                     is_chunked=facts.encode_chunk > 0).result(plan, queries, told, sizes)


def _facts_of(rule: BatchingRule) -> ReserveFacts | None:
    if type(rule) is OrcaRule:
        return rule.facts
    return reserve_facts(rule) if type(rule) is RraRule else None


def _replayed(library: Native, facts: ReserveFacts, is_compacted: bool, inputs: IntArray,
              reserves: IntArray, left: IntArray) -> tuple[dict[str, IntArray], FloatArray]:
    """Arguments and results as in csrc/planning_reserved.cpp: (what is told, by name, sizes of
    steps)."""
    numbers = np.array([
        len(inputs), len(facts.slots), facts.group_kv_tokens, facts.decode_iterations,
        facts.encode_batch, facts.most_active, facts.encode_chunk, is_compacted], np.int64)
    even = np.array([facts.mean_input, facts.adjustment, facts.target_active], float)
    slots, counts = np.array(facts.slots, np.int64), np.empty(5, np.int64)
    replay = library.reserved(*(one.ctypes.data for one in (
        numbers, even, slots, inputs, reserves, left, counts)))
    turns, steps, chunks, ended, changes = counts.tolist()
    shapes = {"waits": (turns,), "turn_of": (steps,), "labels": (steps, 6), "chunks": (chunks, 3),
              "ended": (ended,), "memory": (changes, 2)}
    told = {name: np.empty(shape, np.int64) for name, shape in shapes.items()}
    sizes, times = np.empty((steps, 7)), np.empty((3, len(inputs)), np.int64)
    library.reserved_told(replay, *(one.ctypes.data for one in told.values()), sizes.ctypes.data,
                          times.ctypes.data)
    return {**told, "times": times}, sizes
