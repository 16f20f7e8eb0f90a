"""WAA's batching rules (paper section 4.1): one pool encodes, the other decodes, each at its pace.

Symbols: B_E = encode_batch, B_D = mean number of active requests, N = max_in_system. The pools
share nothing but messages. Requests go from the encode to the decode pool with their KV, and each
finished one is reported back. The encode pool keeps what it has sent within N requests and the
decode pool's KV budget. So the decode pool never refuses one: that is the back-pressure. It also
keeps a growing decode batch at its mean.

The encode pool counts these tokens in a room (xrunner.rules.room) whose steps are the decode pool's
rounds. A request counts with all it may write until the decode pool has reported in which round it
joined. From then on it counts as it grows, until it has written all it may. Reports may come late:
who decodes without a report counts whole, and who has ended without one counts on. How much each
holds in which round is the same whenever its report comes. So what is counted for a round is never
less than what is held in it.

With `encode_chunk` the decode pool helps to encode while the encode pool is behind. If the decode
pool has fewer requests than planned, the next waiting ones are left to it as inputs. A whole batch
of the encode pool must still have room. The decode pool keeps a stock of some chunks' tokens, since
reports arrive only between steps of the encode pool's head."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from xgpt.core.controls import Admission, WaaControls
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


class SystemRoom:
    """The decode pool's room, in which the encode pool counts all requests in the system."""

    def __init__(self, kv_tokens: int, admission: Admission | None) -> None:
        self._room = Room(kv_tokens, admission)
        assert not self._room.evicts, f"{admission = }: the decode pool encodes nobody again"
        # a round is not over for all groups at once: some have grown before others free theirs
        self._ahead = int(self._room.rule != "reserve")  # tokens, of each request

    def __len__(self) -> int:
        """Number of requests in the system."""
        return len(self._room.at_work)

    def counted(self, batch: Sequence[Waiting]) -> Waiting:
        """The batch as one request, with all tokens that count until it decodes."""
        return Waiting(-1, sum([one.reserve for one in batch]) + self._ahead * len(batch),
                       sum([one.tokens for one in batch]))

    def has_room(self, batch: Sequence[Waiting]) -> bool:
        """Whether all of the batch may join those in the system; without any, it may."""
        return self._room.has_room(self.counted(batch), decodes=False)

    def admit(self, new: Waiting) -> None:
        self._room.admit(new._replace(reserve=new.reserve + self._ahead), decodes=False)

    def note_joined(self, queries: Iterable[int], phase: int) -> None:
        """Records that the decode pool decodes these from its round `phase` on, or the next. Call
        it in the order of rounds."""
        self._room.advance_to(phase)
        for query in queries:
            self._room.begin(query)

    def finish(self, query: int) -> None:
        self._room.finish(query)


class WaaEncodeRule:
    """Encodes a batch of requests whenever the system has room for them. At most `num_groups` steps
    are under way, their handover included, so that none pile up in front of a slow stage or
    link."""

    needs_tokens = True
    slot_use = SlotUse.COMPACTED

    def __init__(self, limits: SystemLimits, *, num_groups: int, kv_tokens: int,
                 encode_kv_tokens: int, sizer: BatchSizer,
                 admission: Admission | None = None) -> None:
        """`kv_tokens`: KV budget of the decode pool. `encode_kv_tokens`: that of this pool.
        `admission`: to the decode pool, from which nobody can be evicted; None reserves tokens."""
        assert limits.encode_batch >= 1 and num_groups >= 1 and limits.max_in_system >= 1
        self.limits = self._most = limits
        self.num_groups, self.sizer = num_groups, sizer
        self.kv_tokens, self.encode_kv_tokens = kv_tokens, encode_kv_tokens
        self._given: dict[int, int] = {}  # in the decode pool, not begun: query -> input
        self.waiting: deque[Waiting] = deque()
        self.system = SystemRoom(kv_tokens, admission)
        self._encoding: dict[int, int] = {}  # query -> input tokens; still in this pool
        self._held = 0
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
               and len(self.system) - len(self._encoding) - len(self._given)
               < self.limits.planned_active
               and self._has_room(self.waiting[0])):
            query = self.waiting.popleft()
            self.system.admit(query)
            self._given[query.query] = query.tokens
            given.append(query)
        return given

    def note_begun(self, queries: Iterable[int]) -> None:
        """Records that the decode pool has begun to encode these; other requests are ignored."""
        for query in queries:
            self._given.pop(query, None)

    def _has_room(self, first: Waiting) -> bool:
        """Whether the system has room for the request beside the next batch."""
        both = [*self._next_batch(), first]
        return (len(self.system) + len(both) <= self.limits.max_in_system
                and self.system.counted(both).reserve <= self.kv_tokens
                and self.system.has_room(both))

    def next_group(self) -> int | None:
        return self._steps % self.num_groups if self._batch() else None

    def decide(self) -> Step | None:
        joined = self._batch()
        if not joined:
            return None
        for one in joined:
            self.waiting.popleft()
            self.system.admit(one)
            self._encoding[one.query] = one.tokens
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
        self.system.finish(query)

    def _batch(self) -> list[Waiting]:
        """The requests to encode now; none until a whole batch (or all that are left) has room."""
        batch, others = self._next_batch(), len(self.system)
        if self._held + sum([one.tokens for one in batch]) > self.encode_kv_tokens:
            return []
        if others and others + len(batch) > self.limits.max_in_system:
            return []
        return batch if self.system.has_room(batch) else []

    def _next_batch(self) -> list[Waiting]:
        """The next batch, cut to what the budgets can ever hold; one request always fits."""
        extra, target, batch = 0, self.limits.target_active, self.limits.encode_batch
        if target:  # correction towards the decode batch's mean
            active = len(self.system) - len(self._encoding)
            extra = self.sizer.correction(active - target, target)
        first = list(islice(self.waiting, self.sizer.most(batch)))
        count = self.sizer.count([one.tokens for one in first], batch, extra)
        del first[count:]
        while len(first) > 1:
            whole = self.system.counted(first)
            if whole.reserve <= self.kv_tokens and whole.tokens <= self.encode_kv_tokens:
                break
            first.pop()
        return first


