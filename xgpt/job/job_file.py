"""Reads a job file: YAML (docs/job-file.md) to a frozen `Job`, with every mistake at once.

Relative paths start at the job file's folder, in the file and on the command line. A key without a
value (`constraint:`) counts as not given. Nothing is downloaded or created."""

import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field as Described

from xgpt.core import catalog
from xgpt.core.catalog.releases import row_named
from xgpt.core.cluster import Cluster
from xgpt.core.constraint import OBJECTIVES, Objective
from xgpt.core.engines import IN_CHILDREN, OWN_ENGINE, VLLM
from xgpt.core.errors import InputError, Mistake, XgptError, nearest, wrong
from xgpt.core.hf.values import gguf_in
from xgpt.core.units import parse_seconds
from xgpt.job import typed
from xgpt.job.answer_forms import check_asked
from xgpt.job.arrivals_section import check_arrivals
from xgpt.job.job import LOCAL_CLUSTER, Job, RunSpec, check_run, file_of
from xgpt.job.placement_section import TiersSection, check_placed
from xgpt.job.plan_sections import (
    AnyCluster,
    ConstraintSection,
    InlineCluster,
    Price,
    built_cluster,
    cluster_words,
    constraint_of,
    without_limit,
)
from xgpt.job.schedule_section import AUTO, check_sharing, schedule_of, section_kind, wrong_split
from xgpt.job.sections import Results, SlurmSpec, absolute, check_slurm, is_file, results_of
from xgpt.job.workload_section import WorkloadSection, words_of, workload_of
from xgpt.job.yaml_tree import OVERRIDE_FILE, Field, apply_override, parse_tree, read_tree
from xgpt.requests.request_files import format_of

SWEEP_KEYS = ("base", "grid", "cases")  # a file with any of them is a sweep file
SCORING_POLICIES = ("rra", "ft", "dsi")  # encode whole inputs, without decoding beside them

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ROW_OF_RUN = {VLLM: "vllm-0.32"}  # engine -> row of the release that xgpt has run
_MODEL = "a catalog name, a folder with config.json, or a hub id"


