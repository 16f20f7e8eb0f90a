"""A model on tiers answers as one in memory does, wherever its bytes lie and in whatever order."""

import threading
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples import some
from holding import rule_of
from replayed import problem_of
from replays import answers_of
from toy_runs import executor_of, run_in_process, stages_of
from toys import random_queries

from xgpt.core import catalog
from xgpt.core.cluster import Tier
from xgpt.core.deployment import StageAssignment
from xgpt.core.errors import XgptError
from xgpt.core.placement import DISK, SECTOR, TIERS, Placement, queries_by_tier
from xrunner.rank.loading import KeptWeights, Weights
from xsimulator.memory import StageBytes, largest_rows
from xsimulator.placed_memory import PlacedMemory

FAMILIES = ("llama", "qwen2", "opt", "gpt2", "mixtral", "qwen3-moe", "gemma2")
SHARES = {
    "weights on disk": {"weights": (0.2, 0.0, 0.8)},
    "all weights on disk": {"weights": (0.0, 0.0, 1.0)},
    "entries on disk": {"kv": (0.25, 0.0, 0.75)},
    "three tiers": {"weights": (0.2, 0.4, 0.4), "kv": (0.2, 0.4, 0.4), "hidden": (0.5, 0.5, 0.0)},
    "all on disk": {"weights": (0.0, 0.0, 1.0), "kv": (0.0, 0.0, 1.0)}}


def placement_of(shares: str = "three tiers", **other: Any) -> Placement:
    whole = (1.0, 0.0, 0.0)
    return Placement(**{"weights": whole, "kv": whole, "hidden": whole, "device_batch": 3,
                        **SHARES[shares], **other})


def answers_on_tiers(directory, queries, placement, tmp_path, *, policy="ft", stages=1, batch=8,
                     **own):
    rule = rule_of(policy, groups=stages, batch=batch) if policy == "ft" else None
    sink, executors = run_in_process(directory, queries, num_stages=stages, num_groups=stages,
                                     rule=rule, placed=(placement, tmp_path), **own)
    return answers_of(sink), executors


@pytest.mark.parametrize(("family", "shares", "policy", "stages", "order"), some(
    [(family, shares, policy, stages, order) for family in FAMILIES for shares in SHARES
     for policy in ("ft", "rra") for stages in (1, 2) for order in ("zigzag", "row")],
    lambda case: case[0] == "llama" and (case[3] == 1 or case[1] == "three tiers")
    or case[1:] == ("three tiers", "rra", 1, "zigzag")), ids=str)
def test_tokens_are_those_of_the_model_in_memory(
        made, answered, tmp_path, family, shares, policy, stages, order):
    directory, (queries, wanted) = made(family)[0], answered(family)
    placement = placement_of(shares, order=order)
    found, executors = answers_on_tiers(directory, queries, placement, tmp_path, policy=policy,
                                        stages=stages)
    assert found == wanted
    for executor in executors:
        moved = executor.model.report(1.0).num_bytes
        assert (moved["read"] > 0) == (placement.weights[2] > 0)


@pytest.mark.parametrize(("dtype", "own"), [
    (torch.float32, {"host_attention": True}), (torch.float32, {"overlap": False}),
    (torch.float32, {"host_attention": True, "overlap": False, "device_batch": 1}),
    (torch.bfloat16, {"device_batch": 20}), (torch.bfloat16, {"host_attention": True})], ids=str)
def test_neither_host_attention_nor_overlap_changes_a_token(made, tmp_path, dtype, own):
    """In bfloat16 the products are those of a model in memory with the same layout."""
    directory, queries = made("llama")[0], random_queries(17)
    whole = (1.0, 0.0, 0.0)
    found, _ = answers_on_tiers(directory, queries, placement_of(**own), tmp_path, dtype=dtype)
    in_memory, _ = answers_on_tiers(directory, queries, placement_of(
        weights=whole, kv=whole, hidden=whole, **own), tmp_path, dtype=dtype)
    assert found == in_memory


def test_weights_are_loaded_once_a_step_in_zig_zag_and_once_a_batch_in_row_order(made, tmp_path):
    """FlexGen's n l of the one and K n l of the other: 5 layers, 3 tokens, 4 batches."""
    directory = made("llama")[0]
    queries = [replace(query, max_new_tokens=3, is_forced=True) for query in random_queries(12)]
    loads = {}
    for order in ("zigzag", "row"):
        _, (executor,) = answers_on_tiers(
            directory, queries, placement_of("all weights on disk", order=order), tmp_path,
            batch=12)
        loads[order] = sum(executor.model.lender.loads[layer] for layer in range(5))
    assert loads == {"zigzag": 15, "row": 60}


def test_runs_one_after_the_other_have_their_own_figures_and_leave_nothing(made, tmp_path):
    directory, queries, before = made("llama")[0], random_queries(9), {*threading.enumerate()}
    _, executors = answers_on_tiers(directory, queries, placement_of(), tmp_path)
    kept, model = KeptWeights(), weakref.ref(executors[0].model)
    kept.weights("one placement", partial(Weights, executors.pop().model, 0.0, 0))
    report = model().report(1.0)
    assert report.num_bytes["read"] and report.seconds["read"] and report.waited_s
    again = model().report(1.0)
    assert not any(again.num_bytes.values()) and again.seconds["compute"] == 1.0
    assert 0 < again.peaks["device"] < report.peaks["device"], "the KV cache was given back"
    kept.weights("another", partial(Weights, None, 0.0, 0))
    assert model() is None
    assert not [own for own in Path("/proc/self/fd").iterdir() if tmp_path in own.resolve().parents]
    assert {*threading.enumerate()} <= before


