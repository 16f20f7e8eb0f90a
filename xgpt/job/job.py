"""The job file as a frozen `Job`: the user's keys, checked but not resolved; and its section `run`.

Building a Job has no side effect (no directory, no clock, no seed, no download). `load_job` in
xgpt.job.job_file reads one; xgpt.job.resolve turns it into a Problem."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from xgpt.core.arrivals import PROCESSES, Process
from xgpt.core.cluster import Cluster, Tier
from xgpt.core.constraint import Constraint
from xgpt.core.controls import Adjustment, FixedSchedule
from xgpt.core.engines import IN_CHILDREN, OWN_ENGINE, engine_names
from xgpt.core.units import FP8, INT8, parse_seconds, parse_share
from xgpt.job import typed
from xgpt.job.sections import SlurmSpec, absolute, is_file
from xgpt.requests.keys import KEYS, MAX_INT, MAX_STOP_CHARS, MAX_STOPS
from xgpt.requests.request_files import RequestFiles

LOCAL_CLUSTER = "local"
DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_WORDS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
WEIGHTS = ("checkpoint", "random")
KV_LAYOUTS = ("auto", "rows", "blocks")
RESCHEDULE = 0.1  # run.reschedule: auto
STEP_TIMES = 0.15  # run.step_times: auto

# cannot be an option of ssh or mpiexec, or a list of hosts
_HOST = re.compile(r"[A-Za-z0-9][\w.-]*(@[A-Za-z0-9][\w.-]*)?")
_INTERFACE = r"[A-Za-z0-9][\w.:-]{0,14}"  # Linux's names have at most 15 characters


def file_of(allowed: str) -> typed.InFolder:
    """A check for the name of an existing file, which becomes an absolute path."""
    def value_of(value: Any, folder: Path) -> Path:
        path = absolute(typed.text_of(value), folder)
        if is_file(path):
            return path
        raise ValueError(f"no such file: {path}")

    return typed.InFolder(value_of, allowed, type="string", minLength=1)


def _offload(value: Any, folder: Path) -> str:
    if value in ("auto", "off") or value is False:  # YAML 1.1 reads `off` as false
        return value or "off"
    path = absolute(typed.text_of(value), folder)
    if is_file(path):
        raise ValueError("a folder, not a file")
    return str(path)


def _share(usual: float, of: str) -> typed.Of:
    """A check for a share by which something must leave the plan, `usual` for auto; off: None."""
    given: Callable[[Any], float | None] = typed.amount(
        parse_share, lambda x: 0 < x <= 1, f"auto, off, or a share {of}, '15%' or 0.15").value_of

    def value_of(value: Any) -> float | None:
        if value == "off" or value is False:
            return None
        return usual if value in ("auto", "on") or value is True else given(value)

    return typed.Of(value_of, f"auto, off, or a share {of}, '15%' or 0.15",
              type=["number", "string", "boolean"], maximum=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """How to execute the job. `ranks` None: one per device of the cluster."""

    __pydantic_config__ = typed.CONFIG
    ranks: Annotated[int, typed.whole(1, 100_000)] | None = None
    dtype: Annotated[str, typed.choice(DTYPES, DTYPE_WORDS)] = "auto"
    # that weights are multiplied in; int8: activations, too
    weight_dtype: Annotated[str, typed.choice((*DTYPES, INT8, FP8), DTYPE_WORDS)] = "auto"
    # of the KV cache; other values than auto are only planned for
    kv_dtype: Annotated[str, typed.choice(("auto", FP8, INT8))] = "auto"
    # layout of a request's KV cache
    kv_layout: Annotated[str, typed.choice(KV_LAYOUTS)] = "auto"
    seed: Annotated[int, typed.whole(0, 2**63 - 1)] = 0
    temperature: Annotated[float, typed.number("a number >= 0", ge=0)] = 0.0
    top_k: Annotated[int, typed.whole(1, MAX_INT)] | None = None
    top_p: Annotated[float, typed.number("above 0 and at most 1", gt=0, le=1)] = 1.0
    # strings that end answers, for requests without some of their own
    stop: Annotated[tuple[str, ...], typed.that(
        KEYS["stop"].values.has, f"a text, or a list of at most {MAX_STOPS}, of 1 to "
        f"{MAX_STOP_CHARS} characters each",
        lambda value: tuple(value if isinstance(value, list) else [value]))] = ()
    threads_per_rank: Annotated[int, typed.whole(1, 4096)] | None = None
    ignore_eos: typed.Flag = False
    # random: random weights in the model's shape, for performance work
    weights: Annotated[str, typed.choice(WEIGHTS)] = "checkpoint"
    # that the ranks are spread over evenly; (): this machine
    hosts: Annotated[tuple[str, ...], typed.Of(typed.texts_of, "a list of names")] = ()
    # a program called like ssh; None: ssh
    launcher: Annotated[str | None, typed.text(
        "a program called as `PROGRAM HOST COMMAND...`")] = None
    pickles: typed.Flag = False  # whether PyTorch's pickled weights are read, too
    verify: typed.Flag = False  # whether weights are hashed whole, not sampled
    private: typed.Flag = False  # whether only the user may read the files written
    deterministic: typed.Flag = False  # whether answers are bitwise independent of the batch
    # the hosts' network interface for messages; None: MPI chooses
    interface: Annotated[str | None, typed.matching(
        _INTERFACE, "a network interface's name, such as eth1", type="string")] = None
    # share by which output lengths must differ from the plan to replan; None: never
    reschedule: Annotated[float | None, _share(
        RESCHEDULE, "of the mean output length")] = RESCHEDULE
    # share by which step times must differ from the plan to replan; None: never
    step_times: Annotated[float | None, _share(STEP_TIMES, "of the time of a step")] = STEP_TIMES
    engine: Annotated[str, typed.choice(engine_names)] = OWN_ENGINE
    # whether decode steps are captured on GPUs, where possible
    cuda_graphs: Annotated[bool, typed.that(
        lambda value: value in ("auto", "off") or value is False,  # YAML 1.1 reads `off` as false
        "auto or off", lambda value: value == "auto", enum=["auto", "off", False])] = True
    # Python interpreter of another engine; None: this one
    engine_python: Annotated[str | None, typed.text(
        "the Python of an environment that has the engine, such as /opt/vllm/bin/python")] = None
    # arguments of another engine, by name
    engine_args: Annotated[Mapping[str, Any], typed.any_keys(
        "a mapping of the engine's own arguments, such as {enforce_eager: false}")] = field(
            default_factory=dict)
    # where each node copies the model's files to; auto: only from a network, to its own disk
    stage_model: Annotated[str, typed.that(
        lambda value: value in ("auto", "off") or value is False or (
            Path(typed.text_of(value)).is_absolute() and not is_file(Path(value))),
        "auto, off, or the absolute path of a folder (not a file) on each node's own disk",
        lambda value: value or "off", type=["string", "boolean"])] = "auto"
    # where weights and the KV cache lie that the devices cannot hold; auto: beside the output,
    # where the model does not fit otherwise
    offload: Annotated[str, typed.InFolder(
        _offload, "auto, off, or a folder on a disk", type=["string", "boolean"])] = "auto"
    # seconds after which answers reported done are on the disk
    sync_s: Annotated[float, typed.amount(parse_seconds, lambda x: 0.1 <= x <= 3600,
                                    "seconds, from 0.1 to 3600: 5 or '1m'")] = 5.0
    # restarts by one command after ranks have died
    restarts: Annotated[int, typed.whole(0, 1000)] = 2
    # seconds without progress that end the run; None: derived from the longest step known
    stall_timeout_s: Annotated[float | None, typed.amount(
        parse_seconds, lambda x: 5 <= x <= 7 * 86400,
        "seconds, from 5 to 604800 (7 days): 600 or '10m'"), Field(alias="stall_timeout")] = None


def check_run(run: RunSpec, reading: typed.Reading) -> None:
    """Records keys of the section that contradict each other or the rest of the file."""
    for key in ("engine_python", "engine_args"):
        if run.engine not in IN_CHILDREN and reading.has(f"run.{key}"):
            reading.reject(f"run.{key}", f"only with run.engine: {' or '.join(IN_CHILDREN)}")
    count = len(run.hosts)
    if count == 0:
        if run.launcher is not None:
            reading.reject("run.launcher", "needs run.hosts: it starts the ranks there")
        if run.interface is not None:
            reading.reject("run.interface", "needs run.hosts: on one machine it is loopback alone")
        return
    strange = [name for name in run.hosts if not _HOST.fullmatch(name)]
    if strange or len(set(run.hosts)) < count:
        reading.reject("run.hosts", "names of hosts, each once"
                       + (f"; {strange[0]!r} is none" if strange else ""))
    if run.ranks is not None and run.ranks % count:
        reading.reject("run.ranks", f"a multiple of the {count} hosts: each has as many")
    if reading.has("slurm"):
        reading.reject("run.hosts", "not with a section slurm: Slurm says which nodes")
    elif (cluster := reading.at("cluster")) is not None and cluster.value != LOCAL_CLUSTER:
        reading.reject("run.hosts", f"only with `cluster: {LOCAL_CLUSTER}`")


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSpec:
    """Source of a length distribution: one of the forms of docs/job-file.md."""

    kind: Literal["normal", "from_requests", "file", "task", "observe"]
    mean: float | None = None
    std: float | None = None
    maximum: int | None = None
    path: Path | None = None
    task: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSpec:
    """Prefixes that synthetic requests share: `groups` of them, whose lengths are `tokens`. They
    are a part of the inputs."""

    groups: int
    tokens: LengthSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalSpec:
    """Keys of `workload.arrivals`: how requests arrive. Those of a file have its times, `speed`
    times as fast, or so that `rate` arrive a second. Without any key they have their own times."""

    rate: Annotated[float, typed.number("requests/s > 0", gt=0)] | None = None
    process: Annotated[Process | None, typed.choice(PROCESSES)] = None
    cv: Annotated[float, typed.number("a number > 0", gt=0)] | None = None
    concurrency: Annotated[int, typed.whole(1, MAX_INT)] | None = None
    file: Annotated[Path | None, file_of("a trace with a column TIMESTAMP")] = None
    speed: Annotated[float, typed.number("a number > 0", gt=0)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """The requests of a job, from files or `count` synthetic ones, and their lengths."""

    requests: RequestFiles | None
    count: int | None
    input_tokens: LengthSpec
    output_tokens: LengthSpec
    max_tokens: int | None = None  # cap on output tokens, for requests without one of their own
    choices: tuple[str, ...] = ()  # the texts that an answer can be; (): any text
    chat: bool = True  # apply the tokenizer's chat template, if it has one
    # arguments of that template (`enable_thinking`); a request's own take precedence
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    score: bool = False  # whether continuations are scored instead of generated
    # embed texts by their last hidden states, of the "last" token or their "mean"; None: generate
    embed: str | None = None
    shared: SharedSpec | None = None
    arrivals: ArrivalSpec | None = None  # None: a batch job

    @property
    def only_encodes(self) -> bool:
        """Whether nothing is generated: a request ends with its prefill."""
        return self.score or self.embed is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job file, checked. `source` is its path, for messages; paths inside are absolute."""

    name: str
    model: str
    cluster: str | Cluster
    workload: WorkloadSpec
    constraint: Constraint
    schedule: FixedSchedule
    run: RunSpec
    slurm: SlurmSpec | None
    output: Path
    source: Path
    results: Path | None = None  # a file of results besides results.jsonl
    quote_formulas: bool = False  # whether its cells are quoted against spreadsheet formulas
    profile: Path | None = None  # a Profile file to plan with
    plan_engine: str = OWN_ENGINE  # engine whose roofline times are used
    calibration: Path | None = None  # a Calibration file that scales them
    price_per_hour: float | None = None  # of a device; None: the catalog's, if it has one
    adjustment: Adjustment = Adjustment()
    max_search_s: float | None = None  # seconds that the search may take; None: no limit
    search_queries: int | None = None  # requests of a capacity replay; None: as many as it needs
    tiers: tuple[Tier, ...] = ()  # of a node, in place of the cluster's own of the same name

    @property
    def offload_folder(self) -> Path:
        """Where weights and the KV cache lie that the devices cannot hold."""
        if self.run.offload in ("auto", "off"):
            return self.output.with_name(f"{self.output.name}.offload")
        return Path(self.run.offload)
