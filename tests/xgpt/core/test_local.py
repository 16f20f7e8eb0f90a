"""Detection of this machine, from what the kernel and nvidia-smi would say."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from xgpt.core import catalog, layout, local
from xgpt.core.errors import InputError
from xgpt.core.job import Job
from xgpt.core.job_file import load_job
from xgpt.core.layout import Layout, laid_out, layouts, open_layouts
from xgpt.core.units import GIB, MIB

SMI = """\
0, GPU-aaaa-1, NVIDIA A40, 46068
1, GPU-bbbb-2, NVIDIA A40, 46068
2, GPU-cccc-3, NVIDIA T1000, 4096
"""
CPUINFO = "model name\t: Some CPU (R) 9000 @ 2GHz\nflags\t\t: fpu avx2 avx512f{extra}\n"


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of 16 cores and 64 GiB without cgroup limits."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    _write(tmp_path, {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:  {64 * 2**20} kB",
                      "proc/cpuinfo": CPUINFO.format(extra=""), "proc/self/cgroup": "0::/"})
    return tmp_path


def test_without_limits_the_affinity_and_the_free_memory_count(host: Path) -> None:
    assert local.usable_cores(host) == 16
    assert local.available_memory_bytes(host) == 64 * GIB


def test_a_quota_of_cgroup_2_limits_the_cores_in_any_ancestor(host: Path) -> None:
    _write(host, {"proc/self/cgroup": "0::/user/job", "sys/fs/cgroup/user/cpu.max": "250000 100000",
                  "sys/fs/cgroup/user/job/cpu.max": "max 100000"})
    assert local.usable_cores(host) == 2


def test_a_quota_of_cgroup_1_limits_the_cores(host: Path) -> None:
    _write(host, {"proc/self/cgroup": "3:cpu,cpuacct:/job\n2:memory:/job",
                  "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "50000",
                  "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
                  "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                  "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"})
    assert local.usable_cores(host) == 1, "half a core is one worker"


def test_the_memory_limit_of_a_cgroup_counts_dropable_cache_as_free(host: Path) -> None:
    _write(host, {"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/memory.max": str(8 * GIB),
                  "sys/fs/cgroup/job/memory.current": str(3 * GIB),
                  "sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {GIB}"})
    assert local.available_memory_bytes(host) == 6 * GIB


def test_the_memory_limit_of_cgroup_1_is_read_and_its_huge_none_ignored(host: Path) -> None:
    base = "sys/fs/cgroup/memory"
    _write(host, {"proc/self/cgroup": "4:memory:/job", f"{base}/job/memory.limit_in_bytes":
                  str(4 * GIB), f"{base}/job/memory.usage_in_bytes": str(GIB),
                  f"{base}/memory.limit_in_bytes": str(2**63 - 4096),
                  f"{base}/memory.usage_in_bytes": "5"})
    assert local.available_memory_bytes(host) == 3 * GIB


def test_cgroup_paths_outside_the_mount_do_no_harm(host: Path) -> None:
    _write(host, {"proc/self/cgroup": "0::/../../other\nnonsense", "sys/fs/cgroup/cpu.max":
                  "300000 100000"})
    assert local.usable_cores(host) == 3


def test_cpu_workers_share_cores_and_memory(host: Path) -> None:
    cluster = local.cpu_cluster(4, host)
    device = cluster.device
    assert (cluster.name, cluster.num_devices, device.kind) == ("local", 4, "cpu")
    assert device.memory_bytes == 16 * GIB and device.name == "cpu-4c-some-cpu-r-9000-2ghz"
    assert device.peak_flops_per_s("float32") == pytest.approx(4 * 160e9)
    assert cluster.link_between(0, 3).bandwidth_bytes_per_s == 6.5e9


def test_cpu_workers_default_to_the_cores_and_at_most_eight(
        host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert local.cpu_cluster(None, host).num_devices == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert local.cpu_cluster(None, host).num_devices == 2


def test_more_workers_than_cores_get_a_part_of_one(host: Path) -> None:
    device = local.cpu_cluster(32, host).device
    assert device.name.startswith("cpu-0.5c-")
    assert device.peak_flops_per_s("float32") == pytest.approx(80e9)


def test_three_cores_for_two_workers_are_one_each(host: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    assert local.cpu_cluster(2, host).device.name.startswith("cpu-1c-")


@pytest.mark.parametrize(("extra", "has_bfloat16"), [
    ("", False), (" avx512_bf16", True), (" amx_bf16 avx512_bf16", True)])
def test_bfloat16_is_listed_where_the_cpu_has_a_unit_for_it(host: Path, extra: str,
                                                            has_bfloat16: bool) -> None:
    _write(host, {"proc/cpuinfo": CPUINFO.format(extra=extra)})
    assert ("bfloat16" in dict(local.cpu_cluster(1, host).device.flops_per_s)) == has_bfloat16


def test_free_memory_is_rounded_so_that_a_device_stays_the_same(host: Path) -> None:
    _write(host, {"proc/meminfo": f"MemAvailable: {1000 * 1024} kB"})
    assert local.cpu_cluster(1, host).device.memory_bytes == 768 * MIB


def test_lines_of_nvidia_smi_are_read_and_others_skipped() -> None:
    gpus = local.parse_smi(SMI + "NVIDIA-SMI has failed\n3, GPU-d, Odd GPU, [N/A]\n")
    assert [g.name for g in gpus] == ["NVIDIA A40", "NVIDIA A40", "NVIDIA T1000", "Odd GPU"]
    assert gpus[0].memory_bytes == 46068 * MIB and gpus[3].memory_bytes is None


@pytest.mark.parametrize(("selection", "indices"), [
    (None, [0, 1, 2]), ("1,0", [1, 0]), ("2", [2]), ("", []), ("-1", []), ("0,9,1", [0]),
    ("GPU-bbbb", [1])])
def test_cuda_visible_devices_is_obeyed(selection: str | None, indices: list[int]) -> None:
    found = local.visible_gpus(local.parse_smi(SMI), selection)
    assert [gpu.index for gpu in found] == indices


def test_a_mig_instance_is_refused_with_the_way_out() -> None:
    with pytest.raises(InputError, match="describe the cluster inline"):
        local.visible_gpus(local.parse_smi(SMI), "MIG-xyz")


def test_a_known_gpu_is_its_catalog_row_with_no_more_memory_than_read() -> None:
    cluster = local.gpu_cluster(local.parse_smi(SMI), None)
    assert cluster.num_devices == 2, "the largest group of equal GPUs"
    assert cluster.device == catalog.device("A40") and cluster.intra_link.name == "pcie4-x16"
    small = local.parse_smi("0, GPU-a, NVIDIA A40, 1000")
    assert local.gpu_cluster(small, 1).device.memory_bytes == 1000 * MIB


def test_an_unknown_gpu_keeps_the_memory_read_and_says_so() -> None:
    device = local.gpu_cluster(local.parse_smi("0, GPU-a, NVIDIA T1000, 4096"), None).device
    assert device.memory_bytes == 4 * GIB and "assumed" in device.source
    with pytest.raises(InputError, match="inline"):
        local.gpu_cluster(local.parse_smi("0, GPU-a, Odd GPU, [N/A]"), None)


def test_ranks_beyond_the_gpus_share_them_evenly() -> None:
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
def test_a_build_of_torch_is_known_without_importing_it(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str | None,
        why: str | None) -> None:
    (tmp_path / "version.py").write_text(version or "")
    found = None if version is None else SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(local.importlib.util, "find_spec", lambda name: found)
    said = local.why_no_torch("gpu")
    assert said is None if why is None else said is not None and why in said
    assert (local.why_no_torch("cpu") is None) == (version is not None)


@pytest.mark.parametrize("outcome", [
    FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 30),
    SimpleNamespace(returncode=9, stdout=SMI)])
def test_without_a_working_driver_the_cpu_is_used(monkeypatch: pytest.MonkeyPatch,
                                                  outcome: object) -> None:
    def run(*_args: object, **_kwargs: object) -> object:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(subprocess, "run", run)
    cluster = local.detect(3)
    assert cluster.device.kind == "cpu" and cluster.num_devices == 3


def test_gpus_are_used_where_the_driver_lists_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run",
                        lambda *_a, **_k: SimpleNamespace(returncode=0, stdout=SMI))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert local.detect().device.name == "A40"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local.detect(1).device.kind == "cpu"


@pytest.mark.parametrize(("vendor", "flags", "is_slower"), [
    ("GenuineIntel", "avx512f avx512_bf16", True),  # its own unit for it is AMX
    ("GenuineIntel", "avx512f avx512_bf16 amx_bf16", False),
    ("AuthenticAMD", "avx512f avx512_bf16", False)])
def test_intel_without_amx_multiplies_float32_quicker_than_bfloat16(
        vendor: str, flags: str, is_slower: bool) -> None:
    cpuinfo = f"vendor_id\t: {vendor}\nmodel name\t: some\nflags\t\t: {flags}\n"
    rates = dict(local._cpu_device(2, 1, 2**34, cpuinfo).flops_per_s)
    assert (rates["bfloat16"] < rates["float32"]) == is_slower


@pytest.mark.parametrize(("cores", "expected"), [
    (1, ["1x1"]), (2, ["1x2", "2x1"]), (7, ["1x7", "7x1"]), (8, ["1x8", "2x4", "4x2", "8x1"]),
    (48, ["1x48", "2x24", "3x16", "4x12", "6x8", "8x6"])])
def test_layouts_are_the_divisors_of_the_cores_with_at_most_eight_ranks(
        cores: int, expected: list[str]) -> None:
    assert [str(each) for each in layouts(cores)] == expected


def job_of(folder: Path, run: str, cluster: str = "local", constraint: str = "5") -> Job:
    path = folder / "job.yaml"
    path.write_text(f"model: opt-125m\ncluster: {cluster}\nworkload: {{task: S}}\n"
                    f"constraint: {{latency_s: {constraint}}}\nrun: {{{run}}}\n")
    return load_job(path, ())


@pytest.mark.parametrize(("run", "cluster", "constraint", "expected"), [
    ("", "local", "5", ["1x4", "4x1"]), ("ranks: 2", "local", "5", []),
    ("threads_per_rank: 2", "local", "5", ["2x2"]), ("threads_per_rank: 9", "local", "5", ["1x9"]),
    ("", "a40-4", "5", []), ("hosts: [a, b]", "local", "5", []),
    ("engine: deepspeed", "local", "5", []),
    ("", "local", "5, max_gpus: 3", ["1x4", "2x2"])])
def test_a_wish_or_another_cluster_or_engine_leaves_nothing_open(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str, cluster: str, constraint: str,
        expected: list[str]) -> None:
    monkeypatch.setattr(layout, "usable_cores", lambda: 4)
    monkeypatch.setattr(layout, "gpus_here", list)
    assert [str(e) for e in open_layouts(job_of(tmp_path, run, cluster, constraint))] == expected


def test_gpus_are_not_laid_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "gpus_here", lambda: [object()])
    assert open_layouts(job_of(tmp_path, "")) == ()


def test_a_job_that_is_laid_out_leaves_nothing_open(tmp_path: Path) -> None:
    job = laid_out(job_of(tmp_path, ""), Layout(2, 3))
    assert (job.run.ranks, job.run.threads_per_rank) == (2, 3) and not open_layouts(job)
    assert Layout(1, 2).words == "1 rank x 2 threads"
