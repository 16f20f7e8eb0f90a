"""WAA's batching rules (paper section 4.1): one pool encodes, the other decodes, each at its pace.

Symbols: B_E = encode_batch, B_D = mean of the active queries, N = max_in_system. The pools share
nothing but messages: queries go from the encode to the decode pool with their KV entries, and word
comes back of each that is done. The encode pool keeps what it has sent within N queries and within
the decode pool's KV budget, so the decode pool never has to refuse one: that is the back-pressure,
which also holds a decode batch that the encode pool could let grow at its mean."""

import math
from collections import deque
from dataclasses import dataclass

from xgpt.core.controls import WaaControls
from xgpt.core.schedule import Estimate
from xrunner.rules.batch_sizer import BatchSizer, sizer_of
from xrunner.rules.slots import SlotUse
from xrunner.rules.steps import KvBudget, Step, StepKind


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemLimits:
    """How many queries are encoded together, and how many may be in the system: what of WAA can
    change while it runs, within the caches there are. `target_active`: as for the rule."""

    encode_batch: int
    max_in_system: int
    target_active: float = 0.0


class WaaEncodeRule:
    """Encodes `encode_batch` queries whenever they have room in the system. Up to `num_groups`
    steps are under way, their handover included: the next waits for the one that many before it,
    so that none pile up in front of a slow stage or a slow link."""

    needs_tokens = True
    slot_use = SlotUse.COMPACTED

    def __init__(self, *, encode_batch: int, num_groups: int, max_in_system: int, kv_tokens: int,
                 encode_kv_tokens: int, sizer: BatchSizer, target_active: float = 0.0) -> None:
        """`kv_tokens`: the decode pool's budget, `encode_kv_tokens`: this pool's.
        `target_active`: the decode batch that encode batches lead back to (0: none); what is
        encoded together then depends on the clock."""
        assert encode_batch >= 1 and num_groups >= 1 and max_in_system >= 1
        self.encode_batch, self.num_groups = encode_batch, num_groups
        self.max_in_system, self.kv_tokens = max_in_system, kv_tokens
        self.encode_kv_tokens = encode_kv_tokens
        self._most = SystemLimits(encode_batch=encode_batch, max_in_system=max_in_system)
        self._sizer, self._target_active = sizer, target_active
        self._waiting: deque[tuple[int, int, int]] = deque()  # (query, reserve, input)
        self._in_system: dict[int, int] = {}  # query -> reserve
        self._encoding: dict[int, int] = {}  # query -> input; still in this pool
        self._held = self._reserved = 0
        self._steps = 0
        # of the next batch: (queries, KV tokens reserved, input tokens)
        self._next: tuple[int, int, int] | None = None
        self._next_lean = 0  # with which it was found

    @property
    def group_max_active(self) -> int:
        return self._sizer.most(self._most.encode_batch)

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
        self.encode_batch, self.max_in_system = controls.encode_batch, controls.max_in_system
        self._target_active, self._next = controls.target_active, None

    @property
    def reserved_tokens(self) -> int:
        """KV entries in this pool: inputs being encoded, or on their way out."""
        return self._held

    def submit(self, query: int, reserve_tokens: int, input_tokens: int = 0) -> bool:
        if reserve_tokens > self.kv_tokens or input_tokens > self.encode_kv_tokens:
            return False
        self._waiting.append((query, reserve_tokens, input_tokens))
        self._next = None
        return True

    def next_group(self) -> int | None:
        return self._steps % self.num_groups if self._batch() else None

    def decide(self) -> Step | None:
        count = self._batch()
        if not count:
            return None
        joined = [self._waiting.popleft() for _ in range(count)]
        self._next = None
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
        lean = self._lean() if self._target_active else 0
        if self._next is None or lean != self._next_lean:
            self._next_lean = lean
            most = min(self._sizer.most(self.encode_batch), len(self._waiting))
            first = [self._waiting[i] for i in range(most)]
            count = self._sizer.count([tokens for _, _, tokens in first], self.encode_batch, lean)
            self._next = self._trimmed(first[:count])
        count, wanted, tokens = self._next
        if self._held + tokens > self.encode_kv_tokens:
            return 0
        room = self.max_in_system - len(self._in_system)
        if self._in_system and (count > room or self._reserved + wanted > self.kv_tokens):
            return 0
        return count

    def _lean(self) -> int:
        """Queries more, or fewer, that would bring the decode batch back to its mean."""
        decoding = len(self._in_system) - len(self._encoding)
        return self._sizer.lean(decoding - self._target_active, self._target_active)

    def _trimmed(self, batch: list[tuple[int, int, int]]) -> tuple[int, int, int]:
        """Cuts a batch to what the budgets can ever hold; one query always fits."""
        wanted = sum(reserve for _, reserve, _ in batch)
        tokens = sum(length for _, _, length in batch)
        while wanted > self.kv_tokens or tokens > self.encode_kv_tokens:
            _, reserve, length = batch.pop()
            wanted, tokens = wanted - reserve, tokens - length
        return len(batch), wanted, tokens


