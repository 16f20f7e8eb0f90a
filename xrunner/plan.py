"""The plan of a run: `run.json`, which the launcher writes for the ranks beside schedule.json."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

from xgpt.core.cluster import KV_BLOCK_TOKENS
from xgpt.core.controls import LEAST_TOKENS
from xgpt.core.engines import OWN_ENGINE
from xgpt.core.lengths import FloatArray
from xgpt.core.schedule import Schedule
from xgpt.core.system.whole_file import read_object, write_atomically
from xrunner.checkpoint.identity import changed_files

PLAN_VERSION = 3
# answers' keys that follow from the schedule: they decide which requests can run at all
_HELD_BY_SCHEDULE = ("query_kv_tokens", "most_input_tokens")
PRIVATE_UMASK = 0o077  # umask of a private run
AGREEMENT_FILE = "agreement.json"  # in runs with 8-bit products (xrunner.rank.agreement)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Settings that decide the answers: a stopped run resumes only if all of them are equal."""

    is_chat: bool
    max_tokens: int
    dtype: str
    weight_dtype: str
    seed: int
    temperature: float
    top_k: int | None
    top_p: float
    ignore_eos: bool
    query_kv_tokens: int  # the schedule's room for one request; longer requests cannot run
    most_input_tokens: int = 0  # longest input that the schedule can encode; 0: no limit
    requests_digest: str = ""
    model_files: Mapping[str, str] = field(default_factory=dict)  # xrunner.checkpoint.identity
    engine: str = OWN_ENGINE
    engine_version: str = ""  # set where the version of another engine decides the answers
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # another engine's arguments
    deterministic: bool = False  # xrunner.ops.invariant
    # arguments of the chat template
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()  # end the answers of requests without `stop`

    @property
    def fingerprint(self) -> str:
        """Hash of all these settings, 16 hexadecimal digits."""
        decisive = {key: value if isinstance(value, dict) else str(value)
                    for key, value in asdict(self).items() if key in _DECISIVE}
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


_DECISIVE = tuple(one.name for one in fields(Answers))


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How the work is divided, and in which order it is done: no token depends on it."""

    threads_per_rank: int
    device_kind: Literal["cpu", "gpu"] = "cpu"  # device of each rank
    engine_python: str = ""  # interpreter of another engine
    restarts: int = 0  # of engines, that are left to this run
    stall_timeout_s: float | None = None  # seconds without a step after which an engine is dead
    is_watched: bool = False  # the launcher watches lengths and steps, and may replan
    slots: int = 0  # requests a group's cache has room for; 0: as planned
    shares_prefixes: bool = False  # those of spool/prefixes.npy
    kv_in_blocks: bool = False  # for rules that reserve tokens (RRA, WAA); else in rows
    kv_tokens: int = 0  # tokens in a group's KV blocks; 0: as planned
    other_rooms: tuple[tuple[int, int], ...] = ()  # (slots, kv_tokens) of replicas' other shapes
    routing: str = LEAST_TOKENS  # how requests are divided among replicas
    mean_output_tokens: float = 0.0  # expected of a request, for routing; 0: its max_tokens
    has_forms: bool = False  # the job holds all answers to a form: the tokenizer is read at once
    cuda_graphs: bool = False  # capture decode steps as CUDA graphs where possible
    started_at: float = 0.0  # clock time at which the job's first command began
    deadline_s: float = math.inf  # seconds from there, for requests without their own deadline
    # seconds from there after which no request begins (infinite: but those with a deadline); None:
    # all begin
    expires_s: float | None = None
    stage_model: str = "off"  # xrunner.checkpoint.staging
    offload: str = ""  # folder of what placements keep on disk; "": there is none
    arrives: bool = False  # requests arrive over time, at the spool's times
    concurrency: int = 0  # or from so many clients, who each wait for their answer
    clock_s: float = 0.0  # where the clock of arrivals begins: where an earlier run stopped
    aside: tuple[int, ...] = ()  # indices that this run leaves out (xgpt.app.running.run)

    def expires_at(self, deadlines_s: FloatArray | None, query: int) -> float:
        """Clock time, or seconds from its arrival, after which a request does not begin.
        `deadlines_s`: of all, [requests]."""
        if self.expires_s is None:
            return math.inf
        own_s = math.inf if deadlines_s is None else float(deadlines_s[query])
        return (0.0 if self.arrives else self.started_at) + min(self.expires_s, own_s)


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """Absolute paths of a run's files, and how they are written."""

    name: str
    output: Path
    model_dir: Path
    model_name: str
    served_by: str
    requests: str  # where the requests came from
    model_state: str = ""  # of the model's files before loading (identity.files_state)
    weights_whole: Mapping[str, str] = field(default_factory=dict)  # full hashes of weights
    private: bool = False  # only the user may read what is written
    sync_s: float = 5.0  # seconds between two fsyncs of the results


