"""Copies between device, host and disk, on threads beside the computing. Each term has a thread and
an order of its own, as in FlexGen (arXiv:2303.06865, algorithm 1)."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

# disk to host, host to disk, host to device and back
TERMS = ("read", "write", "up", "down")


class Ticket:
    """A copy that was submitted: its bytes, its call and its end."""

    def __init__(self, num_bytes: int, call: Callable[[], object], after: Sequence["Ticket"],
                 ready: torch.cuda.Event | None) -> None:
        self.num_bytes, self.call, self.after, self.ready = num_bytes, call, after, ready
        self.error: BaseException | None = None
        self.done = threading.Event()

    def wait(self) -> None:
        """Returns once the copy is done. Raises its error."""
        self.done.wait()
        if self.error is not None:
            raise self.error


class Mover:
    """Executes copies in threads, a thread for each term, which begin with the first copy. After
    an error no copy begins, and every call raises that error. `seconds`, `num_bytes`: of the
    copies done, by term. `waited_s`: what the caller spent on copies, in `wait` or without overlap,
    which is the part of them that no computing hid."""

    def __init__(self, *, overlap: bool = True, device: torch.device | str = "cpu") -> None:
        """overlap: False executes each copy at once in the caller's thread."""
        self._overlap, self.waited_s = overlap, 0.0
        self.seconds, self.num_bytes = dict.fromkeys(TERMS, 0.0), dict.fromkeys(TERMS, 0)
        self._queues: dict[str, queue.SimpleQueue[Ticket | None]] = {}
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        is_cuda = torch.device(device).type == "cuda"
        self._streams = {term: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                         for term in ("up", "down")} if is_cuda else {}
        self._last: dict[str, Ticket] = {}

    def submit(self, term: str, num_bytes: int, call: Callable[[], object],
               after: Sequence[Ticket] = ()) -> Ticket:
        """Queues a copy of `num_bytes` behind those of its term and behind the copies `after`. On a
        GPU a copy up or down also begins after what the caller's stream has queued so far. Raises
        the error of an earlier copy."""
        if self._error is not None:
            raise self._error
        ready = None
        if term in self._streams:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        ticket = Ticket(num_bytes, call, after, ready)
        if not self._overlap:
            before_s = self.seconds[term]
            self._execute(term, ticket)
            self.waited_s += self.seconds[term] - before_s
            ticket.wait()
            return ticket
        if term not in self._queues:
            self._queues[term] = queue.SimpleQueue()
            self._threads.append(threading.Thread(target=self._work, args=(term,), daemon=True,
                                                  name=f"offload-{term}"))
            self._threads[-1].start()
        self._queues[term].put(ticket)
        self._last[term] = ticket
        return ticket

    def wait(self, ticket: Ticket) -> None:
        """Returns once the copy is done, and counts the time until then. Raises its error."""
        start_s = time.perf_counter()
        ticket.wait()
        self.waited_s += time.perf_counter() - start_s

    def flush(self) -> None:
        """Returns once all copies are done. Raises the first error among them."""
        for ticket in list(self._last.values()):
            ticket.done.wait()
        if self._error is not None:
            raise self._error

    def taken(self) -> tuple[dict[str, float], dict[str, int], float]:
        """`seconds`, `num_bytes` and `waited_s`, which begin at 0 again. No copy is under way."""
        found = self.seconds, self.num_bytes, self.waited_s
        self.seconds, self.num_bytes = dict.fromkeys(TERMS, 0.0), dict.fromkeys(TERMS, 0)
        self.waited_s = 0.0
        return found

    def close(self) -> None:
        """Ends the threads: copies under way end, those that wait do not begin. May be called
        twice; a copy submitted later raises RuntimeError."""
        self._error = self._error or RuntimeError("the copies between tiers have ended")
        for one in self._queues.values():
            one.put(None)
        for thread in self._threads:
            thread.join()
        self._queues, self._threads = {}, []

    def _work(self, term: str) -> None:
        with torch.inference_mode():  # each thread has a mode of its own
            while (ticket := self._queues[term].get()) is not None:
                self._execute(term, ticket)

    def _execute(self, term: str, ticket: Ticket) -> None:
        try:
            for other in ticket.after:
                other.wait()
            if self._error is not None:
                raise self._error
            start_s, stream = time.perf_counter(), self._streams.get(term)
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                if stream is not None and ticket.ready is not None:
                    ticket.ready.synchronize()  # not the copy's time
                    start_s = time.perf_counter()
                ticket.call()
                if stream is not None:
                    stream.synchronize()
            self.seconds[term] += time.perf_counter() - start_s
            self.num_bytes[term] += ticket.num_bytes
        except BaseException as error:  # the caller raises it: a thread's own end is not seen
            self._error = ticket.error = self._error or error
        finally:
            del ticket.call, ticket.after  # what they hold may be freed
            ticket.done.set()


def copy(into: Tensor, source: Tensor) -> None:
    """Copies `source` over `into`, of the same shape and dtype. Between tensors of a CPU one core
    copies, and other threads go on: torch's own copy would start threads beside the computing."""
    if into.is_cpu and source.is_cpu:
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[into.itemsize]
        into.view(kind).numpy()[...] = source.view(kind).numpy()
    else:
        into.copy_(source, non_blocking=True)
