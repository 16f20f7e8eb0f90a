"""Reads a run's output folder for reports; an interrupted run is as readable as a finished one.

Any file may be missing, and the last line of a `.jsonl` may be torn: each becomes a sentence in
`Output.remarks`. Texts are kept for the first `max_answers` requests only, the figures of all in
columns: those of ten million take 490 MB."""

import json
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from xgpt.core.errors import InputError, wrong
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import load_schedule
from xgpt.report.lanes import EXPECTED_FILE, KINDS, Expected, Lane, read_expected, stage_label
from xgpt.requests.choices import parts
from xgpt.requests.keys import MAX_INT
from xgpt.requests.spool import Spool
from xprofiler.profile import Profile
from xprofiler.profile_file import load_profile

ALONE = "both"  # name of a pool that encodes and decodes
_COUNTS = ("input_tokens", "output_tokens")
_TIMES = ("latency_s", "encode_start_s", "ttft_s", "tpot_s", "arrival_s")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryFigures:
    """Figures of one finished request. `latency_s` counts from `arrival_s`, else from the start of
    its prefill."""

    input_tokens: int
    output_tokens: int
    finish_reason: str
    latency_s: float
    encode_start_s: float
    ttft_s: float | None = None  # to its first token; None if not recorded
    tpot_s: float | None = None  # per token after the first; None for a single token
    arrival_s: float | None = None  # None: it was there at the start


class QueryColumns:
    """Figures of all requests of a run in columns. Token counts are below 2**31, times finite."""

    def __init__(self, queries: Iterable[QueryFigures] = ()) -> None:
        self._counts = {name: array("i") for name in _COUNTS}
        self._times = {name: array("d") for name in _TIMES}
        self._reasons = Counter[str]()
        for query in queries:
            self.add(query)

    def add(self, query: QueryFigures) -> None:
        """Appends a request; only before any column is read."""
        for name, counts in self._counts.items():
            counts.append(getattr(query, name))
        for name, times in self._times.items():
            value = getattr(query, name)
            times.append(math.nan if value is None else value)
        self._reasons[query.finish_reason] += 1

    def __len__(self) -> int:
        return len(self._counts["output_tokens"])

    def times(self, name: str) -> FloatArray:
        """Seconds in the column `name`, [requests]; NaN where not recorded."""
        return np.frombuffer(self._times[name]) if self else np.zeros(0)

    def counts(self, name: str) -> IntArray:
        """Tokens in the column `name`, [requests], 4 bytes each."""
        return np.frombuffer(self._counts[name], np.int32) if self else np.zeros(0, np.int32)

    def reasons(self) -> Counter[str]:
        """Number of requests by finish reason."""
        return self._reasons


def ends_since_first(queries: QueryColumns) -> FloatArray:
    """End of each request in seconds since the first prefill began, or since the first arrival,
    ascending, [requests]."""
    arrival_s, starts_s = queries.times("arrival_s"), queries.times("encode_start_s")
    starts_s = np.where(np.isnan(arrival_s), starts_s, arrival_s)
    ends_s: FloatArray = queries.times("latency_s") + starts_s
    ends_s -= starts_s.min()
    ends_s.sort()
    return ends_s


def recorded(times: FloatArray) -> FloatArray:
    """`times` without NaN, the mark of values that were not recorded."""
    unknown = np.isnan(times)
    return times[~unknown] if unknown.any() else times

@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to one request, for reading. `prompt` is None if it was not kept."""

    id: str
    text: str
    prompt: str | None
    figures: QueryFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Contents of one output folder; None or empty for missing files."""

    directory: Path
    job: Mapping[str, Any] = field(default_factory=dict)
    schedule: Schedule | None = None
    metrics: Mapping[str, Any] | None = None
    profile: Profile | None = None
    queries: QueryColumns = field(default_factory=QueryColumns)
    answers: tuple[Answer, ...] = ()
    errors: tuple[Mapping[str, Any], ...] = ()
    lanes: Sequence[Lane] = ()  # steps of each stage
    expected: Expected | None = None  # the run as predicted by a simulation
    queries_before: int = 0  # of `queries`, answered by earlier runs, on clocks of their own
    remarks: tuple[str, ...] = ()


