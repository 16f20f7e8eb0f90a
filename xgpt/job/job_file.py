"""Reading a job file: YAML (docs/job-file.md) -> frozen `Job`, with every mistake at once.

Relative paths are relative to the job file's folder, whether they stand in the file or on the
command line. A key without a value (`constraint:`) counts as not given. Nothing is downloaded or
created."""

import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import Field as Described

from xgpt.core import catalog
from xgpt.core.cluster import Cluster
from xgpt.core.constraint import OBJECTIVES, Objective
from xgpt.core.engines import OWN_ENGINE, VLLM
from xgpt.core.errors import InputError, Mistake, XgptError, nearest, wrong
from xgpt.core.hf.values import gguf_in
from xgpt.core.lengths import MAX_LENGTH_TOKENS
from xgpt.core.units import parse_seconds
from xgpt.job import typed
from xgpt.job.answer_forms import (
    check_asked,
    choices_of,
    form_of_answers,
    json_schema_of,
    most_tokens_of,
)
from xgpt.job.job import LOCAL_CLUSTER, Job, LengthSpec, RunSpec, WorkloadSpec, check_run
from xgpt.job.plan_sections import (
    AUTO,
    AnyCluster,
    ConstraintSection,
    InlineCluster,
    Price,
    built_cluster,
    cluster_words,
    constraint_of,
    schedule_of,
    section_kind,
)
from xgpt.job.sections import (
    AnyRequests,
    Results,
    SlurmSpec,
    absolute,
    check_slurm,
    is_file,
    requests_of,
    results_of,
)
from xgpt.job.yaml_tree import OVERRIDE_FILE, Field, apply_override, read_tree
from xgpt.requests.request import Terms
from xgpt.requests.request_files import format_of
from xgpt.requests.template import columns_in

SWEEP_KEYS = ("base", "grid", "cases")  # any of which makes a file a sweep's
POOLINGS = ("last", "mean")  # of a text's last hidden states, where it is embedded
SCORING_POLICIES = ("rra", "ft", "dsi")  # which encode whole inputs, without decoding beside them

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MODEL = "a catalog name, a folder with config.json, or a hub id"
_LENGTHS = "{mean, std, max}, {file: path}"
_NO_DISTRIBUTION = LengthSpec(kind="observe")  # stands in for one that could not be read


def _model(value: Any, folder: Path) -> str:
    """Catalog name, absolute path of a local model, or hub id."""
    name, known = typed.text_of(value), catalog.names("model")
    if name in known:
        return name
    local = absolute(name, folder)
    if is_file(local / "config.json") or gguf_in(local) is not None:
        return str(local)
    if name.startswith((".", "/", "~")):
        raise ValueError(f"no config.json in {local}")
    if "/" not in name and (row := catalog.model_named(name)) is not None:
        return row.name  # by letters of another case
    if "/" not in name:
        raise ValueError(f"unknown model; {nearest(name, known, is_sized=True)}; or a folder, or a "
                         "hub id a/b")
    if not _HUB_ID.fullmatch(name):
        raise ValueError("neither a folder with config.json nor a hub id owner/name")
    return name


def _file(allowed: str) -> typed.InFolder:
    def value_of(value: Any, folder: Path) -> Path:
        path = absolute(typed.text_of(value), folder)
        if is_file(path):
            return path
        raise ValueError(f"no such file: {path}")

    return typed.InFolder(value_of, allowed, type="string", minLength=1)


