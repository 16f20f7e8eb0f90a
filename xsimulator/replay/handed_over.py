"""The replay of two pools, of which one encodes by WAA's rule and hands over to the other: what
xsimulator.replay.flow comes to, by csrc/planning_handed.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgpt.core.queries import QueryTimes
from xrunner.rules.slots import SlotUse
from xrunner.rules.waa import WaaDecodeRule, WaaEncodeRule, pair_facts
from xsimulator.addresses import address_of
from xsimulator.policies.continuous.native import FETCH, TELL, Native, native
from xsimulator.replay.pool import HandoverPlan, PoolPlan, records_of
from xsimulator.replay.queries import Queries
from xsimulator.replay.records import HandoverRecords, PoolRecords, ReplayResult
from xsimulator.replay.stage_line import StepTimes
from xsimulator.replay.step_clock import Blocks, StepClock
from xsimulator.replay.told import ToldSteps, never_fits

_TOKENS = 256  # whose handovers are timed at once
_POOL = [np.int64] * 5 + [np.float64] * 4  # what is told of one


def replay_handed(source: PoolPlan, target: PoolPlan, link: HandoverPlan,
                  queries: Queries) -> ReplayResult | None:
    """None where Python is to find it. Raises XgptError for a query that can never fit."""
    library, clocks = native(), (source.clock, target.clock)
    encode, decode = source.rule, target.rule
    if (library is None or type(encode) is not WaaEncodeRule or type(decode) is not WaaDecodeRule
            or type(clocks[0]) is not StepClock or type(clocks[1]) is not StepClock
            or (source.name, target.name) != (link.source, link.target)
            or (source.role, target.role) != ("encode", "decode")
            or link.release != encode.release or (facts := pair_facts(encode, decode)) is None):
        return None
    inputs, reserves, left = (np.array(one, np.int64) for one in (
        queries.inputs, queries.reserve_tokens, queries.left))
    order = np.argsort(queries.arrival_s, kind="stable")
    never = (reserves > encode.kv_tokens) | (inputs > encode.encode_kv_tokens)
    if never.any():
        raise never_fits(queries, int(order[never[order]][0]))
    numbers = [len(inputs), *facts[0], queries.gives_token,
               decode.slot_use is SlotUse.COMPACTED, _TOKENS]
    handovers = Blocks(_TOKENS, lambda tokens: np.broadcast_to(
        link.seconds(tokens), tokens.shape)[:, None])
    told = told_of(library, [
        np.array(numbers, np.int64), np.array(facts[1], float), inputs, reserves, left, order,
        np.ascontiguousarray(queries.arrival_s), *clocks[0].told, *clocks[1].told],
        [clocks[0].tables, clocks[1].tables, [handovers]])
    if told is None:
        return None
    sent, (start_s, first_s, last_s) = told[18].reshape(-1, 3), told[19].reshape(3, -1)
    assert not np.isnan(last_s).any(), "queries have nothing to do"
    return ReplayResult(
        pools=(_records(source, *told[:9]), _records(target, *told[9:18])),
        handovers=(HandoverRecords(source=link.source, target=link.target,
                                   step=sent[:, 0].astype(np.int64), start_s=sent[:, 1],
                                   end_s=sent[:, 2]),),
        times=QueryTimes(arrival_s=queries.arrival_s, start_s=start_s, first_token_s=first_s,
                         last_token_s=last_s), output_tokens=queries.output_tokens, preemptions=0)


def told_of(library: Native, given: Sequence[NDArray[Any]],
            tables: Sequence[Sequence[Blocks]]) -> list[NDArray[Any]] | None:
    """What csrc/planning_handed.cpp tells; None where it leaves the replay to Python."""
    told: list[bytes] = []
    failures: list[BaseException] = []

    def fetch(clock: int, table: int, block: int) -> int:
        try:
            return address_of(tables[clock][table].block(block))
        except BaseException as error:  # none finds its way through csrc
            failures.append(error)
            return 0

    is_done = library.handed(
        address_of(np.array([address_of(one) for one in given])), FETCH(fetch),
        TELL(lambda place, size: told.append(ctypes.string_at(place, size) if size else b"")))
    if failures:
        raise failures[0]
    return [np.frombuffer(one, kind) for one, kind in zip(
        told, [*_POOL * 2, np.float64, np.float64], strict=True)] if is_done else None


def _records(plan: PoolPlan, *told: NDArray[Any]) -> PoolRecords:
    labels, chunks, ended, handed, held, memory_s, sizes, *times = told
    steps = ToldSteps({"labels": labels.reshape(-1, 7), "chunks": chunks.reshape(-1, 3),
                       "ended": ended, "handed": handed}, is_chunked=True)
    durations_s, end_s = (one.reshape(-1, len(plan.stages)) for one in times)
    return records_of(plan, StepTimes(steps, sizes.reshape(-1, 4), durations_s, end_s),
                      memory_s.tolist(), held.tolist())
