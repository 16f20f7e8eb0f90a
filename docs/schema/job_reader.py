"""The schema of a job file, from the code that reads it: the reader is run over a few job files
that have every section, and what it asks each key for is written down."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from xgpt.core import catalog
from xgpt.core.constraint_section import ConstraintSection
from xgpt.core.errors import InputError
from xgpt.core.inline_cluster import InlineCluster
from xgpt.core.job_file import load_job
from xgpt.core.run_section import RunSpec
from xgpt.core.schedule_section import section_kind
from xgpt.core.sections import LARGEST, LARGEST_NUMBER, Section
from xgpt.core.slurm import SlurmSpec
from xgpt.core.typed import schema_of

Json = dict[str, Any]
_TEXT_OR_NUMBER = ["number", "string"]
_SLURM = {"partition": "gpu", "nodes": 1}
_LINK = {"name": "x", "bandwidth_bytes_per_s": "25 GB", "latency_s": "10 us"}
_DEVICE = {"name": "x", "memory_bytes": "48 GiB", "bandwidth_bytes_per_s": "1 TB",
           "flops_per_s": {"float32": 1e13}}
# Each key of theirs is read; between them they have every mapping that a job file may have.
SAMPLES: tuple[Json, ...] = (
    {"model": "opt-13b", "cluster": "local", "slurm": _SLURM,
     "workload": {"requests": "requests.jsonl", "output_tokens": {"file": "lengths.txt"}},
     "constraint": {"latency_s": 20, "ttft_s": {"limit_s": 2}, "tpot_s": {"limit_s": 0.1},
                    "makespan_s": 600}, "schedule": {"policy": "rra"}, "run": {"engine": "xgpt"},
     "search": {"max_seconds": 60}},
    {"model": "opt-13b", "cluster": {
        "device": _DEVICE, "num_nodes": 1, "devices_per_node": 1, "intra_link": _LINK,
        "inter_link": _LINK},
     "workload": {"requests": {"count": 9}, "input_tokens": {"mean": 9, "std": 1, "max": 20},
                  "output_tokens": {"mean": 9, "std": 1, "max": 20}}},
    {"model": "opt-13b", "cluster": "local", "workload": {"requests": {"file": "requests.jsonl"}},
     "constraint": {"ttft_s": 2, "tpot_s": 0.1}},
    {"model": "opt-13b", "cluster": {
        "device": "A40", "num_nodes": 1, "devices_per_node": 1, "intra_link": "nvlink4",
        "inter_link": "ib-400g"}, "workload": {"requests": {"count": 9}, "task": "S"}},
)
TYPED = {"cluster": InlineCluster, "constraint": ConstraintSection, "run": RunSpec,
         "schedule": section_kind(), "slurm": SlurmSpec}
_OR_SEVERAL = ("schedule.policy",)  # a list of what stands there for one will do as well
Asked = dict[str, list[Json]]  # dotted key -> schemas of what it is asked for


def job_schema(folder: Path) -> Json:
    """`folder`: where sample files may be written."""
    for name in ("requests.jsonl", "lengths.txt"):
        (folder / name).write_text('{"id": "1", "prompt": "a"}\n', encoding="utf-8")
    asked: Asked = {}
    with _written_down(asked):
        for sample in SAMPLES:
            _mistakes(folder, sample)
    required = {".".join(path) for sample in SAMPLES for path in _paths(sample)
                if _is_required(folder, sample, path)} - _left_out()
    schema = _object("", asked, required, _words(folder, asked))
    for name, kind in TYPED.items():
        schema["properties"][name] = {"anyOf": [
            *([{"const": "auto"}] if name == "schedule" else []),
            *([{"enum": catalog.names("cluster") + ["local"]}] if name == "cluster" else []),
            schema_of(kind), *([] if name == "cluster" else [{"type": "null"}])]}
    return schema


@contextmanager
def _written_down(asked: Asked) -> Iterator[None]:
    depth = 0

    def wrapped(name: str, schema_of: Callable[..., Json | None]) -> Any:
        original = getattr(Section, name)

        def method(self: Section, key: str, *rest: Any, **named: Any) -> Any:
            nonlocal depth
            if depth == 0 and (schema := schema_of(*rest, **named)) is not None:
                known = asked.setdefault(f"{self._prefix}{key}", [])
                known += [schema] * (schema not in known)
            depth += 1
            try:
                return original(self, key, *rest, **named)
            finally:
                depth -= 1

        return patch.object(Section, name, method)

    with ExitStack() as stack:
        for name, schema_of in _SCHEMAS.items():
            stack.enter_context(wrapped(name, schema_of))
        yield


def _integer(default: object, minimum: int, maximum: int | None = None) -> Json:
    return {"type": "integer", "minimum": minimum,
            **({} if maximum is None else {"maximum": maximum})}


# what each method of Section asks of a key; those of a mapping follow from their dotted names
_SCHEMAS: dict[str, Callable[..., Json | None]] = {
    "integer": _integer,
    "number": lambda *rest: {"type": "number", "maximum": LARGEST_NUMBER},
    "amount": lambda default, parse, is_allowed, allowed, types=(str, int, float): {
        "type": _TEXT_OR_NUMBER if str in types else "number",
        "maximum": LARGEST.get(parse, LARGEST_NUMBER)},
    "text": lambda *rest: {"type": "string", "minLength": 1},
    "choice": lambda default, choices: {"enum": [*choices]} if choices else None,
    "flag": lambda *rest: {"type": "boolean"},
    "read": lambda *rest: {},
    "get": lambda *rest: {},
    "has": lambda *rest: None,
    "reject": lambda *rest: None,
    "reject_type": lambda *rest: None,
    "section": lambda *rest: {"type": "object"},
    "mapping": lambda *rest: {"type": "object"},
}


def _object(prefix: str, asked: Asked, required: set[str], words: dict[str, str]) -> Json:
    own = [key for key in asked if key.rpartition(".")[0] == prefix]
    return {"type": "object", "additionalProperties": False,
            "required": sorted(key.rpartition(".")[2] for key in own if key in required),
            "properties": {key.rpartition(".")[2]: _value(key, asked, required, words)
                           for key in sorted(own)}}


def _value(key: str, asked: Asked, required: set[str], words: dict[str, str]) -> Json:
    """What a key may hold; a key without a value counts as not given."""
    has_keys = any(other.startswith(f"{key}.") for other in asked)
    forms = [form for form in asked[key] if form and form != {"type": "object"}]
    if key in _OR_SEVERAL:
        forms += [{"type": "array", "minItems": 1, "items": {"enum": [
            name for name in form["enum"] if name != "auto"]}} for form in forms]
    if has_keys:
        forms.append(_object(key, asked, set() if _has_forms(key, asked) else required, words))
    described = {"description": words[key]} if key in words else {}
    if {} in asked[key] and has_keys:
        forms.append({"type": ["string", "array"]})  # a word, or several, instead of the mapping
    elif {} in asked[key] and not (forms and all(
            {"enum", "minLength", "minItems"} & {*f} for f in forms)):
        return described  # any value: the reader looks at it itself
    if key in required:
        return {**described, **(forms[0] if len(forms) == 1 else {"anyOf": forms})}
    return {**described, "anyOf": [*forms, {"type": "null"}]}


def _has_forms(key: str, asked: Asked) -> bool:
    """Whether the mapping is of one form or another: its keys are required in one of them alone."""
    return f"{key}.file" in asked


def _words(folder: Path, asked: Asked) -> dict[str, str]:
    """What is said to be allowed where a key holds what it may not: of all keys at once, then one
    at a time of those of which nothing was said."""
    words: dict[str, str] = {}
    for sample in SAMPLES:
        open_keys = [key for key in asked if key not in words and isinstance(
            _at(sample, key.split(".")[:-1]), dict)]
        lowest = [key for key in open_keys if not isinstance(_at(sample, key.split(".")), dict)]
        for keys in (lowest, *([key] for key in open_keys)):
            if len(keys) == 1 and keys[0] in words:
                continue
            wrong = sample
            for key in keys:
                wrong = _with(wrong, key.split("."), [["?"]])
            for name, allowed in _mistakes(folder, wrong):
                if name in keys and name not in words and not allowed.startswith("give either"):
                    words[name] = allowed.removesuffix(", not a list")
    return words


def _mistakes(folder: Path, sample: Json) -> list[tuple[str, str]]:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(sample), encoding="utf-8")
    try:
        load_job(path)
    except InputError as error:
        return [(mistake.key, mistake.allowed) for mistake in error.mistakes]
    return []


def _is_required(folder: Path, sample: Json, path: list[str]) -> bool:
    without = copy.deepcopy(sample)
    del _at(without, path[:-1])[path[-1]]
    return any(key == ".".join(path) and allowed.startswith("required")
               for key, allowed in _mistakes(folder, without))


def _left_out() -> set[str]:
    """Keys that a sample does without, though it has the mapping they would be in."""
    every = [path for sample in SAMPLES for path in _paths(sample)]
    return {".".join(path) for path in every for sample in SAMPLES
            if isinstance(parent := _at(sample, path[:-1]), dict) and path[-1] not in parent}


def _paths(tree: Json, before: tuple[str, ...] = ()) -> Iterator[list[str]]:
    for key, value in tree.items():
        yield [*before, key]
        if isinstance(value, dict):
            yield from _paths(value, (*before, key))


def _at(tree: Any, path: list[str]) -> Any:
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _with(tree: Json, path: list[str], value: Any) -> Json:
    changed = copy.deepcopy(tree)
    _at(changed, path[:-1])[path[-1]] = value
    return changed
