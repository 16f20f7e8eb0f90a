"""Constants by engine and generation of GPU: what rows say, and what stands in where one says
nothing."""

import numpy as np
import pytest

from xgpt.core import catalog
from xgpt.core.engines import OWN_ENGINE
from xgpt.core.errors import UnknownNameError
from xgpt.core.units import FP8, INT8
from xprofiler.constants import BY_KIND, GPU, RooflineConstants
from xprofiler.engines import LINK_FIELDS, changed, engine_constants
from xprofiler.roofline import Roofline
from xprofiler.source_errors import OperatorGroup
from xprofiler.timing import MessageKind, Operator

MODEL = catalog.model("llama-3.1-8b")


@pytest.mark.parametrize("name", catalog.names("engine"))
def test_every_engine_says_versions_and_source_and_has_constants_on_every_gpu(name: str) -> None:
    row = catalog.engine(name)
    assert row.versions and row.source
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
def test_times_of_every_engine_grow_with_size_and_fall_in_relation_to_it(
        name: str, operator: Operator) -> None:
    for weights in ("", FP8):
        source = Roofline(MODEL, catalog.device("H100"), "bfloat16", engine=name,
                          weight_dtype=weights)
        x = np.geomspace(1, 1e5, 100)
        seconds = source.operator_s(operator, x, 300.0, tp_degree=2)
        assert (np.diff(seconds) >= 0).all() and (np.diff(seconds / x) <= 1e-15).all()


def test_a_row_changes_what_it_names_and_leaves_the_rest() -> None:
    found = changed(GPU, {"gemm_flops_share": 0.5, "synchronisation_s": {4: 2e-6, 2: 1e-6},
                          "nvlink": {"launch_s": 1e-6, "all_reduce_shares": {2: 0.4, 8: 0.5}}})
    assert found.gemm_flops_share == 0.5 and found.gemm_half_rows == GPU.gemm_half_rows
    assert found.synchronisation_s == ((2, 1e-6), (4, 2e-6))
    assert found.nvlink.launch_s == 1e-6 and found.nvlink.hop_share == GPU.nvlink.hop_share
    assert found.nvlink.all_reduce_shares == ((2, 0.4), (8, 0.5)) and found.pcie == GPU.pcie


def test_an_engine_never_measured_on_a_generation_takes_its_nearest() -> None:
    ada, ampere = (engine_constants(catalog.device(name), "vllm") for name in ("L4", "A40"))
    assert ada == ampere != engine_constants(catalog.device("H100"), "vllm")


def test_engines_of_today_reduce_small_messages_in_microseconds() -> None:
    """Their tables: 4 to 10 us up to 64 KiB on H200. What ranks wait for each other besides is
    small for vLLM; the common constants charge what FasterTransformer's lost in 2023."""
    link = catalog.link("nvlink4")
    own, vllm, trtllm = (Roofline(MODEL, catalog.device("H200"), "bfloat16", engine=name)
                         for name in (OWN_ENGINE, "vllm", "tensorrt-llm"))
    for source in (vllm, trtllm):
        assert 3e-6 < source.links.collective_s(2**16, 4, link) < 12e-6
    assert vllm.links.synchronisation_s(4) < 5e-6 < own.links.synchronisation_s(4)
    assert float(own.message_s(MessageKind.ALL_REDUCE, 2**16, link, tp_degree=4)) > 30e-6


def test_fp8_halves_the_weights_that_decoding_streams_and_doubles_the_rate_of_encoding() -> None:
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
        device: str, many: float, one: float) -> None:
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


def test_products_of_int8_have_the_error_of_what_nobody_measured() -> None:
    plain, narrow = (Roofline(MODEL, catalog.device("A100-80"), "bfloat16", engine="tensorrt-llm",
                              weight_dtype=weights).errors() for weights in ("", INT8))
    assert plain.groups[OperatorGroup.PRODUCTS].common < 0.1
    assert narrow.groups[OperatorGroup.PRODUCTS].common > 0.3
    assert "int8 were compared with nothing" in narrow.checked
    assert narrow.groups[OperatorGroup.ALL_REDUCE] == plain.groups[OperatorGroup.ALL_REDUCE]


def test_fp8_products_of_vllm_have_columns_of_their_own_where_those_of_16_bits_do_not() -> None:
    def of(weight_dtype: str, columns: float) -> float:
        return float(Roofline(MODEL, catalog.device("H200"), "bfloat16", engine="vllm",
                              weight_dtype=weight_dtype).kernels.layer_product_s(
            4096.0, columns, 4096.0))

    assert of(FP8, 8192.0) / of(FP8, 1024.0) < 4.3  # bound by products: 8 times the columns
    assert of("", 8192.0) / of("", 1024.0) > 6.5


def test_a_processors_constants_are_the_same_whatever_the_engine() -> None:
    with pytest.raises(UnknownNameError, match="vllm"):
        engine_constants(catalog.device("H100"), "vlm")
    assert BY_KIND["cpu"].gemm_half_columns == 0
