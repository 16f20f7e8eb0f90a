"""Reading a job file: YAML (design.md section 5) -> frozen `Job`, with every mistake at once.

Relative paths are relative to the job file's folder, whether they stand in the file or on the
command line. A key without a value (`constraint:`) counts as not given. Nothing is downloaded or
created.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from xgpt.core import catalog
from xgpt.core.constraint import BoundKind, Constraint, latency_constraint
from xgpt.core.engines import OWN_ENGINE, engine_names
from xgpt.core.errors import InputError, Mistake, nearest
from xgpt.core.inline_cluster import read_inline_cluster
from xgpt.core.job import (
    RESCHEDULE,
    Adjustment,
    FixedSchedule,
    Job,
    LengthSpec,
    RunSpec,
    SlurmValue,
    WorkloadSpec,
)
from xgpt.core.length_file import MAX_LENGTH_TOKENS
from xgpt.core.policies import Policy, policies, policy, policy_names
from xgpt.core.sections import Section
from xgpt.core.units import parse_bytes, parse_seconds, parse_share
from xgpt.core.yaml_tree import Field, apply_override, read_tree

LOCAL_CLUSTER = "local"
DTYPES = ("auto", "float32", "bfloat16", "float16")
WEIGHTS = ("checkpoint", "random")
MAX_COUNT = 10**8
_USUAL = "rra"  # whose variables are meant where the policy is left open

# no option of ssh or mpiexec, no list within a list
_HOST = re.compile(r"[A-Za-z0-9][\w.-]*(@[A-Za-z0-9][\w.-]*)?")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SLURM_TIME = re.compile(r"\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+(:\d+){0,2}|infinite|unlimited",
                         re.IGNORECASE)
_SLURM_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)
_NO_DISTRIBUTION = LengthSpec(kind="observe")  # stands in for one that could not be read


def load_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """The job in `path`, with `key.path=value` overrides put in. Raises InputError that carries
    every mistake, in the order of the file's lines."""
    mistakes: list[Mistake] = []
    tree = read_tree(path, mistakes)
    for text in overrides:
        tree = apply_override(tree, text, mistakes)
    if not isinstance(tree.value, dict):
        what = "the file is empty" if tree.value is None else "not a mapping of keys to values"
        raise InputError([Mistake(file=str(path), line=tree.line, key="job file", value=None,
                                  allowed=f"{what}; required keys: model, cluster, workload")])
    job = _read_job(Section(tree, "", mistakes), path)
    if mistakes:
        raise InputError(sorted(mistakes, key=lambda m: (m.line is None, m.line or 0)))
    return job


def _read_job(top: Section, path: Path) -> Job:
    folder = Path(os.path.abspath(path)).parent
    schedule, adjustment = _read_schedule(top)
    job = Job(
        name=top.text("name", path.stem, "a name of printable characters"),
        model=_read_model(top, folder),
        cluster=_read_cluster(top),
        workload=_read_workload(top, folder),
        constraint=_read_constraint(top),
        schedule=schedule,
        adjustment=adjustment,
        run=_read_run(top),
        slurm=_read_slurm(top),
        output=_absolute(top.text("output", "out", "a folder"), folder),
        source=Path(os.path.abspath(path)),
        profile=_read_file(top, "profile", folder, "a profile file, from `xgpt profile --out`"),
    )
    top.finish()
    return job


def _absolute(text: str, folder: Path) -> Path:
    """`text` as an absolute path; relative ones start at the job file's folder."""
    is_home = text == "~" or text.startswith("~/")
    # NOTE: abspath and not resolve: a link stays what the user called it, a loop of links no error
    return Path(os.path.abspath(folder / (Path(text).expanduser() if is_home else Path(text))))


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
    local = _absolute(text, folder)
    if _is_file(local / "config.json"):
        return str(local)
    if text.startswith((".", "/", "~")):
        top.reject("model", f"no config.json in {local}")
    elif "/" not in text:
        top.reject("model", f"unknown model; {nearest(text, known)}; or a folder, or a hub id a/b")
    elif not _HUB_ID.fullmatch(text):
        top.reject("model", "neither a folder with config.json nor a hub id owner/name")
    return text


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name too long, or one with a null byte
        return False


