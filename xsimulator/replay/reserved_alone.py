"""The replay of a pool that is alone and whose rule reserves a query's tokens when it admits it
(RRA's, with chunks and without, and ORCA's): what PoolHead decides with xrunner.rules.rra and
xrunner.rules.iteration, by csrc/planning_replays.cpp."""

from __future__ import annotations

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xrunner.rules.iteration import OrcaRule
from xrunner.rules.rra import RraRule, reserve_facts
from xrunner.rules.slots import SlotUse
from xrunner.rules.steps import BatchingRule, ReserveFacts
from xsimulator.policies.continuous.native import native
from xsimulator.replay.pool import PoolPlan
from xsimulator.replay.queries import Queries
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.told import never_fits, result_of


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
    return result_of(plan, queries, library, library.reserved,
                     _given(facts, plan.rule.slot_use is SlotUse.COMPACTED, queries, reserves),
                     is_chunked=facts.encode_chunk > 0)


def _facts_of(rule: BatchingRule) -> ReserveFacts | None:
    if type(rule) is OrcaRule:
        return rule.facts
    return reserve_facts(rule) if type(rule) is RraRule else None


def _given(facts: ReserveFacts, is_compacted: bool, queries: Queries,
           reserves: IntArray) -> list[IntArray | FloatArray]:
    """As in csrc/planning_replays.cpp."""
    numbers = [len(reserves), len(facts.slots), facts.group_kv_tokens, facts.decode_iterations,
               facts.encode_batch, facts.most_active, facts.encode_chunk, is_compacted]
    even = np.array([facts.mean_input, facts.adjustment, facts.target_active], float)
    first, *others = (np.array(one, np.int64) for one in (
        numbers, facts.slots, queries.inputs, queries.left))
    return [first, even, *others[:-1], reserves, others[-1]]
