"""A job over two hosts (network namespaces with their own addresses) gives the tokens of one on a
single host, and its messages go over the cable between them."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import by_data_sheets
import job_folder
import namespaces
import pytest
import toys
from job_folder import XGPT, as_requests
from mpi_runs import answered, sets
from vllm_jobs import vllm_job

pytestmark = [pytest.mark.mpi, pytest.mark.netns]
SCHEDULES = {"rra": "policy: rra, encode_batch: 3, decode_iterations: 4, tp_degree: 1, replicas: 1",
             "waa-c": "policy: waa-c, encode_batch: 1"}


@pytest.fixture(scope="module")
def hosts():
    if (reason := namespaces.refusal()) is not None:
        pytest.skip(reason)
    with namespaces.two_hosts() as found:
        yield found


def on_first_host(hosts: namespaces.TwoHosts, job: Path, *command: str, env: dict[str, str],
                  names: tuple[str, ...] = namespaces.HOSTS) -> subprocess.CompletedProcess[str]:
    """The words are quoted for the shell that a launcher hands them to."""
    words = [*command, str(job), *sets(f"run.hosts=[{', '.join(names)}]",
                                       f"run.launcher={hosts.launcher}")]
    assert not any("'" in word for word in words)
    return subprocess.run([str(hosts.launcher), namespaces.HOSTS[0], "exec",
                           *(f"'{word}'" for word in words)],
                          env={**env, **namespaces.ENVIRONMENT}, capture_output=True, text=True,
                          timeout=600, check=False)


@pytest.mark.parametrize(("policy", "is_measured"), [
    ("rra", False), *(pytest.param(policy, True, marks=pytest.mark.slow) for policy in SCHEDULES)])
def test_two_hosts_give_the_tokens_of_one(llama, hosts, tmp_path, cache, policy, is_measured):
    directory, reference = llama
    # long prompts: the hidden states alone must be more than MPI's own chatter
    queries = [replace(q, input_ids=q.input_ids * 4) for q in toys.random_queries(24, longest=20)]
    job = job_folder.write_job(tmp_path, directory, as_requests(queries), ranks=2,
                               schedule=SCHEDULES[policy])
    if is_measured:
        done = on_first_host(hosts, job, *XGPT, "profile", "--verbose", env=cache)
        assert done.returncode == 0 and "transfer over network" in done.stdout, done.stderr
    before = hosts.sent_bytes()
    done = on_first_host(hosts, job, *(XGPT if is_measured else by_data_sheets.COMMAND), "submit",
                         env=cache)
    assert done.returncode == 0, done.stderr
    sent = [now - then for now, then in zip(hosts.sent_bytes(), before, strict=True)]
    answered(tmp_path / "out", queries, reference)
    hidden_bytes = sum(len(q.input_ids) for q in queries) * 48 * 4
    assert hidden_bytes > 100_000
    # a pipeline's second stage is sent every input's hidden states; WAA's decode pool the entries
    assert sent[0] > hidden_bytes and sent[1] > 10_000, f"{sent = } {hidden_bytes = }"


def test_a_host_that_cannot_serve_is_named_before_anything_starts(llama, hosts, tmp_path, cache):
    job = job_folder.write_job(tmp_path, llama[0], as_requests(toys.random_queries(3)), ranks=2,
                               schedule=SCHEDULES["rra"])
    done = on_first_host(hosts, job, *by_data_sheets.COMMAND, "submit", env=cache,
                         names=(namespaces.HOSTS[0], "nowhere"))
    assert done.returncode != 0
    assert "run.hosts = 'nowhere': cannot be reached: unknown host nowhere" in " ".join(
        done.stderr.split())
    assert namespaces.HOSTS[0] not in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out" / "results.jsonl").exists()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_replica_of_vllm_on_each_host_gives_the_tokens_of_one_instance(hosts, tmp_path, cache):
    if (python := os.environ.get("XGPT_VLLM_PYTHON")) is None:
        pytest.skip("XGPT_VLLM_PYTHON names the Python of an environment that has vLLM")
    model = toys.make_modern("llama", tmp_path, hidden_size=128, intermediate_size=192,
                             num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    queries = toys.random_queries(40, seed=8)
    job = vllm_job(tmp_path, tmp_path, python, as_requests(queries), "policy: rra, encode_batch: 3,"
                   " decode_iterations: 4, tp_degree: 1, replicas: 2", ranks=2)
    refused = on_first_host(hosts, job, *by_data_sheets.COMMAND, "submit", *sets(
        f"run.engine_python={tmp_path / 'absent'}"), env=cache)
    assert refused.returncode != 0 and "absent" in refused.stderr
    done = on_first_host(hosts, job, *by_data_sheets.COMMAND, "submit", env=cache)
    assert done.returncode == 0, done.stderr
    answered(tmp_path / "out", queries, model)
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert [row["node"] for row in metrics["replicas"]] == [*namespaces.HOSTS]
    assert sum(row["queries"]["measured"] for row in metrics["replicas"]) == len(queries)
