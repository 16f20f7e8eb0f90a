"""Mixtures of experts in the analytic roofline."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from xgpt.core import catalog
from xgpt.core.model import Split
from xgpt.core.units import FP8, INT8
from xprofiler.experts import busiest_share, reached_share
from xprofiler.roofline import Roofline
from xprofiler.timing import MessageKind, Operator

MODELS = ("mixtral-8x7b", "qwen3-235b-a22b", "gpt-oss-120b")
ENGINES = ("xgpt", "vllm", "sglang", "tensorrt-llm")
SPLITS = ((1, 1, 1), (4, 1, 1), (8, 1, 1), (8, 8, 1), (8, 4, 1), (8, 8, 8), (8, 1, 8), (8, 8, 4))
TOKENS = np.geomspace(2.0**-14, 2.0**20, 300)
NVLINK = catalog.link("nvlink4")


def times(model="qwen3-235b-a22b", gpu="H100", engine="vllm", weights="", ep_degree=1, dp=1):
    spec = replace(catalog.model(model), split=Split(ep_degree=ep_degree, attention_dp=dp))
    return Roofline(spec, catalog.device(gpu), "bfloat16", engine=engine, weight_dtype=weights)


@pytest.mark.parametrize(("model", "engine"), list(itertools.product(MODELS, ENGINES)))
@pytest.mark.parametrize("gpu", ["A100-80", "H100"])
@pytest.mark.parametrize("weights", ["", FP8, INT8])
def test_times_of_a_layer_grow_and_times_of_a_token_fall_however_its_group_divides_it(
        model, engine, gpu, weights):
    for degree, ep_degree, dp in SPLITS:
        source = times(model, gpu, engine, weights, ep_degree, dp)
        for operator in (Operator.LAYER_REST, Operator.HEAD, Operator.DECODE_ATTENTION):
            seconds = source.operator_s(operator, TOKENS, 1000.0, tp_degree=degree)
            of_token = seconds / TOKENS
            assert seconds[0] > 0
            assert (seconds[1:] >= seconds[:-1] * (1 - 1e-9)).all()
            assert (of_token[1:] <= of_token[:-1] * (1 + 1e-9)).all()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_the_busiest_part_has_what_draws_of_experts_give_it(model, parts):
    """Each token draws different experts; the largest of the parts' rows is counted."""
    experts, rng = catalog.model(model).decoder.experts, np.random.default_rng(7)
    for tokens in (1, 4, 32, 512):
        chosen = rng.random((200, tokens, experts.count)).argsort(axis=2)[..., :experts.per_token]
        of_part = (chosen * parts // experts.count).reshape(200, -1)
        rows = np.array([np.bincount(draw, minlength=parts) for draw in of_part])
        drawn = rows.max(axis=1).mean() / rows.mean()
        share = float(busiest_share(experts, np.array(float(tokens)), parts))
        assert max(1.0, 0.95 * drawn) <= share <= 1.4 * drawn
    reached = (chosen * parts // experts.count == 0).any(axis=2).mean()
    assert reached == pytest.approx(reached_share(experts, parts), abs=0.01)


def test_rows_of_whole_experts_even_out_with_tokens_and_fewer_are_gathered():
    """With columns of all experts every rank gathers a row for each expert of a token."""
    experts = catalog.model("qwen3-235b-a22b").decoder.experts
    share = busiest_share(experts, TOKENS, 8)
    assert (np.diff(share) <= 0).all() and 1 < share[-1] < 1.01
    columns, whole = ([float(times(model, ep_degree=ep).operator_s(
        Operator.LAYER_REST, tokens, tp_degree=8)) for model, tokens in (
            ("qwen3-235b-a22b", 65536.0), ("mixtral-8x7b", 4.0))] for ep in (1, 8))
    assert whole[0] < columns[0]
    assert whole[1] > columns[1]  # few tokens: the busiest rank reads more weights than the mean


def test_a_request_is_attended_to_by_its_part_alone():
    """With 8 parts a rank reads whole caches of an eighth of the requests; one request takes as
    long as on one rank."""
    divided, own, alone = (source.operator_s(Operator.DECODE_ATTENTION, [1.0, 64.0], 4000.0,
                                             tp_degree=degree)
                           for source, degree in ((times(), 4), (times(ep_degree=4, dp=4), 4),
                                                  (times(), 1)))
    assert own[0] == alone[0] > divided[0]
    assert own[1] == pytest.approx(times().operator_s(
        Operator.DECODE_ATTENTION, 16.0, 4000.0, tp_degree=1))


def test_parts_of_one_rank_exchange_tokens_once_a_layer():
    """A layer has two all-reduces, and that of attention is left out; parts of two ranks have it
    for an eighth of the tokens, within their node."""
    size, network = 2.0**28, replace(catalog.link("ib-400g"), inside=NVLINK, per_node=8)
    for link, degree in ((NVLINK, 8), (network, 16)):
        both, one, pairs = (float(times(ep_degree=8, dp=dp).message_s(
            MessageKind.ALL_REDUCE, size, link, tp_degree=degree))
            for dp in (1, degree, degree // 2))
        assert one == both / 2
        assert one < pairs < 1.3 * one


def test_products_of_experts_leave_a_part_of_their_tiles_empty():
    """As many rows take longer in one launch over 128 experts than in one product."""
    kernels = times(engine="tensorrt-llm").kernels
    one = kernels.gemm_s(128 * 256.0, 1536, 4096)
    assert kernels.gemm_s(256.0, 1536, 4096, np.array(128.0)) > 1.1 * one


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", MODELS)
def test_experts_in_fp8_are_no_slower_than_in_16_bits(model, engine):
    """One fp8 product of vLLM takes 1,400 columns to half of its rate. Those of all experts are
    launched together: with 1,400 columns each, a layer would take up to 1.6 times as long."""
    plain, narrow = times(model, engine=engine), times(model, engine=engine, weights=FP8)
    tokens = np.geomspace(8.0, 16384.0, 12)
    for degree in (1, 4, 8):
        own, other = (source.operator_s(Operator.LAYER_REST, tokens, tp_degree=degree)
                      for source in (narrow, plain))
        assert (own < 0.9 * other).all()
