"""Length distributions of a job (docs/reproducing.md), for each kind of LengthSpec.

`observe` (output lengths are learned from the first part of the job) starts conservatively: every
answer is planned at its cap. A request can then only end earlier than planned: neither the latency
limit nor the memory is exceeded, and the predicted throughput is a lower bound. While the job runs,
xgpt.app.running.follow replans with the lengths measured."""

import csv
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from xgpt.core import catalog
from xgpt.core.errors import InputError, Mistake, refuse, wrong
from xgpt.core.lengths import (
    MAX_LENGTH_TOKENS,
    FloatArray,
    IntArray,
    JointLengths,
    Lengths,
    empirical,
    joint_empirical,
    truncated_normal,
)
from xgpt.core.model import ModelSpec
from xgpt.core.problem import has_room, output_room
from xgpt.core.system.whole_file import read_text
from xgpt.job.job import Job, LengthSpec
from xgpt.requests.arrival_times import WORDS, arrival_of
from xgpt.requests.choices import parts
from xgpt.requests.request import Requests

# Cap on the output if neither the request, the job nor a distribution of outputs has one.
DEFAULT_MAX_TOKENS = 512  # chosen
_RARE = 1e-6  # chosen
_OBSERVE_NOTE = "every answer planned at its cap, until lengths are observed"


def resolve_lengths(job: Job, model: ModelSpec, requests: Requests | None) -> JointLengths:
    """Joint distribution of the job's input and output lengths, in tokens. Raises InputError, also
    if the longest of them exceed the model's positions."""
    inputs, outputs = job.workload.input_tokens, job.workload.output_tokens
    if inputs.kind == "task" and inputs == outputs:
        assert inputs.task is not None, f"{inputs = }"
        lengths = catalog.task(inputs.task)
    elif inputs.kind == "file" and inputs == outputs:
        lengths = _joint_of_file(inputs)
    elif inputs.kind == "from_requests" and outputs.kind in ("from_requests", "observe"):
        lengths = _joint_of_requests(job, model, _needed(requests))
    else:
        lengths = JointLengths(inputs=_inputs(job, model, requests),
                               outputs=_outputs(job, model, requests))
    _check_positions(job, model, lengths)
    return lengths


def _joint_of_file(spec: LengthSpec) -> JointLengths:
    assert spec.path is not None, f"{spec = }"
    pairs = read_lengths(spec.path, "input", "output")
    return joint_empirical(pairs, note=f"observed in {len(pairs)} rows of {spec.path.name}")


def _joint_of_requests(job: Job, model: ModelSpec, requests: Requests) -> JointLengths:
    is_observed = job.workload.output_tokens.kind == "observe"
    outputs = _caps(job, requests) if is_observed else _forced(job, requests)
    pairs = np.stack([_input_lengths(job, requests), outputs], axis=1)
    pairs = pairs[_can_run(job, pairs[:, 0], requests.forced, model)]
    if is_observed:  # a cap beyond the positions ends where they do
        pairs[:, 1] = np.minimum(pairs[:, 1], output_room(model, pairs[:, 0]))
    note, pairs = f"of {len(pairs)} requests", pairs.astype(np.int32)  # of millions: they stay
    return JointLengths(inputs=empirical(pairs[:, 0], note),
                        outputs=empirical(pairs[:, 1], _OBSERVE_NOTE if is_observed else note),
                        pairs=pairs)


def _can_run(job: Job, input_lengths: IntArray, forced: IntArray,
             model: ModelSpec) -> NDArray[np.bool_]:
    """Whether each prompt has a token and leaves room for its output (one token, or all forced
    ones), [requests]; the run reports the others as errors. Raises InputError if none has."""
    limit = model.max_positions or MAX_LENGTH_TOKENS + 1
    mask = (input_lengths > 0) & (input_lengths <= MAX_LENGTH_TOKENS)
    why = f"no prompt has a token and is shorter than the model's {limit} positions"
    if (mask & has_room(model, input_lengths, np.zeros_like(forced))).any():
        why = f"no prompt's forced_tokens fit after it into the model's {limit} positions"
    mask &= has_room(model, input_lengths, forced)
    if not mask.any():
        raise wrong(job.source, "workload.requests", str(job.workload.requests), why)
    return np.asarray(mask)


def _inputs(job: Job, model: ModelSpec, requests: Requests | None) -> Lengths:
    spec = job.workload.input_tokens
    if spec.kind != "from_requests":
        return without_requests(spec, is_input=True)
    requests = _needed(requests)
    lengths = _input_lengths(job, requests)
    lengths = lengths[_can_run(job, lengths, requests.forced, model)]
    return empirical(lengths, note=f"of {len(lengths)} requests")


