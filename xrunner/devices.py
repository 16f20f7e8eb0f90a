"""A rank's device: the CPU, or one of its host's GPUs. The ranks of a host take its GPUs in turn.
More ranks than GPUs share them: each has its own part of the memory, and messages between them go
through host memory."""

import gc
import os
import resource
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from xgpt.core.errors import XgptError
from xrunner.comm.exchange import all_gather

Kind = Literal["cpu", "gpu"]
CPU = torch.device("cpu")


def local_rank(world: Any) -> int:
    """This rank's number among the ranks of its host. `world`: a communicator of mpi4py;
    collective."""
    from mpi4py import MPI

    host = world.Split_type(MPI.COMM_TYPE_SHARED)
    place = int(host.Get_rank())
    host.Free()
    return place


def select_device(kind: Kind, place: int) -> torch.device:
    """Selects and returns the device of the host's rank number `place`. Raises XgptError without
    GPU."""
    # TF32 keeps 10 bits of a factor: float32 tokens would not be those of the same model elsewhere
    torch.set_float32_matmul_precision("highest")
    if kind == "cpu":
        return CPU
    if not torch.cuda.is_available():
        raise XgptError(f"this was planned for GPUs, and PyTorch {torch.__version__} can use none "
                        "here: install a build of it for this machine's CUDA driver, or set "
                        "CUDA_VISIBLE_DEVICES to nothing and plan for CPU ranks")
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    device = torch.device("cuda", gpu_of(place, [(gpu.name, gpu.total_memory) for gpu in gpus]))
    torch.cuda.set_device(device)
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return device


def gpu_of(place: int, kinds: Sequence[Hashable]) -> int:
    """Index of the GPU for the host's rank number `place`. Ranks take the GPUs of the most frequent
    kind in turn, as xgpt.core.system.machine counts them. `kinds`: the kind of each GPU of the
    host."""
    commonest = Counter(kinds).most_common(1)[0][0]
    equal = [index for index, kind in enumerate(kinds) if kind == commonest]
    return equal[place % len(equal)]


def device_words(device: torch.device) -> str:
    """`GPU 3`, as the host or CUDA_VISIBLE_DEVICES names it, or `cores 0-1`, which this process may
    use."""
    if device.type == "cuda":
        names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        index = device.index or 0
        return f"GPU {names[index] if index < len(names) and names[index] else index}"
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    is_range = cores[1:] and cores[-1] - cores[0] == len(cores) - 1
    return "cores " + (f"{cores[0]}-{cores[-1]}" if is_range else ",".join(map(str, cores)))


def has_own_gpu_each(comm: Any, device: torch.device) -> bool:
    """Whether every rank of `comm` has a GPU to itself: NCCL refuses two on one. Collective.
    Compares UUIDs, since a launcher may show each rank its own GPU as number 0."""
    if device.type != "cuda":
        return False
    names = all_gather(comm, str(torch.cuda.get_device_properties(device).uuid), str)
    return len(set(names)) == len(names)


def synchronize(device: torch.device) -> None:
    """Waits until the device has executed all work queued so far."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def host_buffer(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Empty tensor in host memory; pinned if this process uses a GPU, for direct copies."""
    is_pinned = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=is_pinned)


def on_device(numbers: Tensor | Sequence[int] | Sequence[Sequence[int]],
              device: torch.device) -> Tensor:
    """Copies host numbers (integers as int64) to the device without waiting for it. Copies from
    pinned memory: from other memory a GPU would first finish all queued work."""
    held = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=torch.long)
    if held.device == device or held.device.type != "cpu":
        return held.to(device)
    # torch would copy a strided pinned view through unpinned memory
    if not held.is_pinned() or not held.is_contiguous():
        held = host_buffer(held.shape, held.dtype).copy_(held)
    return held.to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """The complete tensor in host memory; the tensor itself if it is there already."""
    return Arriving(tensor).wait()


class Arriving:
    """A copy of a tensor on its way to host memory, while the device goes on working."""

    def __init__(self, tensor: Tensor, then: Callable[[], None] = lambda: None) -> None:
        """Starts the copy. Work queued later may overwrite `tensor`. `then`: called once the copy
        has been waited for."""
        self._then = then
        self._event: torch.cuda.Event | None = None  # recorded after the copy; None on a CPU
        self._copy = tensor
        if tensor.device.type == "cpu":
            return
        self._copy = host_buffer(tensor.shape, tensor.dtype)
        self._copy.copy_(tensor, non_blocking=True)
        if tensor.device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))

    @property
    def is_here(self) -> bool:
        """Whether the copy is complete, so that `wait` returns at once; always true on a CPU."""
        return self._event is None or bool(
            self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        """Waits for the copy, calls `then`, and returns the tensor."""
        if self._event is not None:
            self._event.synchronize()
        self._then()
        return self._copy


def free_bytes(device: torch.device) -> int | None:
    """Bytes a GPU has left for this process; None for a CPU."""
    if device.type != "cuda":
        return None
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def release() -> None:
    """Frees the memory of a finished run, whose objects refer to each other in cycles."""
    gc.collect()
    torch.cuda.empty_cache()  # nothing, where no GPU was used


def peak_memory_bytes(device: torch.device) -> int:
    """Most bytes this process has held at once on its device (CPU: peak resident size)."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
