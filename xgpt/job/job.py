"""The job file as a frozen `Job`: exactly what the user wrote, checked, with nothing resolved.

Building a Job has no side effect (no directory, no clock, no seed, no download). `load_job` in
xgpt.job.job_file reads one; xgpt.job.resolve resolves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from xgpt.core.cluster import Cluster
from xgpt.core.constraint import Constraint
from xgpt.core.controls import Adjustment, FixedSchedule
from xgpt.core.engines import OWN_ENGINE
from xgpt.job.run_section import RunSpec
from xgpt.job.slurm_section import SlurmSpec
from xgpt.requests.request_files import RequestFiles


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