@dataclass(frozen=True, kw_only=True)
class RunPlan(Answers, Execution, RunFiles):
    """All settings that a rank needs besides schedule.json."""

    @property
    def kv_block_tokens(self) -> int:
        """Number of tokens in a KV block."""
        return int(self.engine_args.get("block_size") or KV_BLOCK_TOKENS[self.device_kind])

    def save(self) -> Path:
        """Writes run.json into the output folder and returns its path."""
        path = self.output / "run.json"
        content = {"version": PLAN_VERSION, "fingerprint": self.fingerprint, **asdict(self)}
        write_atomically(path, json.dumps(content, indent=1, default=str) + "\n")
        return path


def weights_key(plan: RunPlan, schedule: Schedule) -> dict[str, str]:
    """Names and values of all that determines the ranks' memory before the first request. Two runs
    with equal keys can use the same loaded ranks one after the other."""
    files, deployments = plan.model_files, [shape.deployment for shape in schedule.estimate.shapes]
    return {"model": json.dumps(files, sort_keys=True) if files else str(plan.model_dir),
            "engine": plan.engine, "dtype": plan.dtype, "weight_dtype": plan.weight_dtype,
            "device": plan.device_kind,
            "layout of ranks and stages": json.dumps([
                ([(pool.name, pool.role, [asdict(stage) for stage in pool.stages])
                  for pool in of.pools], of.replicas) for of in deployments]),
            "placement": json.dumps([plan.offload, *(
                asdict(pool.placement) for of in deployments for pool in of.pools
                if pool.placement)]),
            "kind of products": "deterministic" if plan.deterministic else "usual",
            "number of threads": str(plan.threads_per_rank)}


def load_plan(path: Path) -> RunPlan:
    """Reads a run.json. Asserts that this version of xgpt wrote it."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    assert raw.pop("version") == PLAN_VERSION, f"{path} is of another version of xgpt"
    raw.pop("fingerprint")
    return TypeAdapter(RunPlan).validate_python(raw)


def saved_fingerprint(output: Path) -> str | None:
    """Fingerprint of the last run that wrote into `output`; None if there was none."""
    value = read_object(output / "run.json").get("fingerprint")
    return None if value is None else str(value)


def saved_differences(plan: RunPlan) -> list[str]:
    """Names of answer-deciding settings that differ from the last run in the plan's folder. The
    model's files are left out: `SavedModel.changed` compares them."""
    saved = read_object(plan.output / "run.json")
    now = json.loads(json.dumps(asdict(plan), default=str))
    return [key for key in _DECISIVE if key != "model_files"
            and key in saved and saved[key] != now[key]]


def with_earlier_limits(plan: RunPlan) -> RunPlan:
    """Returns `plan` with the last run's limits on runnable requests, if only these differ.
    Otherwise returns `plan` unchanged. The last run is the one in the plan's folder."""
    saved = read_object(plan.output / "run.json")
    limits: dict[str, Any] = {key: saved.get(key) for key in _HELD_BY_SCHEDULE}
    if not all(isinstance(value, int) for value in limits.values()):
        return plan
    begun = replace(plan, **limits)
    return begun if saved.get("fingerprint") == begun.fingerprint else plan


class SavedModel(NamedTuple):
    """Folder, file hashes and weight type of the model of an earlier run."""

    directory: Path
    files: Mapping[str, str]
    weights_whole: Mapping[str, str]  # empty if only samples of the weights were hashed
    weight_dtype: str | None

    def changed(self, files: Mapping[str, str], weights_whole: Mapping[str, str]) -> list[str]:
        """Sorted names of files whose hashes differ; a file that one side did not hash is left
        out."""
        common = self.weights_whole.keys() & weights_whole.keys()
        return sorted({*changed_files(self.files, files), *(
            name for name in common if self.weights_whole[name] != weights_whole[name])})


def saved_model(output: Path) -> SavedModel | None:
    """The model of the last run in `output`; None if run.json does not say."""
    values = read_object(output / "run.json")
    directory, files = values.get("model_dir"), values.get("model_files")
    whole, dtype = values.get("weights_whole"), values.get("weight_dtype")
    return (SavedModel(Path(directory), files, whole if isinstance(whole, dict) else {},
                       dtype if isinstance(dtype, str) else None)
            if isinstance(directory, str) and isinstance(files, dict) else None)
