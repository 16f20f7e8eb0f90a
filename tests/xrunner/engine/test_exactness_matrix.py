"""Greedy float32 tokens equal transformers' `generate`: every family, policy, layout of ranks,
number of micro-batches, and way in which queries join, leave and are compacted. Caches are checked
after every step. test_replay_equality.py has more, test_waa_run.py those of two pools."""

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import toys
from examples import some
from holding import rule_of
from replays import answers_of, generated, steps_of
from toy_runs import run_in_process, stages_of
from toys import random_queries

FAMILIES = ("llama", "opt", "gpt2", "t5")
OTHERS = ("llama-tied", "llama3-rope", "qwen2", "mistral", "gpt2-untied", "t5-1.1")
# the logits of all are compared in test_exactness.py
MODERN = ("qwen2-windows", "gemma3", "phi4-mini", "granite", "qwen3-moe")
CONTINUOUS = ("orca", "vllm", "sarathi", "mixed", "lightllm")  # of decoder-only models
# tensor-parallel degree of each stage, and micro-batches, encode_batch, decode_iterations
CASES = [((1,), 2, 4, 5), ((2,), 1, 3, 2), ((1, 1), 1, 4, 5), ((2, 1), 2, 4, 1), ((1, 2), 3, 3, 4),
         ((2, 2), 4, 5, 3), ((1, 1, 1), 3, 9, 30), ((2, 1, 1), 4, 1, 1), ((1, 2, 1), 1, 2, 3),
         ((1, 1, 2), 2, 6, 2), ((1, 1, 1, 1), 4, 4, 5)]


# each layout with one of the families, and each family with a quarter of the layouts
@pytest.mark.parametrize(("family", "degrees", "groups", "batch", "iterations"), [
    *some([(family, *case) for family in FAMILIES for case in CASES],
          lambda case: (FAMILIES.index(case[0]) + CASES.index(case[1:])) % 4 == 0
          and case[:2] != ("t5", (2, 2))),  # which takes as long as three others
    *((family, (1, 1), 2, 4, 5) for family in OTHERS),
    *((family, (2, 1), 2, 4, 5) for family in MODERN)])
def test_tokens_equal_generate(made, answered, family, degrees, groups, batch, iterations):
    queries, expected = answered(family)
    sink, executors = run_in_process(made(family)[0], queries, degrees=degrees, num_groups=groups,
                                     encode_batch=batch, decode_iterations=iterations)
    assert answers_of(sink) == expected
    assert len(executors) == sum(degrees)
    assert all(not any(e.awaits_encoded(group) for group in range(groups)) for e in executors)


def baseline(policy: str, groups: int, batch: int) -> Any:
    """`batch`: queries at a time, in each group; where entries are paged these are short of six
    blocks, of which a query may need three."""
    is_paged = policy in CONTINUOUS[1:]
    return rule_of(policy, groups=groups, batch=batch * groups, budget=9 if policy == "sarathi"
                   else 40, kv_tokens=96 * groups if is_paged else 10_000)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("family", "policy", "degrees", "groups", "batch"), [
    ("opt", "ft", (1, 1), 2, 5), ("gpt2", "dsi", (2, 1), 2, 5), ("llama", "ft", (1, 1), 2, 1),
    ("qwen2", "orca", (2, 1), 2, 5), ("gpt2", "orca", (1,), 1, 5), ("opt", "vllm", (1, 2), 2, 5),
    ("llama", "vllm", (1, 1), 2, 1), ("gpt2", "sarathi", (2,), 1, 5),
    ("llama", "sarathi", (1, 1), 2, 17), ("gpt2", "mixed", (1, 1), 2, 5),
    ("llama", "mixed", (2,), 1, 5), ("opt", "lightllm", (1, 2), 2, 5)])
def test_baselines_answer_as_generate_does(made, answered, family, policy, degrees, groups, batch):
    queries, expected = answered(family)
    sink, executors = run_in_process(made(family)[0], queries, degrees=degrees,
                                     rule=baseline(policy, groups, batch))
    assert answers_of(sink) == expected
    assert all(steps_of(e.log) == steps_of(executors[0].log) for e in executors)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["rra", "ft", "dsi", *CONTINUOUS])
@pytest.mark.parametrize("degrees", [case[0] for case in CASES])
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS, *toys.MODERN_FAMILIES])
def test_tokens_equal_generate_in_every_way(made, answered, small_blocks, family, degrees, policy):
    queries, expected = answered(family)
    if policy in CONTINUOUS and family in toys.T5_FAMILIES:
        pytest.skip("continuous batches are of decoder-only models")
    for groups, (batch, iterations) in product((1, 2, 4), ((1, 1), (3, 2), (9, 30))):
        rule = (baseline(policy, groups, batch) if policy != "rra" else rule_of(
            "rra", groups=groups, batch=12, encode=batch, iterations=iterations))
        sink, _ = run_in_process(made(family)[0], queries, degrees=degrees, rule=rule)
        assert answers_of(sink) == expected, f"{groups = } {batch = } {iterations = }"


def test_dead_rows_go_on_beyond_the_models_positions(made):
    """OPT has 128 learned positions; a long input's row is decoded on with the longest output."""
    directory, model = made("opt")
    first, second = (replace(query, is_forced=True) for query in random_queries(2, seed=4))
    queries = [replace(first, input_ids=(first.input_ids * 40)[:120], max_new_tokens=8),
               replace(second, max_new_tokens=100)]
    sink, _ = run_in_process(directory, queries, degrees=(1, 1), rule=baseline("ft", 1, 5))
    assert answers_of(sink) == generated(model, queries)


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
    for early in subsets if family == "llama" else subsets[::4]:
        job = [replace(q, max_new_tokens=3) if q.index in early else q for q in queries]
        sink, executors = run_in_process(directory, job, degrees=degrees, decode_iterations=9)
        assert answers_of(sink) == {q.index: longest[q.index][:q.max_new_tokens] for q in job}
        # the last slots close the gaps before them
        moved = len({slot for slot in range(4 - len(early)) if slot in early})
        assert {e.rows_compacted for e in executors} == {moved}, f"{early = }"


def test_ranks_of_a_group_take_the_same_steps_and_share_the_memory(made, answered):
    for family in ("llama", "t5"):
        _, executors = run_in_process(made(family)[0], answered(family)[0], degrees=(2, 1),
                                      num_groups=2)
        steps = [steps_of(e.log) for e in executors]
        assert steps[0] == steps[1] == steps[2]
        heads = [e.groups[0].cache.store.shape[3] for e in (executors[0], executors[2])]
        assert heads[1] == 2 * heads[0]


def test_a_stage_without_an_encoder_layer_passes_on_what_comes(made, answered):
    directory = made("t5")[0]
    counts = [(0, 0), (0, 5), (5, 0)]  # the first stage only embeds the input
    stages = [replace(stage, first_encoder_layer=first, num_encoder_layers=count)
              for stage, (first, count) in zip(stages_of(directory, (1,) * 3), counts, strict=True)]
    queries, expected = answered("t5")
    sink, _ = run_in_process(directory, queries, stages=stages, num_groups=3)
    assert answers_of(sink) == expected
