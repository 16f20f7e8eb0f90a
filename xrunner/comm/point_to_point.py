"""Point-to-point messages between ranks: a header and at most one tensor.

Waiting ranks poll and sleep, since a blocking MPI call spins on a core that a working rank may
need. A tensor may be sent from any device and arrives in host memory (pinned if the receiver has a
GPU). Its step is over before it is sent, so there is no other work to overlap with."""

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
_Shape = tuple[tuple[int, ...], str]  # of a tensor, with its dtype
_HEADERS: Mapping[bytes, Any] = {
    kind.__name__.encode(): tuple[kind, _Shape | None]  # type: ignore[valid-type]
    for kind in get_args(Message)}
_SPIN_S = 50e-6  # chosen: a partner that answers at once costs no sleep
_SLEEP_S = 50e-6  # chosen
# chosen: whoever has waited for so long sleeps longer between polls
_IDLE_S, _IDLE_SLEEP_S = 0.25, 1e-3


class Comm:
    """Ordered messages from one rank to another."""

    rank: int
    size: int

    def send(self, target: int, message: Message, tensor: Tensor | None = None) -> None:
        """Starts the transfer and returns; `tensor` must not be written to afterwards."""
        raise NotImplementedError

    def poll(self, *sources: int, wait_s: float = 0.0) -> tuple[Message, Tensor | None] | None:
        """The next message of any of `sources` with its tensor; None if none comes within
        `wait_s`."""
        raise NotImplementedError

    def receive(self, *sources: int) -> tuple[Message, Tensor | None]:
        """Waits for the next message of any of `sources`; returns it with its tensor. Messages of
        one source arrive in the order sent. The tensor lies in host memory."""
        got = self.poll(*sources, wait_s=math.inf)
        assert got is not None, f"{sources = }"
        return got

    def flush(self) -> None:
        """Waits until everything sent has left."""


def wait_politely(is_done: Callable[[], bool], sleep_s: float = _SLEEP_S, *,
                  until_s: float = math.inf, since_s: float = math.inf) -> None:
    """Polls `is_done`: spins briefly, then sleeps between polls, so that waiting costs no core.
    Times of the performance counter: no sleep lasts beyond `until_s`; `since_s`: when the waiting
    began, if before this call."""
    begun_s = time.perf_counter()
    idle_from_s = min(begun_s, since_s) + _IDLE_S
    while not is_done():
        if (now := time.perf_counter()) > begun_s + _SPIN_S:
            own_s = sleep_s if now < idle_from_s else max(sleep_s, _IDLE_SLEEP_S)
            time.sleep(min(own_s, max(until_s - now, 0.0)))


class MpiComm(Comm):
    """Messages over mpi4py. Headers are JSON, checked on arrival (xrunner.comm.exchange). Tensors
    are sent as raw bytes without copying host memory; one that is not as long as its header says is
    refused."""

    def __init__(self, comm: Any, sleep_s: float = _SLEEP_S) -> None:
        """`sleep_s`: between two polls for a message."""
        self._comm, self._sleep_s = comm, sleep_s
        self.rank, self.size = int(comm.Get_rank()), int(comm.Get_size())
        self._pending: deque[tuple[Any, object]] = deque()  # (request, buffer kept alive)
        self._heard_s = time.perf_counter()  # when the last message came or left

    def send(self, target: int, message: Message, tensor: Tensor | None = None) -> None:
        self._reap()
        self._heard_s = time.perf_counter()
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

        wait_politely(look, self._sleep_s, until_s=until_s, since_s=self._heard_s)
        if not senders:
            return None
        self._heard_s = time.perf_counter()
        return self._take(senders[0])

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
        # compare the announced size before allocating memory for it
        num_bytes, announced = self._arrived(source, _TAG_TENSOR), _num_bytes(*shape)
        if num_bytes != announced:
            raise ForeignMessage(f"a tensor of {announced} bytes was announced, {num_bytes} came")
        tensor = host_buffer(shape[0], _DTYPES[shape[1]])
        request = self._comm.Irecv(as_bytes(tensor), source=source, tag=_TAG_TENSOR)
        wait_politely(lambda: bool(request.Test()))
        return message, tensor

    def _arrived(self, source: int, tag: int) -> int:
        """Waits for the next message with this tag; its size in bytes."""
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
    """Messages between threads, for tests and for a single rank without MPI."""

    def __init__(self, rank: int, size: int, comms: Sequence[LocalComm]) -> None:
        """`comms`: of all ranks; may be filled later."""
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
    """Connected LocalComms, one per rank."""
    comms = list[LocalComm]()
    comms += [LocalComm(rank, size, comms) for rank in range(size)]
    return comms


def header_of(message: Message, shape: _Shape | None) -> bytes:
    """Header bytes: the name of the message's type, a space, and message and shape as JSON."""
    name = type(message).__name__.encode()
    return name + b" " + to_bytes((message, shape), _HEADERS[name])


def read_header(header: bytes | bytearray) -> tuple[Message, _Shape | None]:
    """The message and tensor shape that `header_of` wrote. Raises ForeignMessage."""
    name, _, data = bytes(header).partition(b" ")
    if name not in _HEADERS:
        raise ForeignMessage(f"{name[:40]!r} is no kind of message")
    message, shape = from_bytes(data, _HEADERS[name])
    return message, shape


def as_bytes(tensor: Tensor) -> Any:
    """The tensor's memory as a byte array, without a copy (numpy has no bfloat16)."""
    return tensor.view(-1).view(torch.uint8).numpy()


def _num_bytes(shape: Sequence[int], dtype: str) -> int:
    """Bytes of a tensor. Raises ForeignMessage for an impossible shape or dtype."""
    if dtype not in _DTYPES or any(size < 0 for size in shape):
        raise ForeignMessage(f"a tensor {list(shape)} of {dtype[:40]!r} was announced")
    return math.prod(shape) * _DTYPES[dtype].itemsize


def _is_sent(request: Any) -> bool:
    return bool(request.Test())
