"""Steps that a batching rule decides, executed by a vLLM engine core: an Executor
(xrunner.engine.pipeline) that holds a whole decoder-only model."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Protocol

import torch
from torch import Tensor

from xrunner.backends.decoder_only import DecoderOnly
from xrunner.backends.vllm.core import Token
from xrunner.comm.messages import StartMessage, StepMessage
from xrunner.files.beat import Beat
from xrunner.ops.likelihoods import as_row, packed
from xrunner.ops.sampling import NOT_FINITE
from xrunner.query import Sampling
from xrunner.rules.slots import GroupSlots
from xrunner.rules.steps import StepKind
from xrunner.step_record import StepRecord, StepSizes, decoded_sizes, even_input

LOG_LIMIT = 200_000  # steps kept for the report; a longer job keeps its last ones
# of a query that is done, in a batch that is not, once it holds as much as there may be
_DEAD = Token(0)


class Core(Protocol):
    """What executes the passes: xrunner.backends.vllm.core.EngineCore."""

    @property
    def max_pass(self) -> int:
        """Tokens of one pass at most."""

    def add(self, name: str, tokens: Sequence[int], sampling: Sampling,
            generated: int = 0) -> None: ...

    def end(self, names: Sequence[str]) -> None: ...

    def step(self, tokens: Mapping[str, int]) -> dict[str, Token]: ...

    def peak_memory_bytes(self) -> int: ...

    def close(self) -> None: ...


class VllmExecutor(DecoderOnly):
    """One request of the core for each query in a slot. A query that is evicted leaves it, and
    comes back as a new one whose input is all that it had."""

    keeps_tokens = returns_early = False

    def __init__(self, make_core: Callable[[StartMessage], Core],
                 tokens_of: Callable[[int, int], tuple[Sequence[int], int]], *,
                 clock: Callable[[], float] = time.perf_counter, beat: Beat | None = None) -> None:
        """`make_core`: for caches of the sizes that the start says. `tokens_of`: the first so many
        tokens of a query, which steps bring in chunks and vLLM wants at once, and how many of them
        are its own output."""
        self._make_core, self._tokens_of, self._clock = make_core, tokens_of, clock
        self._beat, self._numbers = beat, count()
        self._core: Core
        self._groups: list[GroupSlots[str]] = []
        self.log: deque[StepRecord] = deque(maxlen=LOG_LIMIT)
        self._ended: set[str] = set()  # requests that hold as much as there may be
        self._held: dict[str, int] = {}  # tokens of each request that are in the cache
        self.busy_s, self.passes = 0.0, 0

    def start(self, message: StartMessage) -> None:
        self._core = self._make_core(message)
        self._groups = [GroupSlots() for _ in range(message.num_groups)]

    def peak_memory_bytes(self) -> int:
        """Of the engine's processes."""
        return self._core.peak_memory_bytes()

    def close(self) -> None:
        """Ends what the core has started, if there is one."""
        if hasattr(self, "_core"):
            self._core.close()

    def execute(self, message: StepMessage, inputs: Tensor) -> Tensor:
        """inputs: tokens, which the core has already of those who decode. Returns the next token
        of each who decodes, slot by slot, then of each whose encoding ends, [n]; with what is told
        of them (xrunner.ops.likelihoods.packed), where anything is."""
        if self._beat is not None:
            self._beat.begin(message)
        start_s, slots = self._clock(), self._groups[message.group]
        self._leave(slots, message.removed)
        decoding = self._decoding(message, slots)
        joined = self._join(message, slots)
        decoded = [(slots.seats[slot], 1) for slot in decoding]
        encoded, ends = list[tuple[str, int]](), list[str]()
        if message.spans:
            encoded = [(slots.seats[span.slot], span.tokens) for span in message.spans]
            ends = [slots.seats[span.slot] for span in message.spans if span.is_last]
        elif message.kind is StepKind.ENCODE:
            encoded = [(name, new.input_tokens)
                       for name, new in zip(joined, message.joined, strict=True)]
            ends = joined
        sizes, wanted = self._sizes(decoded, encoded), decoded + encoded
        gained, was_ended = dict[str, Token](), frozenset(self._ended)
        for wanted_of in passes([one for one in wanted if one[0] not in self._ended],
                                self._core.max_pass):
            gained |= self._core.step(wanted_of)
            self.passes += 1
        self._ended.update(name for name, token in gained.items() if token.is_end)
        given = [slots.seats[slot] for slot in decoding] + ends
        self._record(message, len(given), len(inputs), start_s, sizes)
        tokens_given = [_DEAD if name in was_ended else gained[name] for name in given]
        tokens = torch.tensor([token.value if token.is_finite else NOT_FINITE
                               for token in tokens_given], dtype=torch.long)
        known = [token.likelihood for token in tokens_given]
        return packed(tokens, [None if one is None else as_row(one) for one in known]) if any(
            known) else tokens

    def _leave(self, slots: GroupSlots[str], removed: Sequence[int]) -> None:
        self._end([slots.seats[slot] for slot in removed])
        slots.compact(removed)

    def _end(self, names: Sequence[str]) -> None:
        self._core.end([name for name in names if name not in self._ended])
        for name in names:
            del self._held[name]
        self._ended.difference_update(names)

    def _decoding(self, message: StepMessage, slots: GroupSlots[str]) -> list[int]:
        """The slots whose queries decode in this step, before others join."""
        if message.kind is StepKind.ENCODE:
            return []
        others = {*message.replaced, *message.resting}
        return [slot for slot in range(len(slots.seats)) if slot not in others]

    def _join(self, message: StepMessage, slots: GroupSlots[str]) -> list[str]:
        self._end([slots.seats[slot] for slot in message.replaced])
        names = []
        for new in message.joined:
            names.append(f"{new.query}.{next(self._numbers)}")
            tokens, generated = self._tokens_of(new.query, new.input_tokens)
            self._core.add(names[-1], tokens, new.sampling, generated)
            self._held[names[-1]] = 0
        slots.place(names, message.replaced)
        return names

    def _sizes(self, decoded: Sequence[tuple[str, int]],
               encoded: Sequence[tuple[str, int]]) -> StepSizes:
        """What the step's time depends on; what these requests hold is counted on."""
        held = self._held
        sizes = decoded_sizes([held[name] + 1 for name, _ in decoded])._replace(
            input_tokens=even_input([(held[name], tokens) for name, tokens in encoded]))
        for name, tokens in (*decoded, *encoded):
            held[name] += tokens
        return sizes

    def _record(self, message: StepMessage, queries: int, tokens: int, start_s: float,
                sizes: StepSizes) -> None:
        record = StepRecord(message.kind.value, message.group, message.phase,
                            message.iteration, queries, tokens, start_s, self._clock(), *sizes)
        self.log.append(record)
        self.busy_s += record.seconds
        if self._beat is not None:
            self._beat(record.end_s, self.busy_s,
                       sum(len(slots.seats) for slots in self._groups), record)


def passes(wanted: Sequence[tuple[str, int]], most: int) -> Iterator[dict[str, int]]:
    """`wanted` tokens of each request, in order, as passes of at most `most` tokens."""
    current: dict[str, int] = {}
    for name, tokens in wanted:
        while tokens:
            taken = min(tokens, most - sum(current.values()))
            current[name] = taken
            tokens -= taken
            if sum(current.values()) == most:
                yield current
                current = {}
    if current:
        yield current
