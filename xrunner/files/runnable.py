"""Which of a job's requests a schedule can run, and why the others cannot."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xgpt.core.model import ModelSpec
from xgpt.core.problem import output_room
from xgpt.requests.deadlines import in_seconds
from xgpt.requests.request import Request, RequestError, Requests
from xgpt.requests.spool import SpoolWriter
from xrunner.files.results import write_errors
from xrunner.plan import RunPlan

_ROWS_AT_A_TIME = 2**18  # chosen


def runnable(requests: Requests, plan: RunPlan | None,
             spec: ModelSpec) -> tuple[IntArray, dict[int, str]]:
    """Requests that can run, [requests, 2], and why each other one cannot, by index. Columns:
    index, most output tokens. `plan`: None for any plan."""
    queries, count = np.empty((len(requests), 2), np.int64), 0
    why = dict(requests.unusable)
    unusable = np.fromiter(why, np.int64, len(why))
    # in pieces, so that memory stays small with ten million requests
    for first in range(0, len(requests), _ROWS_AT_A_TIME):
        rows, most = _runnable(requests, first, plan, spec, why)
        is_usable = ~np.isin(rows, unusable)
        rows, most = rows[is_usable], most[is_usable]
        queries[count:count + len(rows), 0] = rows
        queries[count:count + len(rows), 1] = most
        count += len(rows)
    return queries[:count], why


def save_runnable(requests: Requests, spool: SpoolWriter, plan: RunPlan, spec: ModelSpec,
                  arrival_s: FloatArray | None = None) -> IntArray:
    """Saves the requests that can run to the output folder's spool, the others to errors.jsonl.
    Returns the indices of the first, [queries]. `arrival_s`: when each arrives, [requests] seconds
    by the run's clock, or [queries]; deadlines then count from there."""
    queries, why = runnable(requests, plan, spec)
    errors = errors_of(requests, spool, why)
    write_errors(plan.output / "errors.jsonl", errors, requests.labels)
    # a line has no answer if one of its inputs cannot run
    left_out = [one for request in why for record in [spool.record(request)]
                for first in [request - record.sample]
                for one in range(first, first + record.choices)]
    queries = queries[~np.isin(queries[:, 0], left_out)]
    deadlines_s = in_seconds(requests.deadlines_s, queries[:, 0], plan.deadline_s, plan.started_at)
    own_s = arrival_s if arrival_s is None or len(arrival_s) == len(queries) else (
        arrival_s[queries[:, 0]])
    spool.save(plan.output, queries, len(errors), requests.labels, deadlines_s,
               None if requests.prefixes is None else requests.prefixes[queries[:, 0]], own_s)
    return queries[:, 0]


def errors_of(requests: Requests, spool: SpoolWriter, why: Mapping[int, str]) -> list[RequestError]:
    """All lines that cannot run, in order. `why`: reasons by request, as `runnable` returns
    them."""
    errors = dict[int, RequestError]()  # by the first request of a line
    for request, sentence in sorted(why.items()):
        record = spool.record(request)
        where = f"input {record.asked + 1} of the line: " if record.asked else ""
        errors.setdefault(request - record.sample, RequestError(
            line=record.line, file=record.file, id=record.id, error=where + sentence,
            is_openai=record.is_openai))
    return sorted((*requests.bad_lines, *errors.values()),
                  key=lambda error: (error.file, error.line))


def _runnable(requests: Requests, first: int, plan: RunPlan | None, spec: ModelSpec,
              why: dict[int, str]) -> tuple[IntArray, IntArray]:
    """(indices that can run, most output tokens of each) of one piece from `first` on. Adds reasons
    to `why`."""
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


ASCII_PER_TOKEN = 3.6
OTHERS_PER_TOKEN = 1.0  # characters outside ASCII
SPREAD = 0.32  # standard deviation of the logarithm, common to all texts of a job


# Measured with SmolLM2's tokenizer (benchmarks/results/characters-per-token.md): 4.3 characters a
# token of English prompts, 1.3 to 3.6 of code and other alphabets, 0.8 to 1.2 of Chinese, Japanese
# and Korean. Over 21 kinds of texts the root mean square error of the logarithm is 0.32.
def estimated_tokens(text: str) -> int:
    """Estimated number of a text's tokens, at least 1."""
    others = len(text) - len(text.encode("ascii", "ignore"))
    return max(round((len(text) - others) / ASCII_PER_TOKEN + others / OTHERS_PER_TOKEN), 1)


class CharacterTokens:
    """Stands in for a tokenizer if only numbers of tokens are needed. Tokens that a chat template
    adds are not counted."""

    vocab_size = None

    def tokenise(self, requests: Sequence[Request]) -> list[Any]:
        """Placeholder ids, as many as each request has tokens by the estimate."""
        return [request.tokens if request.tokens is not None else range(estimated_tokens(
            (request.prompt or "\n".join(m.get("content", "") for m in request.messages or ()))
            + (request.continuation or ""))) for request in requests]
