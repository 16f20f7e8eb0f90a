"""The job file as a frozen `Job`: exactly what the user wrote, checked, with nothing resolved.

Building a Job has no side effect (no directory, no clock, no seed, no download). `load_job` in
xgpt.core.job_file reads one; xgpt.core.problem resolves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from xgpt.core.cluster import Cluster
from xgpt.core.constraint import Constraint
from xgpt.core.engines import OWN_ENGINE
from xgpt.core.request_files.files import RequestFiles
from xgpt.core.run_section import RunSpec
from xgpt.core.slurm import SlurmSpec

# Which copy of the model takes a query: the next in turn, or the one with the fewest tokens so far
# (known, or expected of its output), so that all end together. Fixed: the latter, and each keeps
# what it was dealt, however slow it is.
ROUND_ROBIN, LEAST_TOKENS, FIXED = "round-robin", "least-tokens", "fixed"
ROUTINGS = (LEAST_TOKENS, ROUND_ROBIN, FIXED)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSpec:
    """How a length distribution is to be found: one of the ways of docs/job-file.md."""

    kind: Literal["normal", "from_requests", "file", "task", "observe"]
    mean: float | None = None
    std: float | None = None
    maximum: int | None = None
    path: Path | None = None
    task: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """`requests` are files of prompts, or there are `count` synthetic queries."""

    requests: RequestFiles | None
    count: int | None
    input_tokens: LengthSpec
    output_tokens: LengthSpec
    max_tokens: int | None = None  # cap on generated tokens of requests that name none
    chat: bool = True  # apply the tokenizer's chat template, if it has one
    # what that is told besides (`enable_thinking`); a request's own counts before it
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    score: bool = False  # continuations are scored, and nothing is written
    # texts are embedded: the last hidden states, of the "last" token or their "mean"; None: not
    embed: str | None = None

    @property
    def only_encodes(self) -> bool:
        """Whether nothing is written: a query ends with its encoding."""
        return self.score or self.embed is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedSchedule:
    """Control variables the user fixed; None is left to the scheduler. `replicas`: copies of the
    model, all alike."""

    policies: tuple[str, ...] = ()  # among which is chosen; (): all that the engine executes
    replicas: int | None = None
    encode_batch: int | None = None
    decode_iterations: int | None = None
    decode_micro_batches: int | None = None
    encode_chunk: int | None = None  # RRA; 0: without limit, before decoding
    encode_micro_batches: int | None = None  # DSI
    max_active: int | None = None  # ORCA, vLLM, Sarathi
    token_budget: int | None = None  # vLLM, Sarathi
    tp_degree: int | None = None
    tp_gpus: int | None = None
    others: tuple[tuple[str, int], ...] = ()  # (name, value) of variables of policies elsewhere

    @property
    def policy(self) -> str | None:
        """The only policy that is left; None where there is a choice."""
        return self.policies[0] if len(self.policies) == 1 else None

    def value_of(self, variable: str) -> int | None:
        """What the user fixed a control variable to, of a policy of ours or of another package."""
        value: int | None = getattr(self, variable, None)
        return dict(self.others).get(variable) if value is None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustment:
    """How the workload is kept even while a job runs (paper section 5.2); None: as is usual.
    `shuffle`: queries of a window that are taken in random order, or whether one of the usual size
    is. `routing`: by which queries are shared out among copies of the model."""

    share: float | None = None  # by which an encode batch's tokens may leave their mean; 0: as come
    steers: bool | None = None  # whether encode batches lead the decode batch back to its mean
    shuffle: bool | int = False
    routing: str = LEAST_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job file. `source` is its path, for messages; paths inside are absolute."""

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
    quote_formulas: bool = False  # its cells are none of a spreadsheet's formulas
    profile: Path | None = None  # a Profile file to plan with
    plan_engine: str = OWN_ENGINE  # whose times the roofline gives
    price_per_hour: float | None = None  # of a device; None: the catalog's, where it has one
    adjustment: Adjustment = Adjustment()
    max_search_s: float | None = None  # that finding a schedule may take; None: as long as it does
