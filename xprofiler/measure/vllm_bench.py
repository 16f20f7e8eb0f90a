"""Steps of a vLLM engine core, timed as wholes and taken apart by their sizes.

vLLM's kernels cannot be marked from outside as our own can. What a step's parts take follows from
steps that differ in one of them, of n queries and T tokens, with L layers:

    head(n)        n short inputs encoded, less the same tokens as inputs eight times as long
    rest(T)        T tokens in inputs so short that their attention is next to nothing, less head
    attention      a step, less rest and head of its sizes

so that the parts of a step that was measured add up to it. The head of more than MOST_HEADS
queries is as many times theirs: by then it is a product that costs by the row, and encoding inputs
for it alone would be most of the measuring. A part that is lost in the noise of the
difference counts as a hundredth of its step: of nothing, any noise would be a large share."""

import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

from xprofiler.measure.probe import StepParts
from xrunner.engines.vllm.core import PREFIX, Token
from xrunner.query import Sampling

SHORT = 8  # tokens of an input whose attention is next to nothing
_LONGER = 64
LEAST_S = 1e-9  # what is not there at all: a profile holds no zeros
_LEAST, _MOST = 0.01, 0.9  # of a step: attention or head at least, and at most
MOST_HEADS = 64
_REPEATS = 3  # of a step that others are compared with
_SLOW_S = 0.3  # a step this slow hardly scatters: its first time counts, and one more is enough
_TOKEN = 7  # any


class Core(Protocol):
    """What is timed: xrunner.engines.vllm.core.EngineCore."""

    @property
    def max_tokens(self) -> int:
        """Positions of the longest query."""

    def add(self, name: str, tokens: Sequence[int], sampling: Sampling) -> None: ...

    def end(self, names: Sequence[str]) -> None: ...

    def step(self, tokens: dict[str, int]) -> dict[str, Token]: ...


class VllmBench:
    """The whole model behind a core, ready to take any step."""

    def __init__(self, core: Core, num_layers: int, sampling: Sampling, *,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        self.num_layers = num_layers
        self._core, self._sampling, self._clock, self._numbers = core, sampling, clock, count()
        self._known: dict[tuple[str, int], float] = {}

    def decode(self, contexts: list[int], *,
               most_layers: int | None = None) -> Callable[[], StepParts]:
        """One decode step of queries that hold `contexts` tokens. `most_layers`: it takes all."""
        queries = len(contexts)

        def measured() -> StepParts:
            base_s, head_s = self._base_s(queries), self.head_s(queries)
            whole_s = self._decoded_s(contexts)
            return self._parts(whole_s, whole_s - base_s, head_s)

        return measured

    def encode(self, lengths: list[int], *,
               most_layers: int | None = None) -> Callable[[], StepParts]:
        """One encode step of inputs of `lengths` tokens. `most_layers`: it takes all."""
        def measured() -> StepParts:
            head_s, rest_s = self.head_s(len(lengths)), self._rest_s(sum(lengths))
            whole_s = self._encoded_s(lengths)
            return self._parts(whole_s, whole_s - rest_s - head_s, head_s)

        return measured

    def compaction(self, rows: int, tokens: int) -> Callable[[], float]:
        """vLLM moves no rows: its entries lie in blocks."""
        return lambda: LEAST_S

    def head_s(self, queries: int) -> float:
        """Seconds that `queries` next tokens take, after the layers."""
        # of one as half of two: what the first costs more cannot be told from the layers
        several = min(max(queries, 2), MOST_HEADS)
        fewer = _inputs(SHORT * several, _LONGER)
        apart_s = (self._quickest(("short", several), lambda: self._encoded_s([SHORT] * several))
                   - self._quickest(("longer", several), lambda: self._encoded_s(fewer)))
        return max(apart_s * queries / (several - len(fewer)),
                   _LEAST * self._known["short", several])

    def _rest_s(self, tokens: int) -> float:
        """Seconds that all layers take for so many tokens, without attention and head."""
        lengths = _inputs(tokens, SHORT)
        return max(self._quickest(("rest", tokens), lambda: self._encoded_s(lengths))
                   - self.head_s(len(lengths)), LEAST_S)

    def _base_s(self, queries: int) -> float:
        """A decode step of so many queries that hold next to nothing."""
        return self._quickest(("base", queries), lambda: self._decoded_s([1] * queries))

    def _parts(self, whole_s: float, attention_s: float, head_s: float) -> StepParts:
        """Of a step whose attention and head take so long together; the rest is the layers'."""
        head_s = min(head_s, _MOST * whole_s)
        attention_s = min(max(attention_s, _LEAST * whole_s), _MOST * (whole_s - head_s))
        rest_s = whole_s - head_s - attention_s
        return StepParts(whole_s=whole_s, rest_s=rest_s / self.num_layers, embed_s=LEAST_S,
                         attention_s=attention_s / self.num_layers, head_s=head_s)

    def _quickest(self, key: tuple[str, int], measure: Callable[[], float]) -> float:
        if key not in self._known:
            first_s = measure()  # it may compile, or get memory
            # what disturbs a step makes it longer, and a difference of two anything
            self._known[key] = min(first_s, measure()) if first_s >= _SLOW_S else min(
                measure() for _ in range(_REPEATS))
        return self._known[key]

    def _decoded_s(self, contexts: Sequence[int]) -> float:
        """The step after the one that takes the queries up."""
        most = self._core.max_tokens - 2  # contexts scatter beyond the model's positions
        names = self._add([min(max(n - 1, 1), most) for n in contexts], PREFIX)
        self._core.step(dict.fromkeys(names, 1))
        start_s = self._clock()
        self._core.step(dict.fromkeys(names, 1))
        seconds = self._clock() - start_s
        self._core.end(names)
        return seconds

    def _encoded_s(self, lengths: Sequence[int]) -> float:
        start_s = self._clock()  # a run adds its queries within the step, too
        names = self._add(lengths, "")
        self._core.step(dict(zip(names, lengths, strict=True)))
        seconds = self._clock() - start_s
        self._core.end(names)
        return seconds

    def _add(self, lengths: Sequence[int], prefix: str) -> list[str]:
        names = [f"{prefix}{next(self._numbers)}" for _ in lengths]
        for name, length in zip(names, lengths, strict=True):
            self._core.add(name, [_TOKEN] * length, self._sampling)
        return names


def _inputs(tokens: int, each: int) -> list[int]:
    """So many tokens as inputs of `each`, and one of what is left."""
    whole, left = divmod(tokens, each)
    return [each] * whole + [left] * (left > 0)
