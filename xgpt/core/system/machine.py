"""This machine: its GPUs, or CPU workers if it has none, as `cluster: local`; and the share of its
cores that others use. Free of torch.

Figures of a CPU worker, or of an unknown GPU, are rough constants: enough for a first schedule. A
run is planned with a measured profile.
"""

import importlib.util
import os
import re
import resource
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from xgpt.core import catalog
from xgpt.core.cluster import Cluster, Device, Link
from xgpt.core.errors import wrong
from xgpt.core.units import INT8, MIB

MAX_DEFAULT_WORKERS = 8
_MEMORY_STEP_BYTES = 256 * MIB  # rounds free memory, which changes every second
_SMI = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")

# Per core. Measured on a server core of 2023 (AVX-512, AMX): 166-201 GFLOP/s float32, 1.06-1.36
# TFLOP/s bfloat16, 13-14 GB/s of memory; the others by the width of their units.
_FLOAT32_FLOPS = (("avx512f", 160e9), ("avx2", 80e9))  # the first flag present counts
_BFLOAT16_FLOPS = (("amx_bf16", 1.1e12), ("avx512_bf16", 300e9))
# Intel's bfloat16 dot products without AMX: half as fast as its float32 (measured).
_INTEL_AVX512_BFLOAT16_FLOPS = 85e9
_OTHER_FLOPS = 20e9
_INT8_SPEED = 4  # times float32's, with VNNI (measured: 3.5 to 4)
_BANDWIDTH_PER_CORE = 13e9
_SHARED_MEMORY = Link(name="shared-memory", bandwidth_bytes_per_s=6.5e9, latency_s=10e-6,
                      source="rough constant for processes on one host")
_NETWORK = Link(name="network", bandwidth_bytes_per_s=1.2e9, latency_s=50e-6,
                source="rough constant for 10 Gbit/s Ethernet between hosts")
# A GPU without a catalog row: taken for a small one of 2018, so that no more is promised.
_UNKNOWN_GPU_FLOPS = (("float32", 10e12), ("float16", 60e12))
_UNKNOWN_GPU_BANDWIDTH = 300e9


@dataclass(frozen=True, slots=True, kw_only=True)
class SmiGpu:
    """A GPU as nvidia-smi lists it; `memory_bytes` None if unknown."""

    index: int
    uuid: str
    name: str
    memory_bytes: int | None


