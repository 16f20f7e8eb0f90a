"""Reading a job file: YAML (docs/job-file.md) -> frozen `Job`, with every mistake at once.

Relative paths are relative to the job file's folder, whether they stand in the file or on the
command line. A key without a value (`constraint:`) counts as not given. Nothing is downloaded or
created."""

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from xgpt.core import catalog
from xgpt.core.cluster import Cluster
from xgpt.core.constraint_section import read_constraint
from xgpt.core.engines import OWN_ENGINE
from xgpt.core.errors import InputError, Mistake, nearest, wrong
from xgpt.core.inline_cluster import ONE_KIND, read_inline_cluster
from xgpt.core.job import Job, LengthSpec, WorkloadSpec
from xgpt.core.length_file import MAX_LENGTH_TOKENS
from xgpt.core.model_file import gguf_in
from xgpt.core.request_files.files import format_of
from xgpt.core.requests_section import absolute, is_file, read_requests_key, read_results_key
from xgpt.core.run_section import LOCAL_CLUSTER, read_run
from xgpt.core.schedule_section import read_schedule
from xgpt.core.sections import Section, values_of
from xgpt.core.slurm import read_slurm
from xgpt.core.units import parse_seconds
from xgpt.core.yaml_tree import Field, apply_override, read_tree

SWEEP_KEYS = ("base", "grid", "cases")  # any of which makes a file a sweep's

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SECTIONS = ("workload", "constraint", "run", "schedule", "slurm", "cluster", "plan", "search")
POOLINGS = ("last", "mean")  # of a text's last hidden states, where it is embedded
SCORING_POLICIES = ("rra", "ft", "dsi")  # which encode whole inputs, without decoding beside them
_NO_DISTRIBUTION = LengthSpec(kind="observe")  # stands in for one that could not be read


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
    for text in overrides:
        tree = apply_override(tree, text, mistakes)
    if not isinstance(tree.value, dict):
        what = "the file is empty" if tree.value is None else "not a mapping of keys to values"
        raise wrong(path, "job file", None, f"{what}; required keys: model, cluster, workload. "
                    "For a file of prompts `xgpt init --prompts FILE` writes a job file", tree.line)
    if keys := [key for key in SWEEP_KEYS if key in tree.value]:
        raise wrong(path, keys[0], None, "a key of a sweep file, not of a job file: `xgpt sweep` "
                    "takes it", tree.value[keys[0]].line)
    return tree


def job_of(tree: Field, path: Path, mistakes: list[Mistake]) -> Job:
    """The job of a file's tree; to be discarded where `mistakes` were added."""
    top = Section(tree, "", mistakes, elsewhere=lambda: _places(path))
    job = _read_job(top, path)
    top.finish()
    return job


def _places(path: Path) -> dict[str, str]:
    """By the last name of a key, all of it: of sections, those that a file leaves out too."""
    places: dict[str, str] = {}
    empty = Field(value={}, file="", line=None)
    tree = replace(empty, value=dict.fromkeys(_SECTIONS, empty))
    _read_job(Section(tree, "", [], places), path)
    return places


def _read_job(top: Section, path: Path) -> Job:
    folder = Path(os.path.abspath(path)).parent
    schedule, adjustment = read_schedule(top)
    # in the order in which their mistakes are told
    model, cluster, workload = _read_model(top, folder), _read_cluster(top), _read_workload(
        top, folder)
    output, run = absolute(top.text("output", "out", "a folder"), folder), read_run(top)
    if workload.requests is not None and run.engine != OWN_ENGINE:
        workload = replace(workload, requests=replace(workload.requests, engine=run.engine))
    job = Job(
        name=top.text("name", path.stem, "a name of printable characters"),
        model=model, cluster=cluster, workload=workload, constraint=read_constraint(top),
        price_per_hour=top.number("price_per_hour", None, lambda x: x > 0,
                                  "what one device costs in an hour, a number > 0"),
        schedule=schedule, adjustment=adjustment, run=run,
        plan_engine=_read_plan(top, run.engine),
        slurm=read_slurm(top, folder), output=output,
        results=read_results_key(top, workload.requests, output, folder),
        quote_formulas=top.flag("quote_formulas", False),
        source=Path(os.path.abspath(path)),
        profile=_read_file(top, "profile", folder, "a profile file, from `xgpt profile --out`"),
        max_search_s=_read_search(top))
    _check_objective(top, job)
    if job.quote_formulas and (job.results is None or format_of(
            job.results) not in ("csv", "tsv")):
        top.reject("quote_formulas", "true where `results` is a file of .csv or .tsv")
    written = top.mapping("run")
    if run.stop and workload.count is not None and written is not None:
        written.reject("stop", "left out where requests are made: so is how long their answers are")
    if workload.only_encodes:
        _check_encoded(top, job)
        job = replace(job, schedule=replace(
            job.schedule, policies=job.schedule.policies or SCORING_POLICIES[:1], encode_chunk=0))
    return job


