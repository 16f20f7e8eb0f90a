"""A Schedule written and read back is the same, infinities included."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from problems import estimate_from_flat

from xgpt.core.deployment import StageAssignment
from xgpt.core.errors import InputError
from xgpt.core.schedule import Rejected, Schedule
from xgpt.core.schedule_file import (
    from_json,
    load_schedule,
    save_schedule,
    schedule_from_flat,
    to_json,
)


def _schedule(**changes: Any) -> Schedule:
    stages = (StageAssignment(index=0, ranks=(0, 1), first_layer=0, num_layers=3),
              StageAssignment(index=1, ranks=(2,), first_layer=3, num_layers=2))
    estimate = estimate_from_flat(
        policy="rra", encode_batch=8, decode_batch=31.5, decode_iterations=4, tp_degree=2,
        decode_micro_batches=1, tp_gpus=2, throughput_qps=3.25, output_tokens_per_s=104.0,
        latency_s=2.5, encode_s=0.5, decode_iteration_s=0.03, period_s=0.62, fits=True,
        memory_bytes=(10, 20, 30), memory_capacity_bytes=40, kv_tokens=5000, stages=stages,
        notes=("one",))
    values: dict[str, Any] = {
        "estimate": estimate, "latency_bound_s": 11.5, "constraint_kind": "sequence",
        "quantile": 0.99, "status": "optimal", "bound_qps": 3.3, "gap": 0.0154, "nodes": 17,
        "seconds": 0.2, "fingerprint": "0123456789abcdef", "rejected": (
            Rejected(label="tp 4", throughput_qps=None, latency_s=None, reason="memory"),)}
    return schedule_from_flat(**{**values, **changes})


@pytest.mark.parametrize("changes", [
    {}, {"latency_bound_s": math.inf, "gap": math.inf, "bound_qps": math.inf},
    {"rejected": (), "unbounded_qps": 4.0},
    {"rejected": (Rejected(label="x", throughput_qps=1.0, latency_s=math.inf, reason="slow"),)},
])
def test_a_schedule_survives_its_file(tmp_path: Path, changes: dict[str, Any]) -> None:
    schedule, path = _schedule(**changes), tmp_path / "schedule.json"
    save_schedule(schedule, path)
    assert load_schedule(path) == schedule
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


def test_the_file_is_json_that_any_reader_takes(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    save_schedule(_schedule(latency_bound_s=math.inf), path)

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is no JSON")

    raw = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert raw["bounds"][0]["limit_s"] == "inf" and raw["controls"]["encode_batch"] == 8


@pytest.mark.parametrize("text", [
    "", "[1]", "{}", '{"version": 99}', '{"version": 1}', "\x00", "null"])
def test_a_file_that_is_no_schedule_is_wrong_input(tmp_path: Path, text: str) -> None:
    path = tmp_path / "schedule.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError):
        load_schedule(path)


def test_a_missing_file_is_wrong_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a readable schedule"):
        load_schedule(tmp_path / "none.json")


def test_foreign_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="color"):
        from_json({**to_json(_schedule()), "color": "red"})


def test_an_estimate_is_replaced_in_place() -> None:
    changed = _schedule().changed(throughput_qps=9.0)
    assert changed.estimate.figures.throughput_qps == 9.0 and changed.proof.nodes == 17


def test_whole_parts_are_replaced_and_fields_within_them() -> None:
    schedule = _schedule()
    estimate = schedule.estimate
    other = estimate.changed(encode_batch=2, latency_s=9.0, kv_tokens=70)
    parts = {part: getattr(other, part) for part in ("controls", "deployment", "figures")}
    assert estimate.changed(**parts) == other == schedule.changed(**parts).estimate
    assert estimate.changed(**parts, kv_tokens=80) == other.changed(kv_tokens=80) != other
    pools = other.deployment.pools
    assert estimate.changed(pools=pools, num_groups=3).deployment.num_groups == 3
    assert estimate.changed(name="b").deployment.decoding.name == "b"
    proof = replace(schedule.proof, nodes=3)
    assert schedule.changed(proof=proof, gap=0.5).proof == replace(proof, gap=0.5)
    bounds = (replace(schedule.bound, limit_s=7.0),)
    assert schedule.changed(bounds=bounds, quantile=0.5).bound == replace(bounds[0], quantile=0.5)
    with pytest.raises(TypeError, match="color"):
        schedule.changed(color="red")


def test_a_stages_degree_is_its_number_of_ranks() -> None:
    assert [stage.tp_degree for stage in _schedule().estimate.deployment.stages] == [2, 1]


def test_copies_are_alike_and_have_ranks_of_their_own() -> None:
    one = _schedule().estimate
    three = one.in_copies(3)
    assert (three.deployment.num_devices, three.deployment.devices_per_replica) == (9, 3)
    assert three.figures.throughput_qps == 3 * one.figures.throughput_qps
    assert three.figures.latency_s == one.figures.latency_s
    assert [stage.ranks for stage in three.deployment.pools_of(2)[0].stages] == [(6, 7), (8,)]
    assert three.deployment.pools_of(0) == one.deployment.pools
    assert three.one_copy == one
