"""Takes a real step apart: marks where embedding, attention and the rest of each layer begin.

The parts are timed inside the step that XRunner would execute, so the caches are in the state a
run leaves them in (a layer timed alone would find its weights there), and the parts add up to the
whole by construction. A mark costs well under a microsecond.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from xprofiler.measure.clock import Clock
from xrunner.models.stage_model import StageModel


class StepParts(NamedTuple):
    """Seconds of one step. `rest_s`, `attention_s`, `cross_s` (cross-attention) and `cross_kv_s`
    are of one layer, the mean over the layers. `captured_rest_s`: of a decode step that is taken
    captured, which then all but `rest_s` is of; None: of one that is launched kernel by kernel."""

    whole_s: float
    rest_s: float
    attention_s: float
    embed_s: float
    head_s: float
    cross_s: float = 0.0
    cross_kv_s: float = 0.0
    captured_rest_s: float | None = None

    def overhead_s(self, num_layers: int) -> float:
        """What a decode step takes besides its parts: message, slots, tables, mask."""
        rest_s = self.rest_s if self.captured_rest_s is None else self.captured_rest_s
        layers_s = num_layers * (rest_s + self.attention_s + self.cross_s)
        return max(self.whole_s - layers_s - self.embed_s - self.head_s, 0.0)


class LayerParts(NamedTuple):
    """Seconds of what comes before a step's head; `rest_s` and `attention_s` of one layer."""

    rest_s: float
    attention_s: float
    embed_s: float

    def times(self, factor: float) -> "LayerParts":
        return LayerParts(*(factor * part_s for part_s in self))


class Ends(NamedTuple):
    """Seconds of a whole step, and of its head."""

    whole_s: float
    head_s: float


class Spans:
    """Marks of one step's parts: where each begins and ends."""

    def __init__(self) -> None:
        self.rest: list[tuple[Any, Any]] = []  # qkv, finish, qkv, ...
        self.shared: list[tuple[Any, Any]] = []  # rotary tables: once a step, all layers' use
        self.embed: list[tuple[Any, Any]] = []
        self.head: list[Any] = []  # where it begins

    def clear(self) -> None:
        for marks in (self.rest, self.shared, self.embed, self.head):
            marks.clear()

    def parts(self, clock: Clock, num_layers: int) -> LayerParts:
        """Of marks whose distance is known."""
        # a large encode step goes through the layers in pieces
        assert self.rest and len(self.rest) % (2 * num_layers) == 0, (
            f"{len(self.rest) = } {num_layers = }")

        def total(spans: list[tuple[Any, Any]]) -> float:
            return sum(clock.seconds(begin, end) for begin, end in spans)

        # between a layer's two parts lie rotation, cache write and the attention kernel
        attention_s = sum(clock.seconds(qkv_end, finish_begin) for (_, qkv_end), (
            finish_begin, _) in zip(self.rest[::2], self.rest[1::2], strict=True))
        return LayerParts((total(self.rest) + total(self.shared)) / num_layers,
                          attention_s / num_layers, total(self.embed))


class Probe:
    """Puts marks around the parts of `model`'s layers and ends, in place."""

    def __init__(self, model: StageModel, clock: Clock) -> None:
        self._clock, self._model = clock, model
        self._marking: Clock | None = clock
        self._spans = Spans()
        for layer in model.layers:
            layer.qkv = self._timed(layer.qkv, "rest")  # type: ignore[method-assign]
            layer.finish = self._timed(layer.finish, "rest")  # type: ignore[method-assign]
        ends: Any = model.ends
        ends.embed = self._timed(ends.embed, "embed")
        ends.rotation = self._timed(ends.rotation, "shared")
        ends.scores = self._begins(ends.scores)

    def time(self, step: Callable[[], object]) -> StepParts:
        """Runs `step` once."""
        ends = self.ends(step)
        parts = self._spans.parts(self._clock, len(self._model.layers))
        return StepParts(whole_s=ends.whole_s, rest_s=parts.rest_s, attention_s=parts.attention_s,
                         embed_s=parts.embed_s, head_s=ends.head_s)

    def ends(self, step: Callable[[], object]) -> Ends:
        """Runs `step` once; of its other parts nothing need be marked."""
        self._spans.clear()
        start = self._clock.mark()
        step()
        end = self._clock.mark()
        self._clock.settle()
        head = self._spans.head
        return Ends(self._clock.seconds(start, end),
                    self._clock.seconds(head[0], end) if head else 0.0)

    @contextmanager
    def marked_by(self, clock: Clock | None) -> Iterator[Spans]:
        """Meanwhile this clock marks the parts, in spans of their own; None: nothing does."""
        before = self._marking, self._spans
        self._marking, self._spans = clock, Spans()
        try:
            yield self._spans
        finally:
            self._marking, self._spans = before

    def _timed(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            if (clock := self._marking) is None:
                return call(*arguments)
            begin = clock.mark()
            out = call(*arguments)
            getattr(self._spans, part).append((begin, clock.mark()))
            return out

        return timed

    def _begins(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Everything from the head's begin to the step's end is the head's: logits, sampling."""

        def begun(*arguments: Any) -> Any:
            if self._marking is not None:
                self._spans.head.append(self._marking.mark())
            return call(*arguments)

        return begun