def test_bytes_read_are_counted_once(made, tmp_path):
    _, (executor,) = answers_on_tiers(made("llama")[0], random_queries(9), placement_of(
        "all weights on disk"), tmp_path)
    read = executor.model.lender.file.file.bytes_read
    assert executor.model.report(1.0).num_bytes["read"] == read > 0


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_experts_are_read_once_a_step_and_only_those_that_rows_reach(made, tmp_path, family):
    """The experts that rows reach are those of the model in memory, in the same steps."""
    directory, queries = made(family)[0], random_queries(17)
    stage, reached = stages_of(directory, [1])[0], Counter()
    in_memory = executor_of(directory, stage)
    for index, layer in enumerate(in_memory.model.layers):
        layer.weights.mlp.lend = lambda expert, _, index=index: reached.update([(index, expert)])
    run_in_process(directory, queries, stages=[stage], rule=rule_of("ft", batch=8),
                   executors=[in_memory])
    _, (executor,) = answers_on_tiers(
        directory, queries, placement_of("all weights on disk"), tmp_path)
    loads = executor.model.lender.loads
    assert {unit: count for unit, count in loads.items()
            if isinstance(unit, tuple) and unit[0] != "head"} == reached
    assert sum(reached.values()) < sum(loads[layer] for layer in range(5)) * (
        executor.model.spec.decoder.experts.count)


@pytest.mark.parametrize("bits", [{"weight_bits": 4}, {"kv_bits": 4},
                                  {"weight_bits": 4, "kv_bits": 4}], ids=str)
def test_four_bits_answer_alike_wherever_weights_lie(made, tmp_path, bits):
    directory, queries = made("llama")[0], random_queries(17)
    found = [answers_on_tiers(directory, queries, placement_of(
        **{"weights": weights, "kv": (0.0, 0.5, 0.5), **bits}), tmp_path)[0]
        for weights in ((1.0, 0.0, 0.0), (0.2, 0.4, 0.4), (0.0, 0.0, 1.0))]
    assert found[0] == found[1] == found[2]


def test_a_byte_less_than_it_takes_is_refused_in_words(made, tmp_path):
    directory, queries = made("llama")[0], random_queries(9)
    placement = placement_of()
    _, (executor,) = answers_on_tiers(directory, queries, placement, tmp_path)
    peaks = tuple(executor.model.report(1.0).peaks.values())
    assert all(peaks)
    answers_on_tiers(directory, queries, replace(placement, budgets=(peaks,)), tmp_path)
    for tier, name in enumerate(TIERS):
        less = tuple(peak - (own == tier) for own, peak in enumerate(peaks))
        with pytest.raises(XgptError, match=f"the tier {name}, where .* planned bytes are taken"):
            answers_on_tiers(directory, queries, replace(placement, budgets=(less,)), tmp_path)


@pytest.mark.parametrize(("family", "shares", "stages", "own"), [
    *((family, "three tiers", 1, {}) for family in FAMILIES),
    ("qwen3-moe", "three tiers", 1, {"weight_bits": 4}),
    ("llama", "three tiers", 2, {"weight_bits": 4, "kv_bits": 4}),
    ("llama", "three tiers", 2, {"host_attention": True}),
    ("llama", "all on disk", 1, {}), ("llama", "weights on disk", 2, {})], ids=str)
def test_no_tier_takes_more_than_the_planner_counts(made, tmp_path, family, shares, stages, own):
    """Arenas count all but activations and the file of weights. Of these bytes the plan has at most
    20 sectors a tier more than is taken, and hidden states as of the longest inputs."""
    directory, queries = made(family)[0], random_queries(17)
    placement = placement_of(shares, **own)
    _, executors = answers_on_tiers(directory, queries, placement, tmp_path, stages=stages,
                                    dtype=torch.bfloat16)
    lengths = np.array([[len(query.input_ids), query.max_new_tokens] for query in queries])
    problem = problem_of(directory, lengths, stages)
    link = catalog.link("pcie3-x16")
    tiers = tuple(Tier(name=name, memory_bytes=2**40, up=link, down=link) for name in TIERS[1:])
    problem = replace(problem, **dict.fromkeys(("dtype", "kv_dtype", "weight_dtype"), "bfloat16"),
                      cluster=replace(problem.cluster, tiers=tiers, device=replace(
                          problem.cluster.device, kind="cpu")))
    assigned = [StageAssignment(index=index, ranks=(index,), first_layer=0,
                                num_layers=len(executor.model.layers))
                for index, executor in enumerate(executors)]
    planned = PlacedMemory(problem, assigned).held(
        placement, 8 // stages, int(lengths.max(0).sum()) + 1, stages)
    most = min(placement.device_batch, max(map(len, queries_by_tier(8 // stages, placement.kv))))
    activations = StageBytes(problem, assigned).step(
        largest_rows(problem.lengths.inputs, np.array(float(most))), most)
    for own, step, executor in zip(planned, activations, executors, strict=True):
        peaks = executor.model.report(1.0).peaks
        taken = np.array([peaks.get(name, 0) for name in TIERS])
        counted = own.sum(-1) - np.array([step, 0, own[DISK, [0, 3]].sum()])
        assert (counted >= taken).all() and (counted - own[:, 2] <= taken + 20 * SECTOR).all()
