"""The section `workload` of a job file: requests, their lengths, and how they are answered."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import Field as Described

from xgpt.core import catalog
from xgpt.core.engines import OWN_ENGINE
from xgpt.core.lengths import MAX_LENGTH_TOKENS
from xgpt.job import typed
from xgpt.job.answer_forms import (
    CHOICES,
    choices_of,
    form_of_answers,
    json_schema_of,
    most_tokens_of,
)
from xgpt.job.arrivals_section import AnyArrivals
from xgpt.job.job import LengthSpec, SharedSpec, WorkloadSpec, file_of
from xgpt.job.job_lengths import likely_range, without_requests
from xgpt.job.sections import AnyRequests, requests_of
from xgpt.requests.request import Terms
from xgpt.requests.template import columns_in

POOLINGS = ("last", "mean")  # how the last hidden states of a text become its embedding
MOST_GROUPS = 1_000_000  # chosen, as of other numbers of requests
TEMPLATE = "text that names a column in braces, such as 'Summarise: {text}'"
_LENGTHS = "{mean, std, max}, {file: path}"
_NO_DISTRIBUTION = LengthSpec(kind="observe")  # stand-in for one that could not be read


def words_of(*words: str) -> typed.Of:
    """A check for one of these words."""
    return typed.that(lambda value: isinstance(value, str) and value in words, enum=[*words])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lengths:
    """Lengths in tokens: a truncated normal distribution, or a file of lengths."""

    mean: Annotated[float, typed.number("tokens >= 1", ge=1)] | None = None
    std: Annotated[float, typed.number("tokens >= 0", ge=0)] | None = None
    max: Annotated[int, typed.whole(1, MAX_LENGTH_TOKENS)] | None = None
    file: Annotated[Path | None, file_of("a file of lengths")] = None


def _lengths_or(*words: str) -> typed.OrMapping:
    """A distribution, the tokens that every request has, or one of these words."""
    def value_of(value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool) and (
                1 <= value <= MAX_LENGTH_TOKENS):
            return _Lengths(mean=value, std=0, max=value)
        if value in words:
            return value
        raise ValueError

    one = typed.Of(value_of, anyOf=[
        {"type": "integer", "minimum": 1, "maximum": MAX_LENGTH_TOKENS},
        *([{"enum": [*words]}] if words else [])])
    return typed.OrMapping(_Lengths, one, ", or ".join(
        [f"a number of tokens, {_LENGTHS}", *([" or ".join(words)] if words else [])]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """Keys of `workload.shared`: prefixes that requests without a file share."""

    groups: Annotated[int, typed.whole(1, MOST_GROUPS)]
    tokens: Annotated[Any, _lengths_or()]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSection:
    """Keys of the section `workload`."""

    requests: AnyRequests = None
    prompt: Annotated[str | None, typed.that(
        lambda value: isinstance(value, str) and columns_in(value), TEMPLATE,
        type="string")] = None
    system: Annotated[str | None, typed.that(
        lambda value: isinstance(value, str) and value.strip(), "text", type="string")] = None
    json_schema: Annotated[Any, typed.InFolder(
        json_schema_of, "a JSON schema, or the name of a file that holds one",
        type=["object", "string"])] = None
    choices: Annotated[tuple[str, ...], typed.Of(
        choices_of, CHOICES, type="array")] = ()
    task: Annotated[str | None, typed.choice(lambda: catalog.names("task"))] = None
    input_tokens: Annotated[Any, _lengths_or("from_requests")] = None
    output_tokens: Annotated[Any, _lengths_or("from_requests", "observe")] = None
    max_tokens: Annotated[int, typed.whole(1, MAX_LENGTH_TOKENS)] | None = None
    chat: typed.Flag | None = None
    chat_template_kwargs: Annotated[Mapping[str, Any], typed.any_keys(
        "a mapping of what the model's chat template reads, such as {enable_thinking: false}")] = (
            field(default_factory=dict))
    shared: Annotated[_Shared, Described(
        description="a mapping, for example {groups: 50, tokens: 1200}")] | None = None
    arrivals: AnyArrivals = None
    score: typed.Flag = False
    embed: Annotated[str | None, typed.choice(POOLINGS)] = None


def workload_of(own: WorkloadSection, engine: str, reading: typed.Reading) -> WorkloadSpec:
    """The WorkloadSpec of the section, checked. `engine`: the engine that answers the requests."""
    requests, count = requests_of(own.requests, reading)
    if own.score and own.embed is not None:
        reading.reject("workload.embed", "left out where continuations are scored")
    only_encodes = own.score or own.embed is not None
    place = reading.at("workload.requests")
    has_file = place is not None and (not isinstance(place.value, dict) or reading.has(
        "workload.requests.file"))
    if only_encodes:
        for key in ("output_tokens", "max_tokens", "task"):
            if reading.has(f"workload.{key}"):
                reading.reject(f"workload.{key}", "left out where continuations are scored, or "
                               "texts embedded: nothing is written")
        # each request ends with its first token, which counts as its output
        inputs = _length(own.input_tokens, "input_tokens", has_file, reading)
        outputs = LengthSpec(kind="normal", mean=1, std=0, maximum=1)
    elif reading.has("workload.task"):
        for key in ("input_tokens", "output_tokens"):
            if reading.has(f"workload.{key}"):
                reading.reject(f"workload.{key}", "give either task or input_tokens and "
                               "output_tokens")
        inputs = outputs = LengthSpec(kind="task", task=own.task)
    elif own.arrivals is not None and own.arrivals.file is not None and not (
            has_file or reading.has("workload.input_tokens")
            or reading.has("workload.output_tokens")):
        inputs = outputs = LengthSpec(kind="file", path=own.arrivals.file)
    else:
        inputs, outputs = (_length(value, key, has_file, reading) for key, value in (
            ("input_tokens", own.input_tokens), ("output_tokens", own.output_tokens)))
    if requests is not None:
        requests = replace(requests, terms=Terms(
            own.score, None if engine == OWN_ENGINE else engine, own.embed or "",
            own.prompt or "", own.system or "", form_of_answers(own.json_schema, own.choices)))
    return WorkloadSpec(
        requests=requests, count=count, input_tokens=inputs, output_tokens=outputs,
        max_tokens=own.max_tokens or most_tokens_of(own.choices), choices=own.choices,
        chat=not only_encodes if own.chat is None else own.chat, score=own.score,
        embed=own.embed, chat_template_kwargs=own.chat_template_kwargs,
        shared=_shared(own.shared, inputs, has_file, reading), arrivals=own.arrivals)


def _shared(own: _Shared | None, inputs: LengthSpec, has_file: bool,
            reading: typed.Reading) -> SharedSpec | None:
    """The prefixes that requests share, checked against their `inputs`."""
    if own is None or not reading.has("workload.shared.tokens"):
        return None
    if has_file:
        reading.reject("workload.shared", "left out with a file of requests: what they share is "
                       "found in it")
        return None
    tokens = _length(own.tokens, "shared.tokens", False, reading)
    if not reading.mistakes:
        (least, _), (_, most) = map(likely_range, map(without_requests, (inputs, tokens)))
        if most >= least:
            reading.reject("workload.shared.tokens", f"fewer than an input has (here up to {most}, "
                           f"and the shortest input has {least})")
    return SharedSpec(groups=own.groups, tokens=tokens)


def _length(own: _Lengths | str | None, side: str, has_file: bool,
            reading: typed.Reading) -> LengthSpec:
    """The LengthSpec of inputs or outputs. With a file of requests inputs default to
    `from_requests`, outputs to `observe`."""
    key = f"workload.{side}"
    if isinstance(own, str) or not reading.has(key):
        if not has_file:
            reading.reject(key, "needs workload.requests to be a file" if own else "required "
                           f"without a file of requests: {_LENGTHS}, or workload.task")
        usual = "from_requests" if side == "input_tokens" else "observe"
        return LengthSpec(kind=cast(Any, own or usual))
    if own is None:
        return _NO_DISTRIBUTION
    if reading.has(f"{key}.file"):
        for name in ("mean", "std", "max"):
            if reading.has(f"{key}.{name}"):
                reading.reject(f"{key}.{name}", "give either file or mean, std and max")
        return LengthSpec(kind="file", path=own.file)
    at = reading.at(key)
    for name in ("mean", "std", "max") if at is not None and isinstance(at.value, dict) else ():
        if not reading.has(f"{key}.{name}"):
            reading.reject(f"{key}.{name}", "required: mean, std and max describe a length "
                           "together")
        elif name != "max" and (getattr(own, name) or 0) > (own.max or math.inf):
            reading.reject(f"{key}.{name}", f"must not exceed max = {own.max}")
    return LengthSpec(kind="normal", mean=own.mean, std=own.std, maximum=own.max)
