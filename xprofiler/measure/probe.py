"""Times the parts of a real step: marks where embedding, attention and the rest of each layer
begin.

The parts are timed inside the step that XRunner would execute, so processor caches are as in a run:
a layer timed alone would find its weights there. The parts add up to the whole by construction. A
mark costs well under a microsecond.

A decode step captured as a CUDA graph (xrunner.engine.graphs) is one launch to the host, so nothing
can be marked in it. A second capture of the step has events among its kernels, which the graph
records at each replay. Its times are scaled to those of the first capture, which a run replays."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from xprofiler.profile import Peaks
from xrunner.engine.graphs import Capture, Captured, CaptureError, DecodeGraphs, capture_obstacle
from xrunner.engine.group import StageGroup
from xrunner.models.stage_model import StageModel
from xrunner.rules.batch_sizer import bucket_of

_SIDE = 2048  # of a square matrix product: 17 GFLOP
_BYTES = 256 * 2**20  # past every cache
_CUDA_SCALE = 4  # a GPU needs more to fill it
_ROUNDS = 8


class Clock(Protocol):
    """Marks moments in the device's order of work. Call `settle` before reading `seconds`."""

    def mark(self) -> Any:
        """A mark of the moment after all work issued so far."""
        ...

    def settle(self) -> None:
        """Waits until all issued work is done."""
        ...

    def seconds(self, first: Any, second: Any) -> float:
        """Seconds between two marks."""
        ...


class CpuClock:
    """Clock of a CPU, whose work is done when its call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def settle(self) -> None:
        """Returns at once: no work is under way."""

    def seconds(self, first: float, second: float) -> float:
        return second - first


class CudaClock:
    """Clock of a GPU: CUDA events on the current stream, which do not wait for the host."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def settle(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return float(first.elapsed_time(second)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The Clock for `device`."""
    return CudaClock() if device.type == "cuda" else CpuClock()


def measure_peaks(dtype: torch.dtype, device: torch.device) -> Peaks:
    """Peak rates of this rank's device while all ranks are at work: the best of a few rounds, as a
    peak is what the device can do, not what it usually does."""
    side = _SIDE * (_CUDA_SCALE if device.type == "cuda" else 1)
    matrix = torch.randn(side, side, device=device).to(dtype)
    product_s = min(times_s(lambda: matrix @ matrix, device))
    count = _BYTES * (_CUDA_SCALE if device.type == "cuda" else 1) // 4
    source = torch.ones(count, device=device)
    read_s = min(times_s(lambda: source.sum(), device))
    return Peaks(flops_per_s=2 * side**3 / product_s, bandwidth_bytes_per_s=4 * count / read_s,
                 source=f"measured: {side} x {side} matrix product, {4 * count >> 20} MiB read")


def times_s(work: Callable[[], object], device: torch.device) -> list[float]:
    """Seconds of `work` in each of a few rounds."""
    clock = clock_of(device)
    times = []
    for _ in range(_ROUNDS):
        begin = clock.mark()
        work()
        end = clock.mark()
        clock.settle()
        times.append(clock.seconds(begin, end))
    return times


class StepParts(NamedTuple):
    """Seconds of one step and its parts; 0 for parts that were not timed.

    `rest_s`, `attention_s`, `cross_s` (cross-attention) and `cross_kv_s` are means per layer.
    `captured_rest_s`: rest of a layer in a captured decode step (None: not captured). All fields
    but `rest_s`, which is launched kernel by kernel, are then of that step."""

    whole_s: float = 0.0
    rest_s: float = 0.0
    attention_s: float = 0.0
    embed_s: float = 0.0
    head_s: float = 0.0
    cross_s: float = 0.0
    cross_kv_s: float = 0.0
    captured_rest_s: float | None = None

    def overhead_s(self, num_layers: int) -> float:
        """Seconds of a decode step outside its parts: message, slots, tables, mask."""
        rest_s = self.rest_s if self.captured_rest_s is None else self.captured_rest_s
        layers_s = num_layers * (rest_s + self.attention_s + self.cross_s)
        return max(self.whole_s - layers_s - self.embed_s - self.head_s, 0.0)


