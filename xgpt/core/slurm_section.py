"""Reading the section `slurm` of a job file: every option with what is allowed, every mistake at
once. What Slurm itself would refuse only after a wait in the queue is refused here."""

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from xgpt.core.sections import Section, is_one_of, is_text
from xgpt.core.slurm import LAUNCHES, REQUEUES, WARNING_S, SlurmSpec
from xgpt.core.units import parse_seconds

MAIL_TYPES = ("NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "STAGE_OUT",
              "TIME_LIMIT", "TIME_LIMIT_90", "TIME_LIMIT_80", "TIME_LIMIT_50", "ARRAY_TASKS")
# What the batch script says itself: twice, the later one would count.
_OWN = ("array", "a", "chdir", "D", "error", "e", "job-name", "J", "no-requeue", "open-mode",
        "output", "o", "parsable", "requeue", "signal", "wait", "W", "wrap")

_TIME = re.compile(r"\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+(:\d+){0,2}|infinite|unlimited", re.IGNORECASE)
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)
_GPUS = re.compile(r"([A-Za-z][\w.-]*:)?\d{1,3}")
_OPTION = re.compile(r"--([a-z][a-z-]*)(=.*)?|-([A-Za-z])( ?\S.*)?")
_ONE_DEPENDENCY = r"(singleton|after(any|ok|notok|corr)?(:\d+(_(\d+|\*))?(\+\d+)?)+)"
_DEPENDENCY = re.compile(rf"{_ONE_DEPENDENCY}([,?]{_ONE_DEPENDENCY})*")
_VARIABLE = re.compile(r"[A-Za-z_]\w*")


def read_slurm(top: Section, folder: Path) -> SlurmSpec | None:
    """The section; None where the job has none. `folder`: of the job file, where paths start."""
    section = top.section("slurm", "a mapping of sbatch options")
    if section is None:
        return None
    texts: dict[str, Any] = {key: section.text(key, None) for key in (
        "partition", "account", "qos", "constraint", "reservation", "mail_user")}
    counts: dict[str, Any] = {key: section.integer(key, None, 1, 100_000) for key in (
        "nodes", "ntasks_per_node", "cpus_per_task", "at_once")}
    spec = SlurmSpec(
        **texts, **counts,
        dependency=_matching(section, "dependency", _DEPENDENCY,
                             "as sbatch takes it: 'afterok:123', 'afterany:1:2', 'singleton'"),
        gpus_per_node=_matching(section, "gpus_per_node", _GPUS, "a number, or 'a100:4'"),
        mem=_matching(section, "mem", _MEMORY, "megabytes, or a number with K, M, G, T"),
        time=_matching(section, "time", _TIME, "minutes, 'HH:MM:SS' or 'D-HH:MM:SS'"),
        exclusive=section.flag("exclusive", False), mail_type=_read_mail_types(section),
        extra=_read_extra(section), modules=_texts(section, "modules", "a list of names"),
        venv=_read_venv(section, folder), env=_read_env(section),
        prologue=_texts(section, "prologue", "a list of lines of bash"),
        container=_texts(section, "container", "a list of words: [apptainer, exec, image.sif]"),
        launch=cast(Any, section.choice("launch", "srun", LAUNCHES)),
        mpi=section.text("mpi", "pmi2", "a word for `srun --mpi=`: pmi2, pmix, cray_shasta"),
        requeue=section.integer("requeue", REQUEUES, 0, 1000),
        warning_s=round(section.amount(
            "warning", WARNING_S, parse_seconds, lambda x: 30 <= x <= 65535,
            "seconds or '2 min', at least 30 s (a run has 20 s to stop) and at most 65535 s")))
    _check_together(section, spec)
    section.finish()
    return spec


def _check_together(section: Section, spec: SlurmSpec) -> None:
    if spec.time_s is not None and spec.time_s <= spec.warning_s:
        section.reject("time", f"more than slurm.warning, {spec.warning_s} s: so long before the "
                       "limit a run is told to stop")
    if spec.mail_user is None and set(spec.mail_type) - {"NONE"}:
        section.reject("mail_type", "needs slurm.mail_user")
    if section.has("mpi") and spec.launch != "srun":
        section.reject("mpi", "only with launch: srun")


def _matching(section: Section, key: str, pattern: re.Pattern[str], allowed: str) -> str | None:
    def value_of(value: Any) -> str | None:
        is_allowed = is_one_of(value, str, int) and str(value).isascii() and pattern.fullmatch(
            str(value))
        return str(value) if is_allowed else None

    return section.read(key, None, value_of, allowed)


def _texts(section: Section, key: str, allowed: str,
           is_allowed: Callable[[str], bool] = lambda text: True) -> tuple[str, ...]:
    """A list of texts, or a single one."""
    def value_of(value: Any) -> tuple[str, ...] | None:
        texts = [item.value for item in value] if isinstance(value, list) else [value]
        return tuple(texts) if all(is_text(text) and is_allowed(text) for text in texts) else None

    return section.read(key, (), value_of, allowed)


def _read_mail_types(section: Section) -> tuple[str, ...]:
    types = _texts(section, "mail_type", f"some of {', '.join(MAIL_TYPES)}",
                   lambda text: all(t.strip().upper() in MAIL_TYPES for t in text.split(",")))
    return tuple(t.strip().upper() for text in types for t in text.split(","))


def _read_extra(section: Section) -> tuple[str, ...]:
    """Options that have no key of their own."""
    known = {field.name.replace("_", "-"): field.name for field in fields(SlurmSpec)}
    extra = _texts(section, "extra", "a list of whole options of sbatch, such as '--comment=x'",
                   lambda text: _OPTION.fullmatch(text) is not None)
    for option in extra:
        match = _OPTION.fullmatch(option)
        assert match is not None
        name = match[1] or match[3]
        if name in _OWN:
            section.reject("extra", f"{option!r} is what the batch script says itself")
        elif name in known:
            section.reject("extra", f"{option!r} has a key of its own, slurm.{known[name]}")
    return extra


def _read_venv(section: Section, folder: Path) -> str | None:
    text = section.text("venv", None, "the folder of a virtual environment on the nodes")
    return None if text is None else str(folder / Path(text).expanduser())


def _read_env(section: Section) -> tuple[tuple[str, str], ...]:
    allowed = "a mapping of variables to text, {UCX_NET_DEVICES: ib0}"
    field = section.get("env")
    if field is None:
        return ()
    if isinstance(field.value, dict) and all(
            _VARIABLE.fullmatch(name) and is_one_of(child.value, str, int, float)
            and str(child.value).isprintable() for name, child in field.value.items()):
        return tuple((name, str(child.value)) for name, child in field.value.items())
    section.reject("env", allowed)
    return ()
