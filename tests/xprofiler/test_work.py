"""Least operations and bytes of each operator, counted by hand."""

from dataclasses import replace

import numpy as np
import pytest

from xgpt.core import catalog
from xgpt.core.hf.config import from_hf_config
from xgpt.core.model import Decoder, Experts, ModelSpec, active_layer_params
from xprofiler.constants import GPU
from xprofiler.kernels import Kernels, RowKernels
from xprofiler.profile import Peaks
from xprofiler.roofline import LeastWork, bound_by, floor_s, work
from xprofiler.timing import Operator

# H 8, A 8, K 2 x 2 heads x 2 = 8, gated MLP of 10, V 33
SMALL = ModelSpec(name="small", family="llama", num_layers=2, hidden_size=8, num_heads=4,
                  num_kv_heads=2, vocab_size=33, intermediate_size=10, is_gated_mlp=True,
                  has_bias=False, tied_embeddings=False)
T5 = catalog.model("t5-11b")
T5_CROSS_KV = T5.hidden_size * T5.kv_elements_per_token_layer


@pytest.mark.parametrize(("operator", "x", "y", "tp_degree", "flops", "elements"), [
    (Operator.ENCODE_ATTENTION, 3, 0, 1, 4 * 6 * 8, 3 * (16 + 8)),
    (Operator.ENCODE_ATTENTION, 3, 4, 2, 4 * 6 * 4, 3 * 12),
    (Operator.DECODE_ATTENTION, 3, 5, 1, 4 * 15 * 8, 15 * 8 + 3 * 16),
    (Operator.DECODE_ATTENTION, 3, 5, 2, 4 * 15 * 4, 15 * 4 + 3 * 8),
    (Operator.LAYER_REST, 3, 0, 1, 6 * (8 * 24 + 240), 432 + 3 * (16 + 24)),
    (Operator.LAYER_REST, 3, 0, 2, 6 * 216, 216 + 3 * (16 + 12)),
    (Operator.EMBED, 3, 0, 2, 0, 3 * 16),
    (Operator.HEAD, 3, 0, 1, 6 * 8 * 33, 8 * 33 + 24),
    (Operator.HEAD, 3, 0, 2, 6 * 8 * 17, 8 * 17 + 24),  # the first rank has the odd row
    (Operator.KV_COMPACTION, 3, 5, 1, 0, 2 * 15 * 8),
    (Operator.KV_COMPACTION, 3, 5, 2, 0, 15 * 8),
])
def test_operations_and_bytes_of_a_small_model(operator, x, y, tp_degree, flops, elements):
    got = work(SMALL, operator, x, y, tp_degree=tp_degree, item_bytes=2)
    assert (float(got.flops), float(got.num_bytes)) == (flops, 2 * elements)


def test_learned_positions_are_a_row_more_of_embed():
    got = work(catalog.model("opt-125m"), Operator.EMBED, 5, tp_degree=1, item_bytes=4)
    assert float(got.num_bytes) == 5 * 3 * 768 * 4


@pytest.mark.parametrize(("operator", "weights"), [
    (Operator.LAYER_REST, T5.decoder_layer_params - T5_CROSS_KV - 3 * T5.hidden_size),
    (Operator.ENCODER_REST, T5.encoder_layer_params - 2 * T5.hidden_size),
    (Operator.CROSS_KV, T5_CROSS_KV), (Operator.HEAD, T5.head_params)])
@pytest.mark.parametrize("tp_degree", [1, 4])
def test_products_multiply_every_weight_once_but_those_of_norms(operator, weights, tp_degree):
    few, more = (work(T5, operator, x, tp_degree=tp_degree, item_bytes=2) for x in (1, 2))
    assert float(few.flops) == 2 * weights / tp_degree
    assert float(more.flops) == 2 * float(few.flops)
    assert float(2 * few.num_bytes - more.num_bytes) == 2 * weights / tp_degree


