"""What a profile is to cover for a job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from problems import problem_of

from xgpt.app.profile_needs import needs_of
from xprofiler.points import Kind, skeleton


@pytest.mark.parametrize(("model", "kv_layout", "kind", "moves"), [
    ("opt-13b", "auto", "gpu", False), ("opt-13b", "blocks", "gpu", False),
    ("opt-13b", "rows", "gpu", True), ("t5-11b", "auto", "gpu", True),
    ("opt-13b", "auto", "cpu", True)])
def test_copies_of_rows_are_timed_where_rows_are_copied(model: str, kv_layout: str, kind: str,
                                                        moves: bool) -> None:
    problem = problem_of(model, "a40-4", "S")
    cluster = problem.cluster
    device = replace(cluster.device, kind=kind)
    problem = replace(problem, cluster=replace(
        cluster, groups=(replace(cluster.only, device=device),)))
    needs = needs_of(problem, kv_layout)
    points = skeleton(problem.model, needs)
    assert needs.moves_rows == moves == any(p.kind is Kind.COMPACTION for p in points)


def test_a_gpu_s_batches_are_no_larger_than_what_is_captured() -> None:
    needs = needs_of(problem_of("opt-1.3b", "a40-4", "S"))
    assert needs.queries == 500 and max(
        p.x for p in skeleton(problem_of("opt-1.3b", "a40-4", "S").model, needs)
        if p.kind is Kind.DECODE) == 500


def test_caches_of_an_encoder_decoder_models_steps_have_room_in_a_quarter_of_the_memory() -> None:
    """Its decode steps read as many tokens of input as of output."""
    problem = problem_of("t5-11b", "a40-4", "S")
    problem = replace(problem, default_max_tokens=5_000)
    needs, model = needs_of(problem), problem.model
    entry = 2 * model.kv_elements_per_token_layer * 2
    assert needs.context_tokens >= 5_000 and needs.queries > 9
    assert needs.queries * needs.context_tokens * entry <= problem.cluster.device.memory_bytes / 4
