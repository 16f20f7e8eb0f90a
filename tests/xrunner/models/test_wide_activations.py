"""Weights of other types than the activations. Of a bfloat16 model held as float32: what is kept
and what goes to other ranks stays bfloat16, and the logits come nearer to those of float32. 8-bit
products: near the model's own type, the same over stages, and compared with it on inputs."""

import numpy as np
import pytest
import torch
import toys
from plans import plan_of
from torch import Tensor
from toy_runs import split_stages
from toy_stages import CAPACITY, LENGTHS, logits_through, shape

from xgpt.requests.spool import Record, SpoolWriter
from xrunner.models.stage_model import StageModel
from xrunner.models.weights import RandomWeights, Shard
from xrunner.ops.contexts import encode_context, whole_inputs
from xrunner.ops.cpu.products import is_int8_served
from xrunner.rank.agreement import MOST_TOKENS, agreement_of

SPECS = {"llama": shape(), "qwen2": shape(has_qkv_bias=True), "opt": shape("opt")}
BF16, F32 = torch.bfloat16, torch.float32


class Rounded(RandomWeights):
    """The values of bfloat16 weights, as float32."""

    def get(self, *arguments: object) -> Tensor:
        return super().get(*arguments).to(BF16).to(F32)


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("stages", [1, 3])
def test_logits_are_nearer_to_float32_than_those_of_bfloat16(family, stages):
    spec, passed = SPECS[family], list[torch.dtype]()
    exact = logits_through(spec, 1, F32, weights=Rounded(F32, scale=0.3), weight_dtype=F32)
    narrow = logits_through(spec, stages, BF16, weight_dtype=BF16)
    wide = logits_through(spec, stages, BF16, weight_dtype=F32, passed=passed)
    assert wide.dtype == F32 and passed == [BF16] * (stages - 1)
    assert 0 < (wide - exact).norm() < 0.8 * (narrow.float() - exact).norm()


def test_sums_over_a_group_go_as_the_models_type():
    summed = list[tuple[torch.dtype, tuple[int, ...]]]()

    def all_reduce(tensor: Tensor) -> Tensor:
        summed.append((tensor.dtype, tuple(tensor.shape)))
        return tensor

    logits_through(shape(), 1, BF16, weight_dtype=F32, shard=Shard(0, 3, all_reduce))
    assert summed == [(BF16, (sum(LENGTHS), 48))] * 8 + [(BF16, (3, 48))] * 8


def test_a_stage_leaves_what_it_is_given_as_it_is():
    """A message within one process is the sender's own tensor."""
    stage = split_stages(4, 2)[1]
    for dtype, held in ((F32, F32), (BF16, BF16), (BF16, F32)):
        model = StageModel(shape(), RandomWeights(dtype, scale=0.3), stage, dtype,
                           weight_dtype=held)
        cache = torch.zeros(2, 2, 1, 3, CAPACITY, 8, dtype=dtype)
        given = torch.randn(5, 48).to(dtype)
        before = given.clone()
        with torch.inference_mode():
            out = model.encode(given, cache, encode_context(whole_inputs([5])))
        assert torch.equal(given, before) and not torch.equal(out.to(dtype), before)


needs_vnni = pytest.mark.skipif(not is_int8_served(), reason="this processor has no VNNI")


@needs_vnni
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_logits_are_near_those_of_float32_and_the_same_over_stages(family):
    exact, ours, divided = (
        logits_through(SPECS[family], stages, weight_dtype=dtype)
        for dtype, stages in ((torch.float32, 1), (torch.int8, 1), (torch.int8, 3)))
    assert ours.dtype == torch.float32
    assert 0 < (ours - exact).norm() < 0.15 * exact.norm(), "8 bits, four layers"
    assert torch.equal(ours, divided), "sums of bytes are exact"


@needs_vnni
@pytest.mark.parametrize(("lengths", "taken"), [
    ([5, 30, 12], 3), ([MOST_TOKENS - 1, 1, 1], 2), ([MOST_TOKENS + 9, 3], 1), ([], 0)])
def test_the_first_inputs_are_read_with_both_types(tmp_path, lengths, taken):
    toys.make_model("gpt2" if max(lengths, default=0) < 60 else "llama", tmp_path / "model")
    spool = SpoolWriter()
    for number, length in enumerate(lengths):
        spool.add(Record(id=str(number), line=number + 1),
                  (np.arange(length) * 5 % toys.VOCAB).tolist())
    spool.save(tmp_path, np.array([[i, 4] for i in range(len(lengths))]).reshape(-1, 2), 0)
    same = agreement_of(plan_of(tmp_path, tmp_path / "model"))
    assert (same["inputs"], same["positions"]) == (taken, sum(lengths[:taken]))
    assert same["agreeing"] == same["positions"], "a type agrees with itself"
    if taken == 3:
        ours = agreement_of(plan_of(tmp_path, tmp_path / "model", weight_dtype="int8"))
        assert ours["fingerprint"] != same["fingerprint"]
        assert 0 < ours["agreeing"] <= ours["positions"]
