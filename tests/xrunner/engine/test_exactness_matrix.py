"""Greedy float32 tokens equal transformers' `generate`: every family, layout of ranks, number of
micro-batches, and way in which queries join, leave and are compacted. Caches are checked after
every step."""

from dataclasses import replace
from itertools import combinations, product

import pytest
from examples import some
from replays import answers_of, generated
from toy_runs import Collector, run_in_process, stages_of
from toys import random_queries

from xrunner.engine.stage import StageExecutor

FAMILIES = ("llama", "opt", "gpt2", "t5")
# tensor-parallel degree of each stage, and micro-batches, encode_batch, decode_iterations
CASES = [((1,), 2, 4, 5), ((2,), 1, 3, 2), ((1, 1), 1, 4, 5), ((2, 1), 2, 4, 1), ((1, 2), 3, 3, 4),
         ((2, 2), 4, 5, 3), ((1, 1, 1), 3, 9, 30), ((2, 1, 1), 4, 1, 1), ((1, 2, 1), 1, 2, 3),
         ((1, 1, 2), 2, 6, 2), ((1, 1, 1, 1), 4, 4, 5)]


# each layout with one of the families, and each family with a quarter of the layouts
@pytest.mark.parametrize(("family", "degrees", "groups", "batch", "iterations"), some(
    [(family, *case) for family in FAMILIES for case in CASES],
    lambda case: (FAMILIES.index(case[0]) + CASES.index(case[1:])) % 4 == 0
    and case[:2] != ("t5", (2, 2))))  # which takes as long as three others
def test_tokens_equal_generate(made, answered, family, degrees, groups, batch, iterations):
    queries, expected = answered(family)
    sink, executors = run_in_process(made(family)[0], queries, degrees=degrees, num_groups=groups,
                                     encode_batch=batch, decode_iterations=iterations)
    assert answers_of(sink) == expected
    assert len(executors) == sum(degrees)
    assert all(not any(e.awaits_encoded(group) for group in range(groups)) for e in executors)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [case[0] for case in CASES])
@pytest.mark.parametrize("family", [*FAMILIES, "qwen2", "llama3-rope", "gpt2-untied", "t5-1.1"])
def test_tokens_equal_generate_in_every_way(made, answered, family, degrees):
    queries, expected = answered(family)
    for groups, (batch, iterations) in product((1, 2, 3, 4), ((1, 1), (3, 2), (9, 30))):
        sink, _ = run_in_process(made(family)[0], queries, degrees=degrees, num_groups=groups,
                                 encode_batch=batch, decode_iterations=iterations)
        assert answers_of(sink) == expected, f"{groups = } {batch = } {iterations = }"


# who moves where does not hang on the family, but on whether there are two caches
@pytest.mark.parametrize(("family", "degrees"), some(
    product(FAMILIES, [(1,), (1, 2)]),
    lambda case: (case[0] in ("llama", "t5")) == (case[1] == (1,))))
def test_queries_end_early_in_every_position(made, family, degrees):
    """Of four queries that are encoded together, every subset leaves after three tokens."""
    directory, model = made(family)
    queries = [replace(q, max_new_tokens=7, is_forced=True) for q in random_queries(4, seed=5)]
    longest = generated(model, queries)
    subsets = [set(c) for size in range(1, 5) for c in combinations(range(4), size)]
    for early in subsets if degrees == (1,) else subsets[::4]:
        job = [replace(q, max_new_tokens=3) if q.index in early else q for q in queries]
        sink, executors = run_in_process(directory, job, degrees=degrees, decode_iterations=9)
        assert answers_of(sink) == {q.index: longest[q.index][:q.max_new_tokens] for q in job}
        # the last slots close the gaps before them
        moved = len({slot for slot in range(4 - len(early)) if slot in early})
        assert {e.rows_compacted for e in executors} == {moved}, f"{early = }"


@pytest.mark.parametrize(("family", "degrees"), some(
    product(FAMILIES, [(1,), (2, 1)]),
    lambda case: (case[0] in ("llama", "t5")) == (case[1] == (2, 1))))
def test_a_row_is_compacted_after_every_iteration(made, family, degrees):
    """The query in the first slot ends at each iteration, so that the last one takes its place."""
    directory, model = made(family)
    queries = [replace(q, max_new_tokens=3 + (-q.index) % 6, is_forced=True)
               for q in random_queries(6, seed=7)]
    sink, executors = run_in_process(directory, queries, degrees=degrees, encode_batch=6,
                                     decode_iterations=12)
    assert answers_of(sink) == generated(model, queries)
    assert {e.rows_compacted for e in executors} == {5}


def test_ranks_of_a_group_take_the_same_steps_and_share_the_memory(made, answered):
    for family in ("llama", "t5"):
        directory, queries = made(family)[0], answered(family)[0]
        _, executors = run_in_process(directory, queries, degrees=(2, 1), num_groups=2)
        steps = [[r[:6] for r in e.log if r.kind != "cross_kv"] for e in executors]
        assert steps[0] == steps[1] == steps[2]
        shared, whole = executors[0], executors[2]
        heads = [e.groups[0].cache.store.shape[3] for e in (shared, whole)]
        assert heads[1] == 2 * heads[0]
        assert _busy(shared) == pytest.approx(shared.records.busy_s)


def test_a_stage_without_an_encoder_layer_passes_on_what_comes(made, answered):
    directory = made("t5")[0]
    stages = stages_of(directory, (1, 1, 1))
    counts = [(0, 0), (0, 5), (5, 0)]  # the first stage only embeds the input
    stages = [replace(stage, first_encoder_layer=first, num_encoder_layers=count)
              for stage, (first, count) in zip(stages, counts, strict=True)]
    queries, expected = answered("t5")
    sink, _ = run_in_process(directory, queries, stages=stages, num_groups=3)
    assert answers_of(sink) == expected


@pytest.mark.parametrize(("family", "degrees"), some(
    product(["llama", "t5"], [(1, 1, 1), (2, 2)]),
    lambda case: (case[0] == "t5") == (case[1] == (1, 1, 1))))
def test_stopping_early_ends_every_rank(made, answered, family, degrees):
    queries, expected = answered(family)
    for after in (1, 5):
        sink, executors = run_in_process(made(family)[0], queries, degrees=degrees, num_groups=3,
                                         sink=Collector(stop_after=after))
        assert after <= len(sink.results) < len(queries)
        assert answers_of(sink).items() <= expected.items()
        assert not any(e.awaits_encoded() for e in executors)


def _busy(executor: StageExecutor) -> float:
    return sum(record.end_s - record.start_s for record in executor.log)
