"""Keys of a job file for memory below the devices: what they become. What is wrong in them has
test_wrong_jobs.py."""

import math

import pytest

from jobs import job
from xgpt.core.errors import InputError
from xgpt.core.placement import AskedPlacement
from xgpt.core.units import GIB
from xgpt.job.resolve import resolve, resolve_cluster

TIERS = "{host: {memory: 64 GiB, up: 12 GB, down: 6e9}, disk: {memory: 1 TB, up: 3 GB, down: 1 GB}}"
LENGTHS = "{task: S}"


def of(tmp_path, **sections):
    return job(tmp_path, **{"workload": LENGTHS, "cluster": "a40-4", **sections})


def test_tiers_beside_a_cluster_are_those_of_a_node_as_far_as_the_constraint_allows(tmp_path):
    host, disk = resolve_cluster(of(tmp_path, tiers=TIERS)).tiers
    assert (host.memory_bytes, host.attention) == (64 * GIB, True)
    assert (host.up.bandwidth_bytes_per_s, host.down.bandwidth_bytes_per_s) == (12e9, 6e9)
    assert (disk.memory_bytes, disk.attention) == (10**12, False)
    assert (disk.up.bandwidth_bytes_per_s, disk.down.bandwidth_bytes_per_s) == (3e9, 1e9)
    less = resolve_cluster(of(tmp_path, tiers=TIERS, constraint=(
        "{host_memory: 16 GiB, disk: 2 TB}"))).tiers
    assert [tier.memory_bytes for tier in less] == [16 * GIB, 10**12]
    only = "{host: {memory: 64 GiB, up: 12 GB, down: 6e9, attention: false}}"
    assert [(tier.name, tier.attention) for tier in resolve_cluster(
        of(tmp_path, tiers=only)).tiers] == [("host", False)]
    assert resolve_cluster(of(tmp_path)).tiers == ()


def test_what_a_placement_leaves_out_is_left_to_the_planner(tmp_path):
    given = of(tmp_path, tiers=TIERS, schedule=(
        "{placement: {weights: [20%, 0.8, 0], kv: [0, 1, 0], device_batch: 64, order: row, "
        "overlap: false, host_attention: true, weight_bits: 4}}")).schedule.placement
    assert given == AskedPlacement(
        weights=(0.2, 0.8, 0), kv=(0, 1, 0), device_batch=64, order="row", overlap=False,
        host_attention=True, weight_bits=4)
    thirds = of(tmp_path, tiers=TIERS, schedule=(
        "{placement: {weights: [0.3333333, 0.3333333, 0.3333333], host_attention: auto}}"))
    assert math.fsum(thirds.schedule.placement.weights) == 1
    assert thirds.schedule.placement.host_attention is None
    assert of(tmp_path).schedule.placement is None


def test_the_folder_is_the_one_given_or_beside_the_output(tmp_path):
    assert of(tmp_path).offload_folder == tmp_path / "out.offload"
    assert of(tmp_path, run="{offload: scratch}").offload_folder == tmp_path / "scratch"
    assert of(tmp_path, run="{offload: /scratch/me}").offload_folder.as_posix() == "/scratch/me"


@pytest.mark.parametrize(("sections", "may"), [
    ({}, True), ({"run": "{offload: off}"}, False), ({"run": "{offload: scratch}"}, True),
    ({"plan": "{engine: vllm}"}, False), ({"cluster": "h100-8"}, False),
    ({"cluster": "h100-8", "tiers": TIERS}, True), ({"model": "t5-11b"}, False)])
def test_xgpts_own_runner_alone_works_with_memory_below_the_devices(tmp_path, sections, may):
    assert resolve(of(tmp_path, **sections)).offload == ("auto" if may else "off")


def test_this_machine_s_cores_have_a_disk_and_no_host_unless_it_is_given(tmp_path):
    def asked(share, **sections):
        return resolve(of(tmp_path, cluster="local", model="opt-125m", schedule=(
            f"{{placement: {{kv: {share}}}}}"), **sections)).fixed.placement

    assert asked("[0.5, 0, 0.5]").kv == (0.5, 0, 0.5)
    with pytest.raises(InputError, match=r"schedule.placement.kv: 0 for host, .* a node has disk"):
        asked("[0.5, 0.5, 0]")
    assert asked("[0.5, 0.5, 0]", tiers=TIERS).kv == (0.5, 0.5, 0)
    with pytest.raises(InputError, match="constraint.host_memory = .*: of a cluster with"):
        asked("[1, 0, 0]", constraint="{host_memory: 1 GiB}")


def test_an_encoder_decoder_model_has_no_placement(tmp_path):
    with pytest.raises(InputError, match="schedule.placement: left out for t5-11b, an encoder-de"):
        resolve(of(tmp_path, model="t5-11b", tiers=TIERS,
                   schedule="{placement: {device_batch: 4}}"))