def read_output(directory: Path, max_answers: int = 100) -> Output:
    """The contents of the folder `directory`; missing files only get a remark. Raises InputError if
    it is no folder."""
    if not directory.is_dir():
        raise wrong(directory, "output", None, "a folder that `xgpt submit` or `xgpt run` wrote")
    remarks: list[str] = []
    job = _read(_object, directory / "job.json", remarks) or {}
    queries, answers = _read_results(directory / "results.jsonl", max_answers, remarks)
    prompts = _read_prompts(directory, max(answers, default=-1) + 1, remarks)
    # the page says at its top what a missing metrics.json means
    metrics = _read(_object, directory / "metrics.json", remarks, is_optional=True)
    return Output(
        directory=directory, job=job, metrics=metrics,
        schedule=_read(load_schedule, directory / "schedule.json", remarks),
        profile=_read(load_profile, directory / "profile.json", remarks, is_optional=True),
        queries=queries,
        answers=tuple(replace(answer, prompt=prompts[query] if query < len(prompts) else None)
                      for query, answer in answers.items()),
        errors=tuple(map(flat_error, _read_lines(directory / "errors.jsonl", remarks,
                                                 is_optional=True))),
        lanes=_read_lanes(directory / "steps.jsonl", remarks),
        expected=read_expected(directory / EXPECTED_FILE),
        queries_before=_queries_before(directory, metrics),
        remarks=tuple(remarks))


def _queries_before(directory: Path, metrics: Mapping[str, Any] | None) -> int:
    """Number of requests answered by earlier runs, by metrics.json or else progress.json."""
    before = number(metrics, "queries_before") if metrics is not None else number(
        _read(_object, directory / "progress.json", [], is_optional=True), "done_before")
    return int(before) if before is not None and math.isfinite(before) else 0


def number(source: Mapping[str, Any] | None, *keys: str) -> float | None:
    """The number, finite or infinite, at `source[keys[0]][keys[1]]...`; None if there is none."""
    value = _at(source, keys)
    if value == "inf":
        return math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        converted = float(value)
    except OverflowError:  # an integer of more than 308 digits
        return None
    return None if math.isnan(converted) else converted


def text_at(source: Mapping[str, Any] | None, *keys: str) -> str | None:
    """The text at `source[keys[0]][keys[1]]...`; None if there is none."""
    value = _at(source, keys)
    return value if isinstance(value, str) and value else None