def _words(*words: str) -> typed.Of:
    return typed.that(lambda value: isinstance(value, str) and value in words, enum=[*words])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lengths:
    """A truncated normal distribution, or what a file holds."""

    mean: Annotated[float, typed.number("tokens >= 1", ge=1)] | None = None
    std: Annotated[float, typed.number("tokens >= 0", ge=0)] | None = None
    max: Annotated[int, typed.whole(1, MAX_LENGTH_TOKENS)] | None = None
    file: Annotated[Path | None, _file("a file of lengths")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workload:
    requests: AnyRequests = None
    prompt: Annotated[str | None, typed.that(
        lambda value: isinstance(value, str) and columns_in(value), "text that names a column in "
        "braces, such as 'Summarise: {text}'", type="string")] = None
    system: Annotated[str | None, typed.that(
        lambda value: isinstance(value, str) and value.strip(), "text", type="string")] = None
    json_schema: Annotated[Any, typed.InFolder(
        json_schema_of, "a JSON schema, or the name of a file that holds one",
        type=["object", "string"])] = None
    choices: Annotated[tuple[str, ...], typed.Of(
        choices_of, "a list of different texts", type="array")] = ()
    task: Annotated[str | None, typed.choice(lambda: catalog.names("task"))] = None
    input_tokens: Annotated[Any, typed.OrMapping(_Lengths, _words(
        "from_requests"), f"{_LENGTHS}, or from_requests")] = None
    output_tokens: Annotated[Any, typed.OrMapping(_Lengths, _words(
        "from_requests", "observe"), f"{_LENGTHS}, or from_requests or observe")] = None
    max_tokens: Annotated[int, typed.whole(1, MAX_LENGTH_TOKENS)] | None = None
    chat: typed.Flag | None = None
    chat_template_kwargs: Annotated[Mapping[str, Any], typed.any_keys(
        "a mapping of what the model's chat template reads, such as {enable_thinking: false}")] = (
            field(default_factory=dict))
    score: typed.Flag = False
    embed: Annotated[str | None, typed.choice(POOLINGS)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    engine: Annotated[str | None, typed.choice(lambda: catalog.names("engine"))] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    max_seconds: Annotated[float | None, typed.amount(
        parse_seconds, lambda x: x > 0, "seconds > 0, '90 s' or '2 min'")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """The keys of a job file. `schedule` has a kind of its own, by the policies there are."""

    __pydantic_config__ = {**typed.CONFIG, "json_schema_extra": {
        "required": ["model", "cluster", "workload"]}}
    name: Annotated[str | None, typed.text("a name of printable characters")] = None
    model: Annotated[str, typed.InFolder(_model, _MODEL, type="string", minLength=1)] = ""
    cluster: AnyCluster = ""
    workload: Annotated[_Workload, Described(
        description="a mapping with requests and lengths")] = _Workload()
    objective: Annotated[Objective, typed.choice(OBJECTIVES)] = "throughput"
    constraint: Annotated[ConstraintSection, Described(
        description="a mapping, for example {latency_s: 11.5}")] = ConstraintSection()
    price_per_hour: Price | None = None
    schedule: Annotated[Any, typed.OrMapping(Any, _words(AUTO), "auto, or a mapping of control "
                                       "variables")] = None
    run: RunSpec = field(default_factory=RunSpec)
    plan: Annotated[_Plan, Described(
        description="a mapping, for example {engine: vllm}")] = _Plan()
    slurm: Annotated[SlurmSpec, Described(description="a mapping of sbatch options")] | None = None
    search: Annotated[_Search, Described(
        description="a mapping, for example {max_seconds: 60}")] = _Search()
    output: Annotated[Path | None, typed.InFolder(
        lambda value, folder: absolute(typed.text_of(value), folder), "a folder", type="string",
        minLength=1)] = None
    results: Results = None
    quote_formulas: typed.Flag = False
    profile: Annotated[Path | None, _file("a profile file, from `xgpt profile --out`")] = None


def job_schema() -> dict[str, Any]:
    """The JSON schema of a job file."""
    schema = typed.schema_of(JobFile)
    own = {**schema["properties"]["schedule"], "anyOf": [
        {"enum": [AUTO]}, typed.schema_of(section_kind()), {"type": "null"}]}
    return {**schema, "properties": {**schema["properties"], "schedule": own}}


# what other tools call a key -> ours
_FOREIGN = {"max_num_seqs": "schedule.max_active", "max_batch_size": "schedule.max_active",
            "max_num_batched_tokens": "schedule.token_budget",
            "tensor_parallel_size": "schedule.tp_degree", "tp": "schedule.tp_degree",
            "data_parallel_size": "schedule.replicas", "dp": "schedule.replicas",
            "gpus": "constraint.max_gpus", "num_gpus": "constraint.max_gpus",
            "total_gpus": "constraint.max_gpus", "kv_cache_dtype": "run.kv_dtype",
            "quantization": "run.weight_dtype", "max_new_tokens": "workload.max_tokens"}


def key_places() -> dict[str, str]:
    """Dotted keys of job files by their last names, and by what other tools call them; of sections,
    not of mappings within them."""
    places = dict(_FOREIGN)
    for key, own in job_schema()["properties"].items():
        places.setdefault(key, key)
        for name in (name for form in own.get("anyOf", [own]) for name in form.get(
                "properties", ())):
            places.setdefault(name, f"{key}.{name}")
    return places


def load_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """The job in `path`, with `key.path=value` overrides put in. Raises InputError that carries
    every mistake, in the order of the file's lines."""
    mistakes: list[Mistake] = []
    job = job_of(job_tree(path, overrides, mistakes), path, mistakes)
    if mistakes:
        raise in_order(mistakes)
    return job


def in_order(mistakes: Sequence[Mistake]) -> InputError:
    """An InputError of all, in the order of the file's lines."""
    return InputError(sorted(mistakes, key=lambda m: (m.line is None, m.line or 0)))


def job_tree(path: Path, overrides: Sequence[str], mistakes: list[Mistake]) -> Field:
    """The tree of a file with `key.path=value` overrides put in. Raises InputError for what is no
    mapping of keys."""
    if path.is_dir():
        raise wrong(path, "job file", None, "is a folder; a job file in it is wanted, for example "
                    f"{path / 'job.yaml'}")
    if path.is_file() and format_of(path) is not None:
        raise wrong(path, "job file", None, "looks like prompts, by its name; `xgpt init --prompts "
                    f"{shlex.quote(str(path))}` writes a job file for them")
    tree = read_tree(path, mistakes)
    for override in overrides:
        if (refused := _part_of_a_name(tree, override)) is not None:
            mistakes.append(refused)
            continue
        tree = apply_override(tree, override, mistakes)
    if not isinstance(tree.value, dict):
        what = "the file is empty" if tree.value is None else "not a mapping of keys to values"
        raise wrong(path, "job file", None, f"{what}; required keys: model, cluster, workload. "
                    "For a file of prompts `xgpt init --prompts FILE` writes a job file", tree.line)
    if keys := [key for key in SWEEP_KEYS if key in tree.value]:
        raise wrong(path, keys[0], None, "a key of a sweep file, not of a job file: `xgpt sweep` "
                    "takes it", tree.value[keys[0]].line)
    return tree


def _part_of_a_name(tree: Field, override: str) -> Mistake | None:
    """A mistake where `cluster.links=...` is set of a cluster that the file only names; it says how
    the whole is written."""
    key = override.partition("=")[0].strip()
    named = tree.value.get("cluster") if isinstance(tree.value, dict) else None
    if not key.startswith("cluster.") or named is None or not isinstance(named.value, str):
        return None
    words = f"a key of a cluster that is described; the file has the name {named.value!r}"
    with suppress(XgptError):
        own = catalog.cluster(named.value)
        words += (f", which is {{device: {own.device.name}, num_nodes: {own.num_nodes}, "
                  f"devices_per_node: {own.devices_per_node}, intra_link: {own.intra_link.name}, "
                  f"inter_link: {own.inter_link.name}}}: write that with your change")
    return Mistake(file=OVERRIDE_FILE, line=None, key=key, value=None, allowed=words)


def job_of(tree: Field, path: Path, mistakes: list[Mistake]) -> Job:
    """The job of a file's tree; to be discarded where `mistakes` were added."""
    folder, reading = Path(os.path.abspath(path)).parent, typed.Reading(tree, mistakes)
    own: JobFile = typed.read(JobFile, tree, "", mistakes, key_places, folder)
    schedule, adjustment = schedule_of(reading, key_places)
    for key, words in (
            ("model", f"required: {_MODEL}"),
            ("cluster", f"required: {cluster_words()}"),
            ("workload", "required: a mapping with requests and lengths")):
        if not reading.has(key):
            reading.reject(key, words)
    output, run = own.output or folder / "out", own.run
    workload = _workload(own.workload, reading)
    if workload.requests is not None:
        workload = replace(workload, requests=replace(workload.requests, terms=Terms(
            workload.score, None if run.engine == OWN_ENGINE else run.engine,
            workload.embed or "", own.workload.prompt or "", own.workload.system or "",
            form_of_answers(own.workload.json_schema, own.workload.choices))))
    cluster = built_cluster(own.cluster, reading) if isinstance(
        own.cluster, InlineCluster) else own.cluster
    job = Job(
        name=own.name or path.stem, model=own.model, cluster=cluster,
        workload=workload, constraint=constraint_of(own.constraint, own.objective),
        price_per_hour=own.price_per_hour, schedule=schedule, adjustment=adjustment, run=run,
        plan_engine=own.plan.engine or _planned_engine(own, cluster, reading), slurm=own.slurm,
        output=output,
        results=results_of(own.results, workload.requests, output, reading),
        quote_formulas=own.quote_formulas, source=Path(os.path.abspath(path)),
        profile=own.profile, max_search_s=own.search.max_seconds)
    _check(job, reading)
    check_asked(job, reading)
    if workload.only_encodes:
        _check_encoded(job, reading)
        job = replace(job, schedule=replace(
            job.schedule, policies=job.schedule.policies or SCORING_POLICIES[:1], encode_chunk=0))
    return job


def _planned_engine(own: JobFile, cluster: str | Cluster, reading: typed.Reading) -> str:
    """The engine whose times are planned with unless the job says so: the one that is to run, or
    that the profile is of. For GPUs elsewhere, vLLM where its computed times were compared with
    published runs on such GPUs."""
    is_here = cluster in (LOCAL_CLUSTER, "") or any(
        map(reading.has, ("run.engine", "slurm", "profile")))
    if not is_here:
        device = (catalog.cluster(cluster) if isinstance(cluster, str) else cluster).device
        return VLLM if catalog.request_error(device.name, VLLM) else OWN_ENGINE
    return own.run.engine if own.run.engine in catalog.names("engine") else OWN_ENGINE


def _check(job: Job, reading: typed.Reading) -> None:
    """What sections must agree on."""
    check_run(job.run, reading)
    if job.slurm is not None:
        check_slurm(job.slurm, reading)
    if job.constraint.objective != "throughput" and (job.slurm is not None or job.run.hosts):
        reading.reject("objective", "throughput where `slurm` or `run.hosts` says what there is: "
                       "plan without them, and ask for as many devices")
    elif job.constraint.objective != "throughput" and job.run.engine != OWN_ENGINE:
        reading.reject("objective", f"throughput with run.engine {job.run.engine}")
    if job.constraint.bound_on("makespan") and not (job.workload.requests or job.workload.count):
        reading.reject("constraint.makespan_s", "of a job with requests: give workload.requests, "
                       "a file or {count: N}")
    if job.quote_formulas and (job.results is None or format_of(
            job.results) not in ("csv", "tsv")):
        reading.reject("quote_formulas", "true where `results` is a file of .csv or .tsv")
    if job.run.stop and job.workload.count is not None:
        reading.reject("run.stop", "left out where requests are made: so is how long their "
                       "answers are")


def _workload(own: _Workload, reading: typed.Reading) -> WorkloadSpec:
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
        # each query ends with its first token, which counts as its output
        inputs = _length(own.input_tokens, "input_tokens", has_file, reading)
        outputs = LengthSpec(kind="normal", mean=1, std=0, maximum=1)
    elif reading.has("workload.task"):
        for key in ("input_tokens", "output_tokens"):
            if reading.has(f"workload.{key}"):
                reading.reject(f"workload.{key}", "give either task or input_tokens and "
                               "output_tokens")
        inputs = outputs = LengthSpec(kind="task", task=own.task)
    else:
        inputs, outputs = (_length(value, key, has_file, reading) for key, value in (
            ("input_tokens", own.input_tokens), ("output_tokens", own.output_tokens)))
    return WorkloadSpec(
        requests=requests, count=count, input_tokens=inputs, output_tokens=outputs,
        max_tokens=own.max_tokens or most_tokens_of(own.choices), choices=own.choices,
        chat=not only_encodes if own.chat is None else own.chat, score=own.score,
        embed=own.embed, chat_template_kwargs=own.chat_template_kwargs)


def _check_encoded(job: Job, reading: typed.Reading) -> None:
    """What scores or embeds encodes whole inputs, and hands none on."""
    doing = "continuations are scored" if job.workload.score else "texts are embedded"
    if job.workload.requests is None:
        reading.reject("workload.requests", "a file of prompts and continuations, which are scored"
                       if job.workload.score else "a file of texts, which are embedded")
    for name in job.schedule.policies:
        if name not in SCORING_POLICIES:
            reading.reject("schedule.policy", f"one of {', '.join(SCORING_POLICIES)} where "
                           f"{doing}: {name} encodes an input in parts, or hands it on")
    if job.schedule.encode_chunk:
        reading.reject("schedule.encode_chunk", f"0 (or left out) where {doing}")
    if job.run.engine != OWN_ENGINE:
        reading.reject("run", f"engine: {OWN_ENGINE} where {doing}")
    if job.run.stop:
        reading.reject("run.stop", f"left out where {doing}")


def _length(own: _Lengths | str | None, side: str, has_file: bool,
            reading: typed.Reading) -> LengthSpec:
    """One side's lengths. With a file of requests the input defaults to theirs, the output to
    `observe`."""
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
    for name in ("mean", "std", "max"):
        if not reading.has(f"{key}.{name}"):
            reading.reject(f"{key}.{name}", "required: mean, std and max describe a length "
                           "together")
        elif name != "max" and (getattr(own, name) or 0) > (own.max or math.inf):
            reading.reject(f"{key}.{name}", f"must not exceed max = {own.max}")
    return LengthSpec(kind="normal", mean=own.mean, std=own.std, maximum=own.max)
