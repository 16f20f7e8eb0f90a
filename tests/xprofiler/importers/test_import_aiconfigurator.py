"""The importer of aiconfigurator's tables: products, attention, messages, what is refused.

Tests of the files themselves read `shared/data` beside the checkout and skip where it is absent.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from imported import A100, DATA, TINY, again, needs_data, seconds, write

from xgpt.core import catalog
from xgpt.core.errors import InputError, MissingExtraError, UnknownNameError
from xprofiler.constants import engine_constants
from xprofiler.importers import aiconfigurator, import_folder
from xprofiler.profile_timing import ProfileTiming
from xprofiler.timing import MessageKind, Operator

SIZES = (32, 64, 128, 256, 512)


def gemm_file(folder: Path, name: str = "a100_sxm_vllm_0.14.0") -> Path:
    rows = [["bfloat16", m, n, k, 1e-6 * m * n * k] for m in (1, 8, 64) for n in SIZES
            for k in SIZES if (n, k) != (512, 512)]
    return write(folder / f"{name}_gemm.csv", ["gemm_dtype", "m", "n", "k", "latency"], rows)


def attention_files(folder: Path, heads: Sequence[tuple[int, int]],
                    name: str = "a100_sxm_vllm_0.14.0") -> None:
    common = ["batch_size", "num_heads", "num_key_value_heads", "head_dim", "step", "latency"]
    write(folder / f"{name}_context_attention.csv", [*common, "isl"],
          [[b, h, kv, 16, 0, b * n / 100, n] for b in (1, 4) for n in (16, 256)
           for h, kv in heads])
    write(folder / f"{name}_generation_attention.csv", common,
          [[b, h, kv, 16, step, b * (step + 1) / 1000] for b, most in ((1, 255), (8, 31))
           for step in (15, 31, 255) if step <= most for h, kv in heads])


@pytest.fixture
def tables(tmp_path: Path) -> Iterator[Path]:
    gemm_file(tmp_path)
    attention_files(tmp_path, [(4, 2), (2, 1)])
    write(tmp_path / "a100_sxm_vllm_0.14.0_custom_allreduce.csv",
          ["kernel_source", "allreduce_dtype", "num_gpus", "message_size", "latency", "backend"],
          [[f"vLLM_custom_{kind}", "bfloat16", 2, size, size * slow / 1e4, f"vllm_{kind}"]
           for size in (1000, 4000) for kind, slow in (("graph", 1), ("eager", 7))])
    yield tmp_path


def test_products_lie_between_the_measured_sizes_and_beyond_in_proportion(tables: Path) -> None:
    times = aiconfigurator.GemmTimes(
        aiconfigurator.read_gemm(tables / "a100_sxm_vllm_0.14.0_gemm.csv"))
    for m, n, k in ((1, 32, 64), (20, 100, 300), (64, 512, 512), (128, 2048, 256)):
        assert times(m, n, k) == pytest.approx(1e-9 * m * n * k, rel=1e-9)


def test_a_layer_is_measured_products_and_analytic_elementwise_parts(tables: Path) -> None:
    profile = again(import_folder("aiconfigurator", tables, TINY, A100, "bfloat16"), tables)
    assert profile.metadata.libraries == "vllm 0.14.0"
    assert "norms" in profile.metadata.origin and "roofline" in profile.metadata.origin
    # query, key, value: 64 + 2 x 32 wide; output; up and gate; down
    for degree in (1, 2):
        products = 1e-9 * 64 * 64 * (128 + 64 + 256 + 128) / degree
        rest = seconds(profile, Operator.LAYER_REST, 64, tp_degree=degree)
        assert products < rest < products + 1e-4
    assert "key-value heads" in profile.refused[4]


def test_an_engine_and_a_version_may_be_chosen_and_others_are_refused(tables: Path) -> None:
    for name in ("a100_sxm_vllm_0.19.0", "a100_sxm_trtllm_1.0.0"):
        shutil.copy(tables / "a100_sxm_vllm_0.14.0_gemm.csv", tables / f"{name}_gemm.csv")

    def libraries(**of: str) -> str:
        return import_folder("aiconfigurator", tables, TINY, A100, "bfloat16",
                             **of).metadata.libraries

    assert libraries() == libraries(engine="vllm", version="0.19.0") == "vllm 0.19.0"
    assert libraries(version="0.14.0") == "vllm 0.14.0"
    assert libraries(engine="tensorrt-llm") == "trtllm 1.0.0"
    for of, words in (({"engine": "deepspeed"}, "vllm, tensorrt-llm, sglang"),
                      ({"engine": "sglang"}, r" or a100_sxm_sglang_\*_gemm.csv; there are"),
                      ({"version": "0.15.0"}, "0.14.0, 0.19.0"),
                      ({"engine": "tensorrt-llm", "version": "1.2.0rc5"}, "one of 1.0.0")):
        with pytest.raises(InputError, match=words):
            libraries(**of)


COLLECTED = """schema_version: 2
runtime: {framework: vllm, version: 0.25.0}
tables:
  gemm_perf:
    collections:
    - collector_ref: cbaf51b64fa460e5ec6146bde407a4c64958212d
      collected_at: '2026-09-17'
