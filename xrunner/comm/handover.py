"""KV of whole requests, packed into one block of memory and sent to another rank's cache.

A block is [layers, 2, kv_heads, tokens, head_dim], the requests' tokens one after the other. If the
pools divide layers and heads differently, a rank sends each other rank what both hold.

Both pools go on computing. A thread of each encode rank waits for the copy to host memory and sends
it. A thread of each decode rank receives it, and its pool's head lets a request join once all ranks
have its KV. Threads, because a message of this size moves only while both sides call MPI, and a
step may compute for seconds."""

import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from xgpt.core.deployment import StageAssignment
from xgpt.core.model import ModelSpec, kv_copies
from xrunner.comm.messages import BlockMessage, ReceivedMessage, StepMessage, StopMessage
from xrunner.comm.point_to_point import Comm
from xrunner.devices import Arriving
from xrunner.engine.kv import KvCache
from xrunner.ops.kv_entries import gather, scatter

_ALL = slice(None)


class Transfer(NamedTuple):
    """Layers and heads that an encode rank sends to a decode rank, each in its own numbering. For
    an encoder-decoder model, the whole encoder output."""

    source: int
    target: int
    source_layers: slice = _ALL
    source_heads: slice = _ALL
    target_layers: slice = _ALL
    target_heads: slice = _ALL


def transfers(encode: Sequence[StageAssignment], decode: Sequence[StageAssignment],
              spec: ModelSpec) -> list[Transfer]:
    """Transfers from all ranks of an encode pool's stages to those of a decode pool's. Every layer
    and head of a decode rank is sent once."""
    if spec.is_encoder_decoder:  # every rank of the last encode stage has the encoder's output
        givers = encode[-1].ranks
        return [Transfer(source=givers[i % len(givers)], target=rank)
                for stage in decode for i, rank in enumerate(stage.ranks)]
    needed = []
    for own, other in ((e, d) for d in decode for e in encode):
        layers, copies = _shared(_layers(own), _layers(other)), kv_copies(spec, own.tp_degree)
        # the ranks that hold copies of a head take turns to send it
        for i, j in ((i, j) for j in range(other.tp_degree) for i in range(own.tp_degree)
                     if (i - j) % copies == 0):
            held, wanted = _heads(own, i, spec), _heads(other, j, spec)
            heads = _shared(held, wanted)
            if layers and heads:
                needed.append(Transfer(
                    source=own.ranks[i], target=other.ranks[j],
                    source_layers=_within(layers, _layers(own)), source_heads=_within(heads, held),
                    target_layers=_within(layers, _layers(other)),
                    target_heads=_within(heads, wanted)))
    return needed


def pack(cache: KvCache, slots: Sequence[int], layers: slice = _ALL,
         heads: slice = _ALL) -> Tensor:
    """KV of the requests in `slots`, copied out of `cache`, [layers, 2, kv_heads, tokens,
    head_dim]."""
    return gather(cache.store[layers, :, :, heads], *cache.rows_of(slots))


def _layers(stage: StageAssignment) -> range:
    return range(stage.first_layer, stage.first_layer + stage.num_layers)


