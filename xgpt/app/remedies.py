"""What is missing on a machine, what that costs, and the one command that mends it."""

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from xgpt.core.local import gpus_here, why_no_torch
from xgpt.core.units import format_bytes
from xrunner.checkpoint.source import cache_dir, hub_address, is_offline, why_silent

INSTALL = 'pip install -c constraints.txt -e "{}"'
_HUB_LIMIT_S = 4.0
_MANAGERS = (("apt-get", "sudo apt-get install -y g++"), ("dnf", "sudo dnf install -y gcc-c++"),
             ("zypper", "sudo zypper install -y gcc-c++"), ("apk", "sudo apk add g++"),
             ("pacman", "sudo pacman -S --noconfirm gcc"))
_TORCH_INDEX = {"12": "cu128", "13": "cu130"}
# package -> (extra, what it is for)
_OPTIONAL = {"jinja2": ("report", "reports"), "matplotlib": ("report", "plots in reports"),
             "pyarrow": ("parquet", "Parquet files"), "rich": ("top", "xgpt top")}
_FAILS = "fails: "  # how xgpt.app.doctor begins what cannot be used


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """`is_needed`: no job runs here without it; else something is slower, or left out."""

    part: str
    why: str
    command: str
    is_needed: bool = False


def remedies(found: Mapping[str, str]) -> list[Remedy]:
    """Of what `xgpt doctor` found; the needed ones first."""
    known = [*_of_packages(found), *_of_gpus(found), *_of_the_rest(found)]
    return sorted(known, key=lambda remedy: not remedy.is_needed)


def extras_in_words() -> str:
    """Packages that some commands need, and which are there."""
    parts = []
    for package, (extra, purpose) in _OPTIONAL.items():
        has = importlib.util.find_spec(package) is not None
        parts.append(f"{package} {_version(package)}" if has else
                     f"no {package} (the extra `{extra}`; for {purpose})")
    return ", ".join(parts)


def engines_in_words() -> str:
    """Other engines than our own."""
    return ", ".join(f"{name} {_version(name)}" if importlib.util.find_spec(name) is not None else
                     f"no {name}" for name in ("deepspeed", "vllm"))


def hub_in_words() -> str:
    """Whether models can be fetched, and from where."""
    if is_offline():
        return "not asked: HF_HUB_OFFLINE is set, so models come from this machine alone"
    if importlib.util.find_spec("huggingface_hub") is None:
        return "huggingface_hub is not installed (the extra `run` has it)"
    cause = why_silent(_HUB_LIMIT_S)
    return f"{hub_address()} answers" if cause is None else (
        f"{hub_address()} cannot be reached ({getattr(cause, 'strerror', None) or cause})")


def cache_in_words() -> str:
    """Where models, profiles and compiled operators are kept, and the room there."""
    folder = cache_dir()
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as cause:
        return f"{folder} cannot be written to ({cause.strerror})"
    return f"{folder}, {format_bytes(shutil.disk_usage(there).free)} of room; {_models_words()}"


def _models_words() -> str:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    count = len(list(hub.glob("models--*"))) + len(list((cache_dir() / "models").glob("*")))
    return f"{count} model{'' if count == 1 else 's'} fetched"


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
        yield Remedy(part="cupy", why="without it torch's kernels serve on GPUs, not xgpt's own",
                     command=INSTALL.format(f".[cuda{_cuda_major()}]"))


def _of_the_rest(found: Mapping[str, str]) -> Iterator[Remedy]:
    if "no C++ compiler" in found.get("compiler", "") and not gpus_here() and (
            "torch" in found.get("native", "torch")):
        yield Remedy(part="compiler", why="without one torch's operators serve on CPUs, which are "
                     "slower than xgpt's own", command=next(
                         (command for name, command in _MANAGERS if shutil.which(name)),
                         "install g++"))
    if "cannot be reached" in found.get("hub", ""):
        yield Remedy(part="hub", why="models cannot be fetched; those on this machine serve, a "
                     "folder (`model: DIR`) too, and the quickstart's comes as a package",
                     command="export HF_ENDPOINT=https://YOUR-MIRROR")
    if "cannot be written to" in found.get("cache", ""):
        yield Remedy(part="cache", why=found["cache"], is_needed=True,
                     command="export XDG_CACHE_HOME=$PWD/.cache")


def _cuda_major() -> str:
    """The newest CUDA that the driver takes: 12 or 13."""
    try:
        said = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False,
                              timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    match = re.search(r"CUDA Version:\s*(\d+)", said)
    return "13" if match is not None and int(match.group(1)) >= 13 else "12"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"
