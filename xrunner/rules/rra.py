"""RRA's batching rule (paper section 4.1): encode `encode_batch` requests, decode
`decode_iterations` times, repeat. The decode batch is split into `num_groups` micro-batches.

Symbols: B_E = encode_batch, N_D = decode_iterations, B_D = mean number of active requests. With
`encode_chunk` c there is no encode round. The B_E requests of a phase are encoded beside decoding,
in chunks of at most c tokens spread over its N_D iterations. Each joins decoding when its last
chunk is in (xrunner.rules.chunks).

B_E requests join in a phase. A group whose decode batch has left its mean by more than the
adjustment's threshold takes more or fewer (paper section 5.2), as far as the adjustment lets an
encode batch's tokens vary. `max_active` and the KV budget, by which a group's room admits
(xrunner.rules.room), are upper limits. All of these can change between two phases
(`RraRule.change`)."""

import math
from collections import deque
from dataclasses import dataclass
from itertools import islice

from xgpt.core.controls import EvenBatches, RraControls
from xgpt.core.schedule import Estimate
from xrunner.rules.batch_sizer import sizer_of
from xrunner.rules.chunks import PhaseChunks, whole_input
from xrunner.rules.prefixes import SharedPrefixes
from xrunner.rules.room import Rooms, Waiting
from xrunner.rules.slots import SlotUse
from xrunner.rules.steps import Chunk, KvBudget, Step, StepKind, kind_of

UNEVEN = EvenBatches()  # batches as requests come


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseControls:
    """RRA's settings and a group's limits within a phase. `target_active`: active requests at a
    phase's start that encode batches aim at (0: no aim). `encode_chunk`: tokens (0: unchanged, or
    no chunks)."""

    encode_batch: int
    decode_iterations: int
    group_max_active: int
    group_kv_tokens: int
    target_active: float = 0.0
    encode_chunk: int = 0


