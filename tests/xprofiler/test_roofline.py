"""The analytic roofline: laws the search relies on, and agreement with published measurements."""

import math
from dataclasses import replace

import numpy as np
import pytest

from xgpt.core import catalog
from xgpt.core.cluster import Device
from xgpt.core.engines import OWN_ENGINE
from xgpt.core.errors import UnknownNameError
from xgpt.core.model import ModelSpec
from xgpt.core.units import FP8, INT8
from xprofiler.constants import GPU, LINK_FIELDS, RooflineConstants, changed, engine_constants
from xprofiler.roofline import Roofline, link_kind
from xprofiler.timing import MessageKind, Operator

REDUCE, SEND, HAND_OVER = MessageKind.ALL_REDUCE, MessageKind.TRANSFER, MessageKind.HANDOVER

GPT_20B = ModelSpec(name="gpt-20b", family="gpt2", num_layers=44, hidden_size=6144, num_heads=48,
                    vocab_size=51200, intermediate_size=24576)
CPU = Device(name="cpu", kind="cpu", memory_bytes=8 * 2**30, bandwidth_bytes_per_s=14e9,
             flops_per_s=(("float32", 2e11), ("bfloat16", 1.2e12)))


def sources():
    return [Roofline(GPT_20B, catalog.device("A100-80"), "float16"),
            Roofline(catalog.model("t5-11b"), catalog.device("A40"), "float16"),
            Roofline(catalog.model("smollm2-135m"), CPU, "float32")]


@pytest.mark.parametrize("source", sources(), ids=["gpu", "encoder-decoder", "cpu"])
@pytest.mark.parametrize("operator", list(Operator))
def test_times_grow_with_size_and_time_per_token_falls(source, operator):
    x = np.geomspace(0.5, 1e5, 200)
    seconds = source.operator_s(operator, x, 100.0)
    assert (np.diff(seconds) >= 0).all()
    if operator is not Operator.ENCODE_ATTENTION:  # quadratic in one query's own length
        assert (np.diff(seconds / x) <= 0).all()


@pytest.mark.parametrize("source", sources(), ids=["gpu", "encoder-decoder", "cpu"])
@pytest.mark.parametrize("operator", list(Operator))
def test_nothing_costs_nothing_and_arrays_broadcast(source, operator):
    assert source.operator_s(operator, 0.0) == 0.0
    grid = source.operator_s(operator, [[1.0], [2.0], [0.0]], [5.0, 50.0])
    assert grid.shape == (3, 2)
    assert grid[1, 1] == source.operator_s(operator, 2.0, 50.0)


def test_decoding_one_token_streams_the_weights_once():
    device = catalog.device("A100-80")
    layer_s = float(Roofline(GPT_20B, device, "float16").operator_s(Operator.LAYER_REST, 1))
    ideal_s = 2 * GPT_20B.decoder_layer_params / device.bandwidth_bytes_per_s
    assert 1.2 * ideal_s < layer_s < 1.5 * ideal_s


def test_many_rows_reach_the_published_share_of_peak():
    """A100 and A40 multiply 4096 rows of a Llama layer at 0.66 to 0.81 of their peak."""
    for name in ("A100-80", "A40"):
        device = catalog.device(name)
        seconds = float(Roofline(GPT_20B, device, "float16").operator_s(Operator.LAYER_REST, 4096))
        flops = 2 * 4096 * GPT_20B.decoder_layer_params
        assert 0.6 < flops / seconds / device.peak_flops_per_s("float16") < 0.8


def model_s(tp_degree, batch, input_tokens, output_tokens):
    """One static batch of GPT-20B on A100s with NVLink."""
    source, link = sources()[0], catalog.link("nvlink3")

    def layers_s(rows, attention_s):
        reduce_s = source.message_s(REDUCE, rows * GPT_20B.hidden_size * 2, link,
                                    tp_degree=tp_degree)
        rest_s = source.operator_s(Operator.LAYER_REST, rows, tp_degree=tp_degree)
        return GPT_20B.num_layers * (rest_s + attention_s + 2 * reduce_s)

    encode_s = layers_s(batch * input_tokens, batch * source.operator_s(
        Operator.ENCODE_ATTENTION, input_tokens, batch, tp_degree=tp_degree))
    context = input_tokens + np.arange(1, output_tokens)
    decode_s = layers_s(float(batch), source.operator_s(
        Operator.DECODE_ATTENTION, batch, context, tp_degree=tp_degree)).sum()
    ends_s = (source.operator_s(Operator.HEAD, batch, tp_degree=tp_degree)
              + source.facts.step_overhead_s)
    return float(encode_s + decode_s + output_tokens * ends_s)


