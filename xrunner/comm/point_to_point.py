"""Point-to-point messages between ranks: a header and, with it, at most one tensor.

Waiting ranks poll and sleep: a blocking MPI call spins on a core that a working rank may need.
A tensor may be sent from any device and arrives in the host's memory (pinned beside a GPU): a step
is over, and its GPU idle, before its output is sent, so there is no other work to overlap with."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from xrunner.comm.exchange import MOST_BYTES, ForeignMessage, from_bytes, to_bytes
from xrunner.comm.messages import Message
from xrunner.devices import host_buffer, to_host

_TAG_HEADER, _TAG_TENSOR = 1, 2
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8,
    torch.uint8, torch.bool)}
_Shape = tuple[tuple[int, ...], str]  # of a tensor, and its dtype
_HEADERS: Mapping[bytes, Any] = {
    kind.__name__.encode(): tuple[kind, _Shape | None]  # type: ignore[valid-type]
    for kind in get_args(Message)}
_SPIN_S = 50e-6  # a partner that answers at once costs no sleep
_SLEEP_S = 50e-6


class Comm:
    """Ordered messages from one rank to another."""

    rank: int
    size: int

    def send(self, target: int, message: Message, tensor: Tensor | None = None) -> None:
        """Starts the transfer and returns; `tensor` must not be written to afterwards."""
        raise NotImplementedError

    def poll(self, *sources: int, wait_s: float = 0.0) -> tuple[Message, Tensor | None] | None:
        """Receives a message; None where nothing comes within `wait_s`."""
        raise NotImplementedError

    def receive(self, *sources: int) -> tuple[Message, Tensor | None]:
        """The next message from any of `sources`, waiting politely; those of one source come in
        the order in which they were sent. Its tensor lies in the host's memory."""
        got = self.poll(*sources, wait_s=math.inf)
        assert got is not None, f"{sources = }"
        return got

    def flush(self) -> None:
        """Returns when everything sent has left."""


def wait_politely(is_done: Callable[[], bool], sleep_s: float = _SLEEP_S) -> None:
    """Poll: spin briefly, then sleep between looks, so that waiting costs no core."""
    spin_until = time.perf_counter() + _SPIN_S
    while not is_done():
        if time.perf_counter() > spin_until:
            time.sleep(sleep_s)


