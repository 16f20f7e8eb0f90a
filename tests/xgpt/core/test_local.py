"""Detection of this machine by what the kernel and nvidia-smi would say; layouts of its cores."""

import os
import subprocess
from types import SimpleNamespace

import pytest

from jobs import job
from xgpt.core import catalog
from xgpt.core.errors import InputError
from xgpt.core.system import machine as local
from xgpt.core.system.machine import Layout, layouts
from xgpt.core.units import GIB, MIB
from xgpt.job import resolve as layout
from xgpt.job.resolve import open_layouts, with_layout

SMI = """\
0, GPU-aaaa-1, NVIDIA A40, 46068
1, GPU-bbbb-2, NVIDIA A40, 46068
2, GPU-cccc-3, NVIDIA T1000, 4096
"""
CPUINFO = "model name\t: Some CPU (R) 9000 @ 2GHz\nflags\t\t: fpu avx2 avx512f\n"
V1 = "sys/fs/cgroup"


def write_files(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="utf-8")


def cores(monkeypatch, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)), raising=False)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host of 16 cores and 64 GiB without cgroup limits."""
    cores(monkeypatch, 16)
    write_files(tmp_path, {
        "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:  {64 * 2**20} kB",
        "proc/cpuinfo": CPUINFO, "proc/self/cgroup": "0::/"})
    return tmp_path


@pytest.mark.parametrize(("files", "count"), [
    ({}, 16),
    # cgroup 2: in any ancestor
    ({"proc/self/cgroup": "0::/user/job", f"{V1}/user/cpu.max": "250000 100000",
      f"{V1}/user/job/cpu.max": "max 100000"}, 2),
    # cgroup 1: half a core is one worker
    ({"proc/self/cgroup": "3:cpu,cpuacct:/job\n2:memory:/job",
      f"{V1}/cpu/job/cpu.cfs_quota_us": 50000, f"{V1}/cpu/job/cpu.cfs_period_us": 100000,
      f"{V1}/cpu/cpu.cfs_quota_us": -1, f"{V1}/cpu/cpu.cfs_period_us": 100000}, 1),
    # a path outside the mount
    ({"proc/self/cgroup": "0::/../../other\nnonsense", f"{V1}/cpu.max": "300000 100000"}, 3)])
def test_cores_are_those_of_the_affinity_and_the_quotas(host, files, count):
    write_files(host, files)
    assert local.usable_cores(host) == count


@pytest.mark.parametrize(("files", "num_bytes"), [
    ({}, 64 * GIB),
    # cache that can be dropped counts as free
    ({"proc/self/cgroup": "0::/job", f"{V1}/job/memory.max": 8 * GIB,
      f"{V1}/job/memory.current": 3 * GIB,
      f"{V1}/job/memory.stat": f"anon 1\ninactive_file {GIB}"}, 6 * GIB),
    # the huge number of cgroup 1 is none
    ({"proc/self/cgroup": "4:memory:/job", f"{V1}/memory/job/memory.limit_in_bytes": 4 * GIB,
      f"{V1}/memory/job/memory.usage_in_bytes": GIB,
      f"{V1}/memory/memory.limit_in_bytes": 2**63 - 4096,
      f"{V1}/memory/memory.usage_in_bytes": 5}, 3 * GIB)])
def test_memory_is_what_is_free_within_the_limits(host, files, num_bytes):
    write_files(host, files)
    assert local.available_memory_bytes(host) == num_bytes


def test_cpu_workers_share_cores_and_memory(host, monkeypatch):
    cluster = local.cpu_cluster(4, host)
    device = cluster.device
    assert (cluster.name, cluster.num_devices, device.kind) == ("local", 4, "cpu")
    assert device.memory_bytes == 16 * GIB and device.name == "cpu-4c-some-cpu-r-9000-2ghz"
    assert device.peak_flops_per_s("float32") == pytest.approx(4 * 160e9)
    assert cluster.link_between(0, 3).bandwidth_bytes_per_s == 6.5e9
    part = local.cpu_cluster(32, host).device  # of a core
    assert part.name.startswith("cpu-0.5c-")
    assert part.peak_flops_per_s("float32") == pytest.approx(80e9)
    assert local.cpu_cluster(None, host).num_devices == 8, "at most"
    cores(monkeypatch, 2)
    assert local.cpu_cluster(None, host).num_devices == 2
    cores(monkeypatch, 3)
    assert local.cpu_cluster(2, host).device.name.startswith("cpu-1c-")
    # rounded, so that a device stays the same
    write_files(host, {"proc/meminfo": f"MemAvailable: {1000 * 1024} kB"})
    assert local.cpu_cluster(1, host).device.memory_bytes == 768 * MIB


@pytest.mark.parametrize(("vendor", "flags", "is_slower"), [
    ("GenuineIntel", "avx512f", None), ("GenuineIntel", "avx512f avx512_bf16", True),
    ("GenuineIntel", "avx512f avx512_bf16 amx_bf16", False),
    ("AuthenticAMD", "avx512f avx512_bf16", False)])
def test_bfloat16_is_listed_where_the_cpu_has_a_unit_for_it(host, vendor, flags, is_slower):
    """Intel's own is AMX: without it float32 is multiplied quicker."""
    write_files(host, {"proc/cpuinfo": f"vendor_id\t: {vendor}\nmodel name\t: some\n"
                                       f"flags\t\t: {flags}\n"})
    rates = dict(local.cpu_cluster(1, host).device.flops_per_s)
    assert ("bfloat16" in rates) == (is_slower is not None)
    assert is_slower is None or (rates["bfloat16"] < rates["float32"]) == is_slower