def _model(value: Any, folder: Path) -> str:
    """The catalog name, absolute path of a local model, or hub id. Raises ValueError."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    engine: Annotated[str | None, typed.Of(
        lambda value: row_named(value if isinstance(value, str) else ""), anyOf=lambda: [
            {"enum": catalog.names("engine")},
            {"type": "string", "pattern": r"^[a-z-]+-v?[0-9]+\.[0-9]+"}])] = None
    calibration: Annotated[Path | None, file_of("a calibration file, from `xgpt calibrate`")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    max_seconds: Annotated[float | None, typed.amount(
        parse_seconds, lambda x: x > 0, "seconds > 0, '90 s' or '2 min'")] = None
    queries: Annotated[int, typed.whole(1, 10**8)] | None = None  # chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """Keys of a job file. `schedule` is read by a dataclass made from the policies."""

    __pydantic_config__ = {**typed.CONFIG, "json_schema_extra": {
        "required": ["model", "cluster", "workload"]}}
    name: Annotated[str | None, typed.text("a name of printable characters")] = None
    model: Annotated[str, typed.InFolder(_model, _MODEL, type="string", minLength=1)] = ""
    cluster: AnyCluster = ""
    tiers: Annotated[TiersSection, Described(
        description="a mapping, for example {disk: {memory: 1 TB, up: 3 GB, down: 1 GB}}")] = (
            TiersSection())
    workload: Annotated[WorkloadSection, Described(
        description="a mapping with requests and lengths")] = WorkloadSection()
    objective: Annotated[Objective, typed.choice(OBJECTIVES)] = "throughput"
    constraint: Annotated[ConstraintSection, Described(
        description="a mapping, for example {latency_s: 11.5}")] = ConstraintSection()
    price_per_hour: Price | None = None
    schedule: Annotated[Any, typed.OrMapping(Any, words_of(AUTO), "auto, or a mapping of control "
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
    profile: Annotated[Path | None, file_of("a profile file, from `xgpt profile --out`")] = None


def job_schema() -> dict[str, Any]:
    """The JSON schema of a job file."""
    schema = typed.schema_of(JobFile)
    own = {**schema["properties"]["schedule"], "anyOf": [
        {"enum": [AUTO]}, typed.schema_of(section_kind()), {"type": "null"}]}
    return {**schema, "properties": {**schema["properties"], "schedule": own}}


# names of keys in other tools -> our keys
_FOREIGN = {"max_num_seqs": "schedule.max_active", "max_batch_size": "schedule.max_active",
            "max_num_batched_tokens": "schedule.token_budget",
            "tensor_parallel_size": "schedule.tp_degree", "tp": "schedule.tp_degree",
            "ep_size": "schedule.ep_degree", "expert_parallel_size": "schedule.ep_degree",
            "moe_expert_parallel_size": "schedule.ep_degree",
            "enable_attention_dp": "schedule.attention_dp",
            "data_parallel_size": "schedule.replicas", "dp": "schedule.replicas",
            "gpus": "constraint.max_gpus", "num_gpus": "constraint.max_gpus",
            "total_gpus": "constraint.max_gpus", "kv_cache_dtype": "run.kv_dtype",
            "quantization": "run.weight_dtype", "max_new_tokens": "workload.max_tokens"}


def key_places() -> dict[str, str]:
    """Dotted key of each key and of each section's keys, by its last name and by its names in other
    tools."""
    places = dict(_FOREIGN)
    for key, own in job_schema()["properties"].items():
        places.setdefault(key, key)
        for name in (name for form in own.get("anyOf", [own]) for name in form.get(
                "properties", ())):
            places.setdefault(name, f"{key}.{name}")
    return places


def load_job(path: Path, overrides: Sequence[str] = (), text: str | None = None) -> Job:
    """The Job in the file `path`, or in `text` instead of the file's, with `key.path=value`
    overrides applied. Raises InputError with every mistake, in the order of the lines."""
    mistakes: list[Mistake] = []
    job = job_of(job_tree(path, overrides, mistakes, text), path, mistakes)
    if mistakes:
        raise in_order(mistakes)
    return job


def in_order(mistakes: Sequence[Mistake]) -> InputError:
    """An InputError with all `mistakes`, in the order of the file's lines."""
    return InputError(sorted(mistakes, key=lambda m: (m.line is None, m.line or 0)))


def job_tree(path: Path, overrides: Sequence[str], mistakes: list[Mistake],
             text: str | None = None) -> Field:
    """The tree of a job file with `key.path=value` overrides applied. Raises InputError if it is no
    mapping of keys to values."""
    if text is None and path.is_dir():
        raise wrong(path, "job file", None, "is a folder; a job file in it is wanted, for example "
                    f"{path / 'job.yaml'}")
    if text is None and path.is_file() and format_of(path) is not None:
        raise wrong(path, "job file", None, "looks like prompts, by its name; `xgpt init --prompts "
                    f"{shlex.quote(str(path))}` writes a job file for them")
    tree = read_tree(path, mistakes) if text is None else parse_tree(text, str(path), mistakes)
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
    """A Mistake if `cluster.links=...` is set for a cluster that the file only names, with the
    mapping to write instead; else None."""
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
    """The Job of a file's tree. Discard it if anything was added to `mistakes`."""
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
    workload = workload_of(own.workload, run.engine, reading)
    cluster = built_cluster(own.cluster, reading) if isinstance(
        own.cluster, InlineCluster) else own.cluster
    job = Job(
        name=own.name or path.stem, model=own.model, cluster=cluster,
        workload=workload, constraint=constraint_of(
            own.constraint, own.objective, arrive=workload.arrivals is not None),
        price_per_hour=own.price_per_hour, schedule=schedule, adjustment=adjustment, run=run,
        plan_engine=own.plan.engine or _planned_engine(own, cluster, reading), slurm=own.slurm,
        output=output,
        results=results_of(own.results, workload.requests, output, reading),
        quote_formulas=own.quote_formulas, source=Path(os.path.abspath(path)),
        profile=own.profile, calibration=own.plan.calibration,
        max_search_s=own.search.max_seconds, search_queries=own.search.queries,
        tiers=own.tiers.built)
    _check(job, reading)
    check_asked(job, reading)
    if workload.only_encodes:
        _check_encoded(job, reading)
        job = replace(job, schedule=replace(
            job.schedule, policies=job.schedule.policies or SCORING_POLICIES[:1], encode_chunk=0))
    return job