def _read_cluster(top: Section) -> str | dict[str, Any]:
    field = top.get("cluster")
    known = [*catalog.names("cluster"), LOCAL_CLUSTER]
    if field is None:
        top.reject("cluster", f"required: {', '.join(known)}, or a mapping")
        return ""
    if isinstance(field.value, dict):
        section = top.section("cluster")
        assert section is not None
        return read_inline_cluster(section)
    return top.choice("cluster", "", known)


def _read_workload(top: Section, folder: Path) -> WorkloadSpec:
    section = top.section("workload", "a mapping with requests and lengths")
    if section is None:
        if not top.has("workload"):
            top.reject("workload", "required: a mapping with requests and lengths")
        return WorkloadSpec(requests=None, count=None, input_tokens=_NO_DISTRIBUTION,
                            output_tokens=_NO_DISTRIBUTION)
    requests, count = _read_requests(section, folder)
    inputs, outputs = _read_both_lengths(section, folder)
    workload = WorkloadSpec(
        requests=requests, count=count, input_tokens=inputs, output_tokens=outputs,
        max_tokens=section.integer("max_tokens", None, 1, MAX_LENGTH_TOKENS),
        chat=section.flag("chat", True),
    )
    section.finish()
    return workload


def _read_requests(section: Section, folder: Path) -> tuple[Path | None, int | None]:
    """(file of requests, count of synthetic ones): at most one of the two."""
    field = section.get("requests")
    if field is None:
        return None, None
    if isinstance(field.value, dict):
        inner = section.section("requests")
        assert inner is not None
        count = inner.integer("count", None, 1, MAX_COUNT)
        if not inner.has("count"):
            inner.reject("count", "required: a number of synthetic requests")
        inner.finish()
        return None, count
    return _read_file(section, "requests", folder, "a file of requests, or {count: N}"), None


def _read_file(section: Section, key: str, folder: Path, allowed: str) -> Path | None:
    text = section.text(key, None, allowed)
    if text is None:
        return None
    path = _absolute(text, folder)
    if not _is_file(path):
        section.reject(key, f"no such file: {path}")
    return path


def _read_both_lengths(section: Section, folder: Path) -> tuple[LengthSpec, LengthSpec]:
    has_file = section.has("requests") and not isinstance(
        cast(Field, section.get("requests")).value, dict)
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
    if isinstance(field.value, dict):
        inner = section.section(key)
        assert inner is not None
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


def _read_constraint(top: Section) -> Constraint:
    section = top.section("constraint", "a mapping, for example {latency_s: 11.5}")
    if section is None:
        return latency_constraint(latency_s=math.inf)
    constraint = latency_constraint(
        latency_s=section.amount("latency_s", math.inf, parse_seconds, lambda x: x > 0,
                                 "seconds > 0, '90 s', '2 min', or inf"),
        kind=cast(BoundKind, section.choice("kind", "sequence", ("sequence", "queries"))),
        quantile=section.number("quantile", 0.99, lambda x: 0 < x < 1, "between 0 and 1"),
        confidence=section.number("confidence", 0.95, lambda x: 0.5 <= x < 1,
                                  "at least 0.5 and below 1"),
        drift=section.amount("drift", 0.0, parse_share, lambda x: 0 <= x < 1,
                             "a share of the mean output length, '15%' or 0.15, below 1"),
        memory_bytes=_memory(section),
        max_gpus=section.integer("max_gpus", None, 1),
    )
    section.finish()
    return constraint


def _memory(section: Section) -> int | None:
    amount = section.amount("memory", None, parse_bytes, lambda x: x > 0,
                            "bytes of each device, for example '40 GiB'")
    return None if amount is None else int(amount)


