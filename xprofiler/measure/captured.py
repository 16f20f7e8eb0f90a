"""Decode steps timed as a GPU's run takes them: captured in CUDA graphs (xrunner.engine.graphs).

To the host a captured step is one thing, so nothing can be marked in it while it is replayed. What
its parts take is told by a second capture of the same step, with marks among its kernels: events
that the graph itself records at each replay. They are scaled to what the first one takes, which has
none and is what a run replays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from xprofiler.measure.clock import Clock, CudaClock
from xprofiler.measure.probe import LayerParts, Probe, Spans
from xrunner.engine.graphs import Capture, Captured, CaptureError, DecodeGraphs, why_not
from xrunner.engine.group import StageGroup
from xrunner.models.stage_model import StageModel
from xrunner.rules.buckets import bucket_of


class InnerClock(Clock, Protocol):
    """Marks moments within a captured step, the same ones whenever it is replayed."""

    def restart(self) -> None:
        """The next mark is the first one again."""


class GraphClock(CudaClock):
    """CUDA events that a graph records. They are made before it is captured, in the same step
    launched kernel by kernel, and are then recorded by the capture, one after the other."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._next = 0

    def restart(self) -> None:
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
    inner: Callable[[], InnerClock] = GraphClock


class TimedCapture:
    """Captures each step twice, without marks and with them; a `Capture` whose replays are
    timed."""

    def __init__(self, capturing: Capturing, probe: Probe, clock: Clock) -> None:
        self._capture, self._inner = capturing
        self._probe, self._clock = probe, clock
        self.limit_bytes, self.taken_bytes = self._capture.limit_bytes, 0
        self._marked: tuple[Captured, Spans, InnerClock] | None = None
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

    def parts(self, num_layers: int) -> LayerParts:
        """Of the step that was replayed last: it is replayed once more, with marks."""
        assert self._marked is not None and self._span is not None, "nothing was replayed"
        captured, spans, inner = self._marked
        begin = self._clock.mark()
        captured.replay()
        end = self._clock.mark()
        self._clock.settle()
        factor = self._clock.seconds(*self._span) / self._clock.seconds(begin, end)
        return spans.parts(inner, num_layers).times(factor)


def captured_step(model: StageModel, group: StageGroup, queries: int,
                  capture: TimedCapture) -> DecodeGraphs | None:
    """The step of so many queries of a group whose entries lie in rows, captured as in a run; None
    where a run does not capture it either. Raises CaptureError."""
    size = bucket_of(queries)
    if size is None or why_not(model) is not None:
        return None
    graphs = DecodeGraphs(model, group.cache.layers, capture, width=1, in_blocks=False)
    graphs.steps[size] = graphs.capture(size)
    return graphs