@pytest.mark.parametrize(("selection", "indices"), [
    (None, [0, 1, 2]), ("1,0", [1, 0]), ("2", [2]), ("", []), ("-1", []), ("0,9,1", [0]),
    ("GPU-bbbb", [1])])
def test_cuda_visible_devices_is_obeyed(selection, indices):
    found = local.visible_gpus(local.parse_smi(SMI), selection)
    assert [gpu.index for gpu in found] == indices


def test_gpus_are_rows_of_the_catalog_or_assumed_and_shared_evenly():
    gpus = local.parse_smi(SMI + "NVIDIA-SMI has failed\n3, GPU-d, Odd GPU, [N/A]\n")
    assert [g.name for g in gpus] == ["NVIDIA A40", "NVIDIA A40", "NVIDIA T1000", "Odd GPU"]
    assert gpus[0].memory_bytes == 46068 * MIB and gpus[3].memory_bytes is None
    cluster = local.gpu_cluster(local.parse_smi(SMI), None)
    assert cluster.num_devices == 2, "the largest group of equal GPUs"
    assert cluster.device == catalog.device("A40") and cluster.intra_link.name == "pcie4-x16"
    small = local.parse_smi("0, GPU-a, NVIDIA A40, 1000")
    assert local.gpu_cluster(small, 1).device.memory_bytes == 1000 * MIB
    device = local.gpu_cluster(local.parse_smi("0, GPU-a, NVIDIA T1000, 4096"), None).device
    assert device.memory_bytes == 4 * GIB and "assumed" in device.source
    with pytest.raises(InputError, match="inline"):
        local.gpu_cluster(local.parse_smi("0, GPU-a, Odd GPU, [N/A]"), None)
    with pytest.raises(InputError, match="describe the cluster inline"):
        local.visible_gpus(local.parse_smi(SMI), "MIG-xyz")
    assert local.gpu_cluster(local.parse_smi(SMI), 1).num_devices == 1
    whole, cluster = catalog.device("A40"), local.gpu_cluster(local.parse_smi(SMI), 3)
    assert cluster.num_devices == 3 and cluster.intra_link.name == "shared-memory"
    part = cluster.device
    assert part.kind == "gpu" and part.name == "A40/2" and "2 ranks" in part.source
    assert part.memory_bytes == whole.memory_bytes // 2
    assert part.peak_flops_per_s("float16") == whole.peak_flops_per_s("float16") / 2
    assert part.bandwidth_bytes_per_s == whole.bandwidth_bytes_per_s / 2


@pytest.mark.parametrize(("version", "why"), [
    ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "without CUDA"),
    ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", None),
    ('cuda = "12.1"\n', None), (None, "not installed")])
def test_a_build_of_torch_is_known_without_importing_it(monkeypatch, tmp_path, version, why):
    (tmp_path / "version.py").write_text(version or "")
    found = None if version is None else SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(local.importlib.util, "find_spec", lambda name: found)
    said = local.why_no_torch("gpu")
    assert said is None if why is None else why in said
    assert (local.why_no_torch("cpu") is None) == (version is not None)


@pytest.mark.parametrize(("outcome", "kind"), [
    (FileNotFoundError(), "cpu"), (subprocess.TimeoutExpired("nvidia-smi", 30), "cpu"),
    (SimpleNamespace(returncode=9, stdout=SMI), "cpu"),
    (SimpleNamespace(returncode=0, stdout=SMI), "gpu")])
def test_gpus_are_used_where_a_working_driver_lists_them(monkeypatch, outcome, kind):
    def run(*_args, **_kwargs):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cluster = local.detect(3)
    assert cluster.device.kind == kind and cluster.num_devices == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local.detect(1).device.kind == "cpu"


@pytest.mark.parametrize(("num_cores", "expected"), [
    (1, ["1x1"]), (2, ["1x2", "2x1"]), (7, ["1x7", "7x1"]), (8, ["1x8", "2x4", "4x2", "8x1"]),
    (48, ["1x48", "2x24", "3x16", "4x12", "6x8", "8x6"])])
def test_layouts_are_the_divisors_of_the_cores_with_at_most_eight_ranks(num_cores, expected):
    assert [str(each) for each in layouts(num_cores)] == expected


@pytest.mark.parametrize(("run", "sections", "gpus", "expected"), [
    ("", {}, 0, ["1x4", "4x1"]), ("ranks: 2", {}, 0, []), ("threads_per_rank: 2", {}, 0, ["2x2"]),
    ("threads_per_rank: 9", {}, 0, ["1x9"]), ("", {"cluster": "a40-4"}, 0, []),
    ("hosts: [a, b]", {}, 0, []), ("engine: deepspeed", {}, 0, []),
    ("", {"constraint": "{latency_s: 5, max_gpus: 3}"}, 0, ["1x4", "2x2"]), ("", {}, 1, [])])
def test_a_wish_or_another_cluster_or_engine_leaves_nothing_open(
        tmp_path, monkeypatch, run, sections, gpus, expected):
    monkeypatch.setattr(layout, "usable_cores", lambda: 4)
    monkeypatch.setattr(layout, "gpus_here", lambda: [object()] * gpus)
    sections = {"cluster": "local", "model": "opt-125m", "run": f"{{{run}}}"} | sections
    assert [str(each) for each in open_layouts(job(tmp_path, **sections))] == expected


def test_a_job_that_is_laid_out_leaves_nothing_open(tmp_path):
    own = with_layout(job(tmp_path, cluster="local", model="opt-125m"), Layout(2, 3))
    assert (own.run.ranks, own.run.threads_per_rank) == (2, 3) and not open_layouts(own)
    assert Layout(1, 2).words == "1 rank x 2 threads"