def _check_objective(top: Section, job: Job) -> None:
    """What is asked for goes with the rest of the job."""
    constraint, has_requests = job.constraint, job.workload.requests or job.workload.count
    asked = constraint.objective
    if asked != "throughput" and (job.slurm is not None or job.run.hosts):
        top.reject("objective", "throughput where `slurm` or `run.hosts` says what there is: plan "
                   "without them, and ask for as many devices")
    elif asked != "throughput" and job.run.engine != OWN_ENGINE:
        top.reject("objective", f"throughput with run.engine {job.run.engine}")
    section = top.mapping("constraint")
    if section is not None and constraint.bound_on("makespan") and not has_requests:
        section.reject("makespan_s", "of a job with requests: give workload.requests, a file or "
                       "{count: N}")


def _read_model(top: Section, folder: Path) -> str:
    """Catalog name, absolute path of a local model, or hub id."""
    text = top.text("model", None, "a catalog name, a folder with config.json, or a hub id")
    if text is None:
        if not top.has("model"):
            top.reject("model", "required: a catalog name, a folder with config.json, or a hub id")
        return ""
    known = catalog.names("model")
    if text in known:
        return text
    local = absolute(text, folder)
    if is_file(local / "config.json") or gguf_in(local) is not None:
        return str(local)
    if text.startswith((".", "/", "~")):
        top.reject("model", f"no config.json in {local}")
    elif "/" not in text:
        top.reject("model", f"unknown model; {nearest(text, known)}; or a folder, or a hub id a/b")
    elif not _HUB_ID.fullmatch(text):
        top.reject("model", "neither a folder with config.json nor a hub id owner/name")
    return text


def _read_cluster(top: Section) -> str | Cluster:
    known = [*catalog.names("cluster"), LOCAL_CLUSTER]
    if not top.has("cluster"):
        top.reject("cluster", f"required: {', '.join(known)}, or a mapping")
    if (field := top.get("cluster")) is not None and isinstance(field.value, list):
        top.reject("cluster", ONE_KIND)
        return ""
    return (top.choice("cluster", "", known) if top.mapping("cluster") is None
            else read_inline_cluster(top))


def _read_workload(top: Section, folder: Path) -> WorkloadSpec:
    section = top.section("workload", "a mapping with requests and lengths")
    if section is None:
        if not top.has("workload"):
            top.reject("workload", "required: a mapping with requests and lengths")
        return WorkloadSpec(requests=None, count=None, input_tokens=_NO_DISTRIBUTION,
                            output_tokens=_NO_DISTRIBUTION)
    requests, count = read_requests_key(section, folder)
    score = section.flag("score", False)
    embed = section.choice("embed", None, POOLINGS)
    if score and embed is not None:
        section.reject("embed", "left out where continuations are scored")
    only_encodes = score or embed is not None
    inputs, outputs = _read_encoded(section, folder) if only_encodes else _read_both_lengths(
        section, folder)
    workload = WorkloadSpec(
        requests=requests if requests is None or not only_encodes else replace(
            requests, purpose="score" if score else None, pooled=embed),
        count=count, input_tokens=inputs, output_tokens=outputs,
        max_tokens=section.integer("max_tokens", None, 1, MAX_LENGTH_TOKENS),
        chat=section.flag("chat", not only_encodes), score=score, embed=embed,
        chat_template_kwargs=values_of(
            section, "chat_template_kwargs", "a mapping of what the model's chat template reads, "
            "such as {enable_thinking: false}"))
    section.finish()
    return workload


def _read_encoded(section: Section, folder: Path) -> tuple[LengthSpec, LengthSpec]:
    """Lengths of a job that scores or embeds: inputs are texts, prompts with their continuations,
    and each query ends with its first token, which counts as its output."""
    for key in ("output_tokens", "max_tokens", "task"):
        if section.has(key):
            section.reject(key, "left out where continuations are scored, or texts embedded: "
                           "nothing is written")
    inner = section.mapping("requests")
    has_file = inner.has("file") if inner is not None else section.has("requests")
    return (_read_length(section, "input_tokens", folder, has_file, "from_requests"),
            LengthSpec(kind="normal", mean=1, std=0, maximum=1))


