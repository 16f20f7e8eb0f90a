"""WAA's batching rules (paper section 4.1): one pool encodes, the other decodes, each at its pace.

Symbols: B_E = encode_batch, B_D = mean of the active queries, N = max_in_system. The pools share
nothing but messages: queries go from the encode to the decode pool with their KV entries, and word
comes back of each that is done. The encode pool keeps what it has sent within N queries and within
the decode pool's KV budget, so the decode pool never has to refuse one: that is the back-pressure,
which also holds a decode batch that the encode pool could let grow at its mean.

With `encode_chunk` the decode pool takes part in encoding while the encode pool is behind: while it
has fewer queries than planned, the next ones that wait are left to it, as inputs, as far as a whole
batch of the encode pool's has room besides. Some chunks' tokens lie ready there, since word of what
has begun is heard only when the encode pool's head has done a step."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from xgpt.core.controls import WaaControls
from xgpt.core.schedule import Estimate
from xrunner.rules.batch_sizer import BatchSizer, sizer_of
from xrunner.rules.chunks import TakenInputs
from xrunner.rules.slots import SlotUse
from xrunner.rules.steps import Admitted, KvBudget, Step, StepKind, Waiting, kind_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemLimits:
    """What of WAA can change while it runs, within the caches there are: how many queries are
    encoded together, how many may be in the system, and what the encode pool does for the decode
    batch. `target_active`: encode batches lead it back to that (0: they do not); what is encoded
    together then depends on the clock. Queries are left to the decode pool while it works on fewer
    than `planned_active`, and while those that it has not begun have fewer tokens than
    `stock_tokens` (0: never)."""

    encode_batch: int
    max_in_system: int
    target_active: float = 0.0
    planned_active: int = 0
    stock_tokens: int = 0


class WaaEncodeRule:
    """Encodes a batch of queries whenever they have room in the system. Up to `num_groups`
    steps are under way, their handover included: the next waits for the one that many before it,
    so that none pile up in front of a slow stage or a slow link."""

    needs_tokens = True
    slot_use = SlotUse.COMPACTED

    def __init__(self, limits: SystemLimits, *, num_groups: int, kv_tokens: int,
                 encode_kv_tokens: int, sizer: BatchSizer) -> None:
        """`kv_tokens`: the decode pool's budget, `encode_kv_tokens`: this pool's."""
        assert limits.encode_batch >= 1 and num_groups >= 1 and limits.max_in_system >= 1
        self.limits = self._most = limits
        self.num_groups, self.sizer = num_groups, sizer
        self.kv_tokens, self.encode_kv_tokens = kv_tokens, encode_kv_tokens
        self._given: dict[int, int] = {}  # query left to the decode pool, not begun -> its tokens
        self.waiting: deque[Waiting] = deque()
        self._in_system: dict[int, int] = {}  # query -> reserve
        self._encoding: dict[int, int] = {}  # query -> input; still in this pool
        self._held = self._reserved = 0
        self._steps = 0

    @property
    def group_max_active(self) -> int:
        return self.sizer.most(self._most.encode_batch)

    @property
    def next_phase(self) -> int:
        """The first encode step that a change can still be made for."""
        return self._steps

    def change(self, controls: SystemLimits, *, phase: int) -> None:
        """These hold from now on, which is encode step `phase`. Queries that are in the system
        stay: where they are more than may be, encoding waits. No limit may exceed what caches were
        sized by, at the beginning."""
        assert phase == self._steps, f"{phase = } {self._steps = }"
        assert 1 <= controls.encode_batch <= self._most.encode_batch, f"{controls = }"
        assert 1 <= controls.max_in_system <= self._most.max_in_system, f"{controls = }"
        self.limits = controls

    @property
    def reserved_tokens(self) -> int:
        """KV entries in this pool: inputs being encoded, or on their way out."""
        return self._held

    def submit(self, query: int, reserve_tokens: int, input_tokens: int = 0) -> bool:
        if reserve_tokens > self.kv_tokens or input_tokens > self.encode_kv_tokens:
            return False
        self.waiting.append(Waiting(query, reserve_tokens, input_tokens))
        return True

    def give(self) -> list[Waiting]:
        """The next queries that wait, as many as the decode pool is to encode: they have room in
        the system from now on, and the next batch still has."""
        given: list[Waiting] = []
        while (self.waiting and sum(self._given.values()) < self.limits.stock_tokens
               and len(self._in_system) - len(self._encoding) - len(self._given)
               < self.limits.planned_active
               and self._has_room(self.waiting[0])):
            query = self.waiting.popleft()
            self._in_system[query.query] = query.reserve
            self._reserved += query.reserve
            self._given[query.query] = query.tokens
            given.append(query)
        return given

    def begun(self, queries: Iterable[int]) -> None:
        """The decode pool has begun to encode these of the queries left to it; others than those
        are passed over."""
        for query in queries:
            self._given.pop(query, None)

    def _has_room(self, first: Waiting) -> bool:
        """Whether the query has room in the system beside the next batch, which may go alone."""
        count, wanted, _ = self._next_batch()
        return (len(self._in_system) + count < self.limits.max_in_system
                and self._reserved + wanted + first.reserve <= self.kv_tokens)

    def next_group(self) -> int | None:
        return self._steps % self.num_groups if self._batch() else None

    def decide(self) -> Step | None:
        count = self._batch()
        if not count:
            return None
        joined = [self.waiting.popleft() for _ in range(count)]
        for query, reserve, tokens in joined:
            self._in_system[query] = reserve
            self._encoding[query] = tokens
            self._reserved += reserve
            self._held += tokens
        step = Step(kind=StepKind.ENCODE, group=self._steps % self.num_groups, phase=self._steps,
                    iteration=0, joined=tuple(query for query, _, _ in joined))
        self._steps += 1
        return step

    def finish(self, query: int) -> None:
        """It has left this pool: its KV entries are handed over, or it is done already."""
        self._held -= self._encoding.pop(query)

    def release(self, query: int) -> None:
        """It is done: there is room in the system again."""
        self._reserved -= self._in_system.pop(query)

    def _batch(self) -> int:
        """Queries to encode now; 0 until a whole batch (or all that are left) has room."""
        count, wanted, tokens = self._next_batch()
        if self._held + tokens > self.encode_kv_tokens:
            return 0
        room = self.limits.max_in_system - len(self._in_system)
        if self._in_system and (count > room or self._reserved + wanted > self.kv_tokens):
            return 0
        return count

    def _next_batch(self) -> tuple[int, int, int]:
        """(queries, KV tokens reserved, input tokens) of the next batch."""
        lean, target = 0, self.limits.target_active
        if target:  # queries more, or fewer, that would bring the decode batch back to its mean
            lean = self.sizer.lean(len(self._in_system) - len(self._encoding) - target, target)
        first = list(islice(self.waiting, self.sizer.most(self.limits.encode_batch)))
        count = self.sizer.count([tokens for _, _, tokens in first], self.limits.encode_batch, lean)
        return _trimmed(first[:count], self.kv_tokens, self.encode_kv_tokens)


def _trimmed(batch: list[Waiting], kv_tokens: int,
             encode_kv_tokens: int) -> tuple[int, int, int]:
    """Cuts a batch to what the budgets can ever hold; one query always fits."""
    wanted = sum(reserve for _, reserve, _ in batch)
    tokens = sum(length for _, _, length in batch)
    while wanted > kv_tokens or tokens > encode_kv_tokens:
        _, reserve, length = batch.pop()
        wanted, tokens = wanted - reserve, tokens - length
    return len(batch), wanted, tokens


class WaaDecodeRule:
    """Decodes its groups in turn; queries handed over join the group whose turn it is, as long as
    that one has less than its even share, and so do those whose inputs it encodes itself."""

    needs_tokens = True

    def __init__(self, *, num_groups: int, group_max_active: int, kv_tokens: int,
                 encode_chunk: int = 0, planned_active: int = 0) -> None:
        """`kv_tokens`: the pool's budget, within which the encode pool keeps what it sends. Groups
        have even shares of the queries, not of the tokens. `encode_chunk`: tokens of inputs that a
        step encodes at most (0: this pool encodes none); none is begun while `planned_active` or
        more are at work (0: without limit)."""
        self.num_groups, self.group_max_active = num_groups, group_max_active
        self.kv_reserve = KvBudget(kv_tokens, 1, is_shared=True)
        # a row that is encoded in part stays where it is, and who joins takes one that is free
        self.slot_use = SlotUse.REUSED if encode_chunk else SlotUse.COMPACTED
        self.inputs = TakenInputs(encode_chunk, num_groups) if encode_chunk else None
        self.planned = planned_active or math.inf
        self._arrived: deque[tuple[int, int]] = deque()
        self._admitted = Admitted(num_groups)
        self._reserved = 0  # by these and by those that arrived
        self._turn = 0

    @property
    def reserved_tokens(self) -> int:
        """KV entries of all queries that are here, active or about to join."""
        return self._reserved

    def submit(self, query: int, reserve_tokens: int, input_tokens: int = 0) -> bool:
        """The query has been encoded and handed over."""
        self._arrived.append((query, reserve_tokens))
        self._reserved += reserve_tokens
        return True

    def take(self, waiting: Waiting) -> None:
        """This pool encodes the query's input itself."""
        assert self.inputs is not None, f"{waiting = }: a pool that encodes nothing"
        self.inputs.add(waiting)
        self._reserved += waiting.reserve

    def next_group(self) -> int | None:
        if not self._admitted.group_of and not self._arrived and not self.inputs:
            return None
        return self._turn % self.num_groups

    def decide(self) -> Step | None:
        group, handed = self._turn % self.num_groups, list[int]()
        most = self._most(len(self._admitted.group_of) + len(self._arrived))
        while self._arrived and self._admitted.admit(group, *self._arrived[0], most):
            handed.append(self._arrived.popleft()[0])
        phase, self._turn = self._turn // self.num_groups, self._turn + 1
        if self.inputs is not None:
            return self._with_chunks(self.inputs, group, phase, tuple(handed))
        if not self._admitted.active[group]:
            return None
        return Step(kind=StepKind.DECODE, group=group, phase=phase, iteration=1,
                    handed=tuple(handed))

    def _most(self, present: int) -> int:
        """A group's even share of so many queries."""
        return min(-(-present // self.num_groups), self.group_max_active)

    def finish(self, query: int) -> None:
        self._reserved -= self._admitted.finish(query)

    def _with_chunks(self, inputs: TakenInputs, group: int, phase: int,
                     handed: tuple[int, ...]) -> Step | None:
        admitted = self._admitted
        # those that wait count here alone: who is handed over leaves room for them in every group
        most = self._most(len(admitted.group_of) + len(self._arrived) + len(inputs))

        def begin(waiting: Waiting) -> bool:
            return len(admitted.group_of) < self.planned and admitted.admit(
                group, waiting.query, waiting.reserve, most)

        is_decode = len(admitted.active[group]) > inputs.num_begun(group)
        chunks, joined = inputs.take(group, begin)
        if not is_decode and not chunks:
            return None
        return Step(kind=kind_of(is_decode, chunks), group=group, phase=phase, iteration=1,
                    handed=handed, joined=joined, chunks=chunks)


def waa_rules(estimate: Estimate) -> tuple[WaaEncodeRule, WaaDecodeRule]:
    """The rules that execute `estimate`."""
    controls, deployment = estimate.controls, estimate.deployment
    assert isinstance(controls, WaaControls), f"{estimate.policy = }"
    encoding, groups = deployment.encoding, deployment.num_groups
    return (WaaEncodeRule(system_limits(estimate), num_groups=encoding.num_groups,
                          kv_tokens=deployment.kv_tokens, encode_kv_tokens=encoding.kv_tokens,
                          sizer=sizer_of(controls.even)),
            WaaDecodeRule(num_groups=groups, kv_tokens=deployment.kv_tokens,
                          group_max_active=math.ceil(controls.max_in_system / groups),
                          encode_chunk=controls.encode_chunk,
                          planned_active=controls.planned_active))


def system_limits(estimate: Estimate) -> SystemLimits:
    """What turns the encode rule of the same pools into that of `estimate`."""
    controls = estimate.controls
    assert isinstance(controls, WaaControls), f"{estimate.policy = }"
    is_chunked = controls.encode_chunk > 0
    return SystemLimits(encode_batch=controls.encode_batch, max_in_system=controls.max_in_system,
                        target_active=controls.even.target_active,
                        planned_active=controls.planned_active * is_chunked,
                        stock_tokens=controls.stock_tokens * is_chunked)
