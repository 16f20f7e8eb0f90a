"""The artefacts the scheduler hands to the runner: `Estimate` and `Schedule`, as readable JSON.

The runner executes a Schedule wherever it came from; it never imports the planner.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from xgpt.core.errors import InputError, Mistake
from xgpt.core.status import Status

# History of the file format.
#   1: first version
#   2: pruned, margin, explanation
SCHEDULE_VERSION = 2
# of a schedule that a short job is done with soonest, though others are quicker in steady state
JOB_STATUS = Status.JOB

Role = Literal["both", "encode", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAssignment:
    """Consecutive layers held by one tensor-parallel group.

    `first_layer`/`num_layers` count decoder layers; the encoder's are counted apart and are 0
    for a decoder-only model. `role` is the phase the stage's pool works (RRA: both).
    """

    index: int
    ranks: tuple[int, ...]
    first_layer: int
    num_layers: int
    first_encoder_layer: int = 0
    num_encoder_layers: int = 0
    role: Role = "both"

    @property
    def tp_degree(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a schedule is expected to do in steady state (keys of `--json`, design.md section 5).

    `latency_s` is for the bound's kind and quantile; `decode_batch` is the mean number of active
    queries at the first decode iteration of a phase; `memory_bytes` is per rank, in rank order.
    """

    policy: str
    encode_batch: int
    decode_batch: float
    decode_iterations: int
    decode_micro_batches: int
    tp_degree: int
    tp_gpus: int
    throughput_qps: float
    output_tokens_per_s: float
    latency_s: float
    encode_s: float
    decode_iteration_s: float
    period_s: float
    memory_bytes: tuple[int, ...]
    memory_capacity_bytes: int
    kv_tokens: int  # KV entries (tokens) the schedule reserves at most, over the whole pool
    fits: bool
    stages: tuple[StageAssignment, ...]
    notes: tuple[str, ...] = ()
    # of some policies alone; 0 elsewhere
    encode_micro_batches: int = 0  # DSI: groups a batch is encoded in
    token_budget: int = 0  # vLLM, Sarathi: most tokens of one step
    max_active: int = 0  # ORCA, vLLM, Sarathi: most queries at a time over all groups
    max_in_system: int = 0  # WAA: queries between the start of encoding and the last token
    encode_kv_tokens: int = 0  # WAA: KV entries in the encode pool at most
    adjustment: float = 0.0  # share by which an encode batch's tokens may leave their mean
    mean_input_tokens: float = 0.0  # what that mean is reckoned by
    # active queries (RRA: when a phase begins; WAA: in the decode pool) that encode batches lead
    # back to; 0: they do not
    steered_to: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """An alternative that was considered and not chosen, and why."""

    label: str
    throughput_qps: float | None
    latency_s: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The chosen configuration with what the search proved about it."""

    estimate: Estimate
    latency_bound_s: float
    constraint_kind: str
    quantile: float
    status: str
    bound_qps: float  # proved upper bound on the throughput of any admissible configuration
    gap: float  # (bound_qps - throughput) / throughput
    nodes: int  # configurations evaluated
    seconds: float
    fingerprint: str  # of the Problem it answers; the runner refuses another one
    unbounded_qps: float | None = None  # best throughput with no latency bound
    rejected: tuple[Rejected, ...] = ()
    pruned: tuple[tuple[str, int], ...] = ()  # boxes given up by the search, by reason
    margin: float = 1.0  # planned for latency_bound_s / margin, for what is uncertain
    margin_cost: float = 0.0  # share of the throughput that a schedule without it has more
    margin_note: str = ""
    explanation: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Flat: the Estimate's keys, then the Schedule's own. Infinity is the string "inf"."""
        own = asdict(self)
        flat = {"version": SCHEDULE_VERSION, **own.pop("estimate"), **own}
        return {k: _infinities_to_text(v) for k, v in flat.items()}


def save_schedule(schedule: Schedule, path: Path) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(schedule.to_dict(), indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def load_schedule(path: Path) -> Schedule:
    """Raises InputError for a file that is no schedule of a known version."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise _bad(path, "schedule", None, f"not a readable schedule file: {cause}") from None
    if not isinstance(raw, dict) or raw.get("version") != SCHEDULE_VERSION:
        version = raw.get("version") if isinstance(raw, dict) else None
        raise _bad(path, "version", version, f"this xgpt reads version {SCHEDULE_VERSION}")
    try:
        return schedule_from_dict(raw)
    except (KeyError, TypeError, ValueError) as cause:
        raise _bad(path, "schedule", None, f"missing or wrong key: {cause}") from None


def schedule_from_dict(raw: Mapping[str, Any]) -> Schedule:
    """Inverse of `Schedule.to_dict`. Raises KeyError/TypeError on missing or foreign keys."""
    data = {k: _text_to_infinities(v) for k, v in raw.items() if k != "version"}
    stages = tuple(StageAssignment(**{**s, "ranks": tuple(s["ranks"])}) for s in data.pop("stages"))
    rejected = tuple(Rejected(**r) for r in data.pop("rejected"))
    pruned = tuple((str(reason), int(count)) for reason, count in data.pop("pruned"))
    explanation = tuple(map(str, data.pop("explanation")))
    names = set(Estimate.__dataclass_fields__)
    estimate: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v
                                for k, v in data.items() if k in names}
    own = {k: v for k, v in data.items() if k not in names}
    return Schedule(estimate=Estimate(stages=stages, **estimate), rejected=rejected,
                    pruned=pruned, explanation=explanation, **own)


def with_estimate(schedule: Schedule, **changes: Any) -> Schedule:
    """`schedule` with some of its estimate's fields replaced."""
    return replace(schedule, estimate=replace(schedule.estimate, **changes))


def _infinities_to_text(value: Any) -> Any:
    # NOTE: JSON has no infinity, and json.dumps would write a token other readers refuse.
    if isinstance(value, dict):
        return {k: _infinities_to_text(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_infinities_to_text(v) for v in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def _text_to_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _text_to_infinities(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_text_to_infinities(v) for v in value]
    return math.inf if value == "inf" else value


def _bad(path: Path, key: str, value: object, allowed: str) -> InputError:
    return InputError([Mistake(file=str(path), line=None, key=key, value=value, allowed=allowed)])