@pytest.mark.parametrize(("batch", "input_tokens", "output_tokens", "published_s"), [
    (1, 20, 8, 0.225), (1, 200, 200, 5.648), (8, 128, 20, 0.740), (32, 60, 20, 0.933),
    (32, 200, 200, 8.111), (128, 128, 20, 3.830)])
def test_one_gpu_latency_of_gpt_20b_is_within_a_tenth_of_fastertransformers(
        batch, input_tokens, output_tokens, published_s):
    found_s = model_s(1, batch, input_tokens, output_tokens)
    assert found_s == pytest.approx(published_s, rel=0.10)


def test_tensor_parallel_speed_ups_are_those_of_the_engine_not_of_the_sum_of_operators():
    """Medians published for GPT-20B: 1.50, 2.19, 2.67; products and collectives alone say 3.68."""
    shapes = [(b, i, o) for b in (1, 8, 32, 128) for i, o in ((20, 8), (60, 20), (128, 20))]
    for degree, published in ((2, 1.50), (4, 2.19), (8, 2.67)):
        speed_ups = [model_s(1, *shape) / model_s(degree, *shape) for shape in shapes]
        assert np.median(speed_ups) == pytest.approx(published, rel=0.10)


@pytest.mark.parametrize(("name", "share"), [
    ("nvlink3", 0.70), ("ib-200g", 0.70), ("pcie4-x16", 0.13),  # A40: 4 GB/s through the host
    ("pcie4-x16-p2p", 0.52)])
def test_transfer_is_latency_plus_bytes(name, share):
    source, link = sources()[0], catalog.link(name)
    empty, full = source.message_s(SEND, [0, 1e9], link)
    assert empty == link.latency_s
    assert full - empty == pytest.approx(1e9 / (share * link.bandwidth_bytes_per_s))


@pytest.mark.parametrize(("name", "kind"), [
    ("nvlink2", "nvlink"), ("nvlink4", "nvlink"), ("pcie3-x16", "pcie"), ("pcie4-x16", "pcie"),
    ("pcie4-x16-p2p", "pcie_peer"),
    ("ib-100g", "network"), ("ib-400g", "network")])
def test_catalogue_links_are_told_apart(name, kind):
    assert link_kind(catalog.link(name)) == kind


@pytest.mark.parametrize("rows", [1.0, 64.0, 4096.0])
@pytest.mark.parametrize("source", sources(), ids=["gpu", "encoder-decoder", "cpu"])
def test_a_narrow_shard_takes_more_than_its_part_of_the_whole_product(source, rows):
    whole, narrow = source.kernels.gemm_s(rows, 8192, 8192), source.kernels.gemm_s(rows, 1024, 8192)
    assert whole / 8 < narrow < whole


def test_products_of_all_sizes_lie_between_the_longer_of_compute_and_memory_and_their_sum():
    source, device = sources()[0], catalog.device("A100-80")
    c = source.constants
    rows, n, k = np.geomspace(1, 1e5, 50), 12288, 6144
    compute_s = 2 * n * k * (rows + c.gemm_half_rows) / (
        device.peak_flops_per_s("float16") * c.gemm_flops_share)
    memory_s = 2 * (n * k + rows * (n + k)) / (device.bandwidth_bytes_per_s * c.gemm_bytes_share)
    seconds = source.kernels.gemm_s(rows, n, k) - c.gemm_launch_s
    assert (seconds >= np.maximum(compute_s, memory_s) * (1 - 1e-12)).all()
    assert (seconds <= compute_s + memory_s).all()


