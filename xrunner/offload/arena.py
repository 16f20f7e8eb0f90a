"""Memory of one tier of one rank, counted against the bytes that were planned."""

import math
import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from xgpt.core.errors import XgptError
from xgpt.core.placement import sectors
from xgpt.core.units import format_bytes


class _Pages(mmap.mmap):
    """Memory that CUDA knows as pinned, where `pinned_at` is its address, until it goes."""

    pinned_at = 0

    def __del__(self) -> None:
        if self.pinned_at:
            with suppress(RuntimeError):  # CUDA may have ended before
                _cudart("cudaHostUnregister", self.pinned_at)


class Arena:
    """Counts the bytes of a tier ("device", "host" or "disk"). `most_bytes`: those planned; None:
    no limit. `held`, `peak`: bytes taken now, and the most at any time."""

    def __init__(self, tier: str, most_bytes: int | None = None) -> None:
        self.tier, self.most_bytes, self.held, self.peak = tier, most_bytes, 0, 0
        self._lock = threading.Lock()
        self._tensors: dict[int, int] = {}  # bytes by address

    def take(self, num_bytes: int, what: str) -> None:
        """Counts `num_bytes` for `what`, which a message names. Raises XgptError if more were held
        than planned."""
        with self._lock:
            if self.most_bytes is not None and self.held + num_bytes > self.most_bytes:
                raise XgptError(
                    f"offloading: {what} needs {num_bytes:,} bytes ({format_bytes(num_bytes)}) of "
                    f"the tier {self.tier}, where {self.held:,} of the {self.most_bytes:,} planned "
                    "bytes are taken")
            self.held += num_bytes
            self.peak = max(self.peak, self.held)

    def give_back(self, num_bytes: int) -> None:
        """Takes `num_bytes` off the count."""
        with self._lock:
            assert 0 <= num_bytes <= self.held, f"{num_bytes = } {self.held = }"
            self.held -= num_bytes

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, what: str, *,
               device: torch.device | str = "cpu", pin: bool = False) -> Tensor:
        """A tensor that counts up to the end of its last sector. On a CPU it begins at a page's
        address, so that a DirectFile reads into it, and is zero. pin: for copies from and to a GPU
        beside its work. Raises XgptError."""
        count = math.prod(shape)
        num_bytes = sectors(max(count * dtype.itemsize, 1))
        self.take(num_bytes, what)
        try:
            if torch.device(device).type == "cpu":
                # pages of its own: they return to the system when it is freed
                pages = _Pages(-1, num_bytes)
                whole = torch.frombuffer(pages, dtype=torch.uint8)
                if pin:  # torch's own pinned memory takes a power of two, up to twice as much
                    _cudart("cudaHostRegister", whole.data_ptr(), num_bytes, 0)
                    pages.pinned_at = whole.data_ptr()
            else:
                whole = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except (OSError, RuntimeError) as error:
            self.give_back(num_bytes)
            raise XgptError(f"offloading: {num_bytes:,} bytes of the tier {self.tier} for {what} "
                            f"cannot be allocated: {error}") from None
        self._tensors[whole.data_ptr()] = num_bytes
        return whole[:count * dtype.itemsize].view(dtype).view(*shape)

    def free(self, tensor: Tensor) -> None:
        """Gives back a tensor of this arena; its memory goes with the last view of it."""
        self.give_back(self._tensors.pop(tensor.data_ptr()))


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, for a DirectFile."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _cudart(name: str, *values: int) -> None:
    """Calls a function of CUDA's runtime. Raises RuntimeError."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(code := getattr(runtime, name)(*values)):
        raise RuntimeError(f"{name}: {code}")
