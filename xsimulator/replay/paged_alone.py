"""The replay of a pool that is alone and has paged KV (vLLM's rule, Sarathi's): what PoolHead
decides with xrunner.rules.paged, by csrc/planning.cpp."""

from __future__ import annotations

import numpy as np

from xrunner.rules.paged import BLOCK_TOKENS, PagedRule
from xsimulator.policies.continuous.native import native
from xsimulator.replay.pool import PoolPlan
from xsimulator.replay.queries import Queries
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.told import ToldSteps, never_fits


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
    told, sizes, preemptions = library.paged(
        np.array([len(inputs), rule.num_groups, facts.num_blocks, facts.left_free,
                  facts.token_budget, facts.is_chunked]), np.array(facts.slots), inputs,
        np.array(queries.left, np.int64))
    kind, group, number, *counts = told["labels"].T
    labels = np.stack([kind, group, number, (kind != 0).astype(np.int64), *counts], axis=1)
    return ToldSteps(labels, told["chunks"], told["evicted"], told["ended"],
                     is_chunked=facts.is_chunked).result(plan, queries, told, sizes, preemptions)