class MpiComm(Comm):
    """Messages over mpi4py. Headers are JSON, checked on arrival (xrunner.comm.exchange); tensors
    go as raw bytes, without a copy of what lies in the host's memory, and are as long as their
    header says or nothing is made of them."""

    def __init__(self, comm: Any, sleep_s: float = _SLEEP_S) -> None:
        """`sleep_s`: between two looks for a message."""
        self._comm, self._sleep_s = comm, sleep_s
        self.rank, self.size = int(comm.Get_rank()), int(comm.Get_size())
        self._pending: deque[tuple[Any, object]] = deque()  # (request, buffer kept alive)

    def send(self, target: int, message: Message, tensor: Tensor | None = None) -> None:
        self._reap()
        header = header_of(message, None if tensor is None else (
            tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
        self._pending.append((self._comm.Isend(header, dest=target, tag=_TAG_HEADER), header))
        if tensor is not None:
            data = as_bytes(to_host(tensor).contiguous())
            self._pending.append((self._comm.Isend(data, dest=target, tag=_TAG_TENSOR), data))

    def poll(self, *sources: int, wait_s: float = 0.0) -> tuple[Message, Tensor | None] | None:
        until_s, senders = time.perf_counter() + wait_s, list[int]()

        def look() -> bool:
            senders.extend(source for source in sources
                           if self._comm.Iprobe(source=source, tag=_TAG_HEADER))
            return bool(senders) or time.perf_counter() >= until_s

        wait_politely(look, self._sleep_s)
        return self._take(senders[0]) if senders else None

    def _take(self, source: int) -> tuple[Message, Tensor | None]:
        size = self._arrived(source, _TAG_HEADER)
        if size > MOST_BYTES:
            raise ForeignMessage(f"it has {size} bytes, of at most {MOST_BYTES}")
        header = bytearray(size)
        self._comm.Recv(header, source=source, tag=_TAG_HEADER)
        message, shape = read_header(header)
        self._reap()
        if shape is None:
            return message, None
        # what has come is counted before memory is taken for what was announced
        num_bytes, announced = self._arrived(source, _TAG_TENSOR), _num_bytes(*shape)
        if num_bytes != announced:
            raise ForeignMessage(f"a tensor of {announced} bytes was announced, {num_bytes} came")
        tensor = host_buffer(shape[0], _DTYPES[shape[1]])
        request = self._comm.Irecv(as_bytes(tensor), source=source, tag=_TAG_TENSOR)
        wait_politely(lambda: bool(request.Test()))
        return message, tensor

    def _arrived(self, source: int, tag: int) -> int:
        """The bytes of the next message of this kind, once it is there."""
        from mpi4py import MPI

        status = MPI.Status()
        wait_politely(lambda: bool(self._comm.Iprobe(source=source, tag=tag, status=status)))
        return int(status.Get_count(MPI.BYTE))

    def flush(self) -> None:
        while self._pending:
            request, _ = self._pending.popleft()
            wait_politely(partial(_is_sent, request))

    def _reap(self) -> None:
        while self._pending and _is_sent(self._pending[0][0]):
            self._pending.popleft()


class LocalComm(Comm):
    """Messages between threads, for tests and for a single rank that needs no MPI. What was sent
    to a rank lies with it, in the order of arrival."""

    def __init__(self, rank: int, size: int, comms: Sequence[LocalComm]) -> None:
        """`comms`: of all ranks, once they are made."""
        self.rank, self.size, self._comms = rank, size, comms
        self._items: list[tuple[int, Message, Tensor | None]] = []
        self._changed = threading.Condition()

    def send(self, target: int, message: Message, tensor: Tensor | None = None) -> None:
        other = self._comms[target]
        with other._changed:
            other._items.append((self.rank, message, tensor))
            other._changed.notify()

    def poll(self, *sources: int, wait_s: float = 0.0) -> tuple[Message, Tensor | None] | None:
        def places() -> list[int]:
            return [at for at, (source, _, _) in enumerate(self._items) if source in sources]

        with self._changed:
            if not self._changed.wait_for(places, None if wait_s == math.inf else wait_s):
                return None
            _, message, tensor = self._items.pop(places()[0])
        return message, tensor


def local_comms(size: int) -> list[LocalComm]:
    """One connected LocalComm a rank."""
    comms = list[LocalComm]()
    comms += [LocalComm(rank, size, comms) for rank in range(size)]
    return comms


def header_of(message: Message, shape: _Shape | None) -> bytes:
    """The name of the message's kind, a space, and both as JSON."""
    name = type(message).__name__.encode()
    return name + b" " + to_bytes((message, shape), _HEADERS[name])


def read_header(header: bytes | bytearray) -> tuple[Message, _Shape | None]:
    """What `header_of` wrote. Raises ForeignMessage."""
    name, _, data = bytes(header).partition(b" ")
    if name not in _HEADERS:
        raise ForeignMessage(f"{name[:40]!r} is no kind of message")
    message, shape = from_bytes(data, _HEADERS[name])
    return message, shape


def as_bytes(tensor: Tensor) -> Any:
    """The tensor's memory as a byte array, without a copy (numpy has no bfloat16)."""
    return tensor.view(-1).view(torch.uint8).numpy()


def _num_bytes(shape: Sequence[int], dtype: str) -> int:
    """Of a tensor. Raises ForeignMessage for what is none."""
    if dtype not in _DTYPES or any(size < 0 for size in shape):
        raise ForeignMessage(f"a tensor {list(shape)} of {dtype[:40]!r} was announced")
    return math.prod(shape) * _DTYPES[dtype].itemsize


def _is_sent(request: Any) -> bool:
    return bool(request.Test())