def detect(num_workers: int | None = None, num_hosts: int = 1) -> Cluster:
    """This machine as a cluster of one node, or of `num_hosts` equal ones. `num_workers`: ranks in
    all (default: one per GPU, or without GPUs one per usable core up to 8). More ranks than GPUs
    share them."""
    gpus = gpus_here()
    each = None if num_workers is None else max(num_workers // num_hosts, 1)
    node = gpu_cluster(gpus, each) if gpus else cpu_cluster(each)
    return node if num_hosts == 1 else replace(node, num_nodes=num_hosts, inter_link=_NETWORK)


def gpus_here() -> list[SmiGpu]:
    """The GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves."""
    return visible_gpus(_query_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def gpu_cluster(gpus: list[SmiGpu], num_workers: int | None) -> Cluster:
    """A cluster of the machine's largest group of equal GPUs, or of `num_workers` of them. Workers
    that outnumber the GPUs have even parts of them, and message through the host's memory."""
    (name, memory_bytes), count = Counter((g.name, g.memory_bytes) for g in gpus).most_common(1)[0]
    device, link = _gpu_device(name, memory_bytes)
    workers = num_workers or count
    if workers > count:
        device, link = _part_of(device, -(-workers // count)), _SHARED_MEMORY
    return Cluster(name="local", device=device, num_nodes=1, devices_per_node=workers,
                   intra_link=link, inter_link=link)


def cpu_cluster(num_workers: int | None, root: Path = Path("/")) -> Cluster:
    """A cluster of `num_workers` CPU workers that share usable cores and free memory evenly."""
    cores = usable_cores(root)
    workers = num_workers or min(cores, MAX_DEFAULT_WORKERS)
    device = _cpu_device(cores, workers, available_memory_bytes(root), _cpuinfo(root))
    return Cluster(name="local", device=device, num_nodes=1, devices_per_node=workers,
                   intra_link=_SHARED_MEMORY, inter_link=_SHARED_MEMORY)


def parse_smi(text: str) -> list[SmiGpu]:
    """The GPUs in nvidia-smi's lines "0, GPU-uuid, NVIDIA A40, 46068" (MiB)."""
    gpus = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and cells[0].isdigit():
            memory = int(cells[3]) * MIB if cells[3].isdigit() else None
            gpus.append(SmiGpu(index=int(cells[0]), uuid=cells[1], name=cells[2],
                               memory_bytes=memory))
    return gpus


def visible_gpus(gpus: list[SmiGpu], selection: str | None) -> list[SmiGpu]:
    """The GPUs of `gpus` that CUDA_VISIBLE_DEVICES (`selection`) leaves; None leaves all."""
    if selection is None:
        return gpus
    chosen: list[SmiGpu] = []
    for word in (w.strip() for w in selection.split(",")):
        if word.startswith("MIG-"):
            raise wrong("CUDA_VISIBLE_DEVICES", "cluster", word,
                        "the size of a MIG instance is not detected: describe the cluster inline")
        match = [g for g in gpus if word == str(g.index) or (
            word.startswith("GPU-") and g.uuid.startswith(word))]
        if not match:
            break  # as CUDA does: what follows an invalid entry is invisible
        chosen.extend(match[:1])
    return chosen


def usable_cores(root: Path = Path("/")) -> int:
    """Number of cores this process may use (affinity, cgroup quota, Slurm job), at least 1."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = float(len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1)
    for folder in _cgroup_folders(root, "cpu"):
        words = (_read(folder / "cpu.max") or "").split()  # version 2: "quota period"
        if not words:
            words = [_read(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0:
            cores = min(cores, int(words[0]) / int(words[1]))
    of_job = os.environ.get("SLURM_CPUS_ON_NODE", "")  # whether Slurm confines the job or not
    if of_job.isdigit():
        cores = min(cores, int(of_job))
    return max(int(cores), 1)


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory available without swapping, within the cgroup's limit."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _read(root / "proc/meminfo") or "", re.M)
    if match:
        available = int(match.group(1)) * 1024
    else:  # not Linux: what is installed
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for folder in _cgroup_folders(root, "memory"):
        left = _cgroup_memory_left(folder)
        available = available if left is None else min(available, left)
    return max(available, 0)


def why_no_torch(kind: Literal["cpu", "gpu"]) -> str | None:
    """The reason why PyTorch here cannot compute on such devices, judged without importing it; None
    if it can."""
    package = importlib.util.find_spec("torch")
    if package is None or package.origin is None:
        return "torch is not installed"
    written = _read(Path(package.origin).with_name("version.py")) or ""
    if kind == "gpu" and re.search(r"^cuda\b[^=\n]*=\s*['\"]", written, re.M) is None:
        return "this PyTorch was built without CUDA"
    return None


def core_clock(root: Path = Path("/")) -> str:
    """The first core's current clock, as in "2600 MHz"; "" if the system does not show it."""
    scaling = _read(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq") or ""
    if scaling.isdigit():
        return f"{int(scaling) / 1000:.0f} MHz"
    match = re.search(r"^cpu MHz\s*:\s*([0-9.]+)", _cpuinfo(root), re.M)
    return f"{float(match.group(1)):.0f} MHz" if match else ""


def _cgroup_memory_left(folder: Path) -> int | None:
    """Bytes left under a cgroup's limit, inactive file cache counted as free; None: no limit."""
    for limit_file, usage_file, cache_key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")):
        limit, usage = _read(folder / limit_file), _read(folder / usage_file)
        if limit is None or not limit.isdigit() or usage is None or not usage.isdigit():
            continue
        cache = re.search(rf"^{cache_key} (\d+)", _read(folder / "memory.stat") or "", re.M)
        return int(limit) - int(usage) + (int(cache.group(1)) if cache else 0)
    return None


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yields folders of this process's cgroup and its ancestors, of either version; each may set a
    limit."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        base = root / "sys/fs/cgroup"
        if controllers:
            if controller not in controllers.split(","):
                continue
            base /= controller
        parts = [part for part in path.split("/") if part not in ("", "..")]
        yield from (base.joinpath(*parts[:depth]) for depth in range(len(parts) + 1))


def _gpu_device(name: str, memory_bytes: int | None) -> tuple[Device, Link]:
    row = catalog.device_of_smi_name(name)
    if row is not None:
        device, link = row
        memory = min(device.memory_bytes, memory_bytes or device.memory_bytes)
        return replace(device, memory_bytes=memory), link
    if memory_bytes is None:
        raise wrong("local", "cluster", name,
                    "nvidia-smi does not say this GPU's memory: describe the cluster inline")
    device = Device(name=name, kind="gpu", memory_bytes=memory_bytes,
                    bandwidth_bytes_per_s=_UNKNOWN_GPU_BANDWIDTH, flops_per_s=_UNKNOWN_GPU_FLOPS,
                    source="memory from nvidia-smi; no catalog row, rates assumed")
    return device, catalog.link("pcie4-x16")


def _cpu_device(cores: int, workers: int, memory_bytes: int, cpuinfo: str) -> Device:
    flags_line = re.search(r"^flags\s*:(.*)$", cpuinfo, re.M)
    flags = set(flags_line.group(1).split()) if flags_line else set()
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.M)
    slug = re.sub(r"[^a-z0-9]+", "-", model.group(1).lower()).strip("-") if model else "unknown"
    # whole cores, as threads are; below 1 where ranks outnumber cores
    share = cores // workers if cores >= workers else cores / workers
    rates = [("float32", next((r for f, r in _FLOAT32_FLOPS if f in flags), _OTHER_FLOPS))]
    rates += [("bfloat16", rate) for flag, rate in _BFLOAT16_FLOPS if flag in flags][:1]
    if "GenuineIntel" in cpuinfo and "avx512_bf16" in flags and "amx_bf16" not in flags:
        rates[1:] = [("bfloat16", _INTEL_AVX512_BFLOAT16_FLOPS)]
    if flags & {"avx512_vnni", "avx_vnni"}:
        rates.append((INT8, _INT8_SPEED * rates[0][1]))
    memory = memory_bytes // workers
    return Device(
        name=f"cpu-{share:.3g}c-{slug}", kind="cpu",
        memory_bytes=memory - memory % _MEMORY_STEP_BYTES or memory,
        bandwidth_bytes_per_s=_BANDWIDTH_PER_CORE * share,
        flops_per_s=tuple((dtype, rate * share) for dtype, rate in rates),
        source=f"rough constants for {share:.3g} of this machine's {cores} usable cores",
    )


def _cpuinfo(root: Path) -> str:
    return _read(root / "proc/cpuinfo") or ""


def _part_of(gpu: Device, sharers: int) -> Device:
    """The share of `gpu` that one of `sharers` ranks has, as a Device."""
    return replace(
        gpu, name=f"{gpu.name}/{sharers}", memory_bytes=gpu.memory_bytes // sharers,
        bandwidth_bytes_per_s=gpu.bandwidth_bytes_per_s / sharers,
        flops_per_s=tuple((dtype, rate / sharers) for dtype, rate in gpu.flops_per_s),
        source=f"an even part for each of {sharers} ranks; {gpu.source}")


def _query_gpus() -> list[SmiGpu]:
    try:
        done = subprocess.run(_SMI, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):  # no driver here, or one that hangs
        return []
    return parse_smi(done.stdout) if done.returncode == 0 else []


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


class Layout(NamedTuple):
    """Number of ranks, and threads of each."""

    ranks: int
    threads: int

    def __str__(self) -> str:
        return f"{self.ranks}x{self.threads}"

    @property
    def words(self) -> str:
        """The layout in words: "2 ranks x 1 thread"."""
        return (f"{self.ranks} rank{'s' * (self.ranks > 1)} x "
                f"{self.threads} thread{'s' * (self.threads > 1)}")


def layouts(cores: int) -> tuple[Layout, ...]:
    """Every way to divide the cores evenly, the fewest ranks first."""
    return tuple(Layout(ranks, cores // ranks)
                 for ranks in range(1, min(cores, MAX_DEFAULT_WORKERS) + 1) if cores % ranks == 0)


def busy_s(stat: Path = Path("/proc/stat")) -> float | None:
    """Seconds that all cores together were busy since boot; None if the system does not say."""
    try:
        fields = stat.read_text(encoding="utf-8").splitlines()[0].split()[1:9]
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    except (OSError, ValueError, IndexError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def used_s(process: int) -> float:
    """Core seconds that a process and its children have used; 0 if it has ended, or the system does
    not say."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    own = sum(map(int, text.rpartition(")")[2].split()[11:15]))  # ended children included
    return own / os.sysconf("SC_CLK_TCK") + children_s(process)


def children_s(process: int) -> float:
    """Core seconds that a process's living children have used."""
    return sum(map(used_s, children_of(process)))


def children_of(process: int) -> list[int]:
    """Ids of a process's living children; [] if it has ended, or the system does not say."""
    found: list[int] = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text(encoding="utf-8").split())
    return found


def installed(package: str) -> str | None:
    """Name and version of a package, as in "torch 2.7"; None if it is not installed."""
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return None


NOTICEABLE_SHARE = 0.10  # chosen: below it times are off by less than points of profiles scatter
LARGE_SHARE = 0.30  # chosen: above it the error of times is unknown


class Contention:
    """Measures the share of the cores that other programs use, from its creation on: the usual
    reason why a run on CPU ranks is slower than predicted. Time of ended children counts as ours,
    and that of the living processes that `alive` lists."""

    def __init__(self, stat: Path = Path("/proc/stat"),
                 alive: Callable[[], Iterable[int]] = lambda: ()) -> None:
        self._stat, self._alive = stat, alive
        self._busy_s, self._start_s = busy_s(stat), time.monotonic()
        self._own_s = self._used_by_us_s()

    def others_share(self) -> float | None:
        """Share of all cores, 0 to 1, used by other programs and a host's other guests; None if the
        system does not say."""
        now_s, elapsed_s = busy_s(self._stat), time.monotonic() - self._start_s
        if now_s is None or self._busy_s is None or elapsed_s <= 0:
            return None
        others_s = now_s - self._busy_s - (self._used_by_us_s() - self._own_s)
        return max(others_s, 0.0) / elapsed_s / (os.cpu_count() or 1)

    def _used_by_us_s(self) -> float:
        return _own_s() + sum(used_s(child) for child in self._alive())


def contention_words(share: float | None) -> str | None:
    """A sentence about the share of the cores that others used; None if it was not noticeable."""
    if share is None or share < NOTICEABLE_SHARE:
        return None
    text = f"other processes used {share:.0%} of the cores meanwhile; times measured here "
    if share >= LARGE_SHARE:
        return f"{text}mean little unless the machine is quiet"
    return f"{text}may be up to {share / (1 - share):.0%} longer than on a quiet machine"


def _own_s() -> float:
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in spent)
