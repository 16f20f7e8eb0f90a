"""The device a rank works on: the CPU, or one of its host's GPUs; and what differs between the two.

The ranks of a host take its GPUs in turn. Where there are more ranks than GPUs they share them:
each has its own part of the memory, and messages between them go through the host's."""

import gc
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
    """This rank's place among those of its host. `world`: of mpi4py; collective."""
    from mpi4py import MPI

    host = world.Split_type(MPI.COMM_TYPE_SHARED)
    place = int(host.Get_rank())
    host.Free()
    return place


def own_device(kind: Kind, place: int) -> torch.device:
    """The device of the rank at `place` of its host, made the current one. Raises XgptError."""
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
    """Which of a host's GPUs its rank at `place` takes: of the largest group of equal ones, as
    xgpt.core.system.machine counts them, in turn. `kinds`: of all its GPUs."""
    commonest = Counter(kinds).most_common(1)[0][0]
    equal = [index for index, kind in enumerate(kinds) if kind == commonest]
    return equal[place % len(equal)]


def has_own_gpu_each(comm: Any, device: torch.device) -> bool:
    """Whether every rank of `comm` has a GPU to itself: NCCL refuses two on one. By the GPU's own
    name, since a launcher may show each rank its own as number 0. Collective."""
    if device.type != "cuda":
        return False
    names = all_gather(comm, str(torch.cuda.get_device_properties(device).uuid), str)
    return len(set(names)) == len(names)


def settle(device: torch.device) -> None:
    """Returns when what was asked of the device has happened: a GPU works on after a call."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def host_buffer(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Host memory for a message; where this process uses a GPU, pinned, so that the GPU copies
    without a detour."""
    is_pinned = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=is_pinned)


def on_device(numbers: Tensor | Sequence[int] | Sequence[Sequence[int]],
              device: torch.device) -> Tensor:
    """What the host has (whole numbers as int64) on the device, for work that is asked of it from
    now on: nobody waits. A GPU takes it from pinned memory of its own; from any other memory it
    would first finish all that it was asked before."""
    held = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=torch.long)
    if held.device == device or held.device.type != "cpu":
        return held.to(device)
    # a stretch of pinned memory torch would first put together in memory that is not
    if not held.is_pinned() or not held.is_contiguous():
        held = host_buffer(held.shape, held.dtype).copy_(held)
    return held.to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """The tensor in host memory, complete; itself where it is there."""
    return Arriving(tensor).wait()


class Arriving:
    """A tensor on its way into the host's memory; the device works on meanwhile."""

    def __init__(self, tensor: Tensor, then: Callable[[], None] = lambda: None) -> None:
        """`tensor` may be written to by what is asked of its device afterwards. `then`: is called
        when somebody has waited for it."""
        self._then = then
        self._event: torch.cuda.Event | None = None  # after the copy; None: there is none to make
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
        """Whether nobody would have to wait for it: on a CPU it always is."""
        return self._event is None or bool(
            self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        """The tensor, complete."""
        if self._event is not None:
            self._event.synchronize()
        self._then()
        return self._copy


def free_bytes(device: torch.device) -> int | None:
    """What a GPU has left for this process; None of a CPU, whose pages are taken as they are
    written."""
    if device.type != "cuda":
        return None
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def release() -> None:
    """Gives back what a run that is over held: its parts know each other, and the caches of one
    that was not collected leave the next no memory."""
    gc.collect()
    torch.cuda.empty_cache()  # nothing, where no GPU was used


def peak_memory_bytes(device: torch.device) -> int:
    """Most this process has held at once, on its device."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
