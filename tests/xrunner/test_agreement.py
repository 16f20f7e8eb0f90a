"""8-bit products in a whole model: near the model's own type, the same however the layers are
divided over stages, and compared with it on the run's own inputs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import toy_runs
import toys
from torch import Tensor

from xgpt.core.model import ModelSpec
from xgpt.core.spool import Record, SpoolWriter
from xrunner.agreement import MOST_TOKENS, agreement_of
from xrunner.models.stage_model import StageModel
from xrunner.models.weights import RandomWeights
from xrunner.ops.contexts import decode_context, encode_context, whole_inputs
from xrunner.ops.int8 import is_int8_served
from xrunner.plan import RunPlan

pytestmark = pytest.mark.skipif(not is_int8_served(), reason="this processor has no VNNI")

SHAPE = ModelSpec(name="toy", family="llama", num_layers=4, hidden_size=48, num_heads=6,
                  num_kv_heads=3, vocab_size=97, intermediate_size=36, is_gated_mlp=True,
                  has_bias=False, tied_embeddings=True, max_positions=64)
SPECS = {"llama": SHAPE, "opt": replace(
    SHAPE, family="opt", num_kv_heads=None, is_gated_mlp=False, has_bias=True,
    has_learned_positions=True)}
LENGTHS, CAPACITY = [9, 1, 14], 24


def logits(spec: ModelSpec, weight_dtype: torch.dtype, stages: int) -> Tensor:
    """Of a decode step after an encode step, through that many stages."""
    models = [StageModel(spec, RandomWeights(torch.float32, scale=0.3), stage, torch.float32,
                         weight_dtype=weight_dtype)
              for stage in toy_runs.split_stages(spec.num_layers, stages)]
    caches = [torch.zeros(len(m.layers), 2, len(LENGTHS), m.kv_heads, CAPACITY, spec.head_dim)
              for m in models]
    out, spans = torch.arange(sum(LENGTHS)) * 7 % spec.vocab_size, whole_inputs(LENGTHS)
    with torch.inference_mode():
        for model, cache in zip(models, caches, strict=True):
            out = model.encode(out, cache, encode_context(spans))
        out = torch.tensor([3, 50, 96])
        for model, cache in zip(models, caches, strict=True):
            out = model.decode(out, cache, decode_context([n + 1 for n in LENGTHS]))
        return toys.logits_of(models[-1], out)


@pytest.mark.parametrize("family", SPECS)
def test_logits_are_near_those_of_float32_and_the_same_over_stages(family):
    exact, ours = logits(SPECS[family], torch.float32, 1), logits(SPECS[family], torch.int8, 1)
    assert ours.dtype == torch.float32
    assert 0 < (ours - exact).norm() < 0.15 * exact.norm(), "8 bits, four layers"
    assert torch.equal(ours, logits(SPECS[family], torch.int8, 3)), "sums of bytes are exact"


def plan_of(output: Path, model: Path, weight_dtype: str) -> RunPlan:
    return RunPlan(
        name="toy", output=output, model_dir=model, model_name="toy", served_by="test",
        requests="test", is_chat=False, max_tokens=4, dtype="float32", weight_dtype=weight_dtype,
        seed=0, temperature=0.0, top_k=None, top_p=1.0, ignore_eos=False, threads_per_rank=1,
        query_kv_tokens=9)


@pytest.mark.parametrize(("lengths", "taken"), [
    ([5, 30, 12], 3), ([MOST_TOKENS - 1, 1, 1], 2), ([MOST_TOKENS + 9, 3], 1), ([], 0)])
def test_the_first_inputs_are_read_with_both_types(tmp_path, lengths, taken):
    toys.make_model("gpt2" if max(lengths, default=0) < 60 else "llama", tmp_path / "model")
    spool = SpoolWriter()
    for number, length in enumerate(lengths):
        spool.add(Record(id=str(number), line=number + 1),
                  (np.arange(length) * 5 % toys.VOCAB).tolist())
    spool.save(tmp_path, np.array([[i, 4] for i in range(len(lengths))]).reshape(-1, 2), 0)
    same = agreement_of(plan_of(tmp_path, tmp_path / "model", "float32"))
    assert (same["inputs"], same["positions"]) == (taken, sum(lengths[:taken]))
    assert same["agreeing"] == same["positions"], "a type agrees with itself"
    if taken == 3:
        ours = agreement_of(plan_of(tmp_path, tmp_path / "model", "int8"))
        assert ours["fingerprint"] != same["fingerprint"]
        assert 0 < ours["agreeing"] <= ours["positions"]