class Spans:
    """Begin and end marks of one step's parts. Rotation, cache write and attention kernel lie
    between two calls of a layer; the first of the calls names that part."""

    def __init__(self) -> None:
        self._spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._before: tuple[str, Any] | None = None  # the part under way, and its begin
        self.head: Any = None  # mark of the head's begin

    def clear(self) -> None:
        self._spans.clear()
        self._before = self.head = None

    def begins(self, mark: Any) -> None:
        """Records that a call begins, which ends the part under way."""
        if self._before is not None:
            part, begin = self._before
            self._spans[part].append((begin, mark))
            self._before = None

    def add(self, part: str, begin: Any, end: Any, then: str = "") -> None:
        """Records a call from `begin` to `end` as `part`; `then`: the part that starts at its
        end ("": none)."""
        self._spans[part].append((begin, end))
        if then:
            self._before = then, end

    def parts(self, clock: Clock, num_layers: int, cross_layers: int = 1,
              factor: float = 1.0) -> StepParts:
        """StepParts of all that precedes a step's head, with seconds multiplied by `factor`. The
        clock must be settled. `cross_layers`: layers that cache an encoder's output."""
        # a large encode step goes through the layers in pieces
        passed = len(self._spans["attention"])
        assert passed and passed % num_layers == 0, f"{passed = } {num_layers = }"
        total = {part: factor * sum(clock.seconds(*span) for span in spans)
                 for part, spans in self._spans.items()}
        return StepParts(
            rest_s=(total.get("rest", 0.0) + total.get("shared", 0.0)) / num_layers,
            attention_s=total["attention"] / num_layers, embed_s=total.get("embed", 0.0),
            cross_s=total.get("cross", 0.0) / num_layers,
            cross_kv_s=total.get("cross_kv", 0.0) / cross_layers)


