"""WAA's two pools: greedy float32 tokens equal transformers' `generate` for every family, whatever
the pools' stages, tensor-parallel degrees, layer splits and micro-batches. Caches are checked after
every step."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import toys
from examples import some
from replays import answers_of, generated
from toy_runs import ranks_of, run_waa_in_process, toy_waa_rules, waa_pools
from toys import generate, random_queries, spec_of

FAMILIES = ("llama", "opt", "gpt2", "t5")
# degrees of the encode and the decode pool's stages, decode groups, encode batch
CASES = [((1,), (1,), 1, 3), ((1,), (1, 1), 2, 4), ((1, 1), (1,), 3, 2), ((1, 1), (1, 1), 2, 3),
         ((2,), (1,), 1, 4), ((1,), (2,), 2, 3), ((2,), (2,), 3, 5), ((2, 1), (1, 2), 2, 1),
         ((1, 1, 1), (1, 1), 1, 2)]


# each case with one of the families
@pytest.mark.parametrize(("family", "encode", "decode", "groups", "batch"), some(
    [(family, *case) for place, family in enumerate(FAMILIES) for i, case in enumerate(CASES)
     if family in ("llama", "t5") or i % 4 == place],
    lambda case: case[0] == FAMILIES[CASES.index(case[1:]) % 4]))
def test_tokens_equal_generate(made, answered, family, encode, decode, groups, batch):
    queries, expected = answered(family)
    pools = waa_pools(made(family)[0], encode, decode)
    rules = toy_waa_rules(len(encode), encode_batch=batch, num_groups=groups)
    sink, executors = run_waa_in_process(made(family)[0], queries, pools, rules)
    assert answers_of(sink) == expected
    assert len(executors) == sum(encode) + sum(decode)


# two KV heads, which each pool of four ranks holds twice
@pytest.mark.parametrize(("encode", "decode"), [((4,), (1,)), ((1, 1), (4,)), ((4,), (2, 4))])
def test_copied_heads_are_handed_over_once_to_each_rank(tmp_path, encode, decode):
    model = toys.make_modern("llama", tmp_path, num_attention_heads=4)
    queries, pools = random_queries(6), waa_pools(tmp_path, encode, decode)
    rules = toy_waa_rules(len(encode), encode_batch=2, num_groups=2)
    sink, _ = run_waa_in_process(tmp_path, queries, pools, rules)
    assert answers_of(sink) == generated(model, queries)


@pytest.mark.parametrize(("family", "encode_cuts", "decode_cuts"), some(
    [(family, *cuts) for family in ("llama", "t5") for cuts in (
        ([1], [4]), ([4], [1]), ([2], [3]), ([3], [1]))],
    lambda case: case[1] == ([1] if case[0] == "llama" else [4])))
def test_pools_that_divide_layers_unevenly(made, answered, family, encode_cuts, decode_cuts):
    queries, expected = answered(family)
    cuts = [min(cut, 3) for cut in decode_cuts] if family == "t5" else decode_cuts
    pools = waa_pools(made(family)[0], (2, 1), (1, 2), encode_cuts, cuts)
    sink, _ = run_waa_in_process(made(family)[0], queries, pools, toy_waa_rules(2, num_groups=2))
    assert answers_of(sink) == expected


@pytest.mark.parametrize(("family", "encode", "decode", "groups", "batch", "chunk", "in_blocks"), [
    ("llama", (1,), (1,), 1, 3, 7, False), ("opt", (1, 1), (1, 1), 3, 2, 64, True),
    ("gpt2", (1,), (2, 1), 2, 4, 3, False), ("qwen2", (2,), (1,), 2, 2, 16, True)])
def test_decode_pools_that_encode_inputs_answer_as_generate_does(
        made, answered, family, encode, decode, groups, batch, chunk, in_blocks):
    queries, expected = answered(family)
    pools = waa_pools(made(family)[0], encode, decode)
    rules = toy_waa_rules(len(encode), encode_batch=batch, num_groups=groups, encode_chunk=chunk,
                          max_in_system=12)
    sink, executors = run_waa_in_process(made(family)[0], queries, pools, rules,
                                         in_blocks=in_blocks)
    assert answers_of(sink) == expected
    steps = executors[ranks_of(pools[1])[0]].log
    handed = sum(record.queries for record in executors[0].log)
    assert 0 < handed < len(queries), "both pools encode"
    chunks = [record.tokens - record.decoded for record in steps if record.kind != "decode"]
    assert chunks and max(chunks) <= chunk


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, "qwen2", "llama3-rope", "gpt2-untied", "t5-1.1",
                                    *toys.MODERN_FAMILIES])
@pytest.mark.parametrize(("encode", "decode"), [case[:2] for case in CASES])
def test_tokens_equal_generate_in_every_way(made, answered, family, encode, decode):
    queries, expected = answered(family)
    pools = waa_pools(made(family)[0], encode, decode)
    for groups, (batch, most) in product((1, 2, 3, 4), ((1, 1), (3, 8), (9, 17))):
        rules = toy_waa_rules(len(encode), encode_batch=batch, num_groups=groups,
                              max_in_system=most)
        sink, _ = run_waa_in_process(made(family)[0], queries, pools, rules)
        assert answers_of(sink) == expected, f"{groups = } {batch = } {most = }"


@pytest.mark.parametrize(("family", "encode", "decode"), some(
    [(family, *pools) for family in ("llama", "t5")
     for pools in (((1,), (1,)), ((1, 1), (2, 1)))],
    lambda case: case == ("llama", (1,), (1,))))
def test_an_encode_pool_that_has_to_wait_answers_as_generate_does(
        made, answered, family, encode, decode):
    """Tight bounds on queries, decode entries and encode entries: the encode pool waits."""
    queries, expected = answered(family)
    pools = waa_pools(made(family)[0], encode, decode)
    most = max(q.reserve_tokens for q in queries)
    for bounds in ({"max_in_system": 3}, {"kv_tokens": most + 1}, {"encode_kv_tokens": 25}):
        rules = toy_waa_rules(len(encode), num_groups=2, **bounds)
        sink, executors = run_waa_in_process(made(family)[0], queries, pools, rules)
        assert answers_of(sink) == expected
        decoded = [r.queries for e in executors.values() for r in e.log if r.kind == "decode"]
        assert 0 < max(decoded) <= rules[1].group_max_active


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("family", "groups", "chunk"), [("llama", 2, 0), ("opt", 1, 9)])
def test_looking_ahead_works_more_queries_at_a_time_in_the_same_blocks(made, family, groups, chunk):
    """A block that is not there is an error."""
    directory, _ = made(family)
    answers, means = list[dict[int, list[int]]](), list[float]()
    for admission in ("reserve", "future-peak"):
        rules = toy_waa_rules(1, encode_batch=1, num_groups=groups, max_in_system=40,
                              kv_tokens=160, encode_chunk=chunk, admission=admission)
        sink, executors = run_waa_in_process(directory, random_queries(40),
                                             waa_pools(directory, (1,), (1,)), rules,
                                             in_blocks=True)
        decoded = [record.decoded for record in executors[1].log if record.decoded]
        answers.append(answers_of(sink))
        means.append(sum(decoded) / len(decoded))
    assert answers[0] == answers[1] and len(answers[0]) == 40
    assert means[0] < means[1], f"{means = }"


@pytest.mark.parametrize("encode", some([((1,),), ((1, 1),), ((2,),)],
                                        lambda case: case == ((1, 1),)))
def test_who_ends_with_the_first_token_stays_behind(made, encode):
    """By its limit, or (known only then) by its end of sequence or a stop string."""
    directory, model = made("llama")
    queries = random_queries(12, seed=3)
    first = {q.index: generate(model, replace(q, max_new_tokens=1))[0] for q in queries}
    job = []
    for q in queries:
        way = q.index % 4
        job.append(replace(q, max_new_tokens=1) if way == 0 else
                   replace(q, max_new_tokens=9, stop=(str(first[q.index]),)) if way == 1 else
                   replace(q, max_new_tokens=9, is_forced=True))
    pools = waa_pools(directory, encode, (1, 1))
    rules = toy_waa_rules(len(encode), encode_batch=4, num_groups=2, max_in_system=9)
    sink, executors = run_waa_in_process(directory, job, pools, rules)
    expected = {q.index: [first[q.index]] if q.index % 4 < 2 else generate(model, q) for q in job}
    assert answers_of(sink) == expected
    reasons = {r.query.index: r.finish_reason for r in sink.results}
    assert {reasons[i] for i in range(0, 12, 4)} == {"length"}
    assert {reasons[i] for i in range(1, 12, 4)} == {"stop"}
    decoded = {r.queries for e in executors.values() for r in e.log if r.kind == "decode"}
    assert max(decoded) <= 3  # of two groups, six of the twelve never come to decode
    sent = sum(e.sender.num_bytes for e in executors.values() if e.sender is not None)
    got = sum(e.receiver.num_bytes for e in executors.values() if e.receiver is not None)
    spec = spec_of(directory)
    token_bytes = spec.num_layers * 2 * spec.kv_heads * spec.head_dim * 4
    assert sent == got == token_bytes * sum(len(q.input_ids) for q in job if q.max_new_tokens > 1)


def test_a_job_that_ends_with_first_tokens_alone(made):
    directory, model = made("opt")
    queries = [replace(q, max_new_tokens=1) for q in random_queries(7, seed=8)]
    sink, executors = run_waa_in_process(directory, queries, waa_pools(directory, (1,), (1,)),
                                         toy_waa_rules(1))
    assert answers_of(sink) == generated(model, queries)
    assert not executors[1].log and executors[1].receiver.num_bytes == 0
