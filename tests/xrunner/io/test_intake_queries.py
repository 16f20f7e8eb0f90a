"""Which requests a schedule can run, and what a rank takes up of them."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from plans import plan_of, spooled
from toys import spec_of

from xgpt.core import catalog
from xgpt.requests.request import Requests
from xrunner.files import runnable as looked_at
from xrunner.files.intake import queries_of
from xrunner.files.runnable import runnable
from xrunner.plan import load_plan


@pytest.mark.parametrize(("most", "fitting"), [(0, 4), (9, 4), (5, 3), (2, 2)])
def test_an_input_that_the_encode_pool_cannot_hold_becomes_an_error_record(
        llama, tmp_path, most, fitting):
    plan = plan_of(tmp_path, llama[0], most_input_tokens=most)
    spool, errors = spooled(plan, *({"id": f"q{n}", "tokens": [7] * n} for n in (1, 9, 5, 2)))
    queries = list(queries_of(spool, plan))
    assert len(queries) == fitting and spool.num_errors == len(errors) == 4 - fitting
    assert [q.index for q in queries] == list(range(fitting))
    assert all(f"planned to encode {most}" in e["error"] for e in errors)


def test_a_query_is_what_its_request_and_the_job_say(llama, tmp_path):
    plan = plan_of(tmp_path, llama[0])
    spool, _ = spooled(plan, "", {"id": "plain", "tokens": [3, 4]}, {
        "id": "own", "tokens": [5], "forced_tokens": 6, "seed": 11, "temperature": 0, "top_k": 3,
        "top_p": 0.5, "stop": ["a", "b"]},
        {"custom_id": "c", "body": {"model": "m", "prompt": [9, 8, 7], "max_tokens": 3}})
    plain, own, openai = queries_of(spool, plan)
    assert (plain.id, [*plain.input_ids], plain.max_new_tokens) == ("plain", [3, 4], 8)
    assert (plain.sampling.temperature, plain.sampling.seed) == (0.5, 2 * 1_000_003 + 2)
    assert (own.max_new_tokens, own.is_forced, own.stop) == (6, True, ("a", "b"))
    assert (own.sampling.seed, own.sampling.temperature) == (11, 0.0)
    assert (own.sampling.top_k, own.sampling.top_p) == (3, 0.5)
    assert (openai.is_openai, openai.max_new_tokens, openai.input_ids[-1]) == (True, 3, 7)
    assert len(openai.input_ids) == 3 and not openai.is_forced and not openai.is_chat


def test_the_jobs_stop_strings_are_those_of_requests_without_any(llama, tmp_path):
    plan = plan_of(tmp_path, llama[0], stop=("###", "\n\n"))
    spool, _ = spooled(plan, {"tokens": [3, 4]}, {"tokens": [5], "stop": "a"})
    assert [query.stop for query in queries_of(spool, plan)] == [("###", "\n\n"), ("a",)]
    assert load_plan(plan.save()) == plan
    before = plan_of(tmp_path, llama[0])
    assert plan.fingerprint != before.fingerprint == load_plan(before.save()).fingerprint


@pytest.mark.parametrize(("request_", "why"), [
    ({"tokens": [1, 10**6]}, "token 1000000 is outside the vocabulary"),
    ({"tokens": [7] * 4000}, "4000 input tokens leave no room in the model's"),
    ({"tokens": [7] * 10, "forced_tokens": 4000}, "forced_tokens 4000 after 10 input tokens"),
    ({"tokens": [7] * 10, "max_tokens": 31}, "needs up to 41 tokens of KV cache (10 of input)"),
    ({"tokens": []}, "tokens must be a list of at least one token id"), ("{", "not JSON")])
def test_what_cannot_run_is_said_and_the_others_run(llama, tmp_path, request_, why):
    plan = plan_of(tmp_path, llama[0])
    spool, errors = spooled(plan, {"tokens": [1, 2]}, request_, {"id": "c", "tokens": [3, 4, 5]})
    (error,) = errors
    assert error["line"] == 2 and why in error["error"]
    assert [(q.index, q.id, [*q.input_ids]) for q in queries_of(spool, plan)] == [
        (0, "1", [1, 2]), (1, "c", [3, 4, 5])]
    assert spec_of(llama[0]).max_positions is not None


def many(count: int) -> Requests:
    rng = np.random.default_rng(0)
    return Requests(input_tokens=rng.integers(1, 45, count),
                    caps=rng.integers(0, 9, count).astype(np.int32),
                    forced=np.zeros(count, np.int32), may_stop=np.zeros(count, bool),
                    unusable={3: "no tokens", count - 1: "no tokens"})


def test_which_can_run_does_not_depend_on_how_many_are_looked_at_together(monkeypatch, tmp_path):
    plan, spec, requests = plan_of(tmp_path, tmp_path), catalog.model("opt-125m"), many(200)
    whole, why = runnable(requests, plan, spec)
    assert 0 < len(whole) < 198 and len(whole) + len(why) == 200
    assert why[3] == why[199] == "no tokens" and not {3, 199} & set(whole[:, 0].tolist())
    for piece in (1, 7, 199):
        monkeypatch.setattr(looked_at, "_ROWS_AT_A_TIME", piece)
        pieces, said = runnable(requests, plan, spec)
        assert pieces.tolist() == whole.tolist() and said == why


def test_what_can_run_is_told_in_few_bytes_a_request(monkeypatch, tmp_path):
    """16 of the answer; ten million rows of all that decides had been 80 more."""
    monkeypatch.setattr(looked_at, "_ROWS_AT_A_TIME", 2**10)
    requests, count = many(2**17), 2**17
    requests = replace(requests, input_tokens=np.full(count, 9))
    tracemalloc.start()
    queries, _ = runnable(requests, plan_of(tmp_path, tmp_path), catalog.model("opt-125m"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(queries) == count - 2 and peak / count < 20, f"{peak / count:.1f} bytes a request"
