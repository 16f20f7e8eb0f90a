"""From a job file to what the commands work on: the Problem, its times, its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from xgpt.app import deepspeed_engine
from xgpt.app.few_queries import plan_with_enough
from xgpt.app.local_profile import local_profile, profile_metadata, wanted_profile
from xgpt.app.telling import LogTeller, Teller
from xgpt.core import catalog, policies
from xgpt.core.errors import InputError, Mistake
from xgpt.core.job import Job
from xgpt.core.job_file import LOCAL_CLUSTER, load_job
from xgpt.core.lengths import IntArray
from xgpt.core.local import why_no_torch
from xgpt.core.problem import Problem, known_model, resolve
from xgpt.core.schedule import Schedule
from xgpt.core.units import DTYPE_BYTES
from xgpt.core.workload import Request, RequestError, read_requests
from xprofiler.match import match
from xprofiler.profile_file import load_profile
from xprofiler.profile_timing import ProfileTiming
from xprofiler.roofline import Roofline
from xprofiler.timing import TimingSource
from xprofiler.verdict import judge
from xrunner.checkpoint.random_model import SERVED_BY
from xrunner.checkpoint.source import ModelFiles, find_model
from xrunner.rules.paged import BLOCK_TOKENS

# Of the policies that are searched, the one whose schedule can be changed while it runs.
_CHANGEABLE = "rra"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A job resolved as far as planning needs. `files` only where the model was fetched."""

    job: Job
    problem: Problem
    files: ModelFiles | None
    requests: tuple[Request, ...]
    request_errors: tuple[RequestError, ...]
    input_lengths: IntArray | None  # [requests], where they were tokenised
    tell: Teller = field(default_factory=LogTeller, compare=False)

    @property
    def is_local(self) -> bool:
        return self.job.cluster == LOCAL_CLUSTER


def open_session(job_file: Path, overrides: Sequence[str], tell: Teller | None = None, *,
                 fetch: bool) -> Session:
    """Loads and resolves a job. `fetch`: the model's files are needed whatever the lengths say."""
    job, tell = load_job(job_file, overrides), tell or LogTeller()
    requests: list[Request] = []
    errors: list[RequestError] = []
    if job.workload.requests is not None:
        requests, errors = read_requests(job.workload.requests)
        if not requests:
            raise InputError([Mistake(
                file=str(job.source), line=None, key="workload.requests",
                value=str(job.workload.requests), allowed="holds no usable request"
                + (f"; line {errors[0].line}: {errors[0].error}" if errors else ""))])
    needs_tokens = (job.workload.input_tokens.kind == "from_requests"
                    and any(r.tokens is None for r in requests))
    if job.run.weights == "random":
        files: ModelFiles | None = _random_model(job, requests)
    elif fetch or needs_tokens or _is_unknown_shape(job):
        files = find_model(job.model, tell.say)
    else:
        files = None
    lengths = _input_lengths(requests, files, job) if requests and files else None
    problem = resolve(job, model=files.spec if files else None,
                      requests=requests or None, token_lengths=lengths)
    return Session(job=job, problem=problem, files=files, requests=tuple(requests),
                   request_errors=tuple(errors), input_lengths=lengths, tell=tell)


def timing_of(session: Session) -> TimingSource:
    """The job's `profile:`, else this machine's measured one for `cluster: local`, else the
    roofline of the device."""
    job, problem = session.job, session.problem
    roofline = Roofline(problem.model, problem.cluster.device, problem.dtype)
    if job.profile is not None:
        return given_timing(session, job.profile, roofline)
    if session.is_local:
        kind = problem.cluster.device.kind
        why = why_no_torch(kind)
        if why is None:
            return ProfileTiming(local_profile(wanted_profile(job, problem), session.tell))
        of = "a generic CPU" if kind == "cpu" else problem.cluster.device.name
        session.tell.say(
            f"note: {why}, so nothing can be measured here; times come from the roofline of {of} "
            "and are rough")
    return roofline


def given_timing(session: Session, path: Path, fallback: TimingSource) -> ProfileTiming:
    """A profile file the job names. Raises InputError if it is of another model, device or dtype;
    one of other kernels or libraries is used, and says so in every result."""
    found, wanted = load_profile(path), profile_metadata(session.job, session.problem)
    refusals, marks = match(found.metadata, wanted, is_here=session.is_local,
                            is_cpu=session.problem.cluster.device.kind == "cpu")
    if refusals:
        raise InputError([Mistake(file=str(path), line=None, key="profile", value=None, allowed=why)
                          for why in refusals])
    session.tell.say(f"profile: {path}, {judge(found).sentence}")
    for mark in marks:
        session.tell.say(f"WARNING: the profile is not of what will run: {mark}")
    return ProfileTiming(found, fallback, marks)


