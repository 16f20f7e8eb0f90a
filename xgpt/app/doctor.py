"""What this machine has of what xgpt can use, and how the CUDA kernels do on its GPU. What needs
torch or MPI is asked of processes of their own."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from xgpt.app.remedies import (
    cache_in_words,
    engines_in_words,
    extras_in_words,
    hub_in_words,
)
from xgpt.app.telling import Teller
from xgpt.core.errors import XgptError
from xgpt.core.local import available_memory_bytes, gpus_here, usable_cores
from xgpt.core.other_launchers import without_other_launchers
from xgpt.core.units import format_bytes, format_seconds
from xgpt.core.whole_file import write_atomically
from xgpt.launch.own_modules import own_modules
from xrunner.ops.build import BuildError, find_compiler

SCHEMA_VERSION = 1
_LIMIT_S = 600.0  # the native operators may have to be compiled
_INSTRUCTION_SETS = (("avx2", "AVX2"), ("avx512f", "AVX-512"), ("avx512_bf16", "AVX-512 bf16"),
                     ("avx512_vnni", "VNNI"), ("amx_bf16", "AMX bf16"), ("asimd", "NEON"),
                     ("sve", "SVE"))
_CHECKS = Path(__file__).resolve().parents[2] / "tests" / "kit"  # of a source tree
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuVerdict:
    """What comparing every kernel with torch on a card came to. `differing`: operators that do not
    give what torch gives; `shares`: of each, the best rate over the card's copy rate."""

    file: Path
    card: str
    num_cases: int
    differing: tuple[str, ...]
    shares: Mapping[str, float]


class DifferingKernels(XgptError):
    """Kernels do not compute on a card what torch does."""

    def __init__(self, verdict: GpuVerdict) -> None:
        self.details = {"verdict": asdict(verdict)}
        super().__init__(
            f"{', '.join(verdict.differing)}: not what torch computes on this card; "
            f"XGPT_NATIVE=off leaves our kernels out. Please send "
            f"{verdict.file.name} to the project")


def examine() -> dict[str, str]:
    """label -> what there is, or what there is not and why; in the order to be shown."""
    found = {"processor": _processor(), "memory": format_bytes(available_memory_bytes()) + " free"}
    found |= {part: _asked(part) for part in ("torch", "native", "mpi")}
    gpus = ", ".join(f"{gpu.name} ({format_bytes(gpu.memory_bytes or 0)})" for gpu in gpus_here())
    return found | {
        "compiler": _compiler(), "gpus": gpus or "none that nvidia-smi shows", "cupy": _cupy(),
        "nvcc": _said("nvcc", r"release [\w.]+"), "slurm": _said("sbatch", r"[\d.]+"),
        "engines": engines_in_words(), "packages": extras_in_words(),
        "hub": hub_in_words(), "cache": cache_in_words(),
        "browser": next((path for name in _BROWSERS if (path := shutil.which(name))),
                        "none on the PATH (only tests of the report use one)")}


def compare_on_gpu(tell: Teller, folder: Path, checks: Path = _CHECKS) -> GpuVerdict:
    """Compares every kernel with torch on this machine's GPU and writes `xgpt-doctor-<card>.json`
    to `folder`. Raises XgptError where there is no GPU, no cupy, or no source tree, whose tests
    hold the `checks`."""
    if not gpus_here():
        raise XgptError("there is no GPU here (nvidia-smi shows none), so no kernel can be "
                        "compared on one; `xgpt doctor` says what this machine has")
    if not (checks / "gpu_report.py").is_file():
        raise XgptError("`xgpt doctor --gpu` needs xgpt's source tree (`pip install -e .` there): "
                        "what compares the kernels is among its tests")
    lines = _lines_of(checks / "gpu_report.py")
    card = next(lines)
    cases = []
    for case in lines:
        cases.append(case)
        tell.progress(f"{len(cases)} cases, {case['operator']} {case['dtype']}: "
                      f"{'agrees' if case['agrees'] else 'DIFFERS'}")
    tell.end_progress()
    slug = re.sub(r"[^a-z0-9]+", "-", card["card"].lower()).strip("-")
    file = folder / f"xgpt-doctor-{slug}.json"
    write_atomically(file, json.dumps({
        "schema_version": SCHEMA_VERSION, "xgpt": _own_version(), **card,
        "cases": cases}, indent=1) + "\n")
    return verdict_of(file, card, cases)


def _own_version() -> str:
    try:
        return metadata.version("xgpt")
    except metadata.PackageNotFoundError:  # a checkout on the path
        return "not installed"


def verdict_of(file: Path, card: Mapping[str, Any], cases: list[dict[str, Any]]) -> GpuVerdict:
    shares: dict[str, float] = {}
    for case in cases:
        share = case.get("bytes_per_s", 0.0) / card["copy_bytes_per_s"]
        shares[case["operator"]] = max(shares.get(case["operator"], 0.0), share)
    differing = tuple(dict.fromkeys(c["operator"] for c in cases if not c["agrees"]))
    return GpuVerdict(file=file, card=card["card"], num_cases=len(cases), differing=differing,
                      shares=shares)


def _lines_of(script: Path) -> Iterator[dict[str, Any]]:
    """The objects that a script prints as it goes. Raises XgptError with its last words."""
    environment = {**without_other_launchers(os.environ), **own_modules()}
    found = [str(script.parent), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(found)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            yield json.loads(line)
        said = process.stderr.read().strip().splitlines()
    if process.returncode:
        raise XgptError(said[-1] if said else f"{script.name} ended with {process.returncode}")


def _asked(part: str) -> str:
    """What `python -m xrunner.examine` says of a part; of one that cannot be had, why."""
    for package in ("torch", "mpi4py") if part == "mpi" else ("torch",):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed (the extra `run` has it)"
    try:
        done = subprocess.run([sys.executable, "-m", "xrunner.examine", part], text=True,
                              env={**without_other_launchers(os.environ), **own_modules()},
                              capture_output=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {format_seconds(_LIMIT_S)}"
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return f"fails: {said[-1]}"
    return str(json.loads(done.stdout.splitlines()[-1]))


def _processor(root: Path = Path("/")) -> str:
    text = (root / "proc/cpuinfo").read_text("utf-8") if (root / "proc/cpuinfo").exists() else ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.M)
    there = set(flags.group(1).split()) if flags else set()
    sets = [shown for flag, shown in _INSTRUCTION_SETS if flag in there]
    return (f"{name.group(1) if name else 'unknown'}, {usable_cores()} usable cores, "
            f"{', '.join(sets) or 'no vector instructions that xgpt knows'}")


def _compiler() -> str:
    try:
        return find_compiler().version
    except BuildError as why:
        return str(why)


def _cupy() -> str:
    for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "not installed (the extra `cuda12` or `cuda13` has it; only GPUs need it)"


def _said(command: str, pattern: str) -> str:
    """The version that a command tells of itself."""
    path = shutil.which(command)
    if path is None:
        return f"no {command} on the PATH"
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False,
                              timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as cause:
        return f"{path} does not answer: {cause}"
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return f"{path}, which fails: {said[-1]}"
    version = re.search(pattern, done.stdout)
    return f"{path}, {version.group()}" if version else path
