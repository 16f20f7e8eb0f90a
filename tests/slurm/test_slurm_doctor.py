"""`xgpt doctor --slurm` through a real Slurm of two nodes: from outside and within an allocation;
all that is missing at once."""

import json

import pytest
import toys
from job_folder import XGPT

pytestmark = [pytest.mark.slurm]


def test_nodes_that_have_all_are_shown_from_outside_and_within_an_allocation(slurm, make_job):
    job = make_job(queries=toys.random_queries(2), slurm="nodes: 2, ntasks_per_node: 1")
    done = slurm.xgpt("doctor", "--slurm", job, "--json")
    assert done.returncode == 0, done.stderr
    nodes = json.loads(done.stdout)["nodes"]
    assert list(nodes) == ["n1", "n2"]
    assert all(own["lacking"] == {} and own["facts"]["GPUs"] == "none" for own in nodes.values())
    within = slurm.call("salloc", "--nodes=2", *XGPT, "doctor", "--slurm")
    assert within.returncode == 0, within.stderr
    rows = [line.split()[0] for line in within.stdout.splitlines() if line.startswith("n")]
    assert rows == ["node", "n1", "n2", "nothing"]
    assert not (job.parent / "out").exists()


def test_all_that_nodes_lack_is_told_at_once_with_an_exit_code(slurm, make_job):
    """The nodes have stand-ins for GPUs, which no driver knows."""
    job = make_job(queries=toys.random_queries(2), slurm="nodes: 2, gpus_per_node: 2")
    done = slurm.xgpt("doctor", "--slurm", job, "--set", "run.engine=vllm", "--set",
                      "run.engine_python=/no/vllm/bin/python")
    said = " ".join(done.stdout.split())
    assert done.returncode == 1 and "the nodes lack GPUs, job" in done.stderr
    assert "missing GPUs on n1, n2: none, and the job asks for 2" in said
    assert "missing job on n1, n2: '/no/vllm/bin/python' is no program" in said
    none = slurm.xgpt("doctor", "--slurm", job, "--set", "slurm.venv=/no/venv", "--json")
    assert none.returncode == 1
    assert all("/no/venv/bin/python" in own["lacking"]["xgpt"]
               for own in json.loads(none.stdout)["nodes"].values())
    refused = slurm.xgpt("doctor", "--slurm", job, "--set", "slurm.partition=none")
    assert refused.returncode == 1 and "Slurm ran 0 of 2 tasks" in refused.stderr
