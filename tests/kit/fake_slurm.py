"""Stand-ins for sbatch, squeue, sacct, scontrol, srun and scancel: programs on the PATH that keep
their state in files, so that tests of what is asked of Slurm need none."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_PROGRAM = """#!{python}
import json, os, sys
from pathlib import Path
folder, name, words = Path({folder!r}), Path(sys.argv[0]).name, sys.argv[1:]
with (folder / "calls.jsonl").open("a") as file:
    file.write(json.dumps([name, *words]) + "\\n")
state = json.loads((folder / "state.json").read_text())
said = state.get(name)
if name == "scontrol" and words[:2] == ["show", "hostnames"]:
    said = {{"out": "\\n".join(state["nodes"]) + "\\n"}}
if said is None:
    said = {{"err": f"{{name}}: error: no answer was prepared\\n", "code": 1}}
if name == "sbatch":
    (folder / "script.sh").write_text(Path(words[-1]).read_text())
    (folder / "environ.json").write_text(json.dumps(dict(os.environ)))
sys.stdout.write(said.get("out", ""))
sys.stderr.write(said.get("err", ""))
sys.exit(said.get("code", 0))
"""
_UNKNOWN = {"err": "slurm_load_jobs error: Invalid job id specified\n", "code": 1}
_NO_ACCOUNTS = {"err": "Slurm accounting storage is disabled\n", "code": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeSlurm:
    folder: Path

    def says(self, **answers: dict[str, Any] | list[str]) -> None:
        """What each program answers from now on: {"out", "err", "code"}."""
        path = self.folder / "state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **answers}))

    def queue(self, line: str) -> None:
        """A job that waits or runs: state|reason|elapsed|limit|start|nodes."""
        self.says(squeue={"out": line + "\n"})

    def forgets(self) -> None:
        """No job is known any more, anywhere."""
        self.says(squeue=_UNKNOWN, scontrol=_UNKNOWN, sacct=_NO_ACCOUNTS)

    @property
    def calls(self) -> list[list[str]]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if (
            path.is_file()) else []

    @property
    def script(self) -> str:
        return (self.folder / "script.sh").read_text()

    @property
    def environ(self) -> dict[str, str]:
        read: dict[str, str] = json.loads((self.folder / "environ.json").read_text())
        return read


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """On the PATH before everything else, with a queue that knows no job and takes any."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("sbatch", "squeue", "sacct", "scontrol", "scancel"):
        program = folder / name
        program.write_text(_PROGRAM.format(python=sys.executable, folder=str(folder)))
        program.chmod(0o755)
    (folder / "state.json").write_text(json.dumps({"nodes": ["n1", "n2"]}))
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    for name in ("SLURM_JOB_ID", "SLURMD_NODENAME", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    fake = FakeSlurm(folder=folder)
    fake.forgets()
    fake.says(sbatch={"out": "123\n"}, scancel={})
    return fake