def _heads(stage: StageAssignment, index: int, spec: ModelSpec) -> range:
    """KV heads of the rank at `index` of the stage's group (xrunner.models.weights)."""
    copies = kv_copies(spec, stage.tp_degree)
    share = spec.kv_heads * copies // stage.tp_degree
    return range(index // copies * share, (index // copies + 1) * share)


def _shared(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _within(part: range, whole: range) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start)


# chosen: seconds between two polls of a receiving thread, since each takes the interpreter lock
LOOK_S = 1e-3


class _Worker:
    """A thread whose failure is raised when the rank next calls it, or ends the run."""

    def __init__(self, work: Callable[[], None], abort: Callable[[], object] | None) -> None:
        self._work, self._abort = work, abort
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        self._thread.join()
        self.check()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
            if self._abort is not None:  # the rank may be waiting for what will not come
                traceback.print_exception(error)
                self._abort()


class EntrySender:
    """Sends KV of an encode rank, over a communicator of its own beside the pipeline's."""

    def __init__(self, comm: Comm, transfers: Sequence[Transfer], *,
                 abort: Callable[[], object] | None = None) -> None:
        """`transfers`: of all ranks. `abort`: ends the run after a failure of the thread."""
        self._comm = comm
        self._transfers = [transfer for transfer in transfers if transfer.source == comm.rank]
        self._waiting: queue.SimpleQueue[list[tuple[int, BlockMessage, Arriving]] | None] = (
            queue.SimpleQueue())
        self.num_bytes, self.seconds = 0, 0.0  # bytes sent, and seconds spent sending
        self._worker = _Worker(self._send, abort)

    def hand_over(self, message: StepMessage, cache: KvCache,
                  first_slot: int) -> None:
        """Sends KV of the step's requests that go on; they lie in `cache` from `first_slot` on."""
        slots = [first_slot + i for i, joined in enumerate(message.joined) if joined.goes_on]
        if slots:
            self._put(message, lambda transfer: pack(
                cache, slots, transfer.source_layers, transfer.source_heads))

    def hand_over_encoded(self, message: StepMessage, encoded: Tensor) -> None:
        """Sends the encoder output [T, H] of the step's requests, all of which go on."""
        self._put(message, lambda transfer: encoded)

    def close(self) -> None:
        """Waits until everything has been received."""
        self._waiting.put(None)
        self._worker.join()

    def _put(self, message: StepMessage, block_of: Callable[[Transfer], Tensor]) -> None:
        self._worker.check()
        leaving = [joined for joined in message.joined if joined.goes_on]
        header = BlockMessage(batch=message.phase, queries=tuple(j.query for j in leaving),
                              lengths=tuple(j.input_tokens for j in leaving))
        self._waiting.put([(transfer.target, header, Arriving(block_of(transfer)))
                           for transfer in self._transfers])

    def _send(self) -> None:
        while (leaving := self._waiting.get()) is not None:
            blocks = [(target, header, block.wait()) for target, header, block in leaving]
            start = time.perf_counter()
            for target, header, block in blocks:
                self._comm.send(target, header, block)
                self.num_bytes += block.nbytes
            self._comm.flush()
            self.seconds += time.perf_counter() - start
        for transfer in self._transfers:
            self._comm.send(transfer.target, StopMessage())
        self._comm.flush()


class _Entries(NamedTuple):
    """KV, or encoder output, of one request from one encode rank."""

    transfer: Transfer
    tensor: Tensor  # [layers, 2, kv_heads, tokens, head_dim], or [tokens, H]


class EntryReceiver:
    """Receives KV on a decode rank; tells its pool's head which batches every rank has."""

    def __init__(self, comm: Comm, transfers: Sequence[Transfer], decode_ranks: Sequence[int], *,
                 abort: Callable[[], object] | None = None) -> None:
        """`transfers`: of all ranks. `decode_ranks`: of the pool, its head first."""
        self._comm, self._head = comm, decode_ranks[0]
        self._transfers = {t.source: t for t in transfers if t.target == comm.rank}
        assert self._transfers, f"nobody sends to {comm.rank = }"
        self._others = decode_ranks[1:] if comm.rank == self._head else ()
        self._lock = threading.Lock()
        self._entries: dict[int, list[_Entries]] = {}  # by request
        self._missing: dict[int, int] = {}  # batch -> blocks still to come to this rank
        self._lacking: dict[int, int] = {}  # at the head: batch -> ranks that lack some
        self._held: set[int] = set()  # at the head: batches that every rank has
        self.num_bytes = 0
        self._worker = _Worker(self._receive, abort)

    def has_arrived(self, batch: int) -> bool:
        """At the head: whether every rank of the pool has the batch's KV; true once only."""
        self._worker.check()
        with self._lock:
            has_arrived = batch in self._held
            self._held.discard(batch)
        return has_arrived

    def put_into(self, cache: KvCache, slot: int, query: int) -> None:
        """Writes the request's KV into the rank's cache."""
        for transfer, entries in self._take(query):
            scatter(cache.store[transfer.target_layers, :, :, transfer.target_heads],
                    *cache.rows_of([slot]), entries)

    def encoded(self, queries: Sequence[int]) -> Tensor:
        """Encoder output of these requests, one after the other, [T, H]."""
        return torch.cat([entries.tensor for query in queries for entries in self._take(query)])

    def forget(self, queries: Sequence[int]) -> None:
        """Discards what has arrived for these requests."""
        for query in queries:
            self._take(query)

    def close(self) -> None:
        """Waits until every encode rank has stopped sending."""
        self._worker.join()

    def _take(self, query: int) -> list[_Entries]:
        with self._lock:
            entries, wanted = self._entries.pop(query), len(self._transfers)
        assert len(entries) == wanted, f"{query = }: {len(entries)} of {wanted}"
        return entries

    def _receive(self) -> None:
        senders, others = set(self._transfers), set(self._others)
        while senders or others:
            for source in [*senders, *others]:
                got = self._comm.poll(source)
                if got is None:
                    continue
                message, tensor = got
                if isinstance(message, StopMessage):
                    senders.discard(source)
                    others.discard(source)
                elif isinstance(message, BlockMessage):
                    assert tensor is not None, f"{message = }"
                    self._keep(source, message, tensor)
                else:
                    assert isinstance(message, ReceivedMessage), f"{message = }"
                    self._note_held(message.batch)
                break
            else:
                time.sleep(LOOK_S)
        if self._comm.rank != self._head:
            self._comm.send(self._head, StopMessage())
        self._comm.flush()

    def _keep(self, source: int, message: BlockMessage, block: Tensor) -> None:
        transfer, start = self._transfers[source], 0
        is_kv = block.dim() > 2
        with self._lock:
            for query, length in zip(message.queries, message.lengths, strict=True):
                end = start + length
                own = block[:, :, :, start:end] if is_kv else block[start:end]
                self._entries.setdefault(query, []).append(_Entries(transfer, own))
                start = end
        self.num_bytes += block.nbytes
        left = self._missing.pop(message.batch, len(self._transfers)) - 1
        if left:
            self._missing[message.batch] = left
        elif self._comm.rank == self._head:
            self._note_held(message.batch)
        else:
            self._comm.send(self._head, ReceivedMessage(batch=message.batch))

    def _note_held(self, batch: int) -> None:
        """At the head: counts one more rank that has all of the batch."""
        left = self._lacking.pop(batch, 1 + len(self._others)) - 1
        if left:
            self._lacking[batch] = left
            return
        with self._lock:
            self._held.add(batch)