def _at(source: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        source = source.get(key) if isinstance(source, Mapping) else None
    return source


def _is_there(path: Path, remarks: list[str], is_optional: bool = False) -> bool:
    if not path.exists() and not is_optional:
        remarks.append(f"{path.name} is missing.")
    return path.exists()


def _object(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    return value


def _read(load: Callable[[Path], _T], path: Path, remarks: list[str], is_optional: bool = False,
          ) -> _T | None:
    if not _is_there(path, remarks, is_optional):
        return None
    try:
        return load(path)
    except (InputError, OSError, ValueError, RecursionError) as cause:
        remarks.append(f"{path.name} cannot be read: {cause}.")
        return None


def _read_lines(path: Path, remarks: list[str], is_optional: bool = False,
                ) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a file of lines; other lines are counted in one remark."""
    if not _is_there(path, remarks, is_optional):
        return
    bad, is_last_torn = 0, False
    with path.open("rb") as lines:
        for line in lines:
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):  # nested without end counts as unreadable
                value = None
            if isinstance(value, dict):
                yield value
            else:
                bad, is_last_torn = bad + 1, not line.endswith(b"\n")
    if is_last_torn:
        remarks.append(f"The last line of {path.name} is torn (the run was cut off while writing "
                       f"it) and is left out.")
    if bad > is_last_torn:
        remarks.append(f"{bad - is_last_torn} unreadable lines of {path.name} are left out.")


def _read_results(path: Path, max_answers: int, remarks: list[str],
                  ) -> tuple[QueryColumns, dict[int, Answer]]:
    """(figures of all requests, first answers by index of their request)."""
    queries = QueryColumns()
    answers: dict[int, Answer] = {}
    foreign = 0
    for row in chain.from_iterable(map(parts, _read_lines(path, remarks))):
        flat = flat_result(row)
        if (figures := _query_figures(flat)) is None:
            foreign += 1
            continue
        queries.add(figures)
        if len(answers) < max_answers:
            index = number(flat, "index")
            answers[len(queries) - 1 if index is None else int(index)] = Answer(
                id=str(flat.get("id", "")), text=str(flat.get("text") or ""), prompt=None,
                figures=figures)
    if foreign:
        remarks.append(f"{foreign} lines of {path.name} are no results and are left out.")
    return queries, answers


def flat_result(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A result line in our own form (docs/output.md), converted from OpenAI's if necessary."""
    body = _mapping(_mapping(row.get("response")).get("body"))
    if not body:
        return row
    choices = body.get("choices")
    choice = _mapping(choices[0] if isinstance(choices, list) and choices else None)
    usage = _mapping(body.get("usage"))
    return {**_mapping(row.get("xgpt")), **_mapping(body.get("xgpt")),
            "id": row.get("custom_id", row.get("id")),
            "text": _mapping(choice.get("message")).get("content", choice.get("text")),
            "finish_reason": choice.get("finish_reason"),
            "input_tokens": usage.get("prompt_tokens"),
            "output_tokens": 0 if body.get("object") == "list" else usage.get("completion_tokens")}


def flat_error(row: dict[str, Any]) -> dict[str, Any]:
    """An error line in our own form (docs/output.md), converted from OpenAI's if necessary."""
    if "custom_id" not in row:
        return row
    body = _mapping(_mapping(row.get("response")).get("body"))
    why = _mapping(row.get("error")) or _mapping(body.get("error"))
    return {**_mapping(row.get("xgpt")), "id": row["custom_id"], "error": why.get("message")}


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _query_figures(row: Mapping[str, Any]) -> QueryFigures | None:
    needed = ("input_tokens", "output_tokens", "latency_s", "encode_start_s")
    known = {key: value for key in (*needed, "ttft_s", "tpot_s", "arrival_s")
             if (value := number(row, key)) is not None and math.isfinite(value)}
    if not known.keys() >= set(needed):
        return None
    figures = QueryFigures(
        input_tokens=int(known["input_tokens"]), output_tokens=int(known["output_tokens"]),
        finish_reason=str(row.get("finish_reason")), latency_s=known["latency_s"],
        encode_start_s=known["encode_start_s"], ttft_s=known.get("ttft_s"),
        tpot_s=known.get("tpot_s"), arrival_s=known.get("arrival_s"))
    return figures if all(0 <= getattr(figures, name) <= MAX_INT for name in _COUNTS) else None


def _read_lanes(path: Path, remarks: list[str]) -> list[Lane]:
    """The steps in steps.jsonl, a lane per stage, in seconds since the first one."""
    pools: dict[int, str] = {}
    steps: dict[int, list[tuple[float, float, int, int]]] = {}
    for row in _read_lines(path, remarks, is_optional=True):
        stage, start_s, end_s = (number(row, key) for key in ("stage", "start_s", "end_s"))
        if stage is None or start_s is None or end_s is None or not end_s >= start_s or (
                row.get("kind") not in KINDS):
            continue
        pools.setdefault(int(stage), text_at(row, "pool") or ALONE)
        steps.setdefault(int(stage), []).append(
            (start_s, end_s, KINDS.index(row["kind"]), int(number(row, "group") or 0)))
    origin_s = min((step[0] for own in steps.values() for step in own), default=0.0)
    lanes = []
    for stage, own in sorted(steps.items()):
        starts_s, ends_s, kinds, groups = (np.array(column) for column in zip(
            *sorted(own), strict=True))
        lanes.append(Lane(label=stage_label(stage, pools[stage]), pool=pools[stage], kinds=kinds,
                          groups=groups, start_s=starts_s - origin_s, end_s=ends_s - origin_s))
    return lanes


def _read_prompts(directory: Path, most: int, remarks: list[str]) -> list[str | None]:
    """The prompts of the first `most` requests, in their order."""
    if not most:
        return []
    try:
        return Spool(directory).prompts(most)
    except (OSError, EOFError, ValueError, LookupError, TypeError) as cause:
        remarks.append(f"The requests' spool cannot be read ({cause}), so the prompts are not "
                       "shown.")
        return []