"""


def parquet(path: Path, version: str, rows: list[dict[str, object]]) -> None:
    """A table as AISimulate's collectors write it: what it is of comes first, power last."""
    pa = pytest.importorskip("pyarrow")
    path.parent.mkdir(parents=True, exist_ok=True)
    of = {"framework": "VLLM", "version": version, "device": "NVIDIA A100-SXM4-80GB",
          "op_name": path.stem.removesuffix("_perf"), "kernel_source": "default"}
    pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist(
        [{**of, **row, "power": 300.0, "power_limit": 400.0} for row in rows]), path)


def tree(folder: Path, version: str = "0.25.0", slow: float = 1.0) -> Path:
    """`systems/data` with the times of `tables`, and rows of other types, windows and prefixes."""
    data = folder / "systems" / "data"
    places = {name: data / "a100_sxm" / name / "vllm" / version
              for name in ("gemm", "attention", "comm")}
    parquet(places["gemm"] / "gemm_perf.parquet", version, [
        {"gemm_dtype": dtype, "m": m, "n": n, "k": k, "latency": slow * times * 1e-6 * m * n * k}
        for dtype, times in (("bfloat16", 1.0), ("fp8_block", 7.0)) for m in (1, 8, 64)
        for n in SIZES for k in SIZES])
    heads = [{"num_heads": h, "num_key_value_heads": kv, "head_dim": 16, "beam_width": 1,
              "attn_dtype": "bfloat16", "kv_cache_dtype": cache, "window_size": window}
             for h, kv in ((4, 2), (2, 1)) for cache, window in (
                 ("bfloat16", 0), ("fp8", 0), ("bfloat16", 128))]

    def more(of: dict[str, object]) -> float:
        return 1.0 if (of["kv_cache_dtype"], of["window_size"]) == ("bfloat16", 0) else 9.0

    parquet(places["attention"] / "context_attention_perf.parquet", version, [
        {"batch_size": b, "isl": n, **of, "step": step, "latency": more(of) * b * (n + step) / 100}
        for of in heads for b in (1, 4) for n in (16, 256) for step in (0, 64)])
    parquet(places["attention"] / "generation_attention_perf.parquet", version, [
        {"batch_size": b, "isl": 1, **of, "step": step, "latency": more(of) * b * (step + 1) / 1000}
        for of in heads for b in (1, 8) for step in (15, 31, 255)])
    parquet(places["comm"] / "custom_allreduce_perf.parquet", version, [
        {"kernel_source": f"vLLM_custom_{kind}", "allreduce_dtype": "bfloat16", "num_gpus": 2,
         "message_size": size, "latency": size * times / 1e4, "backend": f"vllm_{kind}"}
        for size in (1000, 4000) for kind, times in (("graph", 1), ("eager", 7))])
    (places["gemm"] / "collection_meta.yaml").write_text(COLLECTED, "utf-8")
    return data


def test_the_tree_of_aisimulate_gives_the_same_times_as_an_export(tmp_path, tables) -> None:
    data = tree(tmp_path)
    tree(tmp_path, "0.9.2", slow=5.0)
    (data / "a100_sxm/gemm/vllm/dev-7c1/gemm_perf.parquet").parent.mkdir()
    shutil.copy(data / "a100_sxm/gemm/vllm/0.9.2/gemm_perf.parquet",
                data / "a100_sxm/gemm/vllm/dev-7c1/gemm_perf.parquet")
    found, exported = (again(import_folder("aiconfigurator", folder, TINY, A100, "bfloat16"),
                             tmp_path) for folder in (data, tables))
    assert found.metadata.libraries == "vllm 0.25.0" and found.metadata.date == "2026-09-17"
    assert found.metadata.commit == "cbaf51b64"
    for operator, x, y in ((Operator.LAYER_REST, 8, 0), (Operator.ENCODE_ATTENTION, 256, 4),
                           (Operator.DECODE_ATTENTION, 8, 256)):
        for degree in (1, 2):
            assert seconds(found, operator, x, y, tp_degree=degree) == pytest.approx(
                seconds(exported, operator, x, y, tp_degree=degree))
    link = catalog.link("nvlink3")
    assert ProfileTiming(found).message_s(MessageKind.ALL_REDUCE, [8000], link, tp_degree=2) == (
        pytest.approx(ProfileTiming(exported).message_s(MessageKind.ALL_REDUCE, [8000], link,
                                                        tp_degree=2)))
    slow = import_folder("aiconfigurator", data, TINY, A100, "bfloat16", version="0.9.2")
    assert seconds(slow, Operator.LAYER_REST, 64) > 3 * seconds(found, Operator.LAYER_REST, 64)


