"""WAA's batching rules (paper section 4.1): one pool encodes, the other decodes, each at its pace.

Symbols: B_E = encode_batch, B_D = mean number of active requests, N = max_in_system. The pools
share nothing but messages. Requests go from the encode to the decode pool with their KV, and each
finished one is reported back. The encode pool keeps what it has sent within N requests and the
decode pool's KV budget. So the decode pool never refuses one: that is the back-pressure. It also
keeps a growing decode batch at its mean.

With `encode_chunk` the decode pool helps to encode while the encode pool is behind. If the decode
pool has fewer requests than planned, the next waiting ones are left to it as inputs. A whole batch
of the encode pool must still have room. The decode pool keeps a stock of some chunks' tokens, since
reports arrive only between steps of the encode pool's head."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from xgpt.core.controls import WaaControls
from xgpt.core.schedule import Estimate
from xrunner.rules.batch_sizer import BatchSizer, sizer_of
from xrunner.rules.chunks import DecodePoolInputs
from xrunner.rules.room import Room, Rooms, Waiting
from xrunner.rules.slots import SlotUse
from xrunner.rules.steps import KvBudget, Step, StepKind, kind_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemLimits:
    """Limits of WAA that can change while it runs, within the size of the caches.

    `encode_batch`: requests encoded together. `max_in_system`: requests in both pools.
    `target_active`: decode batch that encode batches aim at (0: no aim); what is encoded together
    then depends on the clock. `planned_active`: the decode pool gets inputs while it has fewer
    requests. `stock_tokens`: most tokens of its inputs that are not begun (0: it gets none)."""

    encode_batch: int
    max_in_system: int
    target_active: float = 0.0
    planned_active: int = 0
    stock_tokens: int = 0


class WaaEncodeRule:
    """Encodes a batch of requests whenever the system has room for them. At most `num_groups` steps
    are under way, their handover included, so that none pile up in front of a slow stage or
    link."""

    needs_tokens = True
    slot_use = SlotUse.COMPACTED

    def __init__(self, limits: SystemLimits, *, num_groups: int, kv_tokens: int,
                 encode_kv_tokens: int, sizer: BatchSizer) -> None:
        """`kv_tokens`: KV budget of the decode pool. `encode_kv_tokens`: that of this pool."""
        assert limits.encode_batch >= 1 and num_groups >= 1 and limits.max_in_system >= 1
        self.limits = self._most = limits
        self.num_groups, self.sizer = num_groups, sizer
        self.kv_tokens, self.encode_kv_tokens = kv_tokens, encode_kv_tokens
        self._given: dict[int, int] = {}  # in the decode pool, not begun: query -> input
        self.waiting: deque[Waiting] = deque()
        self._in_system: dict[int, int] = {}  # query -> reserve
        self._encoding: dict[int, int] = {}  # query -> input tokens; still in this pool
        self._held = self._reserved = 0
        self._steps = 0

    @property
    def group_max_active(self) -> int:
        return self.sizer.most(self._most.encode_batch)

    @property
    def next_phase(self) -> int:
        """The first encode step that a change can still apply to."""
        return self._steps

    def change(self, controls: SystemLimits, *, phase: int) -> None:
        """Applies `controls` at once; `phase` must be the next encode step. Requests in the system
        stay: if they exceed the limit, encoding waits. No limit may exceed that of the start, by
        which caches were sized."""
        assert phase == self._steps, f"{phase = } {self._steps = }"
        assert 1 <= controls.encode_batch <= self._most.encode_batch, f"{controls = }"
        assert 1 <= controls.max_in_system <= self._most.max_in_system, f"{controls = }"
        self.limits = controls

    @property
    def reserved_tokens(self) -> int:
        """Number of KV tokens in this pool: inputs being encoded or handed over."""
        return self._held

    def submit(self, query: int, reserve_tokens: int, input_tokens: int = 0,
               forecast: int = 0) -> bool:
        if reserve_tokens > self.kv_tokens or input_tokens > self.encode_kv_tokens:
            return False
        self.waiting.append(Waiting(query, reserve_tokens, input_tokens))
        return True

    def share_inputs(self) -> list[Waiting]:
        """The next waiting requests that the decode pool is to encode. They have room in the
        system, and so does the next batch."""
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

    def note_begun(self, queries: Iterable[int]) -> None:
        """Records that the decode pool has begun to encode these; other requests are ignored."""
        for query in queries:
            self._given.pop(query, None)

    def _has_room(self, first: Waiting) -> bool:
        """Whether the system has room for the request beside the next batch."""
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
        for one in joined:
            self._in_system[one.query] = one.reserve
            self._encoding[one.query] = one.tokens
            self._reserved += one.reserve
            self._held += one.tokens
        step = Step(kind=StepKind.ENCODE, group=self._steps % self.num_groups, phase=self._steps,
                    iteration=0, joined=tuple(one.query for one in joined))
        self._steps += 1
        return step

    def finish(self, query: int) -> None:
        """Records that a request has left this pool: its KV is handed over, or it is done."""
        self._held -= self._encoding.pop(query)

    def release(self, query: int) -> None:
        """Records that the decode pool has finished a request: the system has room again."""
        self._reserved -= self._in_system.pop(query)

    def _batch(self) -> int:
        """Number of requests to encode now; 0 until a whole batch (or all that are left) has
        room."""
        count, wanted, tokens = self._next_batch()
        if self._held + tokens > self.encode_kv_tokens:
            return 0
        room = self.limits.max_in_system - len(self._in_system)
        if self._in_system and (count > room or self._reserved + wanted > self.kv_tokens):
            return 0
        return count

    def _next_batch(self) -> tuple[int, int, int]:
        """(requests, KV tokens reserved, input tokens) of the next batch."""
        extra, target, batch = 0, self.limits.target_active, self.limits.encode_batch
        if target:  # correction towards the decode batch's mean
            active = len(self._in_system) - len(self._encoding)
            extra = self.sizer.correction(active - target, target)
        first = list(islice(self.waiting, self.sizer.most(batch)))
        count = self.sizer.count([one.tokens for one in first], batch, extra)
        return _trimmed(first[:count], self.kv_tokens, self.encode_kv_tokens)


def _trimmed(batch: list[Waiting], kv_tokens: int,
             encode_kv_tokens: int) -> tuple[int, int, int]:
    """Cuts a batch to what the budgets can ever hold; one request always fits. Returns (requests,
    KV tokens reserved, input tokens)."""
    wanted = sum(one.reserve for one in batch)
    tokens = sum(one.tokens for one in batch)
    while wanted > kv_tokens or tokens > encode_kv_tokens:
        last = batch.pop()
        wanted, tokens = wanted - last.reserve, tokens - last.tokens
    return len(batch), wanted, tokens


class WaaDecodeRule:
    """Decodes its groups in turn. New requests, handed over or encoded here, join the group whose
    turn it is while it has less than its even share."""

    needs_tokens = True

    def __init__(self, *, num_groups: int, group_max_active: int, kv_tokens: int,
                 encode_chunk: int = 0, planned_active: int = 0) -> None:
        """`kv_tokens`: the pool's KV budget, which the encode pool keeps to.

        Groups have even shares of the requests, not of the tokens. `encode_chunk`: most input
        tokens in a step (0: this pool encodes none). `planned_active`: no input is begun while as
        many are active (0: no limit)."""
        self.num_groups, self.group_max_active = num_groups, group_max_active
        self.kv_reserve = KvBudget(kv_tokens, 1, is_shared=True)
        # a partly encoded row must stay in place, so joining requests take free rows
        self.slot_use = SlotUse.REUSED if encode_chunk else SlotUse.COMPACTED
        self.inputs = DecodePoolInputs(encode_chunk, num_groups) if encode_chunk else None
        self.planned = planned_active or math.inf
        self._arrived: deque[Waiting] = deque()
        self.rooms = Rooms([Room(kv_tokens) for _ in range(num_groups)])
        self._reserved = 0  # by active and arrived requests
        self._turn = 0

    @property
    def reserved_tokens(self) -> int:
        """Number of KV tokens of all requests here, active or about to join."""
        return self._reserved

    def submit(self, query: int, reserve_tokens: int, input_tokens: int = 0,
               forecast: int = 0) -> bool:
        """Takes a request that has been encoded and handed over; always True."""
        self._arrived.append(Waiting(query, reserve_tokens, input_tokens))
        self._reserved += reserve_tokens
        return True

    def submit_input(self, waiting: Waiting) -> None:
        """Takes a request whose input this pool encodes itself."""
        assert self.inputs is not None, f"{waiting = }: a pool that encodes nothing"
        self.inputs.add(waiting)
        self._reserved += waiting.reserve

    def next_group(self) -> int | None:
        if not self.rooms.room_of and not self._arrived and not self.inputs:
            return None
        return self._turn % self.num_groups

    def decide(self) -> Step | None:
        group, handed = self._turn % self.num_groups, list[int]()
        most = self._most(len(self.rooms.room_of) + len(self._arrived))
        while self._arrived and self.rooms.admit(group, self._arrived[0], most):
            handed.append(self._arrived.popleft().query)
        phase, self._turn = self._turn // self.num_groups, self._turn + 1
        room = self.rooms.of_group[group]
        is_decode = room.num_decoding > 0
        if is_decode:
            room.advance()
        if self.inputs is not None:
            return self._with_chunks(self.inputs, group, phase, tuple(handed), is_decode)
        if not is_decode:
            return None
        return Step(kind=StepKind.DECODE, group=group, phase=phase, iteration=1,
                    handed=tuple(handed))

    def _most(self, present: int) -> int:
        """A group's even share of `present` requests."""
        return min(-(-present // self.num_groups), self.group_max_active)

    def finish(self, query: int) -> None:
        self._reserved -= self.rooms.finish(query).reserve

    def _with_chunks(self, inputs: DecodePoolInputs, group: int, phase: int,
                     handed: tuple[int, ...], is_decode: bool) -> Step | None:
        rooms = self.rooms
        # waiting inputs count only here: handed-over requests leave room for them in every group
        most = self._most(len(rooms.room_of) + len(self._arrived) + len(inputs))

        def begin(waiting: Waiting) -> bool:
            return len(rooms.room_of) < self.planned and rooms.admit(
                group, waiting, most, decodes=False)

        chunks, joined = inputs.take(group, begin)
        for query in joined:
            rooms.of_group[group].begin(query)
        if not is_decode and not chunks:
            return None
        return Step(kind=kind_of(is_decode, chunks), group=group, phase=phase, iteration=1,
                    handed=handed, joined=joined, chunks=chunks)


def waa_rules(estimate: Estimate) -> tuple[WaaEncodeRule, WaaDecodeRule]:
    """The encode and the decode rule that execute `estimate`."""
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
    """Limits that turn a running encode rule of the same pools into that of `estimate`."""
    controls = estimate.controls
    assert isinstance(controls, WaaControls), f"{estimate.policy = }"
    is_chunked = controls.encode_chunk > 0
    return SystemLimits(encode_batch=controls.encode_batch, max_in_system=controls.max_in_system,
                        target_active=controls.even.target_active,
                        planned_active=controls.planned_active * is_chunked,
                        stock_tokens=controls.stock_tokens * is_chunked)
