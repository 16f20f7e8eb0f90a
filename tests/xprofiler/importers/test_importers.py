"""Vidur's tables: sums, what is refused and what is said of gaps.

Tests of the files themselves read `shared/data` beside the checkout and skip where it is absent.
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from imported import A100, DATA, TINY, again, faults, needs_data, seconds, write

from xgpt.core import catalog
from xgpt.core.errors import InputError
from xprofiler.importers import import_folder, vidur
from xprofiler.importers.draft import Column, grouped_messages, read_table, samples_at, undisturbed
from xprofiler.profile_timing import ProfileTiming
from xprofiler.timing import MessageKind, Operator


def mlp_row(tokens: int, degree: int, shape: Mapping[str, object] | None = None) -> dict[
        str, object]:
    operators = ("emb", *vidur.GEMMS, *vidur.ELEMENTWISE)
    times = {f"time_stats.{op}.median": (i + 1) * tokens / degree
             for i, op in enumerate(operators)}
    model = {"n_head": 4, "n_kv_head": 2, "n_embd": 64, "n_expanded_embd": 128,
             "vocab_size": 256, "use_gated_mlp": True, **(shape or {})}
    return {**times, **model, "num_tokens": tokens, "num_tensor_parallel_workers": degree}


def mlp_file(folder: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    path = folder / "compute" / "a100" / "org" / "tiny" / "mlp.csv"
    return write(path, list(rows[0]), [list(row.values()) for row in rows])


def test_a_layer_of_vidur_is_its_operators_with_two_adds(tmp_path):
    mlp_file(tmp_path, [mlp_row(n, d) for n in (1, 8) for d in (1, 2)])
    profile = import_folder("vidur", tmp_path, TINY, A100, "float16")
    # operators take 1 (emb), 2 .. 10 ms a token; the last, add, counts twice
    assert seconds(profile, Operator.LAYER_REST, 8) == pytest.approx(8e-3 * (sum(range(2, 11))
                                                                            + 10))
    assert seconds(profile, Operator.EMBED, 8, tp_degree=2) == pytest.approx(8e-3 / 2)


def test_what_vidur_lacks_is_said_and_taken_from_the_roofline(tmp_path):
    mlp_file(tmp_path, [mlp_row(n, d) for n in (1, 8) for d in (1, 4)])
    profile = again(import_folder("vidur", tmp_path, TINY, A100, "bfloat16"), tmp_path)
    origin = profile.metadata.origin
    assert "Vidur" in origin and "head" in origin and "roofline" in origin
    assert not profile.metadata.is_padded and profile.model == TINY
    assert "key-value heads" in profile.refused[4], "2 key-value heads are not split by 4"
    assert seconds(profile, Operator.HEAD, 8) > 0
    assert seconds(profile, Operator.KV_COMPACTION, 8, 100) == 0, "a paged cache moves no rows"


def test_a_vidur_table_of_another_model_is_named(tmp_path):
    path = mlp_file(tmp_path, [mlp_row(1, 1, {"n_head": 8, "n_expanded_embd": 256})])
    with pytest.raises(InputError) as error:
        vidur.import_profile(TINY, A100, "float16", vidur.VidurFiles(mlp=path))
    assert {key for _, key in faults(error)} == {"n_head", "n_expanded_embd"}
    assert "tiny has num_heads = 4" in str(error.value)
    with pytest.raises(InputError, match=r"tiny \(8, 2, 64, 256, True\)"):
        vidur.import_folder(tmp_path, TINY, A100, "float16")


def test_a_vidur_file_of_two_models_is_refused(tmp_path):
    path = mlp_file(tmp_path, [mlp_row(1, 1), mlp_row(2, 1, {"n_head": 8})])
    with pytest.raises(InputError, match="one value in the whole file"):
        vidur.read_mlp(path)


def test_unknown_operators_and_lacking_ones_are_refused(tmp_path):
    row = mlp_row(1, 1)
    del row["time_stats.attn_rope.median"]
    path = mlp_file(tmp_path, [{**row, "time_stats.router.median": 1.0}])
    with pytest.raises(InputError) as error:
        vidur.read_mlp(path)
    assert {key for _, key in faults(error)} == {"time_stats.attn_rope.median",
                                                 "time_stats.router.median"}


@pytest.mark.parametrize(("dtype", "device", "match"), [
    ("float32", "A100-80", "16-bit"), ("float16", "T4", "A100-80, A40")])
def test_other_dtypes_and_devices_are_refused(tmp_path, dtype, device, match):
    mlp_file(tmp_path, [mlp_row(1, 1)])
    with pytest.raises(InputError, match=match):
        vidur.import_folder(tmp_path, TINY, catalog.device(device), dtype)


def test_encoder_decoder_models_are_refused(tmp_path):
    path = mlp_file(tmp_path, [mlp_row(1, 1)])
    with pytest.raises(InputError, match="decoder-only"):
        vidur.import_profile(catalog.model("t5-11b"), A100, "float16", vidur.VidurFiles(mlp=path))


def message_file(path: Path, collective: str) -> Path:
    header = ["", f"time_stats.{collective}.median", "rank", "num_workers", "size", "collective",
              "devices_per_node", "max_devices_per_node"]
    rows = [[i, 0.01 * per_node * (i + 1), 0, 2, 1000 * (i + 1), collective, per_node, 8]
            for per_node in (1, 2) for i in range(5)]
    return write(path, header, rows)


def test_messages_within_and_between_nodes_go_to_their_links(tmp_path):
    files = vidur.VidurFiles(
        mlp=mlp_file(tmp_path, [mlp_row(n, d) for n in (1, 8) for d in (1, 2)]),
        all_reduce=message_file(tmp_path / "a.csv", "all_reduce"),
        send_recv=message_file(tmp_path / "s.csv", "send_recv"))
    profile = vidur.import_profile(TINY, A100, "float16", files, links={
        "intra": "nvlink3", "inter": "ib-200g"})
    timing = ProfileTiming(profile)
    near, far = catalog.link("nvlink3"), catalog.link("ib-200g")
    # the third of five sizes is their median: 3000 bytes, 0.03 ms a rank of the node
    assert timing.message_s(MessageKind.ALL_REDUCE, 3000, near, tp_degree=2) == pytest.approx(6e-5)
    assert timing.message_s(MessageKind.TRANSFER, 3000, far) == pytest.approx(3e-5)
    with pytest.raises(InputError, match="collective"):
        vidur.read_messages(message_file(tmp_path / "x.csv", "send_recv"), "all_reduce")


def test_attention_serves_the_degree_that_has_its_heads(tmp_path):
    header = ["time_stats.attn_prefill.median", "time_stats.attn_decode.median", "n_embd",
              "n_q_head", "n_kv_head", "num_tensor_parallel_workers", "batch_size",
              "prefill_chunk_size", "kv_cache_size", "is_prefill"]
    shape = [128, 8, 4]  # at degree 4 a rank has TINY's heads at degree 2
    rows = [[n / 10, "", *shape, 4, 1, n, cached, True] for n in (64, 128) for cached in (0, 99)]
    rows += [["", q * y / 100, *shape, 4, q, 0, y, False] for q in (1, 4) for y in (32, 64)]
    mlp = mlp_file(tmp_path, [mlp_row(n, d) for n in (1, 8) for d in (1, 2)])
    profile = vidur.import_profile(TINY, A100, "float16", vidur.VidurFiles(
        mlp=mlp, attention=[write(tmp_path / "att.csv", header, rows)]))
    assert seconds(profile, Operator.ENCODE_ATTENTION, 128, tp_degree=2) == pytest.approx(0.0128)
    assert seconds(profile, Operator.DECODE_ATTENTION, 4, 64, tp_degree=2) == pytest.approx(2.56e-3)
    assert "decode_attention (tp 1)" in profile.metadata.origin
    rows[0][0] = ""
    with pytest.raises(InputError, match=r"att\.csv:2: time_stats\.attn_prefill\.median"):
        vidur.read_attention(write(tmp_path / "att.csv", header, rows))


@needs_data
def test_llama_2_of_vidur_is_the_sum_of_its_rows(tmp_path):
    profile = again(import_folder("vidur", DATA / "vidur", catalog.model("llama-2-7b"), A100,
                                  "float16"), tmp_path)
    names = ("input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj",
             "post_attention_layernorm", "mlp_up_proj", "mlp_act", "mlp_down_proj", "add", "add")
    path = DATA / "vidur/compute/a100/meta-llama/Llama-2-7b-hf/mlp.csv"
    layers_s: dict[tuple[int, int], list[float]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            place = int(row["num_tokens"]), int(row["num_tensor_parallel_workers"])
            layers_s.setdefault(place, []).append(
                sum(float(row[f"time_stats.{name}.median"]) for name in names) / 1e3)
    for degree in (1, 2, 4, 8):
        points = {p.x: p.median_s for p in profile.table("layer_rest", degree)}
        for tokens in (1, 4096):
            expected = float(np.median(layers_s[tokens, degree]))
            assert points[tokens] == pytest.approx(expected, rel=1e-3)
            # single sizes are up to 5 % out of order, and times are taken to grow
            got = seconds(profile, Operator.LAYER_REST, tokens, tp_degree=degree)
            assert got == pytest.approx(expected, rel=0.06)


@needs_data
def test_every_vidur_layer_of_a_catalog_model_is_found():
    for name, device in (("llama-2-70b", "A100-80"), ("llama-3-8b", "A100-80"),
                         ("llama-2-7b", "A40")):
        profile = import_folder("vidur", DATA / "vidur", catalog.model(name),
                                catalog.device(device), "float16")
        assert profile.table("layer_rest", 8)
        if name == "llama-2-70b":
            assert len(profile.table("decode_attention", 2)) > 5000
    with pytest.raises(InputError, match="Llama-2-7b-hf"):
        import_folder("vidur", DATA / "vidur", catalog.model("opt-13b"), A100, "float16")


# --- tables -----------------------------------------------------------------------------------


COLUMNS = (Column("size", "count", least=1), Column("time", "ms"),
           Column("kind", "text", allowed=("a", "b")))


def test_milliseconds_become_seconds(tmp_path):
    path = write(tmp_path / "t.csv", ["size", "time", "kind"], [[8, 2.5, "a"], [16, 0, "b"]])
    table = read_table(path, COLUMNS)
    assert table["time"].tolist() == [0.0025, 0.0]
    assert table["size"].tolist() == [8, 16]


def test_every_fault_of_a_table_is_named_with_its_line(tmp_path):
    path = write(tmp_path / "t.csv", ["size", "time", "colour"],
                 [[8, -1, "x"], [0, "nan", "x"], [1.5, "fast", "x"], [4, 1, "x"]])
    with pytest.raises(InputError) as error:
        read_table(path, COLUMNS)
    assert sorted(faults(error), key=str) == sorted([
        (1, "kind"), (1, "colour"), (2, "time"), (3, "time"), (4, "time"), (3, "size"),
        (4, "size")], key=str)
    assert "missing column" in str(error.value) and "unknown column" in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", ["", "size,time,kind\n"])
def test_an_empty_table_is_a_mistake(tmp_path, text):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(InputError, match="empty"):
        read_table(path, COLUMNS)


def test_a_missing_file_and_a_short_row_are_mistakes(tmp_path):
    with pytest.raises(InputError, match="readable"):
        read_table(tmp_path / "none.csv", COLUMNS)
    path = write(tmp_path / "t.csv", ["size", "time", "kind"], [[8, 1, "a"], [8, 1]])
    with pytest.raises(InputError, match=r"t\.csv:3"):
        read_table(path, COLUMNS)


def test_many_faults_of_one_column_are_counted_not_listed(tmp_path):
    path = write(tmp_path / "t.csv", ["size", "time", "kind"], [[1, -1, "a"]] * 50)
    with pytest.raises(InputError, match="30 more such cells"):
        read_table(path, COLUMNS)


def test_rows_that_timed_nothing_are_left_out_and_counted(tmp_path):
    columns = (Column("size", "count", least=1, is_work=True), *COLUMNS[1:])
    path = write(tmp_path / "t.csv", ["size", "time", "kind"],
                 [[0, "n/a", "a"], [8, 1, "a"], [0, 0, "b"]])
    table = read_table(path, columns)
    assert table["size"].tolist() == [8] and table.num_empty == 2 and table.lines.tolist() == [3]
    path = write(tmp_path / "u.csv", ["size", "time", "kind"], [[0, 1, "a"]])
    with pytest.raises(InputError, match="at least 1"):  # a file that timed nothing is a mistake
        read_table(path, columns)


# --- drafts -----------------------------------------------------------------------------------


def test_rows_of_one_place_are_samples_of_one_point():
    found = samples_at([4, 1, 4], [0.3, 0.1, 0.5])
    assert [(p.x, p.samples_s) for p in found] == [(4, (0.3, 0.5)), (1, (0.1,))]


def test_one_slow_message_raises_no_larger_ones():
    sizes = np.arange(1, 101) * 1000
    times = 1e-5 + sizes * 1e-10
    times[3] = 1.0
    found = grouped_messages(sizes, times)
    assert max(np.median(p.samples_s) for p in found) < 3e-5
    assert sum(len(p.samples_s) for p in found) == 100


def test_a_point_far_slower_than_one_of_more_work_is_left_out():
    found = samples_at([1, 2, 1, 2], [5.0, 2.0, 1.5, 3.0], [1, 1, 2, 2])
    assert [(p.x, p.y) for p in undisturbed(found, grows_with_y=True)] == [(2, 1), (1, 2), (2, 2)]
    assert len(undisturbed(found, grows_with_y=False)) == 3  # (1, 1) is slower than (2, 1) too