def test_nccl_of_the_tree_stands_in_for_all_reduces_of_the_engine(tmp_path) -> None:
    data = tree(tmp_path)
    (data / "a100_sxm/comm/vllm/0.25.0/custom_allreduce_perf.parquet").unlink()
    parquet(data / "a100_sxm/comm/nccl/2.30.7/nccl_perf.parquet", "2.30.7", [
        {"op_name": name, "nccl_dtype": dtype, "num_gpus": 2, "message_size": size, "latency": times
         * size / 1e4} for size in (1000, 4000) for name, dtype, times in (
             ("all_reduce", "half", 1), ("all_gather", "half", 5), ("all_reduce", "int8", 5))])
    profile = import_folder("aiconfigurator", data, TINY, A100, "bfloat16")
    times = ProfileTiming(profile).message_s(MessageKind.ALL_REDUCE, [2000, 8000],
                                             catalog.link("nvlink3"), tp_degree=2)
    assert times[1] - times[0] == pytest.approx(0.3e-3)


def test_a_pointer_of_git_lfs_and_a_missing_pyarrow_are_said(tmp_path, monkeypatch) -> None:
    data = tree(tmp_path)
    path = data / "a100_sxm/gemm/vllm/0.25.0/gemm_perf.parquet"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "utf-8")
    with pytest.raises(InputError, match="a readable PARQUET file .*git lfs pull"):
        import_folder("aiconfigurator", data, TINY, A100, "bfloat16")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"gemm_perf.parquet needs .*\[parquet\]"):
        import_folder("aiconfigurator", data, TINY, A100, "bfloat16")


def test_a_table_of_other_types_alone_is_refused(tables: Path) -> None:
    write(tables / "a100_sxm_vllm_0.14.0_gemm.csv", ["gemm_dtype", "m", "n", "k", "latency"],
          [["nvfp4", 1, 32, 32, 1.0]])
    with pytest.raises(InputError, match="gemm_dtype = 'nvfp4': one of bfloat16, fp8"):
        import_folder("aiconfigurator", tables, TINY, A100, "bfloat16")


def test_attention_is_per_query_when_encoding_and_by_cached_tokens(tables: Path) -> None:
    profile = import_folder("aiconfigurator", tables, TINY, A100, "bfloat16")
    assert seconds(profile, Operator.ENCODE_ATTENTION, 256, 4) == pytest.approx(256e-5)
    assert seconds(profile, Operator.DECODE_ATTENTION, 1, 256) == pytest.approx(256e-6)
    # eight queries were measured up to 32 tokens: beyond, eight times the one query's
    assert seconds(profile, Operator.DECODE_ATTENTION, 8, 256) == pytest.approx(8 * 256e-6)


def test_all_reduce_sizes_are_elements_and_graph_kernels_count(tables: Path) -> None:
    profile = import_folder("aiconfigurator", tables, TINY, A100, "bfloat16")
    link = catalog.link("nvlink3")
    times = ProfileTiming(profile).message_s(MessageKind.ALL_REDUCE, [2000, 8000], link,
                                             tp_degree=2)
    assert times[1] - times[0] == pytest.approx(0.3e-3)
    skew_s = float(times[0]) - 0.1e-3
    # what this engine's ranks wait for each other is added once, and is little
    assert skew_s == pytest.approx(engine_constants(A100, "vllm").synchronisation_s[0][1])
    assert skew_s < 10e-6


def test_nccl_stands_in_where_the_engine_has_no_all_reduce_of_its_own(tables: Path) -> None:
    (tables / "a100_sxm_vllm_0.14.0_custom_allreduce.csv").unlink()
    write(tables / "a100_sxm_nccl_2.27.3.csv",
          ["op_name", "nccl_dtype", "num_gpus", "message_size", "latency"],
          [[name, "half", 2, size, size / 1e4] for size in (1000, 4000)
           for name in ("all_gather", "all_reduce")])
    table = aiconfigurator.read_all_reduce(tables / "a100_sxm_nccl_2.27.3.csv")
    assert table["num_bytes"].tolist() == [2000, 8000]
    profile = import_folder("aiconfigurator", tables, TINY, A100, "bfloat16")
    times = ProfileTiming(profile).message_s(MessageKind.ALL_REDUCE, [2000, 8000],
                                             catalog.link("nvlink3"), tp_degree=2)
    assert times[1] - times[0] == pytest.approx(0.3e-3)


