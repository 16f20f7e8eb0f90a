"""Checks this machine: its hardware and packages, the command that installs a missing part, and the
CUDA kernels on its GPU. Parts that need torch or MPI are checked in processes of their own. Nodes
of Slurm are checked by tasks there, `python -m xgpt.app.doctor WANTED` (an object in JSON)."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xgpt.core.errors import XgptError
from xgpt.core.system.lifeline import without_other_launchers
from xgpt.core.system.machine import (
    available_memory_bytes,
    gpus_here,
    installed,
    usable_cores,
    why_no_torch,
)
from xgpt.core.system.whole_file import why_no_folder
from xgpt.core.units import format_bytes
from xgpt.job.job import Job
from xgpt.job.job_file import load_job
from xgpt.launch.process import own_modules
from xgpt.launch.slurm_jobs import ask_tasks
from xgpt.report.words import counted
from xrunner.backends.engine import engine_of
from xrunner.checkpoint.source import (
    cache_dir,
    hub_address,
    hub_error,
    is_offline,
    model_at_hand,
)
from xrunner.ops.build import BuildError, find_compiler

INSTALL = 'pip install -c constraints.txt -e "{}"'
_HUB_LIMIT_S = 4.0
_MANAGERS = (("apt-get", "sudo apt-get install -y g++"), ("dnf", "sudo dnf install -y gcc-c++"),
             ("zypper", "sudo zypper install -y gcc-c++"), ("apk", "sudo apk add g++"),
             ("pacman", "sudo pacman -S --noconfirm gcc"))
_TORCH_INDEX = {"12": "cu128", "13": "cu130"}
# package -> (extra, what it is for)
_OPTIONAL = {"jinja2": ("report", "reports"), "matplotlib": ("report", "plots in reports"),
             "pyarrow": ("parquet", "Parquet files"), "rich": ("top", "xgpt top"),
             "llguidance": ("structured", "answers held to a form")}
_FAILS = "fails: "  # begins the words for a part that cannot be used
_LIMIT_S = 600.0  # the native operators may have to be compiled
_INSTRUCTION_SETS = (("avx2", "AVX2"), ("avx512f", "AVX-512"), ("avx512_bf16", "AVX-512 bf16"),
                     ("avx512_vnni", "VNNI"), ("amx_bf16", "AMX bf16"), ("asimd", "NEON"),
                     ("sve", "SVE"))
_FOLDERS = {"/dev/shm": Path("/dev/shm"), "local disk": Path(tempfile.gettempdir())}
_LEAST_SHM_BYTES = 256 * 2**20  # chosen: for messages between a node's processes
_CHECKS = Path(__file__).resolve().parents[2] / "tests" / "kit"  # of a source tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A missing part, why it is wanted, and the command that installs it. `is_needed`: no job runs
    without it; else something is slower, or missing."""

    part: str
    why: str
    command: str
    is_needed: bool = False


def remedies(found: Mapping[str, str]) -> list[Remedy]:
    """Remedies for the parts missing in `found`, the result of `examine`; needed ones first."""
    known = [*_of_packages(found), *_of_gpus(found), *_of_the_rest(found)]
    return sorted(known, key=lambda remedy: not remedy.is_needed)


def hub_in_words() -> str:
    """Words for whether models can be downloaded, and from where."""
    if is_offline():
        return "not used: HF_HUB_OFFLINE is set, so models must be on this machine"
    if importlib.util.find_spec("huggingface_hub") is None:
        return "huggingface_hub is not installed (the extra `run` has it)"
    cause = hub_error(_HUB_LIMIT_S)
    return f"{hub_address()} answers" if cause is None else (
        f"{hub_address()} cannot be reached ({getattr(cause, 'strerror', None) or cause})")


def cache_in_words() -> str:
    """Words for the folder of models, profiles and compiled operators, and its free space."""
    folder = cache_dir()
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as cause:
        return f"{folder} cannot be written to ({cause.strerror})"
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    count = len(list(hub.glob("models--*"))) + len(list((cache_dir() / "models").glob("*")))
    return (f"{folder}, {format_bytes(shutil.disk_usage(there).free)} free; "
            f"{counted(count, 'model')} downloaded")