def _planned_engine(own: JobFile, cluster: str | Cluster, reading: typed.Reading) -> str:
    """The engine to plan for by default: the one that runs, or that the profile is of. For GPUs
    elsewhere it is vLLM, if its computed times were compared with published runs on such GPUs."""
    is_here = cluster in (LOCAL_CLUSTER, "") or any(
        map(reading.has, ("run.engine", "slurm", "profile", "tiers", "schedule.placement")))
    if not is_here:
        device = (catalog.cluster(cluster) if isinstance(cluster, str) else cluster).device
        compared = {row["gpu"] for row in catalog.accuracy()["cells"] if row["engine"] == VLLM}
        return VLLM if device.name in compared else OWN_ENGINE
    engine = _ROW_OF_RUN.get(own.run.engine, own.run.engine)
    return engine if engine in catalog.names("engine") else OWN_ENGINE


def _check(job: Job, reading: typed.Reading) -> None:
    """Records sections that contradict each other."""
    check_run(job.run, reading)
    check_sharing(job, reading)
    check_placed(job, reading)
    check_arrivals(job, reading)
    if (model := catalog.model_named(job.model)) is not None:
        for key, allowed in wrong_split(job.schedule, model):
            reading.reject(f"schedule.{key}", allowed)
    if job.slurm is not None:
        check_slurm(job.slurm, reading)
    if job.constraint.objective != "throughput" and (job.slurm is not None or job.run.hosts):
        reading.reject("objective", "throughput where `slurm` or `run.hosts` says what there is: "
                       "plan without them, and ask for as many devices")
    elif job.constraint.objective != "throughput" and job.run.engine not in (
            OWN_ENGINE, *IN_CHILDREN):
        reading.reject("objective", f"throughput with run.engine {job.run.engine}")
    if job.calibration is not None and (job.profile is not None or job.cluster == LOCAL_CLUSTER):
        reading.reject("plan.calibration", "left out where step times are measured: with "
                       f"`profile`, and on `cluster: {LOCAL_CLUSTER}`")
    for key in ("makespan_s", "deadline_s") if job.workload.arrivals is None else ():
        if reading.has(f"constraint.{key}") and not (
                job.workload.requests or job.workload.count):
            reading.reject(f"constraint.{key}", "of a job with requests: give workload.requests, "
                           "a file or {count: N}")
    if job.workload.requests is None:  # whose lines may have deadlines: see xgpt.job.resolve
        for key, allowed in without_limit(job.constraint):
            reading.reject(key, allowed)
    if job.quote_formulas and (job.results is None or format_of(
            job.results) not in ("csv", "tsv")):
        reading.reject("quote_formulas", "true where `results` is a file of .csv or .tsv")
    if job.run.stop and job.workload.count is not None:
        reading.reject("run.stop", "left out where requests are made: so is how long their "
                       "answers are")


def _check_encoded(job: Job, reading: typed.Reading) -> None:
    """Records keys that a job which scores or embeds cannot have: it encodes whole inputs, and
    hands none to another pool."""
    doing = "continuations are scored" if job.workload.score else "texts are embedded"
    if job.workload.requests is None:
        reading.reject("workload.requests", "a file of prompts and continuations, which are scored"
                       if job.workload.score else "a file of texts, which are embedded")
    for name in job.schedule.policies:
        if name not in SCORING_POLICIES:
            reading.reject("schedule.policy", f"one of {', '.join(SCORING_POLICIES)} where "
                           f"{doing}: {name} encodes an input in parts, or hands it on")
    if job.schedule.placement is not None:
        reading.reject("schedule.placement", f"left out where {doing}")
    if job.schedule.encode_chunk:
        reading.reject("schedule.encode_chunk", f"0 (or left out) where {doing}")
    if job.run.engine != OWN_ENGINE:
        reading.reject("run", f"engine: {OWN_ENGINE} where {doing}")
    if job.run.stop:
        reading.reject("run.stop", f"left out where {doing}")