class RraRule:
    """RRA's rule: ENCODE of each group in turn, then N_D rounds of DECODE of each. With chunks: N_D
    rounds, MIXED where a step also encodes, ENCODE where nothing decodes."""

    needs_tokens = True

    def __init__(self, *, encode_batch: int, decode_iterations: int, num_groups: int,
                 max_active: int, kv_tokens: int, even: EvenBatches = UNEVEN,
                 encode_chunk: int = 0) -> None:
        """`max_active` and `kv_tokens` limit the whole pool; each group gets an equal share.
        `even`: how batches are kept even; its target may change later. `encode_chunk`: tokens; it
        may change later, but not from or to 0. Admission reserves tokens; other `rooms` may be set
        before the first request."""
        assert encode_batch >= 1 and decode_iterations >= 1 and num_groups >= 1
        self.num_groups = num_groups
        self.controls = PhaseControls(  # of the current phase
            encode_batch=encode_batch, decode_iterations=decode_iterations,
            group_max_active=max(math.ceil(max_active / num_groups), 1),
            group_kv_tokens=kv_tokens // num_groups, target_active=even.target_active,
            encode_chunk=encode_chunk)
        self.group_max_active = self.controls.group_max_active  # over all phases
        self.kv_reserve = KvBudget(self.controls.group_kv_tokens, 1)  # of a group, over all phases
        # a partly encoded row must stay in place, so joining requests take free rows
        self.slot_use = SlotUse.REUSED if encode_chunk else SlotUse.COMPACTED
        self._chunks = PhaseChunks(encode_chunk, num_groups) if encode_chunk else None
        self.sizer = sizer_of(even)
        self.waiting: deque[Waiting] = deque()
        self.rooms = Rooms.even(num_groups, kv_tokens)
        self.changes: deque[tuple[int, PhaseControls]] = deque()  # to come: (from phase, settings)
        self._phase = 0
        self._first_iteration = int(encode_chunk > 0)  # 0: the encode round of a phase
        self._iteration = self._first_iteration
        self._group = 0

    @property
    def reserved_tokens(self) -> int:
        return self.rooms.held

    @property
    def next_phase(self) -> int:
        """The first phase that a change can still apply to."""
        return self._phase + 1

    def make_room(self, slots: int, kv_tokens: int = 0) -> None:
        """Raises a group's largest sizes after changes: `slots` requests, `kv_tokens` reserved."""
        self.group_max_active = max(self.group_max_active, slots)
        tokens = kv_tokens * self.num_groups if self.kv_reserve.is_shared else kv_tokens
        tokens = max(self.kv_reserve.tokens, tokens)
        self.kv_reserve = self.kv_reserve._replace(
            tokens=tokens, prefixes=self.rooms.prefixes.most_within(tokens))

    def share_prefixes(self, prefixes: SharedPrefixes) -> None:
        """Lets requests share prefixes. Partly encoded rows stay in place then, as with chunks."""
        self.slot_use, self.rooms.prefixes = SlotUse.REUSED, prefixes
        self.kv_reserve = self.rooms.budget

    def change(self, controls: PhaseControls, *, phase: int) -> None:
        """Applies `controls` from the start of `phase` on. Call it in the order of phases. Active
        requests stay even if they exceed the new limits: admission then waits. The KV budget must
        hold any waiting request."""
        after = self.changes[-1][0] if self.changes else self._phase
        assert phase > self._phase and phase >= after, f"{phase = } {after = } {self._phase = }"
        assert controls.group_max_active <= self.group_max_active, f"{controls = }"
        assert controls.encode_batch >= 1 and controls.decode_iterations >= 1, f"{controls = }"
        assert self._chunks is not None or not controls.encode_chunk, f"{controls = }"
        assigned = self._chunks.waiting() if self._chunks else []
        # each group has a share of a request's prefixes
        most = max((query.reserve + math.ceil(query.shared / self.num_groups)
                    for query in (*self.waiting, *assigned)), default=0)
        assert most <= controls.group_kv_tokens, f"{controls = } {most = }"
        self.changes.append((phase, controls))

    def submit(self, query: int, reserve_tokens: int, input_tokens: int = 0,
               forecast: int = 0) -> bool:
        return self.rooms.submit(Waiting(query, reserve_tokens, input_tokens, forecast=forecast),
                                 self.waiting)

    def next_group(self) -> int | None:
        is_at_work = bool(self.rooms.room_of) or (
            self._chunks is not None and self._chunks.has_waiting())
        if not is_at_work and not self.waiting:
            return None
        if self._iteration > self._first_iteration and not is_at_work:
            self._start_next_phase()  # nothing left to decode: go straight to encoding
        return self._group

    def decide(self) -> Step | None:
        if self._chunks is not None:
            return self._decide_mixed(self._chunks)
        kind, group = StepKind.DECODE if self._iteration else StepKind.ENCODE, self._group
        joined, chunks, evicted = list[int](), list[Chunk](), tuple[int, ...]()
        has_work = self.rooms.of_group[group].num_decoding > 0
        if kind is StepKind.ENCODE:
            for _ in range(self._wanted(group)):
                if not self.rooms.admit(group, self.waiting[0], self.controls.group_max_active):
                    break  # keep the input's order: a smaller request behind does not overtake
                new = self.waiting.popleft()
                joined.append(new.query)
                chunks += whole_input(new, self.rooms.prefixes)
            has_work = bool(joined)
        elif has_work:
            evicted = self.rooms.make_room(group, self.waiting)
            self.rooms.of_group[group].advance()
        step = None
        if has_work:
            starts, released = self.rooms.prefixes.end_step()
            step = Step(kind=kind, group=group, phase=self._phase, iteration=self._iteration,
                        joined=tuple(joined), chunks=tuple(chunks), evicted=evicted, starts=starts,
                        released=released)
        self._advance()
        return step

    def finish(self, query: int) -> None:
        self.rooms.finish(query)

    def quota(self, group: int, phase: int) -> int:
        """Number of requests that `group` encodes in `phase`; they sum to encode_batch over the
        groups. Remainders rotate so that groups stay even."""
        base, odd = divmod(self.controls.encode_batch, self.num_groups)
        return base + ((group + phase * odd) % self.num_groups < odd)

    def _decide_mixed(self, chunks: PhaseChunks) -> Step | None:
        group, iteration = self._group, self._iteration
        if iteration == self._first_iteration and group == 0:
            for each in range(self.num_groups):
                # a group that found no room for one phase's requests gets no more
                if len(chunks.waiting(each)) < self.quota(each, self._phase):
                    chunks.assign(each, [self.waiting.popleft() for _ in range(self._wanted(each))])
            chunks.begin_phase(self.controls.decode_iterations, self.rooms)
        room, evicted = self.rooms.of_group[group], tuple[int, ...]()
        if room.num_decoding:
            evicted = self.rooms.make_room(group, self.waiting)
            chunks.drop(group, evicted)
        is_decode = room.num_decoding > 0
        if is_decode:
            room.advance()
        encoded, joined = chunks.take(group, iteration, lambda new: not evicted and (
            self.rooms.admit(group, new, self.controls.group_max_active, decodes=False)),
            self.rooms.prefixes)
        for query in joined:
            room.begin(query)
        step = None
        if is_decode or encoded:
            starts, released = self.rooms.prefixes.end_step()
            step = Step(kind=kind_of(is_decode, encoded), group=group, phase=self._phase,
                        iteration=iteration, joined=joined, chunks=encoded, evicted=evicted,
                        starts=starts, released=released)
        self._advance()
        return step

    def _wanted(self, group: int) -> int:
        """Number of waiting requests that the group takes in this phase, if there is room for
        them."""
        controls, quota, correction = self.controls, self.quota(group, self._phase), 0
        if not quota:
            return 0
        # the job's last requests are divided evenly among the groups
        if controls.target_active and len(self.waiting) >= controls.encode_batch:
            carried = controls.target_active / self.num_groups
            # correction towards the mean of the group's decode batch
            correction = self.sizer.correction(
                len(self.rooms.of_group[group].at_work) - carried,
                carried + controls.encode_batch / self.num_groups)
        first = islice(self.waiting, self.sizer.most(quota))
        return self.sizer.count([query.tokens for query in first], quota, correction)

    def _advance(self) -> None:
        self._group += 1
        if self._group == self.num_groups:
            self._group = 0
            self._iteration += 1
            if self._iteration > self.controls.decode_iterations:
                self._start_next_phase()

    def _start_next_phase(self) -> None:
        self._phase, self._iteration = self._phase + 1, self._first_iteration
        self._group = 0
        while self.changes and self.changes[0][0] <= self._phase:
            _, self.controls = self.changes.popleft()
            if self._chunks is not None and self.controls.encode_chunk:
                self._chunks.limit = self.controls.encode_chunk
            self.rooms.resize(self.controls.group_kv_tokens)


