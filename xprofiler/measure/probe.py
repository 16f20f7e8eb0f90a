"""Takes a real step apart: marks where embedding, attention and the rest of each layer begin.

The parts are timed inside the step that XRunner would execute, so the caches are in the state a
run leaves them in (a layer timed alone would find its weights there), and the parts add up to the
whole by construction. A mark costs well under a microsecond.

A decode step that a GPU's run takes captured in a CUDA graph (xrunner.engine.graphs) is one thing
to the host, so nothing can be marked in it while it is replayed. A second capture of the same step
tells what its parts take: it has events among its kernels that the graph records at each replay.
Its times are scaled to those of the first, which has none and is what a run replays."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from xprofiler.profile import Peaks
from xrunner.engine.graphs import Capture, Captured, CaptureError, DecodeGraphs, why_not
from xrunner.engine.group import StageGroup
from xrunner.models.stage_model import StageModel
from xrunner.rules.batch_sizer import bucket_of

_SIDE = 2048  # of a square matrix product: 17 GFLOP
_BYTES = 256 * 2**20  # past every cache
_CUDA_SCALE = 4  # a GPU needs more to fill it
_ROUNDS = 8


class Clock(Protocol):
    """Marks moments in the device's own order of work; their distance is read once settled."""

    def mark(self) -> Any:
        """This moment, after all work issued before it."""
        ...

    def settle(self) -> None:
        """Returns when everything issued has happened; only then are distances known."""
        ...

    def seconds(self, first: Any, second: Any) -> float: ...


class CpuClock:
    """Work on a CPU has happened when its call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def settle(self) -> None:
        """Nothing is ever under way."""

    def seconds(self, first: float, second: float) -> float:
        return second - first


class CudaClock:
    """CUDA events on the current stream: times of the device, without waiting for the host."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def settle(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return float(first.elapsed_time(second)) / 1e3


def clock_of(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else CpuClock()


def measure_peaks(dtype: torch.dtype, device: torch.device) -> Peaks:
    """What one rank's device does at most while all ranks are at work: the best of a few rounds,
    since a peak is what the device can do, not what it usually does."""
    side = _SIDE * (_CUDA_SCALE if device.type == "cuda" else 1)
    matrix = torch.randn(side, side, device=device).to(dtype)
    product_s = _best_s(lambda: matrix @ matrix, device)
    count = _BYTES * (_CUDA_SCALE if device.type == "cuda" else 1) // 4
    source = torch.ones(count, device=device)
    read_s = _best_s(lambda: source.sum(), device)
    return Peaks(flops_per_s=2 * side**3 / product_s, bandwidth_bytes_per_s=4 * count / read_s,
                 source=f"measured: {side} x {side} matrix product, {4 * count >> 20} MiB read")


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    clock = clock_of(device)
    times = []
    for _ in range(_ROUNDS):
        begin = clock.mark()
        work()
        end = clock.mark()
        clock.settle()
        times.append(clock.seconds(begin, end))
    return min(times)


class StepParts(NamedTuple):
    """Seconds of one step; 0 of what was not timed. `rest_s`, `attention_s`, `cross_s`
    (cross-attention) and `cross_kv_s` are of one layer, the mean over the layers.
    `captured_rest_s`: of a decode step that is taken captured, which then all but `rest_s` is of;
    None: of one that is launched kernel by kernel."""

    whole_s: float = 0.0
    rest_s: float = 0.0
    attention_s: float = 0.0
    embed_s: float = 0.0
    head_s: float = 0.0
    cross_s: float = 0.0
    cross_kv_s: float = 0.0
    captured_rest_s: float | None = None

    def overhead_s(self, num_layers: int) -> float:
        """What a decode step takes besides its parts: message, slots, tables, mask."""
        rest_s = self.rest_s if self.captured_rest_s is None else self.captured_rest_s
        layers_s = num_layers * (rest_s + self.attention_s + self.cross_s)
        return max(self.whole_s - layers_s - self.embed_s - self.head_s, 0.0)


class Spans:
    """Marks of one step's parts: where each begins and ends. Between two calls of a layer lie
    rotation, cache write and an attention kernel, which are the part that the first one names."""

    def __init__(self) -> None:
        self._spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._before: tuple[str, Any] | None = None  # the part that has begun, and where
        self.head: Any = None  # where it begins

    def clear(self) -> None:
        self._spans.clear()
        self._before = self.head = None

    def begins(self, mark: Any) -> None:
        """A call begins, and ends the part before it."""
        if self._before is not None:
            part, begin = self._before
            self._spans[part].append((begin, mark))
            self._before = None

    def add(self, part: str, begin: Any, end: Any, then: str = "") -> None:
        """A call has ended; `then`: the part that begins there."""
        self._spans[part].append((begin, end))
        if then:
            self._before = then, end

    def parts(self, clock: Clock, num_layers: int, cross_layers: int = 1,
              factor: float = 1.0) -> StepParts:
        """What comes before a step's head, `factor` times as long as between its marks, whose
        distances are known; `cross_layers`: that keep an encoder's output."""
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
    """Puts marks around the parts of `model`'s layers and ends, in place."""

    def __init__(self, model: Any, clock: Clock) -> None:
        """`model`: a StageModel or an EncoderDecoderStage, with both ends."""
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
        """Runs `step` once, through so many layers (None: all that decode)."""
        ends, cross_layers = self.ends(step), len(self._model.layers)
        parts = self._spans.parts(self._clock, num_layers or cross_layers, cross_layers)
        return parts._replace(whole_s=ends.whole_s, head_s=ends.head_s)

    def ends(self, step: Callable[[], object]) -> StepParts:
        """Runs `step` once: the whole and its head; of its other parts nothing need be marked."""
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
        """Meanwhile this clock marks the parts, in spans of their own; None: nothing does."""
        before = self._marking, self._spans
        self._marking, self._spans = clock, Spans()
        try:
            yield self._spans
        finally:
            self._marking, self._spans = before

    def _time(self, owners: Iterable[Any], part: str, **calls: str) -> None:
        """Marks these calls of each owner, as far as it has them, as that part; with each the part
        that follows it, or none."""
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
        """Everything from the head's begin to the step's end is the head's: logits, sampling."""

        def begun(*arguments: Any) -> Any:
            if self._marking is not None:
                self._spans.head = self._marking.mark()
            return call(*arguments)

        return begun


class GraphClock(CudaClock):
    """CUDA events that a graph records. They are made before it is captured, in the same step
    launched kernel by kernel, and are then recorded by the capture, one after the other."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._next = 0

    def restart(self) -> None:
        """The next mark is the first one again."""
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
    """`capture`: captures steps as a run does; `inner`: makes the clock of marks within one."""

    capture: Capture
    inner: Callable[[], GraphClock] = GraphClock


class TimedCapture:
    """Captures each step twice, without marks and with them; a `Capture` whose replays are
    timed."""

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
        """Of the step that was replayed last: it is replayed once more, with marks."""
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
    """The step of so many queries of a group whose entries lie in rows, captured as in a run; None
    where a run does not capture it either. Raises CaptureError."""
    size = bucket_of(queries)
    if size is None or why_not(model) is not None:
        return None
    graphs = DecodeGraphs(model, group.cache.layers, capture, width=1)
    graphs.steps[size] = graphs.capture(size)
    return graphs
