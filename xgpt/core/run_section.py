"""The section `run` of a job file: how and where a job runs."""

import re
from typing import Any

from xgpt.core.engines import ONE_PROCESS, OWN_ENGINE, engine_names
from xgpt.core.job import RESCHEDULE, STEP_TIMES, RunSpec
from xgpt.core.request_keys import MAX_INT, MAX_STOP_CHARS, MAX_STOPS
from xgpt.core.sections import Section, is_text, values_of
from xgpt.core.units import FP8, INT8, parse_seconds, parse_share

LOCAL_CLUSTER = "local"
DTYPES = ("auto", "float32", "bfloat16", "float16")
WEIGHTS = ("checkpoint", "random")
KV_LAYOUTS = ("auto", "rows", "blocks")

# no option of ssh or mpiexec, no list within a list
_HOST = re.compile(r"[A-Za-z0-9][\w.-]*(@[A-Za-z0-9][\w.-]*)?")
_INTERFACE = re.compile(r"[A-Za-z0-9][\w.:-]{0,14}")  # Linux's names have no more


def read_run(top: Section) -> RunSpec:
    section = top.section("run")
    if section is None:
        return RunSpec()
    run = RunSpec(
        ranks=section.integer("ranks", None, 1, 100_000),
        dtype=section.choice("dtype", "auto", DTYPES),
        weight_dtype=section.choice("weight_dtype", "auto", (*DTYPES, INT8, FP8)),
        kv_dtype=section.choice("kv_dtype", "auto", ("auto", FP8, INT8)),
        kv_layout=section.choice("kv_layout", "auto", KV_LAYOUTS),
        seed=section.integer("seed", 0, 0, 2**63 - 1),
        temperature=section.number("temperature", 0.0, lambda x: x >= 0, "a number >= 0"),
        top_k=section.integer("top_k", None, 1, MAX_INT),
        top_p=section.number("top_p", 1.0, lambda x: 0 < x <= 1, "above 0 and at most 1"),
        stop=_read_stops(section),
        threads_per_rank=section.integer("threads_per_rank", None, 1, 4096),
        ignore_eos=section.flag("ignore_eos", False),
        weights=section.choice("weights", "checkpoint", WEIGHTS),
        hosts=_read_names(section, "hosts") or (),
        launcher=section.text("launcher", None, "a program called as `PROGRAM HOST COMMAND...`"),
        pickles=section.flag("pickles", False),
        verify=section.flag("verify", False),
        private=section.flag("private", False),
        deterministic=section.flag("deterministic", False),
        interface=section.read(
            "interface", None, lambda value: value if isinstance(value, str)
            and _INTERFACE.fullmatch(value) else None, "a network interface's name, such as eth1"),
        reschedule=_read_share(section, "reschedule", RESCHEDULE, "of the mean output length"),
        step_times=_read_share(section, "step_times", STEP_TIMES, "of the time of a step"),
        cuda_graphs=_read_cuda_graphs(section),
        engine_python=section.text("engine_python", None, "the Python of an environment that has "
                                   "the engine, such as /opt/vllm/bin/python"),
        engine_args=values_of(section, "engine_args", "a mapping of the engine's own arguments, "
                              "such as {enforce_eager: false}"),
        sync_s=section.amount("sync_s", 5.0, parse_seconds, lambda x: 0.1 <= x <= 3600,
                              "seconds, from 0.1 to 3600: 5 or '1m'"),
        restarts=section.integer("restarts", 2, 0, 1000),
        stall_timeout_s=section.amount(
            "stall_timeout", None, parse_seconds, lambda x: 5 <= x <= 7 * 86400,
            "seconds, from 5 to 604800 (7 days): 600 or '10m'"),
        engine=section.choice(
            "engine", OWN_ENGINE, engine_names() if section.get("engine") else ()))
    _check_hosts(section, run, top)
    if run.engine not in ONE_PROCESS:
        for key in ("engine_python", "engine_args"):
            if section.has(key):
                section.reject(key, f"only with run.engine: {' or '.join(ONE_PROCESS)}")
    section.finish()
    return run


def _check_hosts(section: Section, run: RunSpec, top: Section) -> None:
    """Distinct hosts that can share the ranks evenly."""
    count = len(run.hosts)
    if count == 0:
        if run.launcher is not None:
            section.reject("launcher", "needs run.hosts: it starts the ranks there")
        if run.interface is not None:
            section.reject("interface", "needs run.hosts: on one machine it is loopback alone")
        return
    strange = [name for name in run.hosts if not _HOST.fullmatch(name)]
    if strange or len(set(run.hosts)) < count:
        section.reject("hosts", "names of hosts, each once"
                       + (f"; {strange[0]!r} is none" if strange else ""))
    if run.ranks is not None and run.ranks % count:
        section.reject("ranks", f"a multiple of the {count} hosts: each has as many")
    if top.has("slurm"):
        section.reject("hosts", "not with a section slurm: Slurm says which nodes")
    elif (cluster := top.get("cluster")) is not None and cluster.value != LOCAL_CLUSTER:
        section.reject("hosts", f"only with `cluster: {LOCAL_CLUSTER}`")


def _read_stops(section: Section) -> tuple[str, ...]:
    def value_of(value: Any) -> tuple[str, ...] | None:
        texts = [item.value for item in value] if isinstance(value, list) else [value]
        is_right = len(texts) <= MAX_STOPS and all(
            isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS for text in texts)
        return tuple(texts) if is_right else None

    return section.read("stop", (), value_of, f"a text, or a list of at most {MAX_STOPS}, of 1 to "
                        f"{MAX_STOP_CHARS} characters each")


def _read_share(section: Section, key: str, usual: float, of: str) -> float | None:
    """How far something must leave the plan; None: whatever it does."""
    field = section.get(key)
    value = "auto" if field is None else field.value
    if value == "off" or value is False:  # YAML reads `off` as false
        return None
    if value in ("auto", "on") or value is True:
        return usual
    return section.amount(key, usual, parse_share, lambda x: 0 < x <= 1,
                          f"auto, off, or a share {of}, '15%' or 0.15")


def _read_cuda_graphs(section: Section) -> bool:
    def value_of(value: Any) -> bool | None:
        if value == "auto":
            return True
        return False if value == "off" or value is False else None  # YAML reads `off` as false

    return section.read("cuda_graphs", True, value_of, "auto or off")


def _read_names(section: Section, key: str) -> tuple[str, ...] | None:
    def value_of(value: Any) -> tuple[str, ...] | None:
        texts = [item.value for item in value] if isinstance(value, list) else [value]
        return tuple(texts) if all(is_text(text) for text in texts) else None

    return section.read(key, None, value_of, "a list of names")
