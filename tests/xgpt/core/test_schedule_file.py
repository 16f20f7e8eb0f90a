"""A Schedule written and read back is the same, infinities included."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from problems import (
    estimate_from_flat,
    estimate_of,
    schedule_from_flat,
    schedule_of,
    toy_problem,
)

from xgpt.core.deployment import StageAssignment
from xgpt.core.errors import InputError
from xgpt.core.schedule import Rejected, Schedule
from xgpt.core.schedule_file import (
    from_json,
    load_schedule,
    save_schedule,
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
            Rejected(kind="tp_degree", subject="4", reason="memory"),)}
    return schedule_from_flat(**{**values, **changes})


@pytest.mark.parametrize("changes", [
    {}, {"latency_bound_s": math.inf, "gap": math.inf, "bound_qps": math.inf},
    {"rejected": (), "unbounded_qps": 4.0},
    {"rejected": (Rejected(kind="policy", subject="x", throughput_qps=1.0, latency_s=math.inf,
                           reason="slow"),)},
])
def test_a_schedule_survives_its_file(tmp_path, changes):
    schedule, path = _schedule(**changes), tmp_path / "schedule.json"
    save_schedule(schedule, path)
    assert load_schedule(path) == schedule
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


def test_the_file_is_json_that_any_reader_takes(tmp_path):
    path = tmp_path / "schedule.json"
    save_schedule(_schedule(latency_bound_s=math.inf), path)

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is no JSON")

    raw = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert raw["bounds"][0]["limit_s"] == "inf" and raw["controls"]["encode_batch"] == 8


@pytest.mark.parametrize(("text", "said"), [
    ("[1]", "schedule"), ("{}", "schedule"), ("\x00", "schedule"), ("null", "schedule"),
    ("", "not a readable schedule"),
    ("[" * 100_000, "not a readable schedule"), (None, "not a readable schedule"),
    *((json.dumps({"version": version}), "this xgpt reads version 5: make") for version in (
        1, 99, [3], {"a": 1}, True, 3.0, "3", None, 2**70))])
def test_a_file_that_is_no_schedule_of_this_version_is_wrong_input(tmp_path, text, said):
    path = tmp_path / "schedule.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=said):
        load_schedule(path)


def test_whole_parts_are_replaced_and_fields_within_them_and_copies_have_ranks_of_their_own():
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
    one = _schedule().estimate
    three = one.in_copies(3)
    assert (three.deployment.num_devices, three.deployment.devices_per_replica) == (9, 3)
    assert three.figures.throughput_qps == 3 * one.figures.throughput_qps
    assert three.figures.latency_s == one.figures.latency_s
    assert [stage.ranks for stage in three.deployment.pools_of(2)[0].stages] == [(6, 7), (8,)]
    assert three.deployment.pools_of(0) == one.deployment.pools
    assert three.one_copy == one


def stage(raw: dict[str, Any], index: int) -> dict[str, Any]:
    found: dict[str, Any] = raw["deployment"]["pools"][0]["stages"][index]
    return found


@pytest.fixture
def raw():
    return to_json(schedule_of(toy_problem()))


@pytest.mark.parametrize(("change", "key", "allowed"), [
    (lambda raw: raw["deployment"]["pools"][0].update(role=1), "pools[0].role", "'both', 'encode'"),
    (lambda raw: raw["figures"].update(throughput_qps=math.nan), "throughput_qps", "finite number"),
    (lambda raw: raw["figures"].update(throughput_qps="inf"), "throughput_qps", "valid number"),
    (lambda raw: raw["figures"].update(fits="yes"), "fits", "valid boolean"),
    (lambda raw: raw["controls"]["even"].update(adjustment=-0.5), "even.adjustment", "equal to 0"),
    (lambda raw: raw["controls"].update(encode_batch=0), "encode_batch", "equal to 1"),
    (lambda raw: raw["controls"].update(decode_iterations=1e30), "decode_iterations", "integer"),
    (lambda raw: raw["controls"].update(decode_iterations=2.5), "decode_iterations", "integer"),
    (lambda raw: raw["controls"].update(encode_batch=True), "encode_batch", "integer"),
    (lambda raw: raw["proof"].update(nodes=2**63), "proof.nodes", "equal to 9007199254740992"),
    (lambda raw: stage(raw, 1).update(first_layer=99), "stages[1].first_layer", "begins where"),
    (lambda raw: stage(raw, 1).update(ranks=[0]), "deployment.pools", "in one stage"),
    (lambda raw: raw.update(fingerprint=7), "fingerprint", "string"),
    (lambda raw: raw.update(color="red"), "color", ""), (lambda raw: raw.update(bounds=[]), "", ""),
    (lambda raw: raw.update(rejected="DEEP"), "", ""),
    (lambda raw: raw["figures"].update(throughput_qps=10**400), "", ""),
    (lambda raw: raw["figures"].update(throughput_qps=-10**400), "", ""),
    (lambda raw: raw["deployment"].update(pools=[]), "", ""),
    (lambda raw: (stage(raw, 0).update(ranks=[1]), stage(raw, 1).update(ranks=[0])),
     "deployment.pools", "0 the first"),
    (lambda raw: raw["deployment"]["pools"][0].update(role="encode"), "deployment.pools", "roles")])
def test_a_value_that_cannot_be_is_named_with_what_is_allowed(raw, tmp_path, change, key, allowed):
    path = tmp_path / "schedule.json"
    change(raw)
    # text: Python's own encoder need not reach that far
    path.write_text(json.dumps(raw).replace('"DEEP"', "[" * 950 + "]" * 950))
    with pytest.raises(InputError) as refused:
        load_schedule(path)
    assert all(key in one.key and allowed in one.allowed for one in refused.value.mistakes)
    assert len(refused.value.mistakes) == 1 or not key


def test_what_a_search_writes_passes():
    problem = toy_problem(latency_s=2.0)
    for policy, variables in (("rra", {"encode_batch": 4, "decode_iterations": 8}),
                              ("waa-c", {"encode_batch": 4, "decode_micro_batches": 2})):
        schedule = schedule_of(problem, estimate_of(problem, policy, **variables))
        assert from_json(json.loads(json.dumps(to_json(schedule)))) == schedule, policy