def _check_encoded(top: Section, job: Job) -> None:
    """What scores or embeds encodes whole inputs, and hands none on."""
    section, workload = top.mapping("schedule"), top.mapping("workload")
    doing = "continuations are scored" if job.workload.score else "texts are embedded"
    if workload is not None and job.workload.requests is None:
        workload.reject("requests", "a file of prompts and continuations, which are scored"
                        if job.workload.score else "a file of texts, which are embedded")
    for name in job.schedule.policies:
        if section is not None and name not in SCORING_POLICIES:
            section.reject("policy", f"one of {', '.join(SCORING_POLICIES)} where {doing}: {name} "
                           "encodes an input in parts, or hands it on")
    if section is not None and job.schedule.encode_chunk:
        section.reject("encode_chunk", f"0 (or left out) where {doing}")
    if job.run.engine != OWN_ENGINE:
        top.reject("run", f"engine: {OWN_ENGINE} where {doing}")
    written = top.mapping("run")
    if job.run.stop and written is not None:
        written.reject("stop", f"left out where {doing}")


def _read_plan(top: Section, run_engine: str) -> str:
    """`plan.engine`: whose times are planned with; that of `run.engine`, or ours where the catalog
    has none of its name."""
    known = catalog.names("engine")
    default = run_engine if run_engine in known else OWN_ENGINE
    section = top.section("plan", "a mapping, for example {engine: vllm}")
    if section is None:
        return default
    engine = section.choice("engine", default, known)
    section.finish()
    return engine


def _read_file(section: Section, key: str, folder: Path, allowed: str) -> Path | None:
    text = section.text(key, None, allowed)
    if text is None:
        return None
    path = absolute(text, folder)
    if not is_file(path):
        section.reject(key, f"no such file: {path}")
    return path


def _read_both_lengths(section: Section, folder: Path) -> tuple[LengthSpec, LengthSpec]:
    inner = section.mapping("requests")
    has_file = inner.has("file") if inner is not None else section.has("requests")
    given = [key for key in ("input_tokens", "output_tokens") if section.has(key)]
    if section.has("task"):
        task = section.choice("task", None, catalog.names("task"))
        for key in given:
            section.reject(key, "give either task or input_tokens and output_tokens")
        spec = LengthSpec(kind="task", task=task)
        return spec, spec
    return (_read_length(section, "input_tokens", folder, has_file, "from_requests"),
            _read_length(section, "output_tokens", folder, has_file, "observe"))


def _read_length(section: Section, key: str, folder: Path, has_file: bool,
                 default: str) -> LengthSpec:
    """One side's lengths. With a file of requests the input defaults to theirs, the output to
    `observe`; `default` is that word."""
    words = ["from_requests"] + ["observe"] * (key == "output_tokens")
    forms = "{mean, std, max}, {file: path}"
    field = section.get(key)
    if field is None:
        if not has_file:
            section.reject(key, f"required without a file of requests: {forms}, or workload.task")
            return _NO_DISTRIBUTION
        return LengthSpec(kind=cast(Any, default))
    if (inner := section.mapping(key)) is not None:
        spec = _read_file_length(inner, folder) if inner.has("file") else _read_normal(inner)
        inner.finish()
        return spec
    if field.value not in words:
        section.reject_type(key, f"{forms}, or {' or '.join(words)}")
        return _NO_DISTRIBUTION
    if not has_file:
        section.reject(key, "needs workload.requests to be a file")
    return LengthSpec(kind=cast(Any, field.value))


def _read_file_length(section: Section, folder: Path) -> LengthSpec:
    for key in ("mean", "std", "max"):
        if section.has(key):
            section.reject(key, "give either file or mean, std and max")
    return LengthSpec(kind="file", path=_read_file(section, "file", folder, "a file of lengths"))


def _read_normal(section: Section) -> LengthSpec:
    mean = section.number("mean", None, lambda x: x >= 1, "tokens >= 1")
    std = section.number("std", None, lambda x: x >= 0, "tokens >= 0")
    maximum = section.integer("max", None, 1, MAX_LENGTH_TOKENS)
    section.get("file")  # so that an unknown key's message names it too
    for key in ("mean", "std", "max"):
        if not section.has(key):
            section.reject(key, "required: mean, std and max describe a length together")
    if mean is not None and maximum is not None and mean > maximum:
        section.reject("mean", f"must not exceed max = {maximum}")
    if std is not None and maximum is not None and std > maximum:
        section.reject("std", f"must not exceed max = {maximum}")
    return LengthSpec(kind="normal", mean=mean, std=std, maximum=maximum)


def _read_search(top: Section) -> float | None:
    section = top.section("search", "a mapping, for example {max_seconds: 60}")
    if section is None:
        return None
    most_s = section.amount("max_seconds", None, parse_seconds, lambda x: x > 0,
                            "seconds > 0, '90 s' or '2 min'")
    section.finish()
    return most_s