def _read_schedule(top: Section) -> tuple[FixedSchedule, Adjustment]:
    field = top.get("schedule")
    if field is None or field.value == "auto":
        return FixedSchedule(), Adjustment()
    section = top.section("schedule", "auto, or a mapping of control variables")
    if section is None:
        return FixedSchedule(), Adjustment()
    schedule = FixedSchedule(
        policy=section.choice("policy", None, policy_names()),
        encode_batch=section.integer("encode_batch", None, 1),
        decode_iterations=section.integer("decode_iterations", None, 1),
        decode_micro_batches=section.integer("decode_micro_batches", None, 1),
        encode_micro_batches=section.integer("encode_micro_batches", None, 1),
        max_active=section.integer("max_active", None, 1),
        token_budget=section.integer("token_budget", None, 1),
        tp_degree=section.integer("tp_degree", None, 1),
        tp_gpus=section.integer("tp_gpus", None, 0),
        others=_read_others(section),
    )
    degree, gpus = schedule.tp_degree, schedule.tp_gpus
    if degree is not None and gpus is not None and gpus % degree:
        section.reject("tp_gpus", f"must be a multiple of tp_degree = {degree}")
    _check_controls(section, schedule)
    adjustment = _read_adjustment(section, policy(schedule.policy or _USUAL))
    section.finish()
    return schedule, adjustment


def _read_others(section: Section) -> tuple[tuple[str, int], ...]:
    """The control variables that only policies of other packages have."""
    own = {field.name for field in fields(FixedSchedule)}
    others = {variable.name: variable for row in policies() for variable in row.variables
              if variable.name not in own}
    values = [(name, section.integer(name, None, variable.least))
              for name, variable in others.items()]
    return tuple((name, value) for name, value in values if value is not None)


def _read_adjustment(section: Section, row: Policy) -> Adjustment:
    steers = section.flag("steer", False) if section.has("steer") else None
    share = section.amount("adjustment", None, parse_share, lambda x: 0 <= x < 1,
                           "a share of an encode batch's mean input tokens, '10%' or 0.1; 0 for "
                           "none")
    for key in ("adjustment", "steer"):
        if section.has(key) and not row.has_even_batches:
            able = [other.name for other in policies() if other.has_even_batches]
            section.reject(key, f"of {', '.join(able)} alone")
    if steers and share == 0:
        section.reject("steer", "needs an adjustment above 0")
    field = section.get("shuffle")
    shuffle = field is not None and field.value
    if isinstance(shuffle, bool) or (isinstance(shuffle, int) and shuffle >= 2):
        return Adjustment(share=share, steers=steers, shuffle=shuffle)
    section.reject_type("shuffle", "true, false, or the queries of a window, at least 2")
    return Adjustment()


def _check_controls(section: Section, schedule: FixedSchedule) -> None:
    """Every variable given is one of the policy's (of RRA's where the policy is left open)."""
    own = policy(schedule.policy or _USUAL)
    for name in sorted({name for row in policies() for name in row.variable_names}):
        if schedule.value_of(name) is not None and name not in own.variable_names:
            others = [row.name for row in policies() if name in row.variable_names]
            section.reject(name, f"a variable of {', '.join(others)}; {own.name} "
                                 f"has {', '.join(own.variable_names)}")
    parts, groups = schedule.encode_micro_batches, schedule.decode_micro_batches
    if schedule.policy == "dsi" and parts and groups and parts % groups:
        section.reject("encode_micro_batches", f"must be a multiple of decode_micro_batches = "
                                               f"{groups}")