def _of_packages(found: Mapping[str, str]) -> Iterator[Remedy]:
    missing = [name for name in ("torch", "mpi4py", "transformers", "huggingface_hub")
               if importlib.util.find_spec(name) is None]
    if missing:
        yield Remedy(part="run", why=f"{', '.join(missing)} not installed: jobs can be planned, "
                     "but not run", command=INSTALL.format(".[run,report]"), is_needed=True)
    else:
        for part, packages in (("torch", "torch"), ("mpi", "mpi4py mpich")):
            if found.get(part, "").startswith(_FAILS):
                yield Remedy(part=part, why=found[part].removeprefix(_FAILS), is_needed=True,
                             command=f"pip install --force-reinstall -c constraints.txt {packages}")
    if not missing and importlib.util.find_spec("jinja2") is None:
        yield Remedy(part="report", why="without jinja2 no report is written",
                     command=INSTALL.format(".[report]"))


def _of_gpus(found: Mapping[str, str]) -> Iterator[Remedy]:
    if not gpus_here():
        return
    if importlib.util.find_spec("torch") is not None and (why := why_no_torch("gpu")) is not None:
        yield Remedy(part="torch", why=f"there are GPUs, but {why}", is_needed=True,
                     command="pip install --force-reinstall torch --index-url "
                     f"https://download.pytorch.org/whl/{_TORCH_INDEX[_cuda_major()]}")
    if importlib.util.find_spec("cupy") is None:
        yield Remedy(part="cupy", why="without it GPUs run torch's kernels, not xgpt's own",
                     command=INSTALL.format(f".[cuda{_cuda_major()}]"))


def _of_the_rest(found: Mapping[str, str]) -> Iterator[Remedy]:
    if "no C++ compiler" in found.get("compiler", "") and not gpus_here() and (
            "torch" in found.get("native", "torch")):
        yield Remedy(part="compiler", why="without one CPUs run torch's operators, which are "
                     "slower than xgpt's own", command=next(
                         (command for name, command in _MANAGERS if shutil.which(name)),
                         "install g++"))
    if "cannot be reached" in found.get("hub", ""):
        yield Remedy(part="hub", why="models cannot be downloaded; use one on this machine, or a "
                     "folder (`model: DIR`); the quickstart's comes as a package",
                     command="export HF_ENDPOINT=https://YOUR-MIRROR")
    if "cannot be written to" in found.get("cache", ""):
        yield Remedy(part="cache", why=found["cache"], is_needed=True,
                     command="export XDG_CACHE_HOME=$PWD/.cache")


def _cuda_major() -> str:
    """The newest CUDA version that the driver supports: "12" or "13"."""
    try:
        match = re.search(r"CUDA Version:\s*(\d+)", _printed(["nvidia-smi"]))
    except XgptError:
        match = None
    return "13" if match is not None and int(match.group(1)) >= 13 else "12"


def _printed(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Returns the output of a command. Raises XgptError with the reason where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False,
                              timeout=_LIMIT_S, env=environment)
    except (OSError, subprocess.TimeoutExpired) as cause:
        raise XgptError(f"does not answer: {cause}") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise XgptError(f"{_FAILS}{said[-1]}")
    return done.stdout


def examine() -> dict[str, str]:
    """Words for each part of this machine, by label, in the order to show: what is there, or why it
    is missing."""
    found = {"processor": _processor(), "memory": format_bytes(available_memory_bytes()) + " free"}
    found |= {part: asked(part) for part in ("torch", "native", "mpi")}
    gpus = ", ".join(f"{gpu.name} ({format_bytes(gpu.memory_bytes or 0)})" for gpu in gpus_here())
    return found | {
        "compiler": _compiler(), "gpus": gpus or "none that nvidia-smi shows", "cupy": _cupy(),
        "slurm": _slurm(),
        "engines": ", ".join(installed(name) or f"no {name}" for name in ("deepspeed", "vllm")),
        "packages": ", ".join(
            installed(package) or f"no {package} (the extra `{extra}`; for {purpose})"
            for package, (extra, purpose) in _OPTIONAL.items()),
        "hub": hub_in_words(), "cache": cache_in_words()}


def compare_on_gpu(folder: Path, checks: Path = _CHECKS) -> Path:
    """Compares every kernel with torch on this machine's GPU, with a line for each on stderr, and
    writes `xgpt-doctor-<card>.json` to `folder`; returns that path. Raises XgptError where a kernel
    differs, or there is no GPU, no cupy, or no source tree with the folder `checks`."""
    if not (gpus := gpus_here()):
        raise XgptError("there is no GPU here (nvidia-smi shows none) to compare kernels on; "
                        "`xgpt doctor` shows what this machine has")
    script = checks / "gpu_report.py"
    if not script.is_file():
        raise XgptError("`xgpt doctor --gpu` needs xgpt's source tree (`pip install -e .` there), "
                        "since it is one of its tests")
    card = re.sub(r"[^a-z0-9]+", "-", gpus[0].name.lower()).strip("-")
    file = folder / f"xgpt-doctor-{card}.json"
    done = subprocess.run([sys.executable, str(script), str(file)], check=False, text=True,
                          stdout=sys.__stderr__, stderr=subprocess.PIPE,
                          # the script imports modules beside it, which PYTHONSAFEPATH hides
                          env={**without_other_launchers(os.environ), **own_modules(),
                               "PYTHONSAFEPATH": ""})
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise XgptError(said[-1] if said else f"{script.name} ended with {done.returncode}")
    return file


