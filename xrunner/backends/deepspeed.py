"""DeepSpeed-Inference as an engine: AutoTP takes all ranks as one tensor-parallel group and works
static batches. The batch size is chosen by the times of xgpt's own kernels, since there are no
others."""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace

from xgpt.core.errors import InputError, MissingExtraError, Mistake, XgptError
from xgpt.core.model import Decoder, refuse_tp_degree
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xgpt.job.job import Job
from xrunner.backends.engine import Engine, as_one_group, mistake, not_one_group

NAME = "deepspeed"
_POLICIES = ("ft", "dsi")
_KEY = "run.engine"


def _refusals(job: Job) -> Iterator[Mistake]:
    named, parts = job.schedule.policies, job.schedule
    if len(named) > 1 or not {*named} <= {*_POLICIES}:
        yield mistake(job, "schedule.policy", ", ".join(named), f"{' or '.join(_POLICIES)} (or "
                      "left out: ft): the engine deepspeed works static batches")
    if job.run.dtype == "float16":
        yield _float16(job)
    if job.run.weights == "random":
        yield mistake(job, "run.weights", "random", "checkpoint: DeepSpeed loads the model "
                      "by transformers, from its files")
    if job.run.hosts:
        yield mistake(job, "run.hosts", ", ".join(job.run.hosts), "this machine alone: the "
                      "engine deepspeed was never tried over several")
    if not named and (parts.decode_iterations or parts.encode_chunk or parts.max_active
                      or parts.token_budget):
        yield mistake(job, "schedule", None, "encode_batch, decode_micro_batches: the "
                      "engine deepspeed works static batches (policy ft or dsi)")


def _check_installed(job: Job) -> None:
    """Raises MissingExtraError without DeepSpeed, XgptError without a compiler for it."""
    if importlib.util.find_spec("deepspeed") is None:
        raise MissingExtraError("deepspeed", "deepspeed", f"`{_KEY}: {NAME}`")
    compiler = os.environ.get("CXX", "c++")
    if job.run.ranks != 1 and shutil.which(compiler) is None:
        raise XgptError(f"`{_KEY}: {NAME}` needs a C++ compiler, with which DeepSpeed "
                        f"compiles its all-reduce at first use, and there is no {compiler!r}: "
                        "install g++, or name one in CXX")


def _restricted(job: Job, problem: Problem, schedule: Schedule | None) -> Problem:
    """The problem with all ranks in one group and a static policy. Raises InputError."""
    mistakes, fixed, ranks = list(_unknown(job, problem)), problem.fixed, (
        problem.cluster.num_devices)
    if schedule is not None:
        mistakes += _unknown_schedule(job, schedule, ranks)
        fixed = replace(fixed, policies=(schedule.estimate.policy,))
    if mistakes:
        raise InputError(mistakes)
    return as_one_group(problem, fixed.policies or _POLICIES[:1])


def _unknown_schedule(job: Job, schedule: Schedule, ranks: int) -> Iterator[Mistake]:
    estimate = schedule.estimate
    if estimate.policy not in _POLICIES:
        yield mistake(job, "schedule.policy", estimate.policy,
                      f"{' or '.join(_POLICIES)}: the engine deepspeed works static batches")
    elif estimate.others or estimate.deployment.replicas > 1:
        yield mistake(job, "schedule.replicas", estimate.deployment.replicas, "1: the engine "
                      "deepspeed takes all ranks as one tensor-parallel group")
    elif [len(stage.ranks) for stage in estimate.deployment.stages] != [ranks]:
        yield mistake(job, "schedule.stages", len(estimate.deployment.stages),
                      f"one, of all {ranks} ranks: the engine deepspeed takes them as one "
                      "tensor-parallel group")


def _unknown(job: Job, problem: Problem) -> Iterator[Mistake]:
    fixed, model, ranks = problem.fixed, problem.model, problem.cluster.num_devices
    if problem.dtype == "float16" and job.run.dtype != "float16":  # else refused before
        yield _float16(job)
    if problem.cluster.device.kind != "cpu":
        yield mistake(job, _KEY, job.run.engine, "CPU ranks: set CUDA_VISIBLE_DEVICES to "
                      "nothing, or use the own engine, for GPUs")
    if model.is_encoder_decoder:
        yield mistake(job, "model", job.model, "a decoder-only model: the engine deepspeed does "
                      "not execute encoder-decoder models")
    elif model.decoder != Decoder():
        yield mistake(job, "model", job.model, "OPT, GPT-2, Llama or Qwen2 in their plainest form: "
                      "the engine deepspeed was checked with no other")
    elif model.stored_as:
        yield mistake(job, "model", job.model, f"plain weights: these are stored as "
                      f"{model.stored_as}, and the engine deepspeed was checked with none of it")
    elif model.family == "gpt2" and ranks > 1:
        yield mistake(job, "model", job.model, "OPT, Llama or Qwen2 on more than one rank: "
                      "DeepSpeed's AutoTP does not divide GPT-2 (`run: {ranks: 1}` takes it)")
    elif (why := refuse_tp_degree(model, ranks)) is not None:
        yield mistake(job, "run.ranks", ranks, f"one tensor-parallel group: {why}")
    elif ranks > model.kv_heads:
        yield mistake(job, "run.ranks", ranks, f"at most {model.kv_heads}, the model's key-value "
                      "heads: DeepSpeed's AutoTP does not copy them")
    yield from not_one_group(job, problem)
    if fixed.encode_batch is None and (fixed.decode_micro_batches or fixed.encode_micro_batches):
        yield mistake(job, "schedule.encode_batch", None,
                      "required where another variable of the policy is given")


def _float16(job: Job) -> Mistake:
    return mistake(job, "run.dtype", "float16",
                   "float32 or bfloat16: DeepSpeed has no float16 on CPU ranks")


ENGINE = Engine(name=NAME, worker="xrunner.backends.deepspeed_worker", restricted=_restricted,
                refusals=_refusals, check_installed=_check_installed, note="the times are those of "
                "xgpt's own kernels, by which the batch is chosen: DeepSpeed's are not predicted")