@pytest.mark.parametrize("name", ["nvlink3", "nvlink4", "pcie4-x16", "pcie4-x16-p2p",
                                  "ib-200g"])
@pytest.mark.parametrize("degree", [2, 4, 8, 16])
def test_all_reduce_is_a_collective_and_the_ranks_skew(name, degree):
    source, link = sources()[0], catalog.link(name)
    volume = np.geomspace(1, 1e9, 300)
    seconds = source.links.collective_s(volume, degree, link)
    assert (np.diff(seconds) >= 0).all() and (np.diff(seconds / volume) <= 0).all()
    assert source.message_s(REDUCE, volume, link, tp_degree=degree) == pytest.approx(
        seconds + source.links.synchronisation_s(degree))
    assert source.message_s(HAND_OVER, 1e9, link) > source.message_s(SEND, 1e9, link)
    assert source.message_s(REDUCE, 1e6, link, tp_degree=1) == 0
    if (name, degree) == ("nvlink3", 8):  # 64 MiB over 8 GPUs of an A100 node: 675 us measured
        found_s = source.message_s(REDUCE, 2**26, link, tp_degree=8)
        assert found_s == pytest.approx(675e-6, rel=0.25)
    waits_s = [source.links.synchronisation_s(t) for t in (1, 2, 3, 4, 8, 16, 32)]
    assert waits_s[0] == 0 and (np.diff(waits_s[:-1]) > 0).all() and waits_s[-1] == waits_s[-2]
    # no ring moves its bytes faster than the link does
    assert (seconds > 2 * (degree - 1) / degree * volume / link.bandwidth_bytes_per_s).all()


def test_queries_encoded_together_share_the_launch_and_keep_their_work():
    source = sources()[0]
    shares = source.operator_s(Operator.ENCODE_ATTENTION, 512, [0, 1, 4, 64, 1e9])
    assert shares[0] == shares[1]
    assert (np.diff(shares[1:]) < 0).all()
    assert shares[1] - shares[-1] == pytest.approx(
        source.constants.encode_attention_launch_s
        + 512 * source.constants.encode_attention_tail_s)


def test_compaction_reads_and_writes_the_moved_entries():
    source, device = sources()[0], catalog.device("A100-80")
    few, many = source.operator_s(Operator.KV_COMPACTION, [10, 20], 1000)
    moved_bytes = 10 * 1000 * GPT_20B.kv_elements_per_token_layer * 2
    assert many - few > 2 * moved_bytes / device.bandwidth_bytes_per_s
    assert source.operator_s(Operator.KV_COMPACTION, 10, 1000, tp_degree=8) < few / 4


def test_an_encoder_layer_takes_less_than_a_decoder_layer_with_cross_attention():
    source = sources()[1]
    tokens = np.geomspace(1, 1e4, 20)
    decoder, encoder, cross_kv = (source.operator_s(o, tokens) for o in (
        Operator.LAYER_REST, Operator.ENCODER_REST, Operator.CROSS_KV))
    assert (encoder < decoder).all() and (cross_kv < encoder).all()
    for context in (1, 100, 10000):
        assert source.operator_s(Operator.CROSS_ATTENTION, 7, context) == source.operator_s(
            Operator.DECODE_ATTENTION, 7, context)


def test_given_constants_replace_those_of_the_kind_and_the_provenance_says_so():
    plain = sources()[0]
    slower = Roofline(GPT_20B, catalog.device("A100-80"), "float16",
                      replace(plain.constants, gemm_bytes_share=0.2))
    assert slower.operator_s(Operator.LAYER_REST, 1) > 3 * plain.operator_s(Operator.LAYER_REST, 1)
    assert "analytic" in plain.provenance() and "calibrated" in slower.provenance()
    assert np.isinf(plain.reach(Operator.HEAD, 8)).all() and not plain.facts.is_padded


# --- engines ----------------------------------------------------------------------------------


MODEL = catalog.model("llama-3.1-8b")


