"""What the launcher hands to the ranks: `run.json`, beside the schedule it executes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from xgpt.core.engines import OWN_ENGINE
from xgpt.core.job import LEAST_TOKENS
from xgpt.core.schedule import Schedule
from xgpt.core.whole_file import write_atomically
from xrunner.checkpoint.identity import changed_files

# History of the file format.
#   1: first version
#   2: the requests lie in the spool; `requests` tells them apart
#   3: `model_files` and `requests_digest` tell models and requests apart, paths no longer do
PLAN_VERSION = 3
# What decides no token: names and places, how the work is shared out, and in which order.
_NOT_DECISIVE = ("name", "output", "model_dir", "model_name", "served_by", "requests",
                 "threads_per_rank", "device_kind", "is_watched", "slots", "kv_tokens",
                 "other_rooms", "kv_in_blocks", "shuffle_window",
                 "routing", "mean_output_tokens", "cuda_graphs", "private",
                 "sync_s", "aside", "model_state",
                 "weights_whole")  # the last stands beside `model_files`
# What a schedule holds: which requests can run by it follows, and nothing of their answers.
_HELD_BY_SCHEDULE = ("query_kv_tokens", "most_input_tokens")
# Keys that came later, with what held before: runs of that time go on.
_AS_BEFORE: tuple[tuple[str, object], ...] = (
    ("deterministic", False), ("stop", ()), ("chat_template_kwargs", {}))
OWN_ALONE = 0o077  # the umask of a private run
AGREEMENT_FILE = "agreement.json"  # of a run of 8-bit products (xrunner.agreement)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Everything a rank needs besides schedule.json; paths are absolute."""

    name: str
    output: Path
    model_dir: Path
    model_name: str
    served_by: str
    requests: str  # where they came from
    is_chat: bool
    max_tokens: int
    dtype: str
    weight_dtype: str
    seed: int
    temperature: float
    top_k: int | None
    top_p: float
    ignore_eos: bool
    threads_per_rank: int
    query_kv_tokens: int  # what the schedule holds for one query: decides which requests can run
    device_kind: Literal["cpu", "gpu"] = "cpu"  # what a rank works on
    is_watched: bool = False  # the launcher follows lengths and steps, and may change the schedule
    slots: int = 0  # queries that a group's cache has room for, for such changes; 0: as planned
    kv_in_blocks: bool = False  # entries that a rule reserves tokens for (RRA, WAA), else in rows
    kv_tokens: int = 0  # that a group has blocks for, for such changes; 0: as planned
    other_rooms: tuple[tuple[int, int], ...] = ()  # (slots, kv_tokens) of the copies' other shapes
    shuffle_window: int = 1  # queries that are taken in random order among themselves
    routing: str = LEAST_TOKENS  # of queries to replicas
    mean_output_tokens: float = 0.0  # that are expected of a query, for that; 0: as many as allowed
    most_input_tokens: int = 0  # that the schedule can encode at a time; 0: any input
    engine: str = OWN_ENGINE
    requests_digest: str = ""
    cuda_graphs: bool = False  # decode steps are captured where they can be
    private: bool = False  # what is written is the user's alone to read
    deterministic: bool = False  # xrunner.ops.invariant
    model_files: Mapping[str, str] = field(default_factory=dict)  # xrunner.checkpoint.identity
    model_state: str = ""  # of these files before they were read: identity.files_state
    weights_whole: Mapping[str, str] = field(default_factory=dict)  # where every byte was read
    engine_version: str = ""  # of another engine, where its own numbers decide the answers
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # its own arguments, by name
    sync_s: float = 5.0  # between two times that results are put on the disk
    # what the chat template is told besides
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()  # strings that end the answers of requests that name none
    aside: tuple[int, ...] = ()  # queries that this run leaves out (xgpt.app.running.run)

    @property
    def fingerprint(self) -> str:
        """Stands for all that decides the answers: a stopped run goes on only if it is the same."""
        decisive = {k: v if isinstance(v, dict) else str(v) for k, v in asdict(self).items()
                    if k not in _NOT_DECISIVE and (k, v) not in _AS_BEFORE}
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]

    def save(self) -> Path:
        path = self.output / "run.json"
        values = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self).items()}
        content = {"version": PLAN_VERSION, "fingerprint": self.fingerprint, **values}
        write_atomically(path, json.dumps(content, indent=1) + "\n")
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
    paths = ("output", "model_dir")
    values: dict[str, Any] = {k: Path(v) if k in paths else v for k, v in raw.items()}
    values |= {key: tuple(values.get(key, ())) for key in ("aside", "stop")}
    values["other_rooms"] = tuple((slots, tokens) for slots, tokens in values.get(
        "other_rooms", ()))
    return RunPlan(**values)


def saved_fingerprint(output: Path) -> str | None:
    """Fingerprint of the run that last wrote into `output`; None if there was none."""
    value = _saved(output).get("fingerprint")
    return None if value is None else str(value)


def saved_differences(plan: RunPlan) -> list[str]:
    """The keys that decide the answers and are others than in the run that last wrote into the
    plan's folder; the model's files are not among them."""
    saved = _saved(plan.output)
    now = json.loads(json.dumps(asdict(plan), default=str))
    return [key for key in now if key not in (*_NOT_DECISIVE, "model_files")
            and key in saved and saved[key] != now[key]]


def as_begun(plan: RunPlan) -> RunPlan:
    """The plan for the very requests that the run which last wrote into its folder took for ones
    that can run, where the two differ in nothing else that decides the answers; else the plan."""
    saved = _saved(plan.output)
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
    values = _saved(output)
    directory, files = values.get("model_dir"), values.get("model_files")
    whole, dtype = values.get("weights_whole"), values.get("weight_dtype")
    return (SavedModel(Path(directory), files, whole if isinstance(whole, dict) else {},
                       dtype if isinstance(dtype, str) else None)
            if isinstance(directory, str) and isinstance(files, dict) else None)


def _saved(output: Path) -> dict[str, Any]:
    try:
        values = json.loads((output / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