def _outputs(job: Job, model: ModelSpec, requests: Requests | None) -> Lengths:
    spec = job.workload.output_tokens
    if spec.kind == "from_requests":
        forced = _forced(job, _needed(requests))
        inputs = _needed(requests).input_tokens
        fits = has_room(model, np.ones_like(forced) if inputs is None else inputs, forced)
        return empirical(forced[fits] if fits.any() else forced, note="forced by the requests")
    if spec.kind == "observe":
        caps = _caps(job, _needed(requests))
        if model.max_positions is not None:
            longest = without_requests(job.workload.input_tokens, is_input=True).max
            room = int(output_room(model, longest))
            caps = np.minimum(caps, max(room, 1))
        return empirical(caps, note=_OBSERVE_NOTE)
    return without_requests(spec, is_input=False)


def likely_range(lengths: Lengths) -> tuple[int, int]:
    """(shortest, longest) of the lengths; rarer ones than one in a million do not count."""
    return lengths.quantile(_RARE), lengths.quantile(1 - _RARE)


def without_requests(spec: LengthSpec, *, is_input: bool = True) -> Lengths:
    """Lengths of inputs or outputs by a spec that needs no requests."""
    if spec.kind == "normal":
        assert spec.mean is not None and spec.std is not None and spec.maximum is not None
        # a spread of millionths of the range (under two tokens of a million) counts as none
        std = spec.std if spec.std > 4e-6 * spec.maximum else 0.0
        return truncated_normal(spec.mean, std, spec.maximum)
    if spec.kind == "task":
        assert spec.task is not None, f"{spec = }"
        task = catalog.task(spec.task)
        return task.inputs if is_input else task.outputs
    assert spec.kind == "file" and spec.path is not None, f"{spec = }"
    values = read_lengths(spec.path, "input" if is_input else "output")[:, 0]
    return empirical(values, note=f"observed in {len(values)} rows of {spec.path.name}")


def _needed(requests: Requests | None) -> Requests:
    assert requests, "load_job lets from_requests and observe through only with a file of requests"
    return requests


def _input_lengths(job: Job, requests: Requests) -> IntArray:
    if requests.input_tokens is None:
        raise wrong(job.source, "workload.input_tokens", "from_requests",
                    "the prompts must be tokenised to know their lengths, which needs the model's "
                    "tokenizer; without it give {mean, std, max} or {file: path}")
    return requests.input_tokens


def _forced(job: Job, requests: Requests) -> IntArray:
    num_free = int((requests.forced == 0).sum())
    if num_free:
        raise wrong(job.source, "workload.output_tokens", "from_requests",
                    f"{num_free} of {len(requests)} requests have no forced_tokens; give "
                    "{mean, std, max}, {file: path} or observe")
    return requests.forced


def _caps(job: Job, requests: Requests) -> IntArray:
    default = job.workload.max_tokens or DEFAULT_MAX_TOKENS
    return np.minimum(requests.output_caps(default), MAX_LENGTH_TOKENS)


def _check_positions(job: Job, model: ModelSpec, lengths: JointLengths) -> None:
    if model.max_positions is None:
        return
    if model.is_encoder_decoder:
        longest = max(lengths.inputs.max, lengths.outputs.max)
    elif lengths.pairs is not None:
        longest = int(lengths.pairs.sum(axis=1).max())
    else:
        longest = lengths.inputs.max + lengths.outputs.max
    together = "" if model.is_encoder_decoder else f", together {longest}"
    if longest > model.max_positions:
        raise wrong(job.source, "workload", None,
                    f"the longest input and output ({lengths.inputs.max} and {lengths.outputs.max} "
                    f"tokens{together}) exceed the {model.max_positions} positions of "
                    f"{model.name}")


Side: TypeAlias = Literal["input", "output"]
MOST_LEARNED = 100_000  # chosen: first lines of an earlier run's results that are read
MAX_MISTAKES = 20  # chosen: of a bad file; the rest would only repeat them

_NAMES: dict[Side, tuple[str, ...]] = {
    "input": ("input", "input_tokens", "prompt_tokens", "ContextTokens", "num_prefill_tokens"),
    "output": ("output", "output_tokens", "completion_tokens", "GeneratedTokens",
               "num_decode_tokens")}
_TIMES = ("TIMESTAMP", "timestamp", "arrival_s", "arrived_at")
_Row: TypeAlias = "tuple[int, Mapping[Any, Any]]"  # line, values by column


def read_lengths(path: Path, *sides: Side) -> IntArray:
    """Lengths in tokens in a CSV or JSON-lines file, [rows, sides]: from the columns of these names
    or, for one side, from the file's only column. Raises InputError with each row's first bad
    value."""
    rows = _read_rows(path)
    line, columns = rows[0]
    keys = [next((name for name in _NAMES[side] if name in columns), None) for side in sides]
    is_named = any(name in columns for names in _NAMES.values() for name in names)
    if len(sides) == len(columns) == 1 and not is_named:  # the other side's column will not do
        keys = [*columns]
    if None in keys:
        raise wrong(path, "lengths", None, f"no column {sides[keys.index(None)]}; has "
                    f"{', '.join(map(str, columns))}", line)
    values = [[_length(row.get(key)) for key in keys] for _, row in rows]
    bad = [(line, row, keys[numbers.index(None)])
           for (line, row), numbers in zip(rows, values, strict=True) if None in numbers]
    if bad:
        raise InputError([Mistake(file=str(path), line=line, key=str(key), value=row.get(key),
                                  allowed=f"a whole number from 1 to {MAX_LENGTH_TOKENS}")
                          for line, row, key in bad[:MAX_MISTAKES]])
    return np.array(values, dtype=np.int64)


