"""Requests to queries: the launcher says which of them can run by a schedule, a rank takes those
up. What cannot run becomes an error record; the job goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from xgpt.core.lengths import IntArray
from xgpt.core.model import ModelSpec
from xgpt.core.requests import Requests
from xgpt.core.spool import Spool, SpoolWriter
from xgpt.core.workload import RequestError
from xrunner.io.results import write_errors
from xrunner.plan import RunPlan
from xrunner.query import PreparedQuery, Sampling


def runnable(requests: Requests, plan: RunPlan,
             spec: ModelSpec) -> tuple[IntArray, dict[int, str]]:
    """Tells which requests can run: (which request each query is and most tokens that it may
    generate, [queries, 2]; why each other request cannot run)"""
    assert requests.input_tokens is not None, "a run tokenises its requests"
    inputs, caps = requests.input_tokens, requests.output_caps(plan.max_tokens)
    room = np.maximum(caps, 1) if spec.max_positions is None else spec.max_positions - inputs
    most = np.minimum(caps, room)
    why = dict(requests.unusable)

    def refuse(is_so: NDArray[np.bool_], sentence: Callable[[int], str]) -> None:
        for row in np.flatnonzero(is_so).tolist():
            why.setdefault(row, sentence(row))

    refuse(room < 1, lambda row: f"{inputs[row]} input tokens leave no room in the model's "
           f"{spec.max_positions} positions")
    refuse(requests.forced > room, lambda row: f"forced_tokens {requests.forced[row]} after "
           f"{inputs[row]} input tokens exceed the model's {spec.max_positions} positions")
    refuse(inputs + most > plan.query_kv_tokens, lambda row: (
        f"needs up to {inputs[row] + most[row]} tokens of KV cache ({inputs[row]} of input); the "
        f"schedule was planned for {plan.query_kv_tokens}: lower max_tokens, or state the "
        "workload's longest lengths in the job"))
    refuse(inputs > (plan.most_input_tokens or np.inf), lambda row: (
        f"{inputs[row]} input tokens; the schedule was planned to encode "
        f"{plan.most_input_tokens} at a time: state the workload's longest lengths in the job"))
    rows = np.array([row for row in range(len(requests)) if row not in why], np.int64)
    return np.stack([rows, most[rows]], axis=1), why


def hand_on(requests: Requests, spool: SpoolWriter, plan: RunPlan, spec: ModelSpec) -> None:
    """Puts the requests that can run into the spool of the output folder, the others into its
    errors.jsonl."""
    queries, why = runnable(requests, plan, spec)
    errors = [RequestError(line=record.line, id=record.id, error=sentence)
              for request, sentence in why.items() for record in [spool.record(request)]]
    write_errors(plan.output / "errors.jsonl", [*requests.bad_lines, *errors])
    spool.save(plan.output, queries, len(requests.bad_lines) + len(errors))


def queries_of(spool: Spool, plan: RunPlan) -> Iterator[PreparedQuery]:
    """Yields the job's queries in their order, indexed from 0 without gaps."""
    for index, record in enumerate(spool.records()):
        sampling = Sampling(
            temperature=plan.temperature if record.temperature is None else record.temperature,
            top_k=plan.top_k if record.top_k is None else record.top_k,
            top_p=plan.top_p if record.top_p is None else record.top_p,
            # queries without a seed of their own must not all draw the same numbers
            seed=plan.seed * 1_000_003 + record.line if record.seed is None else record.seed)
        yield PreparedQuery(
            index=index, id=record.id, input_ids=spool.tokens(index),
            max_new_tokens=spool.most_output_tokens(index),
            is_forced=record.is_forced or plan.ignore_eos, sampling=sampling, stop=record.stop,
            is_openai=record.is_openai, is_chat=record.is_chat)
