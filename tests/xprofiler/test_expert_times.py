"""Times and sizes of a mixture of experts: all of them are held, a token's own are multiplied, and
those that a step's tokens go to are read."""

from dataclasses import replace

import numpy as np
import pytest

from xgpt.core import catalog
from xgpt.core.decoder import Decoder, Experts
from xgpt.core.hf_config import from_hf_config
from xgpt.core.model import ModelSpec, active_layer_params
from xprofiler.constants import GPU
from xprofiler.kernels import Kernels, RowKernels
from xprofiler.timing import Operator
from xprofiler.work import work

EXPERTS = Experts(count=8, per_token=2, inner=64)
MIXED = ModelSpec(name="toy", family="llama", num_layers=2, hidden_size=32, num_heads=4,
                  vocab_size=50, intermediate_size=64, is_gated_mlp=True, has_bias=False,
                  decoder=Decoder(experts=EXPERTS))
DENSE = replace(MIXED, decoder=Decoder())


def test_published_shapes_have_their_published_parameters() -> None:
    mixtral = from_hf_config({
        "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
        "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
        "max_position_embeddings": 32768}, "mixtral-8x7b")
    assert mixtral.num_params == 46_702_792_704  # "46.7 billion, of which a token uses 12.9"
    idle = mixtral.decoder_layer_params - active_layer_params(mixtral)
    assert (mixtral.num_params - 32 * idle) / 1e9 == pytest.approx(12.88, abs=0.01)


def test_experts_that_are_hit_grow_with_the_tokens_up_to_all() -> None:
    hit = EXPERTS.hit(np.array([0, 1, 4, 1000]))
    assert hit[:2] == pytest.approx([0, 2]) and hit[3] == pytest.approx(8)
    # two of eight a token, four tokens: an expert is missed by all with 0.75 ** 4
    assert hit[2] == pytest.approx(8 * (1 - 0.75**4))


def test_least_work_reads_the_experts_that_are_hit_and_multiplies_a_tokens_own() -> None:
    at = {"tp_degree": 1, "item_bytes": 2}
    for tokens in (1, 4, 4096):
        mixed, dense = (work(model, Operator.LAYER_REST, tokens, **at) for model in (MIXED, DENSE))
        one = 3 * 32 * 64
        assert mixed.flops - dense.flops == pytest.approx(2 * tokens * one)
        assert mixed.num_bytes - dense.num_bytes == pytest.approx(
            2 * one * (float(EXPERTS.hit(tokens)) - 1))


def test_a_layers_time_grows_with_its_tokens_and_a_tokens_never_does() -> None:
    device = catalog.device("A40")
    rows = RowKernels(MIXED, Kernels(device, "bfloat16", GPU))
    tokens = np.arange(1.0, 3000.0)
    times = rows.layer_rest_s(tokens, 1)
    assert (np.diff(times) > 0).all() and (np.diff(times / tokens) < 0).all()