def test_attention_of_other_heads_refuses_the_degree_and_says_what_there_is(tables: Path) -> None:
    attention_files(tables, [(2, 1)])
    profile = import_folder("aiconfigurator", tables, TINY, A100, "bfloat16")
    assert "4 heads and 2 key-value heads of 16" in profile.refused[1]
    assert "it has heads: 2" in profile.refused[1] and profile.table("layer_rest", 2)
    attention_files(tables, [(2, 2), (4, 4)])
    with pytest.raises(InputError, match="with 4 heads it has key-value heads: 4 of 16"):
        import_folder("aiconfigurator", tables, TINY, A100, "bfloat16")


def test_times_beyond_the_devices_peaks_are_not_taken(tables: Path) -> None:
    common = ["batch_size", "num_heads", "num_key_value_heads", "head_dim", "step", "latency"]
    write(tables / "a100_sxm_vllm_0.14.0_generation_attention.csv", common,
          [[1, h, kv, 16, step, 1e-9] for step in (15, 4095) for h, kv in ((4, 2), (2, 1))])
    profile = import_folder("aiconfigurator", tables, TINY, A100, "bfloat16")
    assert "decode_attention not taken" in profile.metadata.origin
    assert "2 of 2 at tp 1" in profile.metadata.origin
    assert seconds(profile, Operator.DECODE_ATTENTION, 1, 4000) > 1e-6


def test_folders_without_the_device_say_what_is_there(tables: Path) -> None:
    with pytest.raises(InputError, match="a100_sxm_vllm_0.14.0_gemm.csv"):
        import_folder("aiconfigurator", tables, TINY, catalog.device("H200"), "bfloat16")
    with pytest.raises(InputError, match="A100-80, H100, H200"):
        import_folder("aiconfigurator", tables, TINY, catalog.device("A40"), "bfloat16")


@needs_data
def test_llama_3_1_of_aiconfigurator(tmp_path: Path) -> None:
    model = catalog.model("llama-3.1-8b")
    profile = again(import_folder("aiconfigurator", DATA / "aiconfigurator", model, A100,
                                  "bfloat16"), tmp_path)
    assert not profile.refused
    # weights of a layer are 436 MB: read at 1.1 to 1.8 TB/s by one row, 2039 GB/s at most
    weights_bytes = 2 * (6144 + 4096 + 2 * 14336 + 14336) * 4096
    rate = weights_bytes / seconds(profile, Operator.LAYER_REST, 1)
    assert 1.1e12 < rate < 1.8e12
    # 64 queries of 1023 cached tokens and the new one: 268 MB of keys and values
    table = aiconfigurator.read_generation_attention(
        DATA / "aiconfigurator/a100_sxm_vllm_0.14.0_generation_attention.csv")
    row = np.flatnonzero((table["num_heads"] == 32) & (table["num_key_value_heads"] == 8)
                         & (table["batch_size"] == 64) & (table["tokens"] == 1024))
    assert len(row) == 1
    assert seconds(profile, Operator.DECODE_ATTENTION, 64, 1024) == pytest.approx(
        float(table["latency"][row[0]]), rel=1e-3)
    assert 0.5 * 2.039e12 < 2**28 / seconds(profile, Operator.DECODE_ATTENTION, 64, 1024) < 2.039e12


@needs_data
def test_the_h200_prompt_attention_that_beats_the_peak_is_left_out() -> None:
    profile = import_folder("aiconfigurator", DATA / "aiconfigurator",
                            catalog.model("llama-3.1-8b"), catalog.device("H200"), "bfloat16")
    assert "encode_attention not taken" in profile.metadata.origin
    assert seconds(profile, Operator.ENCODE_ATTENTION, 8192, 1) > 0.5559e-3


@pytest.mark.parametrize(("model", "dtype", "match"), [
    ("llama-3.1-8b", "float32", "16-bit"), ("t5-11b", "float16", "decoder-only")])
def test_other_dtypes_and_models_with_an_encoder_are_refused(tables: Path, model: str, dtype: str,
                                                             match: str) -> None:
    with pytest.raises(InputError, match=match):
        import_folder("aiconfigurator", tables, catalog.model(model), A100, dtype)


@needs_data
def test_mha_models_lack_vllms_decode_attention() -> None:
    with pytest.raises(InputError, match="40 key-value heads"):
        import_folder("aiconfigurator", DATA / "aiconfigurator", catalog.model("opt-13b"), A100,
                      "bfloat16")


def test_an_unknown_source_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="aiconfigurator"):
        import_folder("aiconfiguratr", tmp_path, TINY, A100, "float16")
