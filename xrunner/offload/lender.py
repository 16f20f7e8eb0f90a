"""Lends weights that do not stay on the device, one unit at a time: the products of a layer, one
expert, one piece of the head. While a unit is computed with, the next one comes into the other of
two buffers (FlexGen, arXiv:2303.06865, algorithm 1)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from xgpt.core.placement import DEVICE, DISK, HOST, sectors
from xrunner.devices import CPU
from xrunner.offload.arena import Arena
from xrunner.offload.mover import Mover, Ticket, copy
from xrunner.offload.weights_file import WeightsFile, unpack
from xrunner.ops.linear import Product


@dataclass(eq=False)
class _Buffer:
    """Memory of a unit as it is stored, on the device, and on the host, where a file is read: the
    same on a CPU. `unit`: the one that is there or on its way, after `tickets`."""

    device: Tensor
    host: Tensor
    unit: object = None
    tickets: list[Ticket] = field(default_factory=list)


class Lender:
    """Products by tier. `add` takes each; `lend` brings a unit of those below the device. `loads`:
    how often each unit was lent."""

    def __init__(self, file: WeightsFile, arenas: Sequence[Arena], mover: Mover,
                 device: torch.device) -> None:
        """`arenas`: by tier."""
        self.file, self.loads = file, Counter[object]()
        self._arenas, self._mover, self._device = arenas, mover, device
        self._is_gpu = device.type != "cpu"  # whose memory is not the host's
        self._products: dict[str, Product] = {}
        self._below: dict[object, list[tuple[str, int]]] = {}  # names and tiers of a unit, by tier
        self._hosted: dict[str, Tensor] = {}
        self._buffers: list[_Buffer] = []
        self._plain: Tensor | None = None  # a unit widened from 4 bits
        self._current = 0

    def add(self, unit: object, name: str, product: Product, tier: int) -> None:
        """Places a product, whose weight is on "meta", on `tier`. Raises XgptError."""
        self._products[name] = product
        if (scales := self.file.vector(name)) is not None:
            product.place(product.movable, scales.to(self._device))
        if tier != DEVICE:
            self._below.setdefault(unit, []).append((name, tier))
            self._below[unit].sort(key=lambda own: -own[1])  # the disk's first: they come last
        if tier == HOST:
            self._hosted[name] = self._read(HOST, name, is_pinned=self._is_gpu)
        elif tier == DEVICE:
            form = product.movable
            held = self._read(DEVICE, name)
            if self.file.stored[name].bits == 4:
                arena = self._arenas[DEVICE]
                wide = arena.tensor(form.shape, form.dtype, name, device=self._device)
                unpack(held, wide)
                arena.free(held)
                held = wide
            product.place(held)

    def table(self, name: str, tier: int) -> Tensor:
        """A table of the file as it is, read whole to the device or the host."""
        return self._read(tier, name, is_pinned=tier == HOST and self._is_gpu, is_raw=False)

    def open(self) -> None:
        """Makes the buffers, once all products are added. Raises XgptError."""
        names = [[name for name, _ in own] for own in self._below.values()]
        most = max(map(self.file.num_bytes, names), default=0)
        of_disk = max((self.file.num_bytes([name for name, tier in own if tier == DISK])
                       for own in self._below.values()), default=0)
        if not most:
            return
        what = "a buffer of weights"
        for _ in range(2):
            memory = self._arenas[DEVICE].tensor((most,), torch.uint8, what, device=self._device)
            host = memory
            if self._is_gpu and of_disk:
                host = self._arenas[HOST].tensor((of_disk,), torch.uint8, what, pin=True)
            self._buffers.append(_Buffer(memory, host))
        wide = max((sum(sectors(self._wide_bytes(name)) for name in own) for own in names
                    if self._is_packed(own)), default=0)
        if wide:
            self._plain = self._arenas[DEVICE].tensor(
                (wide,), torch.uint8, "weights widened from 4 bits", device=self._device)

    def lend(self, unit: object, following: object = None) -> None:
        """Places the unit's products in a buffer, and begins to bring the unit `following` (None:
        none). The unit lent before is no more. Raises XgptError."""
        if own := self._below.get(unit):
            self.loads[unit] += 1
            buffer = self._brought(unit)
            for ticket in buffer.tickets:
                self._mover.wait(ticket)
            buffer.tickets = []
            self._current = self._buffers.index(buffer)
            self._place([name for name, _ in own], buffer.device)
        if following in self._below:
            self._brought(following)

    def close(self) -> None:
        """Ends the copies' threads and closes the file."""
        self._mover.close()
        self.file.close()

    def _brought(self, unit: object) -> _Buffer:
        """The buffer that has the unit, or to which it is on its way."""
        for buffer in self._buffers:
            if buffer.unit == unit:
                return buffer
        buffer = self._buffers[1 - self._current]
        for ticket in buffer.tickets:  # of a unit that was not used after all
            self._mover.wait(ticket)
        buffer.unit = unit
        names = {tier: [name for name, own in self._below[unit] if own == tier]
                 for tier in (DISK, HOST)}
        size, at = self.file.num_bytes(names[DISK]), self.file.num_bytes(names[DISK])
        buffer.tickets = []
        if size:
            read = self._mover.submit("read", size, partial(
                self.file.read, names[DISK], buffer.host[:size]))
            buffer.tickets.append(read if not self._is_gpu else self._mover.submit(
                "up", size, partial(copy, buffer.device[:size], buffer.host[:size]), [read]))
        for name in names[HOST]:
            held = self._hosted[name]
            buffer.tickets.append(self._mover.submit(
                "up", len(held), partial(copy, buffer.device[at:at + len(held)], held)))
            at += len(held)
        return buffer

    def _place(self, names: Sequence[str], memory: Tensor) -> None:
        at = 0
        for name, held in zip(names, self.file.views(names, memory), strict=True):
            product = self._products[name]
            if self.file.stored[name].bits == 4:
                assert self._plain is not None
                form, size = product.movable, self._wide_bytes(name)
                wide = self._plain[at:at + size].view(form.dtype).view(form.shape)
                unpack(held, wide)
                held, at = wide, at + sectors(size)
            product.place(held)

    def _read(self, tier: int, name: str, *, is_pinned: bool = False, is_raw: bool = True,
              ) -> Tensor:
        """A tensor of the file in the tier's memory: as bytes on the host, where it is copied on,
        else (or not `is_raw`) in its form."""
        size, on_host = self.file.num_bytes([name]), tier == HOST or not self._is_gpu
        device = CPU if on_host else self._device
        memory = self._arenas[tier].tensor((size,), torch.uint8, name, device=device, pin=is_pinned)
        read = memory if on_host else Arena("host").tensor((size,), torch.uint8, name)
        self.file.read([name], read)
        if read is not memory:
            memory.copy_(read)
        return memory if tier == HOST and is_raw else self.file.views([name], memory)[0]

    def _wide_bytes(self, name: str) -> int:
        return self._products[name].movable.nbytes

    def _is_packed(self, names: Sequence[str]) -> bool:
        return any(self.file.stored[name].bits == 4 for name in names)
