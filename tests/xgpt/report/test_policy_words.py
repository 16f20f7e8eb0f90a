"""Policies shown by their rows: what each of them has, and what a row of another package adds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from fake_run import fake_schedule

from xgpt.core import policies
from xgpt.core.controls import ContinuousControls, Controls, StaticControls, WaaControls
from xgpt.core.schedule import Estimate
from xgpt.report.words import (
    controls_cell,
    controls_line,
    policy_sentence,
    value_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnControls:
    """Those of a policy that is not ours."""

    policy: str = "turns"
    encode_batch: int = 3
    turns: int = 5


def estimate_of(controls: Controls) -> Estimate:
    return replace(fake_schedule().estimate, controls=controls)


CASES: list[tuple[Controls, str, str]] = [
    (fake_schedule().estimate.controls, "RRA: encode 16 together, then 12 decode iterations, in 2 "
     "micro-batches", "16 encoded, 12 iterations, 2 groups"),
    (WaaControls(policy="waa-m", encode_batch=16, decode_micro_batches=2, max_in_system=90),
     "WAA-M: encode 16 together, in 2 micro-batches", "16 encoded, 2 groups"),
    (StaticControls(policy="dsi", encode_batch=16, decode_micro_batches=2, encode_micro_batches=4),
     "DSI: encode 16 together in 4 micro-batches, in 2 micro-batches",
     "16 encoded in 4, 2 groups"),
    (ContinuousControls(policy="orca", max_active=1), "Orca: up to 1 query at a time, in 2 "
     "micro-batches", "1 at a time, 2 groups"),
    (ContinuousControls(policy="vllm", max_active=30, token_budget=512), "vLLM: up to 30 queries "
     "at a time, 512 tokens a step, in 2 micro-batches", "30 at a time, 512 tokens, 2 groups")]


@pytest.mark.parametrize(("controls", "line", "cell"), CASES)
def test_a_policy_is_shown_by_what_its_row_has(controls: Controls, line: str, cell: str) -> None:
    estimate = estimate_of(controls)
    assert (controls_line(estimate), controls_cell(estimate)) == (line, cell)
    assert policy_sentence(estimate).startswith(f"{policies.policy(controls.policy).title}: ")
    has_iterations = value_of(estimate, "decode_iterations") is not None
    assert has_iterations is (controls.policy == "rra")


def test_a_row_of_another_package_is_shown_as_ours_are(monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(policies.policy("ft"), name="turns", title="Turns", words="each in its turn",
                  variables=(policies.policy("ft").variables[0],
                             policies.Variable(name="turns", words="turns")))
    monkeypatch.setattr(policies, "_OWN", {**policies._OWN, "turns": row})
    estimate = estimate_of(TurnControls())
    assert controls_line(estimate) == "Turns: encode 16 together, 5 turns, in 2 micro-batches"
    assert controls_cell(estimate) == "16 encoded, 5 turns, 2 groups"
    assert policy_sentence(estimate) == "Turns: each in its turn."