def executable(session: Session, schedule: Schedule | None = None) -> Session:
    """The session as a run plans and measures it: over every policy and tensor-parallel degree
    that the job, or the `schedule` it is to execute, leaves open. Lengths yet to be observed want
    a schedule that can be changed in place. Raises InputError for a policy that the runner does
    not execute."""
    if deepspeed_engine.is_chosen(session.job):
        return deepspeed_engine.executable(session, schedule)
    fixed = session.problem.fixed
    policy = fixed.policy if schedule is None else schedule.estimate.policy
    if policy is not None and policies.policy(policy).is_decoder_only and (
            session.problem.model.is_encoder_decoder):
        able = [row.name for row in policies.policies() if not row.is_decoder_only]
        raise InputError([Mistake(
            file=str(session.job.source), line=None, key="schedule.policy", value=policy,
            allowed=f"one of {', '.join(able)} for an encoder-decoder model: {policy} encodes "
            "queries beside decoding others, or again with what they generated, in one pass "
            "through the same layers")])
    if policy is None and session.job.workload.output_tokens.kind == "observe":
        policy = _CHANGEABLE
    fixed = replace(fixed, policy=policy)
    if schedule is not None:
        degree, gpus = schedule.estimate.deployment.tp_degree, schedule.estimate.deployment.tp_gpus
        fixed = replace(fixed, tp_degree=degree, tp_gpus=gpus)
    elif fixed.tp_degree == 1 or fixed.tp_gpus == 0:
        fixed = replace(fixed, tp_degree=1, tp_gpus=0)
    return replace(session, problem=replace(session.problem, fixed=fixed))


def find(session: Session, timing: TimingSource) -> Schedule:
    """The best schedule within the bound and its confidence (for a short job, what answers it
    soonest; what a job that observes its lengths begins with), with room for the longest request
    where the memory allows it. Raises InfeasibleError. A policy that is not searched, a baseline,
    has to be named by the job."""
    return with_room(session, plan_with_enough(session, lambda enough: _found(enough, timing)))


def _found(session: Session, timing: TimingSource) -> Schedule:
    if deepspeed_engine.is_chosen(session.job):
        return deepspeed_engine.find(session, timing)
    from xgpt.app.job_choice import choose_for_the_job
    from xgpt.app.observing import found_or_begun
    from xscheduler.planner import Planner
    from xscheduler.spaces.baselines import BASELINES, baseline_space, find_baseline

    if session.problem.fixed.policy in BASELINES:
        return choose_for_the_job(session, timing, find_baseline(session.problem, timing),
                                  lambda: [baseline_space(session.problem, timing)])
    planner = Planner(session.problem, timing, asked=session.job.schedule)
    return choose_for_the_job(session, timing,
                              found_or_begun(session, timing, planner.find))


def with_room(session: Session, schedule: Schedule) -> Schedule:
    """`schedule` with room for the session's longest request, where the memory allows it."""
    reserves = reserve_tokens(session)
    return schedule if reserves is None else with_room_for(schedule, session.problem,
                                                           int(reserves.max()))


def reserve_tokens(session: Session) -> IntArray | None:
    """[requests] most KV tokens each may need; None where their lengths are not known."""
    if session.input_lengths is None:
        return None
    cap = session.problem.default_max_tokens
    outputs = np.array([request.output_cap(cap) for request in session.requests])
    positions = session.problem.model.max_positions
    total: IntArray = session.input_lengths + outputs
    return total if positions is None else np.minimum(total, positions)


def with_room_for(schedule: Schedule, problem: Problem, query_tokens: int) -> Schedule:
    """`schedule` with KV tokens for a query of `query_tokens` in every group, if they fit: one
    request longer than the planned lengths should be answered, not refused. Else unchanged."""
    estimate = schedule.estimate
    if getattr(estimate.controls, "token_budget", None):  # its memory is paged
        query_tokens = -(-query_tokens // BLOCK_TOKENS) * BLOCK_TOKENS
    kv_tokens = max(estimate.deployment.kv_tokens, query_tokens * estimate.deployment.num_groups)
    per_layer = problem.model.kv_elements_per_token_layer * DTYPE_BYTES[problem.dtype]
    added = (kv_tokens - estimate.deployment.kv_tokens) * per_layer
    extra = {rank: added * stage.num_layers // stage.tp_degree
             for stage in estimate.deployment.stages for rank in stage.ranks}
    memory = tuple(size + extra[rank] for rank, size in enumerate(estimate.figures.memory_bytes))
    if max(memory) > estimate.figures.memory_capacity_bytes:
        return schedule
    return schedule.changed(kv_tokens=kv_tokens, memory_bytes=memory)


def _random_model(job: Job, requests: Sequence[Request]) -> ModelFiles:
    """A folder that execution will write. Raises InputError for requests of text."""
    texts = [request for request in requests if request.tokens is None]
    if texts:
        raise InputError([Mistake(
            file=str(job.source), line=None, key="run.weights", value="random",
            allowed=f"needs requests of tokens, or {{count: N}}: random weights come without a "
            f"tokenizer, and line {texts[0].line} of {job.workload.requests} is text")])
    return ModelFiles(directory=job.output / "model", spec=known_model(job), served_by=SERVED_BY)


def _is_unknown_shape(job: Job) -> bool:
    hub_ids = {catalog.model(name).hub_id for name in catalog.names("model")}
    return (job.model not in catalog.names("model") and job.model not in hub_ids
            and not Path(job.model).is_absolute())


def _input_lengths(requests: Sequence[Request], files: ModelFiles, job: Job) -> IntArray:
    """[requests] tokenised input lengths; 1 for a request that will become an error record."""
    from xrunner.io.prepare import tokenise
    from xrunner.io.tokenizer import TextTokenizer

    tokens = tokenise(requests, TextTokenizer(files.directory), job.workload.chat)
    return np.array([1 if isinstance(ids, str) else max(len(ids), 1) for ids in tokens])
