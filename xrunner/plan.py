"""What the launcher hands to the ranks: `run.json`, beside the schedule it executes."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

from xgpt.core.controls import LEAST_TOKENS
from xgpt.core.engines import OWN_ENGINE
from xgpt.core.schedule import Schedule
from xgpt.core.system.whole_file import read_object, write_atomically
from xrunner.checkpoint.identity import changed_files

PLAN_VERSION = 3
# Of what decides the answers, what a schedule holds: which requests can run follows from it alone.
_HELD_BY_SCHEDULE = ("query_kv_tokens", "most_input_tokens")
OWN_ALONE = 0o077  # the umask of a private run
AGREEMENT_FILE = "agreement.json"  # of a run of 8-bit products (xrunner.rank.agreement)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What decides the answers: a stopped run goes on only if all of it is the same."""

    is_chat: bool
    max_tokens: int
    dtype: str
    weight_dtype: str
    seed: int
    temperature: float
    top_k: int | None
    top_p: float
    ignore_eos: bool
    query_kv_tokens: int  # what the schedule holds for one query: decides which requests can run
    most_input_tokens: int = 0  # that the schedule can encode at a time; 0: any input
    requests_digest: str = ""
    model_files: Mapping[str, str] = field(default_factory=dict)  # xrunner.checkpoint.identity
    engine: str = OWN_ENGINE
    engine_version: str = ""  # of another engine, where its own numbers decide the answers
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # its own arguments, by name
    deterministic: bool = False  # xrunner.ops.invariant
    # what the chat template is told besides
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()  # strings that end the answers of requests that name none

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that stand for it."""
        decisive = {key: value if isinstance(value, dict) else str(value)
                    for key, value in asdict(self).items() if key in _DECISIVE}
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


_DECISIVE = tuple(one.name for one in fields(Answers))


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How the work is shared out, and in which order: no token depends on it."""

    threads_per_rank: int
    device_kind: Literal["cpu", "gpu"] = "cpu"  # what a rank works on
    is_watched: bool = False  # the launcher follows lengths and steps, and may change the schedule
    slots: int = 0  # queries that a group's cache has room for, for such changes; 0: as planned
    kv_in_blocks: bool = False  # entries that a rule reserves tokens for (RRA, WAA), else in rows
    kv_tokens: int = 0  # that a group has blocks for, for such changes; 0: as planned
    other_rooms: tuple[tuple[int, int], ...] = ()  # (slots, kv_tokens) of the copies' other shapes
    shuffle_window: int = 1  # queries that are taken in random order among themselves
    routing: str = LEAST_TOKENS  # of queries to replicas
    mean_output_tokens: float = 0.0  # that are expected of a query, for that; 0: as many as allowed
    cuda_graphs: bool = False  # decode steps are captured where they can be
    aside: tuple[int, ...] = ()  # queries that this run leaves out (xgpt.app.running.run)


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """Where a run's files are, by absolute paths, and how they are written."""

    name: str
    output: Path
    model_dir: Path
    model_name: str
    served_by: str
    requests: str  # where they came from
    model_state: str = ""  # of the model's files before they were read: identity.files_state
    weights_whole: Mapping[str, str] = field(default_factory=dict)  # where every byte was read
    private: bool = False  # what is written is the user's alone to read
    sync_s: float = 5.0  # between two times that results are put on the disk


@dataclass(frozen=True, kw_only=True)
class RunPlan(Answers, Execution, RunFiles):
    """Everything a rank needs besides schedule.json."""

    def save(self) -> Path:
        path = self.output / "run.json"
        content = {"version": PLAN_VERSION, "fingerprint": self.fingerprint, **asdict(self)}
        write_atomically(path, json.dumps(content, indent=1, default=str) + "\n")
        return path


def weights_key(plan: RunPlan, schedule: Schedule) -> dict[str, str]:
    """What the ranks hold in memory before the first query, by what may differ, in words: two runs
    of which it is equal can be had from the same ranks, one after the other."""
    files, deployments = plan.model_files, [shape.deployment for shape in schedule.estimate.shapes]
    return {"model": json.dumps(files, sort_keys=True) if files else str(plan.model_dir),
            "engine": plan.engine, "dtype": plan.dtype, "weight_dtype": plan.weight_dtype,
            "device": plan.device_kind,
            "layout of ranks and stages": json.dumps([
                ([(pool.name, pool.role, [asdict(stage) for stage in pool.stages])
                  for pool in of.pools], of.replicas) for of in deployments]),
            "kind of products": "deterministic" if plan.deterministic else "usual",
            "number of threads": str(plan.threads_per_rank)}


def load_plan(path: Path) -> RunPlan:
    raw = json.loads(path.read_text(encoding="utf-8"))
    assert raw.pop("version") == PLAN_VERSION, f"{path} is of another version of xgpt"
    raw.pop("fingerprint")
    return TypeAdapter(RunPlan).validate_python(raw)


def saved_fingerprint(output: Path) -> str | None:
    """Fingerprint of the run that last wrote into `output`; None if there was none."""
    value = read_object(output / "run.json").get("fingerprint")
    return None if value is None else str(value)


def saved_differences(plan: RunPlan) -> list[str]:
    """The keys that decide the answers and are others than in the run that last wrote into the
    plan's folder; the model's files are not among them."""
    saved = read_object(plan.output / "run.json")
    now = json.loads(json.dumps(asdict(plan), default=str))
    return [key for key in _DECISIVE if key != "model_files"
            and key in saved and saved[key] != now[key]]


def as_begun(plan: RunPlan) -> RunPlan:
    """The plan for the very requests that the run which last wrote into its folder took for ones
    that can run, where the two differ in nothing else that decides the answers; else the plan."""
    saved = read_object(plan.output / "run.json")
    limits: dict[str, Any] = {key: saved.get(key) for key in _HELD_BY_SCHEDULE}
    if not all(isinstance(value, int) for value in limits.values()):
        return plan
    begun = replace(plan, **limits)
    return begun if saved.get("fingerprint") == begun.fingerprint else plan


class SavedModel(NamedTuple):
    """Where a run's model lay, and its files (xrunner.checkpoint.identity)."""

    directory: Path
    files: Mapping[str, str]
    weights_whole: Mapping[str, str]  # empty where not every byte was read
    weight_dtype: str | None

    def changed(self, files: Mapping[str, str], weights_whole: Mapping[str, str]) -> list[str]:
        """The names of files that are others now, as far as both sides were read."""
        common = self.weights_whole.keys() & weights_whole.keys()
        return sorted({*changed_files(self.files, files), *(
            name for name in common if self.weights_whole[name] != weights_whole[name])})


def saved_model(output: Path) -> SavedModel | None:
    """The model of that run; None where it is not known."""
    values = read_object(output / "run.json")
    directory, files = values.get("model_dir"), values.get("model_files")
    whole, dtype = values.get("weights_whole"), values.get("weight_dtype")
    return (SavedModel(Path(directory), files, whole if isinstance(whole, dict) else {},
                       dtype if isinstance(dtype, str) else None)
            if isinstance(directory, str) and isinstance(files, dict) else None)
