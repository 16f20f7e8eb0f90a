"""Jobs with `run: {engine: deepspeed}`: what is refused before anything starts, and the schedule.

DeepSpeed's AutoTP takes all ranks as one tensor-parallel group and works static batches. How many
queries a batch has is decided by the times of xgpt's own kernels, the only ones there are.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xgpt.core.errors import InfeasibleError, InputError, MissingExtraError, Mistake, XgptError
from xgpt.core.job import DEEPSPEED, FixedSchedule, Job
from xgpt.core.model import refuse_tp_degree
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xgpt.core.schedule_file import schedule_from_flat
from xgpt.core.units import format_seconds
from xprofiler.timing import TimingSource
from xsimulator.policies import make_config, make_policy

if TYPE_CHECKING:
    from xgpt.app.session import Session

POLICIES = ("ft", "dsi")
NOTE = ("the times are those of xgpt's own kernels, by which the batch is chosen: DeepSpeed's are "
        "not predicted")
_KEY = "run.engine"


def is_chosen(job: Job) -> bool:
    return job.run.engine == DEEPSPEED


def mistakes_of(job: Job) -> list[Mistake]:
    """What can be refused by the job file alone."""
    if not is_chosen(job):
        return []
    policy, parts = job.schedule.policy, job.schedule
    found = []
    if policy not in (None, *POLICIES):
        found.append(_mistake(job, "schedule.policy", policy, f"{' or '.join(POLICIES)} (or left "
                              "out: ft): the engine deepspeed works static batches"))
    if job.run.dtype == "float16":
        found.append(_float16(job))
    if job.run.weights == "random":
        found.append(_mistake(job, "run.weights", "random", "checkpoint: DeepSpeed loads the model "
                              "by transformers, from its files"))
    if job.run.hosts:
        found.append(_mistake(job, "run.hosts", ", ".join(job.run.hosts), "this machine alone: the "
                              "engine deepspeed was never tried over several"))
    if policy is None and (parts.decode_iterations or parts.max_active or parts.token_budget):
        found.append(_mistake(job, "schedule", None, "encode_batch, decode_micro_batches: the "
                              "engine deepspeed works static batches (policy ft or dsi)"))
    return found


def check_installed(job: Job) -> None:
    """Raises MissingExtraError without DeepSpeed, XgptError without what it compiles with."""
    if not is_chosen(job):
        return
    if importlib.util.find_spec("deepspeed") is None:
        raise MissingExtraError("deepspeed", "deepspeed", f"`{_KEY}: {DEEPSPEED}`")
    compiler = os.environ.get("CXX", "c++")
    if job.run.ranks != 1 and shutil.which(compiler) is None:
        raise XgptError(f"`{_KEY}: {DEEPSPEED}` needs a C++ compiler, with which DeepSpeed "
                        f"compiles its all-reduce at first use, and there is no {compiler!r}: "
                        "install g++, or name one in CXX")


def executable(session: Session, schedule: Schedule | None = None) -> Session:
    """The session with a policy and all ranks in one group. Raises InputError, with every mistake,
    for a model or a `schedule` that DeepSpeed does not execute."""
    problem, mistakes = session.problem, list(_refusals(session))
    fixed, ranks = problem.fixed, problem.cluster.num_devices
    if schedule is not None:
        estimate = schedule.estimate
        if estimate.policy not in POLICIES:
            mistakes.append(_mistake(
                session.job, "schedule.policy", estimate.policy,
                f"{' or '.join(POLICIES)}: the engine deepspeed works static batches"))
        elif [len(stage.ranks) for stage in estimate.deployment.stages] != [ranks]:
            mistakes.append(_mistake(
                session.job, "schedule.stages", len(estimate.deployment.stages), f"one, of all {ranks} "
                "ranks: the engine deepspeed takes them as one tensor-parallel group"))
        fixed = replace(fixed, policy=estimate.policy)
    if mistakes:
        raise InputError(mistakes)
    degree, gpus = (ranks, ranks) if ranks > 1 else (1, 0)
    fixed = replace(fixed, policy=fixed.policy or POLICIES[0], tp_degree=degree, tp_gpus=gpus)
    return replace(session, problem=replace(problem, fixed=fixed))


def find(session: Session, timing: TimingSource) -> Schedule:
    """The batches the job fixes, else those of highest throughput within its bound. Raises
    InfeasibleError where none keeps it, InputError for a job that fixes half of them."""
    began, session = time.monotonic(), executable(session)
    problem, fixed, constraint = session.problem, session.problem.fixed, session.problem.constraint
    policy: Any = make_policy(str(fixed.policy), problem, timing)
    if fixed.encode_batch is not None:
        estimate, nodes, status = _given(session, policy), 1, "given"
    elif fixed.decode_micro_batches or fixed.encode_micro_batches:
        raise InputError([_mistake(session.job, "schedule.encode_batch", None,
                                   "required where another variable of the policy is given")])
    else:
        (estimate, nodes), status = _best(problem, policy), "best seen"
    estimate = replace(estimate, notes=(*estimate.notes, NOTE))
    return schedule_from_flat(
        estimate=estimate, latency_bound_s=constraint.latency_s, constraint_kind=constraint.kind,
        quantile=constraint.quantile, status=status, bound_qps=math.inf, gap=math.inf, nodes=nodes,
        seconds=time.monotonic() - began, fingerprint=problem.fingerprint)


def _given(session: Session, policy: Any) -> Estimate:
    fixed = session.problem.fixed
    config, _ = make_config(str(fixed.policy), replace(
        fixed, decode_micro_batches=fixed.decode_micro_batches or 1))
    estimate: Estimate = policy.estimate(config)
    if not estimate.figures.fits:
        raise InfeasibleError(
            f"schedule.encode_batch = {fixed.encode_batch} does not fit: it takes "
            f"{max(estimate.figures.memory_bytes)} bytes of {estimate.figures.memory_capacity_bytes} a rank")
    if math.isinf(estimate.figures.latency_s):
        raise InputError([_mistake(session.job, "schedule.encode_batch", fixed.encode_batch,
                                   "sizes that the profile does not reach")])
    return estimate


def _best(problem: Problem, policy: Any) -> tuple[Estimate, int]:
    """(the estimate, configurations looked at)"""
    from xscheduler.spaces.grid_search import MOST_QUERIES, best

    fixed, bound_s = problem.fixed, problem.constraint.latency_s
    assert fixed.tp_degree is not None and fixed.tp_gpus is not None, f"{fixed = }"
    plans: Sequence[tuple[int, int]] = [(fixed.tp_degree, fixed.tp_gpus)]
    found = best(policy, bound_s, plans=plans)
    if found is not None:
        return found, len(policy.grid(problem.num_queries or MOST_QUERIES, plans))
    single, _ = make_config(policy.name, replace(
        FixedSchedule(), encode_batch=1, decode_micro_batches=1, tp_degree=fixed.tp_degree,
        tp_gpus=fixed.tp_gpus))
    alone: Estimate = policy.estimate(single)
    raise InfeasibleError(
        f"no batch of {policy.name} on {problem.cluster.num_devices} ranks fits and keeps the "
        f"latency bound of {format_seconds(bound_s)}: one query alone takes "
        f"{format_seconds(alone.figures.latency_s)}, by the times of xgpt's own kernels")


def _refusals(session: Session) -> Iterator[Mistake]:
    job, problem, fixed = session.job, session.problem, session.problem.fixed
    model, ranks = problem.model, problem.cluster.num_devices
    if problem.dtype == "float16" and job.run.dtype != "float16":  # else refused before
        yield _float16(job)
    if problem.cluster.device.kind != "cpu":
        yield _mistake(job, "run.engine", job.run.engine, "CPU ranks: set CUDA_VISIBLE_DEVICES to "
                       "nothing, or use the own engine, for GPUs")
    if model.is_encoder_decoder:
        yield _mistake(job, "model", job.model, "a decoder-only model: the engine deepspeed does "
                       "not execute encoder-decoder models")
    elif model.family == "gpt2" and ranks > 1:
        yield _mistake(job, "model", job.model, "OPT, Llama or Qwen2 on more than one rank: "
                       "DeepSpeed's AutoTP does not divide GPT-2 (`run: {ranks: 1}` takes it)")
    elif (why := refuse_tp_degree(model, ranks)) is not None:
        yield _mistake(job, "run.ranks", ranks, f"one tensor-parallel group: {why}")
    for key, value, only in (("tp_degree", fixed.tp_degree, (ranks,)),
                             ("tp_gpus", fixed.tp_gpus, (ranks,) if ranks > 1 else (0, 1))):
        if value is not None and value not in only:
            yield _mistake(job, f"schedule.{key}", value, f"left out, or {only[0]}: the engine "
                           "deepspeed takes all ranks as one tensor-parallel group")


def _float16(job: Job) -> Mistake:
    return _mistake(job, "run.dtype", "float16",
                    "float32 or bfloat16: DeepSpeed has no float16 on CPU ranks")


def _mistake(job: Job, key: str, value: object, allowed: str) -> Mistake:
    return Mistake(file=str(job.source), line=None, key=key, value=value, allowed=allowed)
