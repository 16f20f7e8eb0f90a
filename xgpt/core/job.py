"""The job file as a frozen `Job`: exactly what the user wrote, checked, with nothing resolved.

Building a Job has no side effect (no directory, no clock, no seed, no download). `load_job` in
xgpt.core.job_file reads one; xgpt.core.problem resolves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from xgpt.core.constraint import Constraint
from xgpt.core.engines import OWN_ENGINE
from xgpt.core.request_files.files import RequestFiles
from xgpt.core.slurm import SlurmSpec

RESCHEDULE = 0.1  # run.reschedule: auto
STEP_TIMES = 0.15  # run.step_times: auto
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
class RunSpec:
    """How to execute. `ranks` None: one per device of the cluster."""

    ranks: int | None = None
    dtype: str = "auto"
    weight_dtype: str = "auto"  # as which weights are multiplied; int8: activations with them
    kv_dtype: str = "auto"  # as which entries of the cache are held; planned for alone
    kv_layout: str = "auto"  # or "rows", "blocks": how what is reserved for a query lies
    seed: int = 0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    stop: tuple[str, ...] = ()  # strings that end the answers of requests that name none
    threads_per_rank: int | None = None
    ignore_eos: bool = False
    weights: str = "checkpoint"  # or "random": of the model's shape, for performance work
    hosts: tuple[str, ...] = ()  # over which the ranks are spread evenly; (): this machine
    launcher: str | None = None  # a program that is called as ssh is; None: ssh itself
    pickles: bool = False  # weights in PyTorch's pickled files are read, too
    verify: bool = False  # weights are known again by every byte, not by samples
    private: bool = False  # what is written is the user's alone to read
    deterministic: bool = False  # answers that do not depend on the batch, bit for bit
    interface: str | None = None  # the hosts' network interface for messages; None: MPI chooses
    # share by which output lengths must leave the plan for it to be made anew; None: never
    reschedule: float | None = RESCHEDULE
    # share by which steps must be slower or quicker than planned for the same; None: never
    step_times: float | None = STEP_TIMES
    engine: str = OWN_ENGINE  # one of xgpt.core.engines.engine_names()
    cuda_graphs: bool = True  # on GPUs: decode steps captured, where they can be
    engine_python: str | None = None  # the interpreter of another engine; None: this one
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # its own arguments, by name
    sync_s: float = 5.0  # what was reported done so long ago is on the disk
    restarts: int = 2  # after a rank's death, of one command
    # without progress, after which the run is ended; None: by the longest step known
    stall_timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job file. `source` is its path, for messages; paths inside are absolute."""

    name: str
    model: str
    cluster: str | dict[str, Any]
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
