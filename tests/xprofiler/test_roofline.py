"""The analytic roofline: laws the search relies on, and agreement with published measurements."""

from dataclasses import replace

import numpy as np
import pytest

from xgpt.core import catalog
from xgpt.core.cluster import Device
from xgpt.core.model import ModelSpec
from xprofiler.links import link_kind
from xprofiler.roofline import Roofline
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


def test_all_reduce_of_one_rank_is_free_and_grows_with_bytes():
    source, link = sources()[0], catalog.link("nvlink3")
    assert source.message_s(REDUCE, 1e6, link, tp_degree=1) == 0
    seconds = source.message_s(REDUCE, [1e3, 1e6, 64e6], link, tp_degree=8)
    assert (np.diff(seconds) > 0).all()
    # 64 MiB over 8 GPUs of an A100 node: 675 us measured
    assert source.message_s(REDUCE, 2**26, link, tp_degree=8) == pytest.approx(675e-6, rel=0.25)


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
    # no ring moves its bytes faster than the link does
    assert (seconds > 2 * (degree - 1) / degree * volume / link.bandwidth_bytes_per_s).all()


def test_synchronisation_grows_with_the_degree_and_one_rank_has_none():
    seconds = [sources()[0].links.synchronisation_s(t) for t in (1, 2, 3, 4, 8, 16, 32)]
    assert seconds[0] == 0
    assert (np.diff(seconds[:-1]) > 0).all()
    assert seconds[-1] == seconds[-2]


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


def test_cross_attention_costs_what_decode_attention_costs_at_that_context():
    source = sources()[1]
    for context in (1, 100, 10000):
        assert source.operator_s(Operator.CROSS_ATTENTION, 7, context) == source.operator_s(
            Operator.DECODE_ATTENTION, 7, context)


def test_handover_costs_more_than_the_message():
    source, link = sources()[0], catalog.link("nvlink3")
    assert source.message_s(HAND_OVER, 1e9, link) > source.message_s(SEND, 1e9, link)


def test_given_constants_replace_those_of_the_kind_and_the_provenance_says_so():
    plain = sources()[0]
    slower = plain.with_constants(replace(plain.constants, gemm_bytes_share=0.2))
    assert slower.operator_s(Operator.LAYER_REST, 1) > 3 * plain.operator_s(Operator.LAYER_REST, 1)
    assert "analytic" in plain.provenance() and "calibrated" in slower.provenance()
    assert np.isinf(plain.reach(Operator.HEAD, 8)).all() and not plain.facts.is_padded
