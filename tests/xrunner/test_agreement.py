"""8-bit products in a whole model: near the model's own type, the same however the layers are
divided over stages, and compared with it on the run's own inputs."""


import numpy as np
import pytest
import torch
import toys
from plans import plan_of
from toy_stages import logits_through, shape

from xgpt.core.spool import Record, SpoolWriter
from xrunner.agreement import MOST_TOKENS, agreement_of
from xrunner.ops.int8 import is_int8_served

pytestmark = pytest.mark.skipif(not is_int8_served(), reason="this processor has no VNNI")

SPECS = {"llama": shape(), "opt": shape("opt")}


@pytest.mark.parametrize("family", SPECS)
def test_logits_are_near_those_of_float32_and_the_same_over_stages(family):
    exact, ours, divided = (
        logits_through(SPECS[family], stages, weight_dtype=dtype)
        for dtype, stages in ((torch.float32, 1), (torch.int8, 1), (torch.int8, 3)))
    assert ours.dtype == torch.float32
    assert 0 < (ours - exact).norm() < 0.15 * exact.norm(), "8 bits, four layers"
    assert torch.equal(ours, divided), "sums of bytes are exact"


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
