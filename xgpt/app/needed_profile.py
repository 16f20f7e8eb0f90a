"""Computes the metadata and the sizes that a profile must have to plan a job on this machine."""

import math
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib import metadata
from pathlib import Path

from xgpt.core.cluster import Device
from xgpt.core.errors import InputError, Mistake
from xgpt.core.model import refuse_tp_degree
from xgpt.core.problem import Problem
from xgpt.core.system.direct_file import why_no_disk
from xgpt.core.system.machine import core_clock, installed, usable_cores
from xgpt.core.units import DTYPE_BYTES
from xgpt.job.job import Job
from xgpt.launch.launcher import Launcher, launcher_of, threads_per_rank
from xgpt.launch.standby import Standby
from xprofiler.points import OWN_TABLE, Kind, Needs, Point, missing_points, quick_points
from xprofiler.profile import Profile, ProfileMetadata, kernels_fingerprint, model_shape
from xrunner.backends.engine import Engine, engine_of
from xrunner.checkpoint.source import cache_dir
from xrunner.ops.build import why_no_kernels, why_not_native
from xscheduler.replicas import equal_parts, num_replicas, weights_fit
from xscheduler.tensor_plans import DEGREES

# no more queries than decode steps are captured for (xrunner.rules.batch_sizer)
_GPU_NEEDS = Needs(input_tokens=2060, context_tokens=4120, queries=500, tokens=8240)
_KV_SHARE = 4  # decode is measured with KV caches of at most 1/4 of a rank's memory
_LEAST_QUERIES = 9
REACH = 2.0  # see `is_insufficient`


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededProfile:
    """The metadata and sizes that a job's profile must have, and the ranks that measure it."""

    job: Job
    problem: Problem
    metadata: ProfileMetadata
    needs: Needs
    own: Needs  # sizes of the job itself
    degrees: tuple[int, ...]
    refused: dict[int, str]
    launcher: Launcher  # of the ranks that measure
    standby: Standby | None  # a process that can become one of them
    folder: Path | None  # the model's, for other engines than xgpt's own

    @property
    def engine(self) -> Engine:
        """The engine whose step times are measured."""
        return engine_of(self.job)

    def exceeds(self, profile: Profile) -> bool:
        """Whether the profile has too few points to plan the job."""
        return any(is_insufficient(profile, degree, self.points, self.own)
                   for degree in self.degrees)

    @property
    def offload(self) -> Path | None:
        """A folder on the disk below the devices; None where the job has none that can be used."""
        folder = self.job.offload_folder
        near = next(own for own in (folder, *folder.parents) if own.is_dir())
        is_used = self.problem.offload == "auto" and self.problem.cluster.tiers
        return near if is_used and why_no_disk(near, 0) is None else None

    @property
    def starts(self) -> list[tuple[tuple[int, ...], int, int | None]]:
        """(degrees, ranks that measure them at once, ranks on a node) of each start of ranks.
        Another engine's replicas share the memory's bandwidth of a CPU; on GPUs one is enough."""
        cluster = self.problem.cluster
        if not self.engine.rank_per_replica:
            return [(self.degrees, self.metadata.ranks, None)]
        is_cpu = cluster.device.kind == "cpu"
        return [((degree,), num_replicas(self.problem, degree) if is_cpu else 1,
                 cluster.devices_per_node // degree if is_cpu else 1) for degree in self.degrees]

    @property
    def points(self) -> list[Point]:
        """The points that a quick profile measures."""
        return quick_points(self.problem.model, self.needs, self.own)


def needed_profile(job: Job, problem: Problem, degrees: Sequence[int] | None = None,
                   folder: Path | None = None, standby: Standby | None = None) -> NeededProfile:
    """Makes the request for the profile that this job needs on this machine. `degrees`:
    tensor-parallel degrees, which may exceed the number of devices (a shard needs one); None: those
    that the job can use. `folder`: the model's, for other engines than xgpt's own. `standby`: a
    process that can measure."""
    cluster, fixed = problem.cluster, problem.fixed.tp_degree
    if degrees is None and problem.most_stages is not None:
        parts = [part.cluster.num_devices for part in equal_parts(problem) if weights_fit(part)]
        degrees = [d for d in parts if d in DEGREES or d == fixed] or [fixed or 1]
    if degrees is None:
        # ranks outside the groups are stages of degree 1
        has_single = problem.fixed.tp_gpus != cluster.num_devices
        degrees = [d for d in range(1, cluster.num_devices + 1)
                   if fixed == d or (d == 1 and has_single)
                   or (fixed is None and d <= cluster.devices_per_node)]
    reasons = {degree: refuse_tp_degree(problem.model, degree) for degree in degrees}
    refused = {degree: why for degree, why in reasons.items() if why is not None}
    possible = tuple(degree for degree in reasons if degree not in refused)
    if not possible or fixed in refused:
        raise InputError([Mistake(file=str(job.source), line=None, key="tensor-parallel degree",
                                  value=d, allowed=why) for d, why in refused.items()])
    needs = measured_sizes(problem, job.run.kv_layout)
    return NeededProfile(
        job=job, problem=problem, metadata=profile_metadata(job, problem), needs=needs,
        own=job_sizes(problem, needs), degrees=possible, refused=refused,
        launcher=launcher_of(job, problem), standby=standby, folder=folder)


@cache
def why_no_operators() -> str:
    """Words for why torch runs on this machine's CPU instead of the native operators; "" where
    those run."""
    return why_not_native(cache_dir() / "native")


def profile_metadata(job: Job, problem: Problem) -> ProfileMetadata:
    """The metadata with which a profile is valid for this job on this machine."""
    device, threads = problem.cluster.device, threads_per_rank(job, problem)
    identity = engine_of(job).identity  # of another engine
    # threads of a host's ranks per core, at least 1; not for GPUs
    sharing = 1.0 if device.kind != "cpu" else max(
        problem.cluster.devices_per_node * threads / usable_cores(), 1.0)
    return ProfileMetadata(
        model=problem.model.name, model_shape=model_shape(problem.model), device=device.name,
        dtype=problem.dtype, weight_dtype=problem.weight_dtype, ranks=problem.cluster.num_devices,
        nodes=problem.cluster.num_nodes, threads_per_rank=threads, sharing=sharing,
        # on GPUs decode steps are captured unless the job asks
        kernels=identity(job) if identity is not None else kernels_fingerprint() + (
            ", no CUDA graphs" if device.kind != "cpu" and not job.run.cuda_graphs else ""),
        libraries=_libraries(device),
        sampling="drawn" if job.run.temperature > 0 else "greedy",
        is_padded=identity is None and bool(
            why_no_operators() if device.kind == "cpu" else why_no_kernels()),
        clock=core_clock(), date=date.today().isoformat(), commit=_commit())


def _libraries(device: Device) -> str:
    """Versions of the libraries and the driver that decide the times of kernels and messages."""
    versions = [*filter(None, map(installed, ("torch", "mpi4py", "mpich")))]
    if device.kind == "gpu":
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        versions.append("driver " + (_first_line(command) or "unknown"))
    return ", ".join(versions)


def _commit() -> str:
    """The commit of xgpt's source tree, or the installed version."""
    root = Path(__file__).resolve().parents[2]
    commit = (_first_line(["git", "-C", str(root), "rev-parse", "--short", "HEAD"])
              if (root / ".git").exists() else "")
    return commit or f"version {metadata.version('xgpt')}"


def _first_line(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout else ""


def measured_sizes(problem: Problem, kv_layout: str = "auto") -> Needs:
    """The sizes to measure: the job's where they are larger than usual ones. `kv_layout`: of the
    job; with blocks, the default on GPUs, compaction is not measured."""
    usual = Needs() if problem.cluster.device.kind == "cpu" else _GPU_NEEDS
    inputs, outputs = problem.lengths.inputs.max, problem.lengths.outputs.max
    context = max(usual.context_tokens, inputs + max(outputs, problem.default_max_tokens))
    per_query = (problem.model.kv_elements_per_token_layer * DTYPE_BYTES[problem.dtype]
                 * min(context, problem.model.max_positions or context)
                 # an encoder-decoder model is measured with as long a cache for its input
                 * (2 if problem.model.is_encoder_decoder else 1))
    room = problem.cluster.device.memory_bytes // _KV_SHARE // per_query
    return Needs(input_tokens=max(usual.input_tokens, inputs), context_tokens=context,
                 queries=max(min(usual.queries, room), _LEAST_QUERIES),
                 tokens=max(usual.tokens, inputs),
                 moves_rows=kv_layout == "rows" or problem.model.is_encoder_decoder or (
                     problem.cluster.device.kind == "cpu")).within(problem.model)


def job_sizes(problem: Problem, usual: Needs) -> Needs:
    """The largest sizes of the job's own steps; `usual` where its number of queries is unknown."""
    lengths, count = problem.lengths, problem.num_queries
    if any(problem.fixed.value_of(name) for name in ("encode_batch", "max_active")):
        count = None  # those variables may keep more queries active than the job has
    inputs = lengths.inputs.max
    return Needs(
        input_tokens=inputs,
        context_tokens=inputs + max(lengths.outputs.max, problem.default_max_tokens),
        queries=usual.queries if count is None else min(max(count, 1), usual.queries),
        tokens=usual.tokens if count is None else max(
            min(math.ceil(count * lengths.inputs.mean), usual.tokens), inputs))


def is_insufficient(profile: Profile, degree: int, points: Sequence[Point], own: Needs) -> bool:
    """Whether the profile is too small for these points. A profile that runs have added to may be
    extrapolated to REACH times its largest sizes; the next run adds those. `own`: sizes of the job
    itself, which count where points lie beyond them."""
    reach = REACH if profile.learned else 1.0
    most = {Kind.DECODE: (own.queries, own.context_tokens), Kind.REST: (own.tokens, 0),
            Kind.CROSS: (own.queries, own.input_tokens), Kind.COMPACTION: (0, own.context_tokens)}
    for point in missing_points(profile, degree, points):
        table = profile.table(OWN_TABLE[point.kind].value, degree)
        x, y = most.get(point.kind, (own.input_tokens, point.y))
        if not table or min(point.x, x) > reach * max(one.x for one in table) or (
                min(point.y, y) > reach * max(max(one.y for one in table), 1)):
            return True
    return False