@pytest.mark.parametrize("name", catalog.names("engine"))
def test_every_engine_says_versions_and_source_and_has_constants_on_every_gpu(name):
    row = catalog.engine(name)
    assert row.source and (row.releases or name == "xgpt")
    for device in map(catalog.device, catalog.names("device")):
        constants = engine_constants(device, name)
        for field in RooflineConstants.__dataclass_fields__:
            if field.endswith("_share"):
                share = getattr(constants, field)
                assert share is None or 0 < share <= 1, (name, device.name, field)
        for link in LINK_FIELDS:
            shares = dict(getattr(constants, link).all_reduce_shares).values()
            assert all(0 < share <= 1 for share in shares)


@pytest.mark.parametrize("name", catalog.names("engine"))
@pytest.mark.parametrize("operator", [Operator.LAYER_REST, Operator.DECODE_ATTENTION,
                                      Operator.HEAD])
def test_times_of_every_engine_grow_with_size_and_fall_in_relation_to_it(name, operator):
    for weights in ("", FP8):
        source = Roofline(MODEL, catalog.device("H100"), "bfloat16", engine=name,
                          weight_dtype=weights)
        x = np.geomspace(1, 1e5, 100)
        seconds = source.operator_s(operator, x, 300.0, tp_degree=2)
        assert (np.diff(seconds) >= 0).all() and (np.diff(seconds / x) <= 1e-15).all()


def test_a_row_changes_what_it_names_and_leaves_the_rest():
    found = changed(GPU, {"gemm_flops_share": 0.5, "synchronisation_s": {4: 2e-6, 2: 1e-6},
                          "nvlink": {"launch_s": 1e-6, "all_reduce_shares": {2: 0.4, 8: 0.5}}})
    assert found.gemm_flops_share == 0.5 and found.gemm_half_rows == GPU.gemm_half_rows
    assert found.synchronisation_s == ((2, 1e-6), (4, 2e-6))
    assert found.nvlink.launch_s == 1e-6 and found.nvlink.hop_share == GPU.nvlink.hop_share
    assert found.nvlink.all_reduce_shares == ((2, 0.4), (8, 0.5)) and found.pcie == GPU.pcie


def test_an_engine_never_measured_on_a_generation_takes_its_nearest():
    ada, ampere = (engine_constants(catalog.device(name), "vllm") for name in ("L4", "A40"))
    assert ada == ampere != engine_constants(catalog.device("H100"), "vllm")
    with pytest.raises(UnknownNameError, match="vllm"):
        engine_constants(catalog.device("H100"), "vlm")


def test_engines_of_today_reduce_small_messages_in_microseconds():
    """Their tables: 4 to 10 us up to 64 KiB on H200. What ranks wait for each other besides is
    small for vLLM; the common constants charge what FasterTransformer's lost in 2023."""
    link = catalog.link("nvlink4")
    own, vllm, trtllm = (Roofline(MODEL, catalog.device("H200"), "bfloat16", engine=name)
                         for name in (OWN_ENGINE, "vllm", "tensorrt-llm"))
    for source in (vllm, trtllm):
        assert 3e-6 < source.links.collective_s(2**16, 4, link) < 12e-6
    assert vllm.links.synchronisation_s(4) < 10e-6 < own.links.synchronisation_s(4)
    assert float(own.message_s(MessageKind.ALL_REDUCE, 2**16, link, tp_degree=4)) > 30e-6


def test_fp8_halves_the_weights_that_decoding_streams_and_doubles_the_rate_of_encoding():
    plain, narrow = (Roofline(MODEL, catalog.device("H100"), "bfloat16", engine="vllm",
                              weight_dtype=weights) for weights in ("", FP8))
    for rows in (1.0, 8192.0):
        ratio = (narrow.operator_s(Operator.LAYER_REST, rows)
                 / plain.operator_s(Operator.LAYER_REST, rows))
        assert 0.45 < ratio < 0.85
    without = Roofline(MODEL, catalog.device("A100-80"), "bfloat16", weight_dtype=FP8)
    wide = Roofline(MODEL, catalog.device("A100-80"), "bfloat16")
    assert without.operator_s(Operator.LAYER_REST, 1) < 0.8 * wide.operator_s(
        Operator.LAYER_REST, 1)
    assert without.operator_s(Operator.LAYER_REST, 8192) == pytest.approx(
        wide.operator_s(Operator.LAYER_REST, 8192), rel=0.02)


