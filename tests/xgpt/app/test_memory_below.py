"""Memory of this machine below its devices: when a job has it, and which folders cannot be it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobs import opened
from xgpt.app.tiers import needs_tiers, refuse_folder, with_measured_tiers
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.placement import Placement

LOCAL = {"model": "opt-125m", "cluster": "local", "run": "{ranks: 1}"}
ON_DISK = Placement(weights=(0, 0, 1), kv=(1, 0, 0), hidden=(1, 0, 0), device_batch=4,
                    budgets=((10**8, 0, 10**8), (10**8, 0, 3 * 10**8)))


def of(folder, **sections):
    return opened(folder, **{**LOCAL, **sections})


def estimate(placement):
    return SimpleNamespace(all_pools=(SimpleNamespace(placement=placement),))


def test_a_job_has_it_where_its_weights_do_not_fit_or_it_says_where_bytes_lie(tmp_path):
    small = "{memory: 100 MiB}"
    assert not needs_tiers([of(tmp_path)])
    assert needs_tiers([of(tmp_path, constraint=small)])
    assert not needs_tiers([of(tmp_path, constraint=small), of(tmp_path)])
    assert needs_tiers([of(tmp_path, schedule="{placement: {kv: [1, 0, 0]}}")])
    assert not needs_tiers([of(tmp_path, model="opt-30b", cluster="1xT4")])
    with pytest.raises(InfeasibleError, match="The weights of opt-125m alone take .* can be used"):
        needs_tiers([of(tmp_path, constraint=small, run="{ranks: 1, offload: off}")])


def test_cores_have_the_disk_of_the_folder_beside_the_output_alone(tmp_path):
    found = with_measured_tiers(job := of(tmp_path, constraint="{disk: 1 GB}"))
    (disk,) = found.problem.cluster.tiers
    assert (disk.name, disk.memory_bytes) == ("disk", 10**9)
    assert disk.up.bandwidth_bytes_per_s > 1e7 < disk.down.bandwidth_bytes_per_s
    assert not job.job.offload_folder.exists(), "a plan leaves no folder"
    assert with_measured_tiers(found) is found
    given = of(tmp_path, tiers="{host: {memory: 1 GB, up: 5 GB, down: 4 GB}}")
    tiers = with_measured_tiers(given).problem.cluster.tiers
    assert [(tier.name, tier.up.source) for tier in tiers][0] == ("host", "job file")


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no folder in memory here")
def test_a_folder_in_memory_or_one_that_cannot_be_written_is_refused(tmp_path):
    for folder, words in (("/dev/shm/xgpt-offload-test", "this one lies in memory (tmpfs)"),
                          ("/proc/xgpt", "run.offload")):
        job = of(tmp_path, run=f"{{ranks: 1, offload: {folder}}}")
        with pytest.raises(InputError) as refused:
            with_measured_tiers(job)
        assert words in str(refused.value) and f"run.offload = '{folder}'" in str(refused.value)


def test_room_for_all_stages_is_looked_for_before_a_run(tmp_path):
    job = of(tmp_path).job
    refuse_folder(job, estimate(ON_DISK))
    refuse_folder(job, estimate(None))
    much = replace(ON_DISK, budgets=((0, 0, 10**16), (0, 0, 10**15)))
    job.offload_folder.mkdir(exist_ok=True)
    with (job.offload_folder / "of another program").open("wb") as other:
        other.truncate(10**13)
    with pytest.raises(InputError, match=r"with room for .* \(11,000,000,000,000,000 bytes\): .*"
                                         r" are free"):
        refuse_folder(job, estimate(much))