def _read_run(top: Section) -> RunSpec:
    section = top.section("run")
    if section is None:
        return RunSpec()
    run = RunSpec(
        ranks=section.integer("ranks", None, 1, 100_000),
        dtype=section.choice("dtype", "auto", DTYPES),
        seed=section.integer("seed", 0, 0, 2**63 - 1),
        temperature=section.number("temperature", 0.0, lambda x: x >= 0, "a number >= 0"),
        top_k=section.integer("top_k", None, 1),
        top_p=section.number("top_p", 1.0, lambda x: 0 < x <= 1, "above 0 and at most 1"),
        threads_per_rank=section.integer("threads_per_rank", None, 1, 4096),
        ignore_eos=section.flag("ignore_eos", False),
        weights=section.choice("weights", "checkpoint", WEIGHTS),
        hosts=_read_names(section, "hosts") or (),
        launcher=section.text("launcher", None, "a program called as `PROGRAM HOST COMMAND...`"),
        reschedule=_read_reschedule(section),
        engine=section.choice(
            "engine", OWN_ENGINE, engine_names() if section.get("engine") else ()),
    )
    _check_hosts(section, run, top.get("cluster"))
    section.finish()
    return run


def _check_hosts(section: Section, run: RunSpec, cluster: Field | None) -> None:
    """Distinct hosts that can share the ranks evenly."""
    count = len(run.hosts)
    if count == 0:
        if run.launcher is not None:
            section.reject("launcher", "needs run.hosts: it starts the ranks there")
        return
    strange = [name for name in run.hosts if not _HOST.fullmatch(name)]
    if strange or len(set(run.hosts)) < count:
        section.reject("hosts", "names of hosts, each once"
                       + (f"; {strange[0]!r} is none" if strange else ""))
    if run.ranks is not None and run.ranks % count:
        section.reject("ranks", f"a multiple of the {count} hosts: each has as many")
    if cluster is not None and cluster.value != LOCAL_CLUSTER:
        section.reject("hosts", f"only with `cluster: {LOCAL_CLUSTER}`")


def _read_reschedule(section: Section) -> float | None:
    field = section.get("reschedule")
    value = "auto" if field is None else field.value
    if value == "off" or value is False:  # YAML reads `off` as false
        return None
    if value in ("auto", "on") or value is True:
        return RESCHEDULE
    return section.amount("reschedule", RESCHEDULE, parse_share, lambda x: 0 < x <= 1,
                          "auto, off, or a share of the mean output length, '15%' or 0.15")


def _read_slurm(top: Section) -> dict[str, SlurmValue] | None:
    """Slurm's own words; what is absent is left to the cluster's defaults."""
    section = top.section("slurm", "a mapping of sbatch options")
    if section is None:
        return None
    read: dict[str, SlurmValue | None] = {
        key: section.text(key, None) for key in ("partition", "account", "qos", "constraint")}
    for key in ("nodes", "ntasks_per_node", "gpus_per_node", "cpus_per_task"):
        read[key] = section.integer(key, None, 0 if key == "gpus_per_node" else 1, 100_000)
    read["time"] = _matching(section, "time", _SLURM_TIME,
                             "minutes, 'HH:MM:SS' or 'D-HH:MM:SS'")
    read["mem"] = _matching(section, "mem", _SLURM_MEMORY, "megabytes, or a number with K, M, G, T")
    read["modules"] = _read_names(section, "modules")
    section.finish()
    return {key: value for key, value in read.items() if value is not None}


def _matching(section: Section, key: str, pattern: re.Pattern[str],
              allowed: str) -> str | int | None:
    field = section.get(key)
    if field is None:
        return None
    value = field.value
    is_word = isinstance(value, (str, int)) and not isinstance(value, bool)
    if is_word and pattern.fullmatch(str(value)):
        return cast("str | int", value)
    section.reject_type(key, allowed)
    return None


def _read_names(section: Section, key: str) -> tuple[str, ...] | None:
    field = section.get(key)
    if field is None:
        return None
    items = field.value if isinstance(field.value, list) else [field]
    texts = [item.value for item in items]
    if not all(isinstance(text, str) and text.strip() and text.isprintable() for text in texts):
        section.reject_type(key, "a list of names")
        return None
    return tuple(str(text) for text in texts)