class Probe:
    """Marks the parts of `model`'s layers, embedding and head, by wrapping their calls in place."""

    def __init__(self, model: Any, clock: Clock) -> None:
        """`model`: a StageModel or an EncoderDecoderStage, with embedding and head."""
        self._clock, self._model = clock, model
        self._marking: Clock | None = clock
        self._spans = Spans()
        self._time(model.layers, "rest", qkv="attention", cross_query="cross", finish="")
        self._time([model.ends], "embed", embed="")
        self._time([model.ends], "shared", rotation="", bias="")
        model.ends.scores = self._begins(model.ends.scores)
        if hasattr(model, "encoder_layers"):
            self._time(model.encoder_layers, "rest", qkv="attention", finish="")
            self._time([model.encoder_ends], "embed", embed="")
            self._time([model.encoder_ends], "shared", bias="", finish="")
            self._time([model], "cross_kv", store_encoded="")

    def time(self, step: Callable[[], object], num_layers: int | None = None) -> StepParts:
        """Runs `step` once and returns its parts. `num_layers`: layers that it executes (None: all
        decoder layers)."""
        ends, cross_layers = self.ends(step), len(self._model.layers)
        parts = self._spans.parts(self._clock, num_layers or cross_layers, cross_layers)
        return parts._replace(whole_s=ends.whole_s, head_s=ends.head_s)

    def ends(self, step: Callable[[], object]) -> StepParts:
        """Runs `step` once and returns the seconds of the whole and of its head alone."""
        self._spans.clear()
        start = self._clock.mark()
        step()
        end = self._clock.mark()
        self._clock.settle()
        head = self._spans.head
        return StepParts(whole_s=self._clock.seconds(start, end),
                         head_s=0.0 if head is None else self._clock.seconds(head, end))

    @contextmanager
    def marked_by(self, clock: Clock | None) -> Iterator[Spans]:
        """Lets `clock` mark the parts inside the `with` block, in the Spans it yields; None marks
        nothing."""
        before = self._marking, self._spans
        self._marking, self._spans = clock, Spans()
        try:
            yield self._spans
        finally:
            self._marking, self._spans = before

    def _time(self, owners: Iterable[Any], part: str, **calls: str) -> None:
        """Wraps the methods `calls` of each owner, where it has them, to be timed as `part`. The
        value of a call names the part that follows it ("": none)."""
        for owner in owners:
            for name, then in calls.items():
                if hasattr(owner, name):
                    setattr(owner, name, self._timed(getattr(owner, name), part, then))

    def _timed(self, call: Callable[..., Any], part: str, then: str) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            if (clock := self._marking) is None:
                return call(*arguments)
            begin = clock.mark()
            self._spans.begins(begin)
            out = call(*arguments)
            self._spans.add(part, begin, clock.mark(), then)
            return out

        return timed

    def _begins(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, which also marks the head's begin: logits and sampling last until the step
        ends."""

        def begun(*arguments: Any) -> Any:
            if self._marking is not None:
                self._spans.head = self._marking.mark()
            return call(*arguments)

        return begun


class GraphClock(CudaClock):
    """Clock of CUDA events that a graph records. A step launched kernel by kernel makes the events;
    the capture after it records them in the same order."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._next = 0

    def restart(self) -> None:
        """Makes the next mark reuse the first event."""
        self._next = 0

    def mark(self) -> torch.cuda.Event:
        if self._next == len(self._events):
            try:
                event = torch.cuda.Event(enable_timing=True,  # type: ignore[no-untyped-call]
                                         external=True)
            except TypeError:
                raise CaptureError(f"PyTorch {torch.__version__} has no events that a graph "
                                   "records") from None
            self._events.append(event)
        event = self._events[self._next]
        self._next += 1
        event.record()
        return event


class Capturing(NamedTuple):
    """How to capture steps as a run does. `inner` makes the clock for marks inside a graph."""

    capture: Capture
    inner: Callable[[], GraphClock] = GraphClock


class TimedCapture:
    """A `Capture` that captures each step twice, without marks and with them, and times its
    replays."""

    def __init__(self, capturing: Capturing, probe: Probe, clock: Clock) -> None:
        self._capture, self._inner = capturing
        self._probe, self._clock = probe, clock
        self.limit_bytes, self.taken_bytes = self._capture.limit_bytes, 0
        self._marked: tuple[Captured, Spans, GraphClock] | None = None
        self._span: tuple[Any, Any] | None = None  # the last replay's begin and end

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        inner = self._inner()
        with self._probe.marked_by(inner):
            work()  # kernels are loaded and events made now, which must not be in a capture
        with self._probe.marked_by(None):
            plain = self._capture(work)
        inner.restart()
        with self._probe.marked_by(inner) as spans:
            self._marked = self._capture(work), spans, inner
        self.taken_bytes = self._capture.taken_bytes

        def replay() -> None:
            begin = self._clock.mark()
            plain.replay()
            self._span = begin, self._clock.mark()

        return Captured(replay, plain.out)

    def parts(self, num_layers: int) -> StepParts:
        """Parts of the step that was replayed last, found by replaying it once more with marks."""
        assert self._marked is not None and self._span is not None, "nothing was replayed"
        captured, spans, inner = self._marked
        begin = self._clock.mark()
        captured.replay()
        end = self._clock.mark()
        self._clock.settle()
        factor = self._clock.seconds(*self._span) / self._clock.seconds(begin, end)
        return spans.parts(inner, num_layers, factor=factor)


def captured_step(model: StageModel, group: StageGroup, queries: int,
                  capture: TimedCapture) -> DecodeGraphs | None:
    """The decode step of `queries` requests of a group, captured as in a run; None where a run does
    not capture it either. Raises CaptureError."""
    size = bucket_of(queries)
    if size is None or capture_obstacle(model) is not None:
        return None
    graphs = DecodeGraphs(model, group.cache.layers, capture, width=1)
    graphs.steps[size] = graphs.capture(size)
    return graphs
