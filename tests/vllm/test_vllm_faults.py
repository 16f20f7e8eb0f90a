"""Two replicas of vLLM whose processes are killed and stopped at random moments: no line is lost or
doubled, greedy tokens are those of a run without faults, and nothing is left running."""

import itertools
import os
import random
import signal
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import toys
from faults import wait
from vllm_replicas import STARTED, Processes, ReplicaJob, inject, replica_job, traces

from xrunner.files.sink import read_underway
from xrunner.query import PreparedQuery

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3000)]

POSITIONS = 16384
SCHEDULES = {
    "rra": "policy: rra, encode_batch: 2, decode_iterations: 8, encode_chunk: 0, order: input",
    "sarathi": "policy: sarathi, max_active: 3, token_budget: 32, order: input",
    "prefill-first": "policy: vllm, max_active: 3, token_budget: 64, order: input"}
KINDS = ("kill an engine", "kill a rank", "kill the launcher", "stop an engine")
FAULTS = 20  # over all policies


@pytest.fixture(autouse=True)
def _ended():
    yield
    for process in STARTED:
        process.kill()
        process.wait()
    STARTED.clear()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A toy with room for long answers, and transformers' own instance of it."""
    folder = tmp_path_factory.mktemp("model")
    return folder, toys.make_modern(
        "llama", folder, hidden_size=128, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=POSITIONS)


def long_queries(count: int, tokens: int) -> list[PreparedQuery]:
    return [replace(query, max_new_tokens=tokens + query.max_new_tokens)
            for query in toys.random_queries(count)]


def answers_of(model: Any, queries: list[PreparedQuery]) -> list[tuple[str, list[int]]]:
    """Greedy answers by transformers, whole batches of equal inputs at a time: end-of-sequence
    ends none."""
    found: dict[str, list[int]] = {}
    for query in queries:
        with torch.inference_mode():
            out = model.generate(torch.tensor([query.input_ids]), do_sample=False,
                                 max_new_tokens=query.max_new_tokens,
                                 min_new_tokens=query.max_new_tokens, eos_token_id=None)
        found[query.id] = out[0, len(query.input_ids):].tolist()
    return [(query.id, found[query.id]) for query in queries]


def test_a_killed_engine_gives_its_requests_to_the_other_replica(tmp_path, model, vllm_python,
                                                                 cache):
    queries = long_queries(24, 30)
    job = replica_job(tmp_path / "job", model[0], vllm_python, cache, queries,
                      SCHEDULES["sarathi"], f"run.stage_model={tmp_path / 'disk'}")
    job.start()
    assert job.await_lines(6), job.end()
    before, (copy,) = job.lines(), (tmp_path / "disk").glob("*/*/model.safetensors")
    os.kill(job.processes()[1].engine or 0, signal.SIGKILL)
    facts = job.end()
    assert facts["code"] == 0 and facts["status"] == "done", facts
    assert "note: the engine of replica 1 died" in facts["told"]
    assert job.answers() == answers_of(model[1], queries)
    assert all(line in job.lines() for line in before)
    assert not copy.exists(), "the job is done"


@pytest.mark.slow
def test_a_replica_starts_again_while_the_other_goes_on(tmp_path, model, vllm_python, cache):
    queries = long_queries(400, 35)
    job = replica_job(tmp_path / "job", model[0], vllm_python, cache, queries,
                      SCHEDULES["sarathi"])
    job.start()
    assert job.await_lines(20), job.end()
    first = job.processes()
    os.kill(first[0].engine or 0, signal.SIGKILL)
    wait(lambda: job.states()[0].restarts == 1, "its death is seen")
    away, done = job.states(), job.count()
    wait(lambda: not job.states()[0].note, "it is back")
    back, now = job.states(), job.processes()
    assert "loading vLLM" in away[0].note
    assert job.count() > done + 5 and back[1].num_steps > away[1].num_steps + 20
    assert now == {0: Processes(first[0].rank, now[0].engine), 1: first[1]}
    assert now[0].engine not in (None, first[0].engine)
    served = {line["index"] for line in job.lines()}
    wait(lambda: {line["replica"] for line in job.lines() if line["index"] not in served} == {0, 1},
         "both answer")
    job.process.send_signal(signal.SIGINT)
    assert job.end()["code"] == 75 and "note: the engine of replica 0 died" in job.messages()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, model, vllm_python, cache):
    """(queries, their answers by a run without faults)"""
    queries = long_queries(300, 0)
    job = replica_job(tmp_path_factory.mktemp("jobs") / "undisturbed", model[0], vllm_python,
                      cache, queries, "policy: sarathi, max_active: 32, token_budget: 256")
    job.start()
    assert job.end()["code"] == 0
    assert job.answers()[:20] == answers_of(model[1], queries[:20])
    return queries, job.answers()


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "count"), [("rra", 7), ("sarathi", 7), ("prefill-first", 6)])
def test_nothing_is_lost_in_faults_at_random_moments(tmp_path, model, vllm_python, cache,
                                                     undisturbed, policy, count):
    queries, answers = undisturbed
    chance = random.Random(f"{policy} 47")
    kinds = [KINDS[number % len(KINDS)] for number in range(count)]
    chance.shuffle(kinds)
    said = list[str]()
    for number in itertools.count():
        job = replica_job(tmp_path / f"job{number}", model[0], vllm_python, cache, queries,
                          SCHEDULES[policy], "run.stall_timeout=10")
        said += disturbed(job, kinds, chance)
        assert job.answers() == answers, said
        if not kinds:
            break
    assert len(said) == count, said
    print(policy, said)


