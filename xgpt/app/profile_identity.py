"""What a profile must be of to speak of a job's run on this machine."""

import subprocess
from collections.abc import Sequence
from datetime import date
from functools import cache
from importlib import metadata
from pathlib import Path

from xgpt.core.cluster import Device
from xgpt.core.job import Job
from xgpt.core.local import core_clock, usable_cores
from xgpt.core.problem import Problem
from xgpt.launch.launcher import threads_per_rank
from xprofiler.profile import ProfileMetadata, kernels_fingerprint, model_shape
from xrunner.checkpoint.source import cache_dir
from xrunner.engines.engine import engine_of
from xrunner.ops.build import why_no_kernels, why_not_native


@cache
def why_no_operators() -> str:
    """Why torch serves on this machine's CPU instead of the native operators; empty where they
    do."""
    return why_not_native(cache_dir() / "native")


def profile_metadata(job: Job, problem: Problem) -> ProfileMetadata:
    """What a profile must be of to speak of this job's run on this machine."""
    device, threads = problem.cluster.device, threads_per_rank(job, problem)
    identity = engine_of(job).identity  # of another engine
    # threads of a host's ranks for each of its cores, at least 1; GPUs are shared otherwise
    sharing = 1.0 if device.kind != "cpu" else max(
        problem.cluster.devices_per_node * threads / usable_cores(), 1.0)
    return ProfileMetadata(
        model=problem.model.name, model_shape=model_shape(problem.model), device=device.name,
        dtype=problem.dtype, weight_dtype=problem.weight_dtype, ranks=problem.cluster.num_devices,
        nodes=problem.cluster.num_nodes, threads_per_rank=threads, sharing=sharing,
        kernels=_kernels(job, device) if identity is None else identity(job),
        libraries=_libraries(device),
        sampling="drawn" if job.run.temperature > 0 else "greedy",
        is_padded=identity is None and bool(
            why_no_operators() if device.kind == "cpu" else why_no_kernels()),
        clock=core_clock(), date=date.today().isoformat(), commit=_commit())


def _kernels(job: Job, device: Device) -> str:
    """Fingerprint of what computes; on GPUs decode steps are captured unless the job asks."""
    is_launched = device.kind != "cpu" and not job.run.cuda_graphs
    return kernels_fingerprint() + (", no CUDA graphs" if is_launched else "")


def _libraries(device: Device) -> str:
    """Versions of what decides the kernels and the messages."""
    versions = [f"{name} {version}" for name in ("torch", "mpi4py", "mpich")
                if (version := _version(name)) is not None]
    if device.kind == "gpu":
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        versions.append("driver " + (_first_line(command) or "unknown"))
    return ", ".join(versions)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """The commit of the source that this runs from, or the installed version."""
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