class WaaDecodeRule:
    """Decodes its groups in turn; queries handed over join the group whose turn it is, as long as
    that one has less than its even share."""

    needs_tokens = True
    slot_use = SlotUse.COMPACTED

    def __init__(self, *, num_groups: int, group_max_active: int, kv_tokens: int) -> None:
        """`kv_tokens`: the pool's budget, within which the encode pool keeps what it sends. Groups
        have even shares of the queries, not of the tokens."""
        self.num_groups, self.group_max_active = num_groups, group_max_active
        self.kv_reserve = KvBudget(kv_tokens, 1, is_shared=True)
        self._arrived: deque[tuple[int, int]] = deque()
        self._active: list[dict[int, int]] = [{} for _ in range(num_groups)]
        self._group_of: dict[int, int] = {}
        self._reserved = 0
        self._turn = 0

    @property
    def reserved_tokens(self) -> int:
        """KV entries of all queries that are here, active or about to join."""
        return self._reserved

    def submit(self, query: int, reserve_tokens: int, input_tokens: int = 0) -> bool:
        self._arrived.append((query, reserve_tokens))
        self._reserved += reserve_tokens
        return True

    def next_group(self) -> int | None:
        if not self._group_of and not self._arrived:
            return None
        return self._turn % self.num_groups

    def decide(self) -> Step | None:
        group, active = self._turn % self.num_groups, self._active[self._turn % self.num_groups]
        share = -(-(len(self._group_of) + len(self._arrived)) // self.num_groups)
        joined = []
        while self._arrived and len(active) < min(share, self.group_max_active):
            query, reserve = self._arrived.popleft()
            active[query] = reserve
            self._group_of[query] = group
            joined.append(query)
        phase, self._turn = self._turn // self.num_groups, self._turn + 1
        if not active:
            return None
        return Step(kind=StepKind.DECODE, group=group, phase=phase, iteration=1,
                    joined=tuple(joined))

    def finish(self, query: int) -> None:
        self._reserved -= self._active[self._group_of.pop(query)].pop(query)


def waa_rules(estimate: Estimate) -> tuple[WaaEncodeRule, WaaDecodeRule]:
    """The rules that execute `estimate`."""
    controls, deployment = estimate.controls, estimate.deployment
    assert isinstance(controls, WaaControls), f"{estimate.policy = }"
    encoding, groups = deployment.encoding, deployment.num_groups
    return (WaaEncodeRule(encode_batch=controls.encode_batch, num_groups=encoding.num_groups,
                          sizer=sizer_of(controls.even), max_in_system=controls.max_in_system,
                          kv_tokens=deployment.kv_tokens, encode_kv_tokens=encoding.kv_tokens,
                          target_active=controls.even.target_active),
            WaaDecodeRule(num_groups=groups, kv_tokens=deployment.kv_tokens,
                          group_max_active=math.ceil(controls.max_in_system / groups)))


def system_limits(estimate: Estimate) -> SystemLimits:
    """What turns the encode rule of the same pools into that of `estimate`."""
    controls = estimate.controls
    assert isinstance(controls, WaaControls), f"{estimate.policy = }"
    return SystemLimits(encode_batch=controls.encode_batch, max_in_system=controls.max_in_system,
                        target_active=controls.even.target_active)
