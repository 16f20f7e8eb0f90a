"""Which of a job's requests a schedule can run, and why the others cannot."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from xgpt.core.lengths import BoolArray, IntArray
from xgpt.core.model import ModelSpec
from xgpt.core.problem import output_room
from xgpt.requests.request import Requests
from xrunner.plan import RunPlan

_ROWS_AT_A_TIME = 2**18


def runnable(requests: Requests, plan: RunPlan | None,
             spec: ModelSpec) -> tuple[IntArray, dict[int, str]]:
    """Tells which requests can run, by the plan or by any: (which request each query is and most
    tokens that it may generate, [queries, 2]; why each other request cannot run)"""
    queries, count = np.empty((len(requests), 2), np.int64), 0
    why = dict(requests.unusable)
    unusable = np.fromiter(why, np.int64, len(why))
    # piece by piece: ten million rows of every number that decides are not to be there at once
    for first in range(0, len(requests), _ROWS_AT_A_TIME):
        rows, most = _runnable(requests, first, plan, spec, why)
        is_usable = ~np.isin(rows, unusable)
        rows, most = rows[is_usable], most[is_usable]
        queries[count:count + len(rows), 0] = rows
        queries[count:count + len(rows), 1] = most
        count += len(rows)
    return queries[:count], why


def _runnable(requests: Requests, first: int, plan: RunPlan | None, spec: ModelSpec,
              why: dict[int, str]) -> tuple[IntArray, IntArray]:
    """(Which requests can run of those from the first on; most tokens of each.) Adds to `why`."""
    assert requests.input_tokens is not None, "a run tokenises its requests"
    piece = slice(first, first + _ROWS_AT_A_TIME)
    inputs, forced = requests.input_tokens[piece], requests.forced[piece]
    caps = requests.caps[piece]
    room = output_room(spec, inputs)
    most = np.minimum(np.where(caps > 0, caps, plan.max_tokens if plan else 1), room)
    can_run = np.ones(len(inputs), bool)

    def refuse(is_so: BoolArray, sentence: Callable[[int], str]) -> None:
        for row in np.flatnonzero(is_so).tolist():
            why.setdefault(first + row, sentence(row))
            can_run[row] = False

    refuse(room < 1, lambda row: f"{inputs[row]} input tokens leave no room in the model's "
           f"{spec.max_positions} positions")
    refuse(forced > room, lambda row: f"forced_tokens {forced[row]} after "
           f"{inputs[row]} input tokens exceed the model's {spec.max_positions} positions")
    if plan is not None:
        refuse(inputs + most > plan.query_kv_tokens, lambda row: (
            f"needs up to {inputs[row] + most[row]} tokens of KV cache ({inputs[row]} of input); "
            f"the schedule was planned for {plan.query_kv_tokens}: lower max_tokens, or state the "
            "workload's longest lengths in the job"))
        refuse(inputs > (plan.most_input_tokens or np.inf), lambda row: (
            f"{inputs[row]} input tokens; the schedule was planned to encode "
            f"{plan.most_input_tokens} at a time: state the workload's longest lengths in the job"))
    rows = np.flatnonzero(can_run)
    return first + rows, most[rows]