def asked(part: str) -> str:
    """The words of `python -m xrunner.rank.examine` for a part, or why it is missing."""
    for package in ("torch", "mpi4py") if part == "mpi" else ("torch",):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed (the extra `run` has it)"
    try:
        said = _printed([sys.executable, "-m", "xrunner.rank.examine", part],
                        {**without_other_launchers(os.environ), **own_modules()})
    except XgptError as why:
        return str(why)
    return str(json.loads(said.splitlines()[-1]))


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
    found = filter(None, map(installed, ("cupy-cuda13x", "cupy-cuda12x", "cupy")))
    return next(found, "not installed (the extra `cuda12` or `cuda13` has it; only GPUs need it)")


def _slurm() -> str:
    """The path and version of sbatch, or that there is none."""
    if (path := shutil.which("sbatch")) is None:
        return "no sbatch on the PATH"
    try:
        version = re.search(r"[\d.]+", _printed([path, "--version"]))
    except XgptError as why:
        return f"{path}, which {why}"
    return f"{path}, {version.group()}" if version else path


def node_report(wanted: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Words for what this node has, by part, and for why the parts in "lacking" are missing.
    `wanted`: at most one job file in "jobs", and its "overrides"; "gpus": how many it asks for;
    "seen": what lies at paths that are shared."""
    free = {name: shutil.disk_usage(path).free if path.is_dir() else 0
            for name, path in _FOLDERS.items()} | {"memory": available_memory_bytes()}
    gpus = Counter(gpu.name for gpu in gpus_here())
    facts = {"GPUs": ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "none",
             **{name: f"{format_bytes(count)} free" for name, count in free.items()}}
    lacking = {remedy.part: remedy.why for remedy in remedies(
        {part: asked(part) for part in ("torch", "mpi")}) if remedy.is_needed}
    if free["/dev/shm"] < _LEAST_SHM_BYTES:
        lacking["/dev/shm"] = f"{facts['/dev/shm']}, needed: {format_bytes(_LEAST_SHM_BYTES)}"
    for path, what in wanted["seen"].items():
        if not os.access(path, os.R_OK):
            lacking[what] = f"{path} is not seen there"
        elif "folder" in what and (why := why_no_folder(Path(path).parent)) is not None:
            lacking[what] = f"{Path(path).parent}: {why}"
    if gpus.total() < wanted["gpus"]:
        lacking["GPUs"] = f"{facts['GPUs']}, and the job asks for {wanted['gpus']}"
    try:
        for path in wanted["jobs"]:
            job = load_job(Path(path), wanted["overrides"])
            (engine := engine_of(job)).check_installed(job)
            facts["engine"] = engine.identity(job) if engine.identity else engine.name
    except XgptError as cause:
        lacking["job"] = str(cause)
    return {"facts": facts, "lacking": lacking}


def examine_nodes(job: Job | None, overrides: Sequence[str], nodes: int,
                  gpus: str | None) -> dict[str, Any]:
    """The reports of so many nodes, by name, each from a task that Slurm runs there. `overrides`:
    the job's `--set`s; `gpus`: of a node, as sbatch takes them. Raises XgptError where Slurm does
    not run the tasks."""
    with ExitStack() as files:
        seen, folders = dict[str, str](), {"cache folder": cache_dir()}
        if job is not None:
            folders["output folder"], found = job.output, model_at_hand(job.model)
            seen |= {} if found is None else {str(found.directory): "model"}
        for what, folder in folders.items():
            there = next(path for path in (folder, *folder.parents) if path.is_dir())
            seen[files.enter_context(tempfile.NamedTemporaryFile(dir=there)).name] = what
        wanted = {"jobs": [str(job.source)] if job else [], "overrides": overrides, "seen": seen,
                  "gpus": int(gpus.rpartition(":")[2]) if gpus else 0}
        said = ask_tasks(None if job is None else job.slurm, nodes, gpus,
                         ["-P", "-m", __name__, json.dumps(wanted)])
    return {node: json.loads(words) if words.startswith("{") else {
        "facts": {}, "lacking": {"xgpt": words}} for node, words in said.items()}


if __name__ == "__main__":
    print(json.dumps(node_report(json.loads(sys.argv[1]))))