class WaaDecodeRule:
    """Decodes its groups in turn. New requests, handed over or encoded here, join the group whose
    turn it is while it has less than its even share."""

    needs_tokens = True

    def __init__(self, *, num_groups: int, group_max_active: int, kv_tokens: int,
                 encode_chunk: int = 0, planned_active: int = 0,
                 admission: Admission | None = None) -> None:
        """`kv_tokens`: the pool's KV budget, which the encode pool keeps to by `admission`.

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
        self.rooms = Rooms([Room(kv_tokens, admission) for _ in range(num_groups)])
        # whether the encode pool must hear of requests that join
        self.tells_joined = self.rooms.of_group[0].rule != "reserve"
        self._coming = 0  # most tokens of requests that are to join a group
        self._turn = 0

    @property
    def reserved_tokens(self) -> int:
        """Number of KV tokens of all requests here, active or about to join."""
        return self.rooms.held + self._coming

    def submit(self, query: int, reserve_tokens: int, input_tokens: int = 0,
               forecast: int = 0) -> bool:
        """Takes a request that has been encoded and handed over; always True."""
        self._arrived.append(Waiting(query, reserve_tokens, input_tokens))
        self._coming += reserve_tokens
        return True

    def submit_input(self, waiting: Waiting) -> None:
        """Takes a request whose input this pool encodes itself."""
        assert self.inputs is not None, f"{waiting = }: a pool that encodes nothing"
        self.inputs.add(waiting)
        self._coming += waiting.reserve

    def next_group(self) -> int | None:
        if not self.rooms.room_of and not self._arrived and not self.inputs:
            return None
        return self._turn % self.num_groups

    def decide(self) -> Step | None:
        group, handed = self._turn % self.num_groups, list[int]()
        most = self._most(len(self.rooms.room_of) + len(self._arrived))
        while self._arrived and self._admit(group, self._arrived[0], most, decodes=True):
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
        self.rooms.finish(query)

    def _admit(self, group: int, new: Waiting, most: int, *, decodes: bool) -> bool:
        is_admitted = self.rooms.admit(group, new, most, decodes=decodes)
        self._coming -= new.reserve * is_admitted
        return is_admitted

    def _with_chunks(self, inputs: DecodePoolInputs, group: int, phase: int,
                     handed: tuple[int, ...], is_decode: bool) -> Step | None:
        rooms = self.rooms
        # waiting inputs count only here: handed-over requests leave room for them in every group
        most = self._most(len(rooms.room_of) + len(self._arrived) + len(inputs))

        def begin(waiting: Waiting) -> bool:
            return len(rooms.room_of) < self.planned and self._admit(
                group, waiting, most, decodes=False)

        chunks, joined = inputs.take(group, begin, rooms.prefixes)
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
                          sizer=sizer_of(controls.even), admission=controls.admission),
            WaaDecodeRule(num_groups=groups, kv_tokens=deployment.kv_tokens,
                          group_max_active=math.ceil(controls.max_in_system / groups),
                          encode_chunk=controls.encode_chunk,
                          planned_active=controls.planned_active,
                          admission=controls.admission))


def system_limits(estimate: Estimate) -> SystemLimits:
    """Limits that turn a running encode rule of the same pools into that of `estimate`."""
    controls = estimate.controls
    assert isinstance(controls, WaaControls), f"{estimate.policy = }"
    is_chunked = controls.encode_chunk > 0
    return SystemLimits(encode_batch=controls.encode_batch, max_in_system=controls.max_in_system,
                        target_active=controls.even.target_active,
                        planned_active=controls.planned_active * is_chunked,
                        stock_tokens=controls.stock_tokens * is_chunked)
