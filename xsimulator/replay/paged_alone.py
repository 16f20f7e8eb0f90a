"""The replay of a pool that is alone and has paged KV (vLLM's rule, Sarathi's): what PoolHead
decides with xrunner.rules.paged, by csrc/planning_replays.cpp."""

from __future__ import annotations

import numpy as np

from xrunner.rules.paged import BLOCK_TOKENS, PagedRule
from xsimulator.policies.continuous.native import native
from xsimulator.replay.pool import PoolPlan
from xsimulator.replay.queries import Queries
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.told import never_fits, result_of


def replay_paged(plan: PoolPlan, queries: Queries) -> ReplayResult | None:
    """What xsimulator.replay.flow.replay_alone comes to; None where Python is to find it. Raises
    XgptError for a query that can never fit."""
    rule, library = plan.rule, native()
    if (library is None or type(rule) is not PagedRule or rule.waiting
            or not queries.gives_token):
        return None
    facts, inputs = rule.facts, np.array(queries.inputs, np.int64)
    reserved = np.maximum(np.array(queries.reserve_tokens, np.int64), inputs)
    if len(rows := np.flatnonzero(-(-reserved // BLOCK_TOKENS) > facts.num_blocks)):
        raise never_fits(queries, int(rows[0]))
    numbers = [len(inputs), rule.num_groups, facts.num_blocks, facts.left_free, facts.token_budget,
               facts.is_chunked]
    given = [np.array(one, np.int64) for one in (numbers, facts.slots, inputs, queries.left)]
    return result_of(plan, queries, library, library.paged, given, is_chunked=facts.is_chunked)