def rra_rule(estimate: Estimate) -> RraRule:
    """The rule that executes `estimate`."""
    controls, deployment = _controls(estimate), estimate.deployment
    groups = deployment.num_groups
    rule = RraRule(encode_batch=controls.encode_batch, decode_iterations=controls.decode_iterations,
                   num_groups=groups, max_active=groups * most_active(estimate),
                   kv_tokens=deployment.kv_tokens, even=controls.even,
                   encode_chunk=controls.encode_chunk)
    rule.rooms = Rooms.even(groups, deployment.kv_tokens, controls.admission)
    return rule


def phase_controls(estimate: Estimate, *, slots: int, kv_tokens: int | None = None
                   ) -> PhaseControls:
    """Settings that turn a rule with `slots` rows a group into that of `estimate`. `kv_tokens`:
    tokens in a group's blocks (None: its KV lies in rows)."""
    controls, wanted = _controls(estimate), estimate.deployment.group_kv_tokens
    return PhaseControls(encode_batch=controls.encode_batch,
                         decode_iterations=controls.decode_iterations,
                         group_max_active=min(most_active(estimate), slots),
                         group_kv_tokens=wanted if kv_tokens is None else min(wanted, kv_tokens),
                         target_active=controls.even.target_active,
                         encode_chunk=controls.encode_chunk)


def most_active(estimate: Estimate) -> int:
    """Most requests of a group. Their number is a sum of independent presences, so its variance is
    at most its mean. Three deviations above the mean suffice for the spread of a steady state, not
    for drift. Every group can always take one phase's new requests."""
    controls, groups = _controls(estimate), estimate.deployment.num_groups
    mean = estimate.figures.decode_batch / groups
    new = sizer_of(controls.even).most(math.ceil(controls.encode_batch / groups))
    if controls.encode_chunk and controls.even.mean_input_tokens > 0:
        # those of one chunk, and the partly encoded one
        new = 1 + min(new, math.ceil(
            2 * controls.encode_chunk / controls.even.mean_input_tokens))
    return math.ceil(mean + 3 * math.sqrt(mean)) + new


def _controls(estimate: Estimate) -> RraControls:
    assert isinstance(estimate.controls, RraControls), f"{estimate.policy = }"
    return estimate.controls
