"""A row of the table of engines: what an engine executes and refuses, and who plans for it. The
runner's own engine (xrunner.rank.worker) executes every policy and layout."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import cast

from xgpt.core.engines import OWN_ENGINE, engine_place, load_row
from xgpt.core.errors import Mistake, wrong
from xgpt.core.policies import policies
from xgpt.core.policies import policy as row_of
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xgpt.job.job import Job

Restriction = Callable[[Job, Problem, Schedule | None], Problem]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine, whose ranks run `python -m WORKER OUT/run.json`.

    They read run.json, schedule.json and the requests, and write results.jsonl, progress.json and
    measured.json (xrunner.files).

    `restricted`: the problem with a policy and layout that the engine executes. It is called to
    plan, or
      for a given schedule, and raises InputError with every mistake.
    `refusals`: mistakes that the job file alone shows, before anything is fetched.
    `check_installed`: raises XgptError if something is missing.
    `rank_per_replica`: a rank executes a whole replica, on all its devices; else one device.
    `profiler`: module that measures its times, as `python -m PROFILER REQUEST.json`.
    `identity`: what its times depend on besides model and machine; None: our own code."""

    name: str
    worker: str
    restricted: Restriction
    refusals: Callable[[Job], Iterable[Mistake]] = lambda job: ()
    check_installed: Callable[[Job], None] = lambda job: None
    is_predicted: bool = False  # by measured times of its own
    is_changeable: bool = False  # applies a changed schedule while it runs
    tells_steps: bool = False  # its heartbeats report steps, from which profiles learn
    note: str = ""  # printed with every schedule if it is not predicted
    rank_per_replica: bool = False
    profiler: str = "xprofiler.measure.worker"
    identity: Callable[[Job], str] | None = None


def engine_of(job: Job) -> Engine:
    """The engine that the job names."""
    return cast(Engine, load_row(engine_place(job.run.engine)))


def mistake(job: Job, key: str, value: object, allowed: str) -> Mistake:
    """A Mistake in the job's file."""
    return Mistake(file=str(job.source), line=None, key=key, value=value, allowed=allowed)


def as_one_group(problem: Problem, policies: tuple[str, ...]) -> Problem:
    """The problem with these policies and all devices as one tensor-parallel group."""
    devices = problem.cluster.num_devices
    return replace(problem, fixed=replace(
        problem.fixed, policies=policies, replicas=1, tp_degree=devices,
        tp_gpus=devices if devices > 1 else 0))


def not_one_group(job: Job, problem: Problem) -> Iterator[Mistake]:
    """Mistakes of the job's schedule for an engine that takes all ranks as one group."""
    fixed, devices = problem.fixed, problem.cluster.num_devices
    for key, value, only in (("replicas", fixed.replicas, (1,)),
                             ("tp_degree", fixed.tp_degree, (devices,)),
                             ("tp_gpus", fixed.tp_gpus, (devices,) if devices > 1 else (0, 1))):
        if value is not None and value not in only:
            yield mistake(job, f"schedule.{key}", value, f"left out, or {only[0]}: the engine "
                          f"{job.run.engine} takes all ranks as one tensor-parallel group")


def _restricted(job: Job, problem: Problem, schedule: Schedule | None) -> Problem:
    """The problem as our own runner executes it: every layout and policy for its kind of model. The
    search leaves out and reports other policies that the job names. Raises InputError if none is
    left."""
    fixed = problem.fixed
    if job.workload.only_encodes and problem.model.is_encoder_decoder:
        key, value = ("score", True) if job.workload.score else ("embed", job.workload.embed)
        raise wrong(job.source, f"workload.{key}", value, "left out for an encoder-decoder model: "
                    "continuations are scored, and texts embedded, by decoder-only models alone "
                    "so far")
    named = fixed.policies if schedule is None else (schedule.estimate.policy,)
    is_able = [not (row_of(name).is_decoder_only and problem.model.is_encoder_decoder)
               for name in named]
    if named and not any(is_able):
        able = [row.name for row in policies() if not row.is_decoder_only]
        raise wrong(job.source, "schedule.policy", ", ".join(named),
                    f"one of {', '.join(able)} for an encoder-decoder model: {named[0]} encodes "
                    "requests beside decoding others, or again with what they generated, in one "
                    "pass through the same layers")
    chunk = fixed.encode_chunk if schedule is None else schedule.estimate.variables.get(
        "encode_chunk")
    if chunk and problem.model.is_encoder_decoder:
        raise wrong(job.source, "schedule.encode_chunk", chunk,
                    "0 (or left out) for an encoder-decoder model: its encoder and its decoder "
                    "share no layers that chunks could go through beside decoding")
    fixed = replace(fixed, policies=named)
    if schedule is not None:
        fixed = replace(fixed, tp_degree=schedule.estimate.deployment.tp_degree,
                        tp_gpus=schedule.estimate.deployment.tp_gpus)
    elif fixed.tp_degree == 1 or fixed.tp_gpus == 0:
        fixed = replace(fixed, tp_degree=1, tp_gpus=0)
    return replace(problem, fixed=fixed)


OWN = Engine(name=OWN_ENGINE, worker="xrunner.rank.worker", restricted=_restricted,
             is_predicted=True, is_changeable=True, tells_steps=True)
