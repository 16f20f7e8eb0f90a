"""A run over two hosts (network namespaces with their own addresses) gives the tokens of a run on
one, and its messages go over the cable between them."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import job_folder
import namespaces
import pytest
import toys
from given_runs import given, toy_plan
from job_folder import XGPT, as_requests
from mpi_runs import answered, sets
from replays import estimated

from xgpt.app.opened import open_file

pytestmark = [pytest.mark.mpi, pytest.mark.netns]

# what a host of its own is asked to do: the ranks of a job, without the command around them
LAUNCH = """
import sys
from pathlib import Path
from xgpt.app.opened import open_file
from xgpt.launch.launcher import RankProgram
from xgpt.launch.launcher import launcher_of
session = open_file(Path(sys.argv[1]), sys.argv[3:])
hosts = launcher_of(session.job, session.problem)
assert not hosts.is_here and hosts.ranks_each == 1
hosts.run(RankProgram(module="xrunner.rank.worker", argument=Path(sys.argv[2]), count=2),
          watch=lambda: None)
"""
CONFIGS = {"rra": {"encode_batch": 3, "decode_iterations": 4}, "waa-c": {"encode_batch": 1}}
SCHEDULES = {"rra": "policy: rra, encode_batch: 3, decode_iterations: 4, tp_degree: 1",
             "waa-c": "policy: waa-c, encode_batch: 1"}


@pytest.fixture(scope="module")
def hosts():
    if (reason := namespaces.refusal()) is not None:
        pytest.skip(reason)
    with namespaces.two_hosts() as found:
        yield found


def keys_of(hosts: namespaces.TwoHosts) -> list[str]:
    return [f"run.hosts=[{', '.join(namespaces.HOSTS)}]", f"run.launcher={hosts.launcher}"]


def on_first_host(hosts: namespaces.TwoHosts, *command: str, env: dict[str, str],
                  ) -> subprocess.CompletedProcess[str]:
    """The words are quoted for the shell that a launcher hands them to."""
    quoted = [f"'{word}'" for word in command]
    assert not any("'" in word for word in command)
    return subprocess.run([str(hosts.launcher), namespaces.HOSTS[0], "exec", *quoted],
                          env={**env, **namespaces.ENVIRONMENT}, capture_output=True, text=True,
                          timeout=240, check=False)


def lay_out(out: Path, job_file: Path, directory: Path, policy: str) -> Path:
    """What a run's ranks read, as the simulator plans it for this machine."""
    out.mkdir()
    problem = open_file(job_file).problem
    estimate = estimated(policy, problem, **CONFIGS[policy])
    given(estimate, problem, out / "schedule.json")
    plan = toy_plan(directory, out, query_kv_tokens=estimate.deployment.group_kv_tokens)
    toys.write_spool(plan, job_file.with_name("requests.jsonl"))
    return plan.save()


@pytest.mark.parametrize("policy", ["rra", pytest.param("waa-c", marks=pytest.mark.slow)])
def test_two_hosts_give_the_tokens_of_one(llama, hosts, tmp_path, policy):
    directory, reference = llama
    # long prompts: the hidden states alone must be more than MPI's own chatter
    queries = [replace(q, input_ids=q.input_ids * 4) for q in toys.random_queries(24, longest=20)]
    job = job_folder.write_job(tmp_path, directory, as_requests(queries), ranks=2,
                               schedule=SCHEDULES[policy])
    plan = lay_out(tmp_path / "two", job, directory, policy)
    before = hosts.sent_bytes()
    done = on_first_host(hosts, sys.executable, "-c", LAUNCH, str(job), str(plan), *keys_of(hosts),
                         env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    sent = [now - then for now, then in zip(hosts.sent_bytes(), before, strict=True)]
    # which are those of one host, too (test_exact_runs.py)
    answered(tmp_path / "two", queries, reference)
    hidden_bytes = sum(len(q.input_ids) for q in queries) * 48 * 4
    assert hidden_bytes > 100_000
    # a pipeline's second stage is sent every input's hidden states; WAA's decode pool the entries
    assert sent[0] > hidden_bytes and sent[1] > 10_000, f"{sent = } {hidden_bytes = }"


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(CONFIGS))
def test_submit_measures_plans_and_runs_over_both_hosts(llama, hosts, tmp_path, policy, cache):
    directory, reference = llama
    queries = toys.random_queries(40, seed=6)
    job = job_folder.write_job(tmp_path, directory, as_requests(queries), ranks=2,
                               schedule=SCHEDULES[policy])
    keys = sets(*keys_of(hosts))
    for command in (("profile", str(job)), ("submit", str(job))):
        done = on_first_host(hosts, *XGPT, *command, *keys, env=cache)
        assert done.returncode == 0, done.stderr
    answered(tmp_path / "out", queries, reference)
    assert "transfer over network" in on_first_host(
        hosts, *XGPT, "profile", str(job), *keys, env=cache).stdout


def test_a_host_that_cannot_serve_is_named_before_anything_starts(llama, hosts, tmp_path):
    job = job_folder.write_job(tmp_path, llama[0], as_requests(toys.random_queries(3)), ranks=2,
                               schedule=SCHEDULES["rra"])
    plan = lay_out(tmp_path / "out", job, llama[0], "rra")
    keys = [f"run.hosts=[{namespaces.HOSTS[0]}, nowhere]", f"run.launcher={hosts.launcher}"]
    done = on_first_host(hosts, sys.executable, "-c", LAUNCH, str(job), str(plan), *keys,
                         env=dict(os.environ))
    assert done.returncode != 0
    assert "run.hosts = 'nowhere': cannot be reached: unknown host nowhere" in done.stderr
    assert namespaces.HOSTS[0] not in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out" / "progress.json").exists()