def test_an_encoder_attends_to_all_pairs_and_cross_attention_to_its_cache():
    width = T5.num_heads * T5.head_dim
    encode = work(T5, Operator.ENCODE_ATTENTION, 10, tp_degree=1, item_bytes=2)
    assert float(encode.flops) == 4 * 100 * width
    cross, decode = (work(T5, operator, 3, 50, tp_degree=2, item_bytes=2) for operator in (
        Operator.CROSS_ATTENTION, Operator.DECODE_ATTENTION))
    assert cross == decode and float(cross.num_bytes) == 2 * (3 * 50 * 2 + 3 * 2) * width / 2


@pytest.mark.parametrize("operator", list(Operator))
def test_arrays_broadcast_and_nothing_to_do_is_no_work(operator):
    model = SMALL if operator in (Operator.LAYER_REST, Operator.HEAD) else T5
    got = work(model, operator, np.arange(4), np.array([[1.0], [7.0]]), tp_degree=1, item_bytes=2)
    assert got.flops.shape == got.num_bytes.shape == (2, 4)
    assert not got.flops[:, 0].any() and not got.num_bytes[:, 0].any()
    assert (np.diff(got.num_bytes, axis=1) > 0).all() and (np.diff(got.flops, axis=1) >= 0).all()


def test_the_floor_is_the_higher_of_the_two_and_says_which():
    peaks = Peaks(flops_per_s=100.0, bandwidth_bytes_per_s=10.0, source="test")
    needed = LeastWork(flops=np.array([100.0, 400.0, 0.0]), num_bytes=np.array([20.0, 20.0, 0.0]))
    assert floor_s(needed, peaks).tolist() == [2.0, 4.0, 0.0]
    assert bound_by(needed, peaks).tolist() == ["memory", "compute", "memory"]


# --- mixtures of experts ----------------------------------------------------------------------


EXPERTS = Experts(count=8, per_token=2, inner=64)
MIXED = ModelSpec(name="toy", family="llama", num_layers=2, hidden_size=32, num_heads=4,
                  vocab_size=50, intermediate_size=64, is_gated_mlp=True, has_bias=False,
                  decoder=Decoder(experts=EXPERTS))
DENSE = replace(MIXED, decoder=Decoder())


def test_published_shapes_have_their_published_parameters():
    mixtral = from_hf_config({
        "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
        "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
        "max_position_embeddings": 32768}, "mixtral-8x7b")
    assert mixtral.num_params == 46_702_792_704  # "46.7 billion, of which a token uses 12.9"
    idle = mixtral.decoder_layer_params - active_layer_params(mixtral)
    assert (mixtral.num_params - 32 * idle) / 1e9 == pytest.approx(12.88, abs=0.01)


def test_experts_that_are_hit_grow_with_the_tokens_up_to_all():
    hit = EXPERTS.hit(np.array([0, 1, 4, 1000]))
    assert hit[:2] == pytest.approx([0, 2]) and hit[3] == pytest.approx(8)
    # two of eight a token, four tokens: an expert is missed by all with 0.75 ** 4
    assert hit[2] == pytest.approx(8 * (1 - 0.75**4))


def test_least_work_reads_the_experts_that_are_hit_and_multiplies_a_tokens_own():
    at = {"tp_degree": 1, "item_bytes": 2}
    for tokens in (1, 4, 4096):
        mixed, dense = (work(model, Operator.LAYER_REST, tokens, **at) for model in (MIXED, DENSE))
        one = 3 * 32 * 64
        assert mixed.flops - dense.flops == pytest.approx(2 * tokens * one)
        assert mixed.num_bytes - dense.num_bytes == pytest.approx(
            2 * one * (float(EXPERTS.hit(tokens)) - 1))


def test_a_layers_time_grows_with_its_tokens_and_a_tokens_never_does():
    device = catalog.device("A40")
    rows = RowKernels(MIXED, Kernels(device, "bfloat16", GPU))
    tokens = np.arange(1.0, 3000.0)
    times = rows.layer_rest_s(tokens, 1)
    assert (np.diff(times) > 0).all() and (np.diff(times / tokens) < 0).all()
