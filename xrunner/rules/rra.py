"""RRA's batching rule (paper section 4.1): encode `encode_batch` queries, decode
`decode_iterations` times, repeat; the decode batch is split into `num_groups` micro-batches.

Symbols: B_E = encode_batch, N_D = decode_iterations, B_D = mean of the active queries.
B_E queries join a phase; a group whose decode batch has left its mean by more than the workload
adjustment's threshold takes more or fewer (paper section 5.2), by no more than that adjustment lets
an encode batch's tokens vary anyway. `max_active` and the KV budget cut off what is far above.
All of these can change between two phases of a job (`RraRule.change`)."""

import math
from collections import deque
from dataclasses import dataclass
from itertools import islice

from xgpt.core.controls import RraControls
from xgpt.core.schedule import Estimate
from xrunner.rules.batch_sizer import BatchSizer, sizer_of
from xrunner.rules.slots import SlotUse
from xrunner.rules.steps import Step, StepKind


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseControls:
    """RRA's control variables, and a group's limits, as they hold within a phase. `target_active`:
    queries still active when a phase begins, to which they are led back (0: they are left as they
    come)."""

    encode_batch: int
    decode_iterations: int
    group_max_active: int
    group_kv_tokens: int
    target_active: float = 0.0


class RraRule:
    """Order within a phase: ENCODE of each group in turn, then N_D rounds of DECODE of each."""

    needs_tokens = True
    slot_use = SlotUse.COMPACTED

    def __init__(self, *, encode_batch: int, decode_iterations: int, num_groups: int,
                 max_active: int, kv_tokens: int, sizer: BatchSizer | None = None,
                 target_active: float = 0.0) -> None:
        """`max_active` and `kv_tokens` bound the whole pool; each group gets an equal share.
        `sizer`: keeps the tokens of a group's encode step near their mean (None: its queries).
        `target_active`: see PhaseControls."""
        assert encode_batch >= 1 and decode_iterations >= 1 and num_groups >= 1
        self.num_groups = num_groups
        self.controls = PhaseControls(  # of this phase
            encode_batch=encode_batch, decode_iterations=decode_iterations,
            group_max_active=max(math.ceil(max_active / num_groups), 1),
            group_kv_tokens=kv_tokens // num_groups, target_active=target_active)
        self.group_max_active = self.controls.group_max_active  # in any phase
        self._sizer = sizer or BatchSizer(mean_input=0.0)
        self._waiting: deque[tuple[int, int, int]] = deque()  # (query, reserve, input)
        self._active: list[dict[int, int]] = [{} for _ in range(num_groups)]  # query -> reserve
        self._reserved = [0] * num_groups
        self._group_of: dict[int, int] = {}
        self._changes: deque[tuple[int, PhaseControls]] = deque()  # to come: (from phase, new)
        self._phase = 0
        self._iteration = 0  # 0: the encode round of this phase
        self._group = 0

    @property
    def reserved_tokens(self) -> int:
        return sum(self._reserved)

    @property
    def next_phase(self) -> int:
        """The first phase that a change can still be made for."""
        return self._phase + 1

    def make_room(self, slots: int) -> None:
        """A group may come to hold so many queries after a change, if that is more than now."""
        self.group_max_active = max(self.group_max_active, slots)

    def change(self, controls: PhaseControls, *, phase: int) -> None:
        """These hold from the beginning of `phase` on. Queries that are active stay, also where
        they are more than the new limits allow: admission then waits. The KV budget must hold any
        query that waits. To be called in the order of phases."""
        after = self._changes[-1][0] if self._changes else self._phase
        assert phase > self._phase and phase >= after, f"{phase = } {after = } {self._phase = }"
        assert controls.group_max_active <= self.group_max_active, f"{controls = }"
        assert controls.encode_batch >= 1 and controls.decode_iterations >= 1, f"{controls = }"
        most = max((reserve for _, reserve, _ in self._waiting), default=0)
        assert most <= controls.group_kv_tokens, f"{controls = } {most = }"
        self._changes.append((phase, controls))

    def submit(self, query: int, reserve_tokens: int, input_tokens: int = 0) -> bool:
        if reserve_tokens > self.controls.group_kv_tokens:
            return False
        self._waiting.append((query, reserve_tokens, input_tokens))
        return True

    def next_group(self) -> int | None:
        if not self._group_of and not self._waiting:
            return None
        if self._iteration > 0 and not self._group_of:
            self._start_next_phase()  # nothing left to decode: go straight to encoding
        return self._group

    def decide(self) -> Step | None:
        kind, group = StepKind.DECODE if self._iteration else StepKind.ENCODE, self._group
        joined = self._admit(group) if kind is StepKind.ENCODE else ()
        has_work = bool(joined) if kind is StepKind.ENCODE else bool(self._active[group])
        step = Step(kind=kind, group=group, phase=self._phase, iteration=self._iteration,
                    joined=joined) if has_work else None
        self._advance()
        return step

    def finish(self, query: int) -> None:
        group = self._group_of.pop(query)
        self._reserved[group] -= self._active[group].pop(query)

    def quota(self, group: int, phase: int) -> int:
        """Queries `group` encodes in `phase`; sums to encode_batch over the groups, and the odd
        ones rotate so that groups stay even."""
        base, odd = divmod(self.controls.encode_batch, self.num_groups)
        return base + ((group + phase * odd) % self.num_groups < odd)

    def _admit(self, group: int) -> tuple[int, ...]:
        controls, active = self.controls, self._active[group]
        room, quota = controls.group_max_active - len(active), self.quota(group, self._phase)
        first = islice(self._waiting, self._sizer.most(quota))
        wanted = self._sizer.count([tokens for _, _, tokens in first], quota,
                                   self._lean(group)) if quota else 0
        joined = []
        for _ in range(min(wanted, room)):
            query, reserve, _ = self._waiting[0]
            if self._reserved[group] + reserve > controls.group_kv_tokens:
                break  # keep the input's order: a smaller query behind does not overtake
            self._waiting.popleft()
            active[query] = reserve
            self._reserved[group] += reserve
            self._group_of[query] = group
            joined.append(query)
        return tuple(joined)

    def _lean(self, group: int) -> int:
        """Queries more, or fewer, that would bring the group's decode batch back to its mean."""
        controls = self.controls
        if not controls.target_active or len(self._waiting) < controls.encode_batch:
            return 0  # of a job's last queries every group gets its even share
        carried = controls.target_active / self.num_groups
        return self._sizer.lean(len(self._active[group]) - carried,
                                carried + controls.encode_batch / self.num_groups)

    def _advance(self) -> None:
        self._group += 1
        if self._group == self.num_groups:
            self._group = 0
            self._iteration += 1
            if self._iteration > self.controls.decode_iterations:
                self._start_next_phase()

    def _start_next_phase(self) -> None:
        self._phase, self._iteration, self._group = self._phase + 1, 0, 0
        while self._changes and self._changes[0][0] <= self._phase:
            _, self.controls = self._changes.popleft()


def rra_rule(estimate: Estimate) -> RraRule:
    """The rule that executes `estimate`."""
    controls, deployment = _controls(estimate), estimate.deployment
    groups = deployment.num_groups
    return RraRule(encode_batch=controls.encode_batch, decode_iterations=controls.decode_iterations,
                   num_groups=groups, max_active=groups * most_active(estimate),
                   kv_tokens=deployment.kv_tokens, sizer=sizer_of(controls.even),
                   target_active=controls.even.target_active)


def phase_controls(estimate: Estimate, *, slots: int) -> PhaseControls:
    """What turns a rule of the same groups, with room for `slots`, into that of `estimate`."""
    controls = _controls(estimate)
    return PhaseControls(encode_batch=controls.encode_batch,
                         decode_iterations=controls.decode_iterations,
                         group_max_active=min(most_active(estimate), slots),
                         group_kv_tokens=estimate.deployment.group_kv_tokens,
                         target_active=controls.even.target_active)


def most_active(estimate: Estimate) -> int:
    """Most queries of a group.

    They are a sum of independent presences, so their variance is at most their mean: three
    deviations above it are room for a steady state's spread, and none for drift. Every group can
    always take one phase's new queries."""
    controls, groups = _controls(estimate), estimate.deployment.num_groups
    mean = estimate.figures.decode_batch / groups
    new = sizer_of(controls.even).most(math.ceil(controls.encode_batch / groups))
    return math.ceil(mean + 3 * math.sqrt(mean)) + new


def _controls(estimate: Estimate) -> RraControls:
    assert isinstance(estimate.controls, RraControls), f"{estimate.policy = }"
    return estimate.controls
