"""A schedule's file that was edited is refused by the keys that cannot be."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from problems import estimate_of, schedule_of, toy_problem

from xgpt.core.errors import InputError
from xgpt.core.schedule_file import from_json, load_schedule, to_json

Change = Callable[[dict[str, Any]], object]


def stage(raw: dict[str, Any], index: int) -> dict[str, Any]:
    found: dict[str, Any] = raw["deployment"]["pools"][0]["stages"][index]
    return found


@pytest.fixture
def raw() -> dict[str, Any]:
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
    (lambda raw: raw.update(fingerprint=7), "fingerprint", "string")])
def test_a_value_that_cannot_be_is_named_with_what_is_allowed(
        raw: dict[str, Any], tmp_path: Path, change: Change, key: str, allowed: str) -> None:
    path = tmp_path / "schedule.json"
    change(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(InputError) as refused:
        load_schedule(path)
    (mistake,) = refused.value.mistakes
    assert key in mistake.key and allowed in mistake.allowed, mistake


def test_all_mistakes_are_told_at_once(raw: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    raw["controls"]["encode_batch"], raw["figures"]["latency_s"] = -1, -2.0
    path.write_text(json.dumps(raw))
    with pytest.raises(InputError) as refused:
        load_schedule(path)
    assert [mistake.key for mistake in refused.value.mistakes] == [
        "controls.encode_batch", "figures.latency_s"]


def test_what_a_search_writes_passes() -> None:
    problem = toy_problem(latency_s=2.0)
    for policy, variables in (("rra", {"encode_batch": 4, "decode_iterations": 8}),
                              ("waa-c", {"encode_batch": 4, "decode_micro_batches": 2})):
        schedule = schedule_of(problem, estimate_of(problem, policy, **variables))
        assert from_json(json.loads(json.dumps(to_json(schedule)))) == schedule, policy


def test_json_that_is_nested_without_end_is_no_schedule(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    path.write_text("[" * 100_000)
    with pytest.raises(InputError, match="not a readable schedule"):
        load_schedule(path)


@pytest.mark.parametrize("version", [[3], {"a": 1}, True, 3.0, "3", None, 2**70])
def test_a_version_that_is_no_whole_number_is_refused(tmp_path: Path, version: object) -> None:
    path = tmp_path / "schedule.json"
    path.write_text(json.dumps({"version": version}))
    with pytest.raises(InputError, match="this xgpt reads version 5: make"):
        load_schedule(path)


_DEEP = "[" * 950 + "]" * 950  # text: Python's own encoder need not reach that far


@pytest.mark.parametrize("change", [
    lambda raw: raw.update(bounds=[]), lambda raw: raw.update(rejected="DEEP"),
    lambda raw: raw["figures"].update(throughput_qps=10**400),
    lambda raw: raw["figures"].update(throughput_qps=-10**400),
    lambda raw: raw["deployment"].update(pools=[]),
    lambda raw: raw["deployment"]["pools"][0].update(role="encode")],
    ids=["no bound", "deep", "large", "small", "no pool", "nobody decodes"])
def test_what_the_fuzzer_found_is_refused(tmp_path: Path, change: Change) -> None:
    problem = toy_problem()
    raw = to_json(schedule_of(problem, estimate_of(
        problem, encode_batch=4, decode_iterations=4)))
    change(raw)
    path = tmp_path / "schedule.json"
    path.write_text(json.dumps(raw).replace('"DEEP"', _DEEP))
    with pytest.raises(InputError):
        load_schedule(path)
