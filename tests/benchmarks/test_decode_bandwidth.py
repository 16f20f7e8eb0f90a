"""What a run's decode steps must move, over the time that they took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from decode_bandwidth import DecodeStep, decode_steps, reached

from xgpt.core import catalog


def test_a_step_moves_the_weights_once_and_every_entry(tmp_path: Path) -> None:
    model = catalog.model("opt-13b")
    step = {"kind": "decode", "queries": 100, "context_tokens": 200.0, "start_s": 1.0,
            "end_s": 1.02}
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (
        {**step, "kind": "mixed"}, step)))
    (found,) = decode_steps(tmp_path, model, "bfloat16")
    weights = 2 * (model.num_layers * model.decoder_layer_params
                   + model.vocab_size * model.hidden_size)
    entries = 2 * model.num_layers * model.kv_elements_per_token_layer * 100 * 200
    assert (found.queries, found.seconds) == (100, pytest.approx(0.02))
    assert weights + entries < found.num_bytes < 1.03 * (weights + entries), "and activations"


def test_the_largest_steps_are_told_apart() -> None:
    steps = [DecodeStep(100, 40.0, 2.0), DecodeStep(91, 30.0, 1.0), DecodeStep(89, 30.0, 6.0)]
    found = reached(steps)
    assert found.bytes_per_s == pytest.approx(100 / 9)
    assert found.largest_bytes_per_s == pytest.approx(70 / 3) and found.median_queries == 91
