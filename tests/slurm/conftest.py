"""A Slurm of two nodes on this machine for these tests, and toy jobs to hand in to it."""

import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from job_folder import SUPPORT, XGPT, as_requests, read_lines

_SCRIPT = SUPPORT / "slurm-local.sh"
_NEEDED = ("slurmctld", "slurmd", "sbatch", "munge")
# The first ports may be taken by others on this machine: they are drawn by chance.
_TRIES = 3

JOB = """
model: {model}
cluster: local
workload: {{requests: requests.jsonl, output_tokens: {{mean: 15, std: 8, max: 40}}}}
schedule: {{policy: rra, encode_batch: 3, decode_iterations: 4, tp_degree: 1, order: input}}
run: {{dtype: float32, threads_per_rank: 1}}
slurm: {{{slurm}}}
output: out
"""


def why_not() -> str | None:
    """Why there can be no Slurm here; None where there can."""
    missing = [name for name in _NEEDED if shutil.which(name, path=_path()) is None]
    if missing:
        return f"no Slurm here ({', '.join(missing)} missing): apt-get install slurmctld slurmd " \
               "slurm-client munge"
    return None if os.geteuid() == 0 else "starting a Slurm of one's own needs root"


def _path() -> str:
    return os.environ["PATH"] + ":/usr/sbin:/sbin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`environment`: of commands that speak to it."""

    environment: dict[str, str]

    def call(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*map(str, command)], env=self.environment, capture_output=True,
                              text=True, timeout=120, check=False)

    def xgpt(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return self.call(*XGPT, *words)

    def submit(self, *words: str | Path) -> list[str]:
        """Ids of the jobs."""
        done = self.xgpt("submit", *words, "--json")
        assert done.returncode == 0, done.stderr
        return [job["job_id"] for job in json.loads(done.stdout)["jobs"]]

    def status(self, output: Path) -> dict[str, Any]:
        done = self.xgpt("status", output, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def slurm_state(self, job_id: str) -> str:
        said = self.call("scontrol", "--oneliner", "show", "job", job_id).stdout
        return said.partition("JobState=")[2].partition(" ")[0]

    def await_state(self, job_id: str, *states: str, timeout_s: float = 150) -> str:
        deadline = time.monotonic() + timeout_s
        while (state := self.slurm_state(job_id)) not in states:
            assert time.monotonic() < deadline, self.call("scontrol", "show", "job", job_id).stdout
            time.sleep(0.2)
        return state

    def await_end(self, job_id: str) -> str:
        return self.await_state(job_id, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture(scope="session")
def slurm(tmp_path_factory, profiled):
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    cache = profiled("llama", 2)  # a toy's profile, measured on this very machine, serves its nodes
    folder = tmp_path_factory.mktemp("slurm")
    environment = {**cache, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}

    def call(word: str) -> subprocess.CompletedProcess[bytes]:
        with (folder / "script.log").open("ab") as log:
            return subprocess.run([str(_SCRIPT), word, str(folder)], stdout=log, stderr=log,
                                  env=environment, timeout=120, check=False)

    for _ in range(_TRIES):
        if call("up").returncode == 0:
            break
        call("down")
    else:
        pytest.fail((folder / "script.log").read_text()[-3000:])
    yield Cluster(environment=environment)
    call("down")


@pytest.fixture(scope="session")
def over_network(slurm, tmp_path_factory):
    """The toy's profile with a link between nodes. These nodes are one host, whose ranks measure
    none."""
    profiles = Path(slurm.environment["XDG_CACHE_HOME"], "xgpt", "profiles")
    (found,) = [profile for path in profiles.glob("*.json")
                if (profile := json.loads(path.read_text())).get("metadata", {}).get("ranks") == 2]
    for key, points in [*found["tables"].items()]:
        found["tables"][key.replace("link=shared-memory", "link=network")] = points
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    path.write_text(json.dumps(found))
    return path


@pytest.fixture
def folder(tmp_path):
    awkward = tmp_path / "it's a \"job\" of 50% $HOME"
    awkward.mkdir()
    return awkward


@pytest.fixture
def make_job(llama, folder):
    """Writes a job of a toy model on two ranks of one node, unless `slurm` says otherwise."""
    def make(name: str = "job", *, queries: list[Any], slurm: str = "", more: str = "") -> Path:
        own = folder / name
        own.mkdir()
        (own / "requests.jsonl").write_text("".join(
            json.dumps(request) + "\n" for request in as_requests(queries)))
        options = slurm or "nodes: 1, ntasks_per_node: 2, time: 10"
        (own / f"{name}.yaml").write_text(JOB.format(model=llama[0], slurm=options) + more)
        return own / f"{name}.yaml"

    return make


def answers(job: Path) -> dict[str, list[int]]:
    """Of a job's results, each line of which is there once."""
    lines = read_lines(job.parent / "out" / "results.jsonl")
    found = {line["id"]: line["output_ids"] for line in lines}
    assert len(found) == len(lines), "a line twice"
    return found