@pytest.mark.parametrize(("device", "many", "one"), [
    ("A100-80", 0.66, 0.5), ("T4", 0.66, 0.5), ("RTX-4090", 0.33, 0.5), ("V100", 1.0, 0.63)])
def test_int8_has_the_rate_of_its_units_and_half_the_weights_where_there_are_none(
        device, many, one):
    """Twice or four times the rate, of which 0.70 are reached (16 bits: 0.92); the bytes of one
    row's weights, which V100 widens."""
    plain, narrow = (Roofline(MODEL, catalog.device(device), "float16", engine="vllm",
                              weight_dtype=weights) for weights in ("", INT8))

    def times(rows: float) -> float:
        return float(narrow.kernels.layer_product_s(rows, 12288.0, 12288.0)
                     / plain.kernels.layer_product_s(rows, 12288.0, 12288.0))

    assert times(8192.0) == pytest.approx(many, rel=0.02)
    assert times(1.0) == pytest.approx(one, rel=0.02)
    assert "weights int8" in narrow.provenance()


def test_weights_that_nobody_ran_are_doubted_more():
    plain, narrow = (Roofline(catalog.model("llama-3.1-8b"), catalog.device("H100"), "bfloat16",
                              engine="tensorrt-llm-1.0", weight_dtype=weights).doubt(1)
                     for weights in ("", INT8))
    assert plain.level == "same cell" and narrow.level == "far"
    assert "no run with int8 weights" in narrow.why


def test_fp8_products_of_vllm_have_columns_of_their_own_where_those_of_16_bits_do_not():
    def of(weight_dtype: str, columns: float) -> float:
        return float(Roofline(MODEL, catalog.device("H200"), "bfloat16", engine="vllm",
                              weight_dtype=weight_dtype).kernels.layer_product_s(
            4096.0, columns, 4096.0))

    assert of(FP8, 8192.0) / of(FP8, 1024.0) < 4.3  # bound by products: 8 times the columns
    assert of("", 8192.0) / of("", 1024.0) > 6.5


def test_sampling_reads_the_logits_of_the_whole_vocabulary_on_every_rank():
    """Half a gigabyte is written and read for 1,000 rows of 128,256 tokens, at every degree."""
    device = catalog.device("H100")
    few, many = (replace(GPT_20B, vocab_size=size) for size in (256, 128_256))
    more_s = [float(np.subtract(*(Roofline(model, device, "bfloat16").operator_s(
        Operator.HEAD, 1000.0, tp_degree=degree) for model in (many, few)))) for degree in (1, 8)]
    rate = device.bandwidth_bytes_per_s * GPU.elementwise_bytes_share
    sampled_s = 2 * 4 * 1000 * 128_000 / rate
    assert sampled_s > 0.5e-3 and all(seconds > sampled_s for seconds in more_s)
    assert more_s[1] - sampled_s == pytest.approx((more_s[0] - sampled_s) / 8, rel=0.2)


def test_a_key_value_head_costs_little_beside_what_the_others_read():
    """Without grouped heads a step has eight times as many of them, each with a fixed cost."""
    device, contexts = catalog.device("A100-80"), np.array([1.0, 4096.0])
    short_s, long_s = Roofline(catalog.model("llama-2-7b"), device, "float16").operator_s(
        Operator.DECODE_ATTENTION, 64.0, contexts)
    read_s = 64 * 4096 * 2 * 4096 * 2 / (
        device.bandwidth_bytes_per_s * GPU.decode_attention_bytes_share)
    fixed_s = short_s - GPU.decode_attention_launch_s
    assert fixed_s == pytest.approx(64 * 32 * GPU.decode_attention_item_s, rel=0.05)
    assert long_s - GPU.decode_attention_launch_s == pytest.approx(math.hypot(fixed_s, read_s))
    assert long_s < 1.02 * read_s + GPU.decode_attention_launch_s