def disturbed(job: ReplicaJob, kinds: list[str], chance: random.Random) -> list[str]:
    """Runs the job to its end, while one after another of these happens to it, as far as it lasts.
    Returns what happened."""
    said, left = list[str](), set[Any]()
    before: dict[int, Any] = {}
    job.start()
    while True:
        # nearer to each other, they would find the same requests under way: each would run alone
        is_alive = job.await_lines(chance.randint(20, 40))
        time.sleep(chance.uniform(0, 1))
        if is_alive and kinds and job.process.poll() is None:
            job.processes()
            left |= traces(sorted(job.seen or ()))
            if what := inject(job, kinds[0], chance):
                kinds.pop(0)
                said.append(what)
        elif is_alive:
            job.process.wait(900)
        if job.process.poll() is not None:
            facts = job.end()
            now = {line["index"]: line["output_ids"] for line in job.lines()}
            assert now.items() >= before.items(), said
            before = now
            if facts["code"] == 0:
                break
            assert facts["code"] == -signal.SIGKILL, (facts, said)
            job.start()  # the same command goes on
    assert not job.left() and not [path for path in left if path.exists()], said
    return said


@pytest.mark.slow
def test_a_request_that_kills_every_engine_gets_an_error_and_the_others_answers(
        tmp_path, model, vllm_python, cache):
    """Its engine is killed whenever it is under way: the one that takes steps for seconds, and
    gives no results meanwhile, as others do within one."""
    queries = long_queries(30, 5)
    queries[5] = replace(queries[5], max_new_tokens=POSITIONS - 200)
    job = replica_job(tmp_path / "job", model[0], vllm_python, cache, queries,
                      "policy: sarathi, max_active: 1, token_budget: 64, order: input")
    job.start()
    assert job.await_lines(3), job.end()
    kills = 0
    while job.process.poll() is None:
        before = job.lines()
        at_work, lines = job.at_work(), job.lines()
        gave = [line.get("replica") for line in lines if line not in before]
        whom = [own.engine for r, own in job.processes().items() if r in at_work and r not in gave
                and own.engine]
        if whom and 5 in read_underway(job.output) and 5 not in {line["index"] for line in lines}:
            os.kill(whom[0], signal.SIGKILL)
            kills += 1
    facts = job.end()
    assert kills >= 3 and facts["status"] == "done", (kills, facts)
    found = {line["index"]: line for line in job.lines()}
    assert sorted(found) == list(range(30)) and found[5]["error"] and not found[5]["output_ids"]
    del queries[5]
    assert [pair for pair in job.answers() if pair[0] != "q5"] == answers_of(model[1], queries)


@pytest.mark.slow
def test_without_restarts_left_the_run_ends_in_words_and_the_same_command_goes_on(
        tmp_path, model, vllm_python, cache):
    queries = long_queries(80, 10)
    job = replica_job(tmp_path / "job", model[0], vllm_python, cache, queries,
                      SCHEDULES["prefill-first"], "run.restarts=0")
    job.start()
    for replica in (1, 0):  # the first one's requests go to the other
        assert job.await_lines(5), job.end()
        os.kill(job.processes()[replica].engine or 0, signal.SIGKILL)
    facts = job.end()
    assert facts["code"] == 1 and "no replica is left" in facts["told"], facts
    assert "run.restarts" in facts["told"] and facts["told"].count("no replica is left") == 1
    before = job.count()
    assert 10 <= before < 80
    job.start()
    assert job.end()["code"] == 0 and job.answers() == answers_of(model[1], queries)