def trace_columns(path: Path) -> tuple[bool, bool]:
    """Whether a trace has columns of lengths, and of times. Raises InputError."""
    columns = {*_read_rows(path)[0][1]}
    return all(columns & {*names} for names in _NAMES.values()), bool(columns & {*_TIMES})


def read_times(path: Path) -> FloatArray:
    """Times of arrival in a trace, [rows] seconds, which do not fall. Raises InputError with each
    row that has none, or an earlier one than the row before."""
    rows = _read_rows(path)
    line, columns = rows[0]
    if (key := next((name for name in _TIMES if name in columns), None)) is None:
        raise wrong(path, "arrivals", None, f"no column {_TIMES[0]}, when each request arrives; "
                    f"has {', '.join(map(str, columns))}", line)
    times_s, bad = list[float](), list[Mistake]()
    for line, row in rows:
        at_s = arrival_of(row.get(key))
        if at_s is None or (times_s and at_s < times_s[-1]):
            bad.append(Mistake(file=str(path), line=line, key=key, value=row.get(key), allowed=(
                WORDS if at_s is None else "at or after the time of the row before")))
        else:
            times_s.append(at_s)
    refuse(bad[:MAX_MISTAKES])
    return np.array(times_s)


def earlier_lengths(output: Path) -> JointLengths | None:
    """Lengths of the requests that the latest run in a folder finished, of a run moved aside if it
    has no other; None if there are none."""
    aside = sorted(output.glob("earlier*/results.jsonl"), key=lambda path: path.stat().st_mtime)
    for path in (output / "results.jsonl", *aside[::-1]):
        if pairs := finished_lengths(path):
            return joint_empirical(np.array(pairs), f"observed in an earlier run, {path.name}")
    return None


def finished_lengths(results: Path) -> list[tuple[int, int]]:
    """(input, output) tokens of the requests in a results.jsonl; none without such a file."""
    with suppress(OSError), results.open("rb") as lines:
        return [pair for line in islice(lines, MOST_LEARNED) for pair in _pairs(line)]
    return []


def _pairs(line: bytes) -> Iterator[tuple[int, int]]:
    """Yields (input, output) tokens of the answers in a line of results.jsonl."""
    with suppress(ValueError, RecursionError, LookupError, TypeError, AttributeError):
        for row in parts(json.loads(line)):
            usage = _usage(row) or row
            inputs, outputs = (next((length for name in _NAMES[side] if (
                length := _length(usage.get(name))) is not None), None)
                for side in ("input", "output"))
            if inputs is not None and outputs is not None:
                yield inputs, outputs


def _length(value: object) -> int | None:
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
        value = int(value) if len(value) < 20 else None
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_LENGTH_TOKENS:
        return value
    return None


def _read_rows(path: Path) -> list[_Row]:
    try:
        text = read_text(path, "utf-8-sig")
    except UnicodeDecodeError as cause:
        raise wrong(path, "lengths", None, f"not UTF-8 text: {cause.reason}") from None
    except (OSError, ValueError) as cause:
        raise wrong(path, "lengths", None, "cannot be read: "
                    f"{getattr(cause, 'strerror', None) or cause}") from None
    is_json = text.lstrip().startswith("{")
    rows = list(_json_rows(path, text) if is_json else _csv_rows(path, text))
    if not rows or not rows[0][1]:
        raise wrong(path, "lengths", None, "holds no lengths")
    return rows


def _json_rows(path: Path, text: str) -> Iterator[_Row]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as cause:
            raise wrong(path, "lengths", None, f"not JSON: {cause}", number) from None
        if not isinstance(record, dict):
            raise wrong(path, "lengths", None, "not a JSON object", number)
        yield number, _usage(record) or record


def _usage(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """`response.body.usage` of an OpenAI batch line; None if the record is none."""
    value: object = record
    for key in ("response", "body", "usage"):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else None


def _csv_rows(path: Path, text: str) -> Iterator[_Row]:
    reader = csv.reader(text.splitlines())
    header: list[str] | None = None
    try:
        for cells in reader:
            cells = [cell.strip() for cell in cells]
            if not any(cells):
                continue
            if header is None:
                if any(_length(cell) is None for cell in cells):
                    header = cells
                    continue
                header = ["length"] if len(cells) == 1 else ["input", "output"]
            if len(cells) > len(header):
                raise wrong(path, "lengths", None, f"more cells than columns ({len(header)})",
                            reader.line_num)
            yield reader.line_num, dict(zip_longest(header, cells))
    except csv.Error as cause:
        raise wrong(path, "lengths", None, f"not CSV: {cause}", reader.line_num) from None
