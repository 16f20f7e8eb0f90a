"""Takes a real step apart: marks where embedding, attention and the rest of each layer begin.

The parts are timed inside the step that XRunner would execute, so the caches are in the state a
run leaves them in (a layer timed alone would find its weights there), and the parts add up to the
whole by construction. A mark costs well under a microsecond.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from xprofiler.measure.clock import Clock
from xrunner.models.stage_model import StageModel


class StepParts(NamedTuple):
    """Seconds of one step. `rest_s`, `attention_s`, `cross_s` (cross-attention) and `cross_kv_s`
    are of one layer, the mean over the layers."""

    whole_s: float
    rest_s: float
    attention_s: float
    embed_s: float
    head_s: float
    cross_s: float = 0.0
    cross_kv_s: float = 0.0

    def overhead_s(self, num_layers: int) -> float:
        """What a decode step takes besides its parts: message, slots, tables, mask."""
        layers_s = num_layers * (self.rest_s + self.attention_s + self.cross_s)
        return max(self.whole_s - layers_s - self.embed_s - self.head_s, 0.0)


class Probe:
    """Puts marks around the parts of `model`'s layers and ends, in place."""

    def __init__(self, model: StageModel, clock: Clock) -> None:
        self._clock, self._model = clock, model
        self._rest: list[tuple[Any, Any]] = []  # (begin, end): qkv, finish, qkv, ...
        self._shared: list[tuple[Any, Any]] = []  # rotary tables: once a step, all layers' use
        self._embed: list[tuple[Any, Any]] = []
        self._head: list[Any] = []
        for layer in model.layers:
            layer.qkv = self._timed(layer.qkv, self._rest)  # type: ignore[method-assign]
            layer.finish = self._timed(layer.finish, self._rest)  # type: ignore[method-assign]
        ends: Any = model.ends
        ends.embed = self._timed(ends.embed, self._embed)
        ends.rotation = self._timed(ends.rotation, self._shared)
        ends.scores = self._begins(ends.scores)

    def time(self, step: Callable[[], object]) -> StepParts:
        """Runs `step` once."""
        for marks in (self._rest, self._shared, self._embed, self._head):
            marks.clear()
        start = self._clock.mark()
        step()
        end = self._clock.mark()
        self._clock.settle()
        num_layers = len(self._model.layers)
        # a large encode step goes through the layers in pieces
        assert self._rest and len(self._rest) % (2 * num_layers) == 0, (
            f"{len(self._rest) = } {num_layers = }")
        rest_s = self._sum(self._rest) + self._sum(self._shared)
        # between a layer's two parts lie rotation, cache write and the attention kernel
        attention_s = sum(self._clock.seconds(qkv_end, finish_begin) for (_, qkv_end), (
            finish_begin, _) in zip(self._rest[::2], self._rest[1::2], strict=True))
        return StepParts(
            whole_s=self._clock.seconds(start, end), rest_s=rest_s / num_layers,
            attention_s=attention_s / num_layers, embed_s=self._sum(self._embed),
            head_s=self._clock.seconds(self._head[0], end) if self._head else 0.0)

    def _sum(self, spans: list[tuple[Any, Any]]) -> float:
        return sum(self._clock.seconds(begin, end) for begin, end in spans)

    def _timed(self, call: Callable[..., Any], spans: list[tuple[Any, Any]]) -> Callable[..., Any]:
        mark = self._clock.mark

        def timed(*arguments: Any) -> Any:
            begin = mark()
            out = call(*arguments)
            spans.append((begin, mark()))
            return out

        return timed

    def _begins(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Everything from the head's begin to the step's end is the head's: logits, sampling."""

        def begun(*arguments: Any) -> Any:
            self._head.append(self._clock.mark())
            return call(*arguments)

        return begun
