"""ORCA's batching rule: iteration-level scheduling (paper section 2; ORCA, OSDI '22).

Every step advances all active requests of a group by one token and encodes at most one waiting
request. There is one group per pipeline stage, each with an even share of slots and KV budget.
Waiting requests go to groups in turn. A group admits by its room (xrunner.rules.room): by default
KV is reserved for the input and the most output tokens. A request leaves with its last token."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from xgpt.core.controls import Admission, ContinuousControls
from xgpt.core.schedule import Estimate
from xrunner.rules.chunks import whole_input
from xrunner.rules.prefixes import SharedPrefixes
from xrunner.rules.room import Rooms, Waiting
from xrunner.rules.slots import SlotUse
from xrunner.rules.steps import Chunk, KvBudget, Step, kind_of


class Turns:
    """Takes groups in turn, skipping those without work, and counts each group's steps."""

    def __init__(self, num_groups: int) -> None:
        self.group = 0  # group whose turn it is
        self._steps = [0] * num_groups

    def find(self, has_work: Callable[[int], bool]) -> int | None:
        """Moves to the first group from the current one on that has work; None if none has."""
        count = len(self._steps)
        for ahead in range(count):
            group = (self.group + ahead) % count
            if has_work(group):
                self.group = group
                return group
        return None

    @property
    def next_step(self) -> int:
        """Number of the current group's next step."""
        return self._steps[self.group]

    def end(self) -> int:
        """Ends the current turn; returns the number of the group's step, from 0."""
        group = self.group
        self.group = (group + 1) % len(self._steps)
        self._steps[group] += 1
        return self._steps[group] - 1


def slot_shares(max_active: int, num_groups: int) -> list[int]:
    """Slots of each group, as even as possible, `max_active` in all."""
    assert max_active >= num_groups >= 1, f"{max_active = } {num_groups = }"
    base, odd = divmod(max_active, num_groups)
    return [base + (group < odd) for group in range(num_groups)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Limits of continuous batching that can change while it runs. `max_active`: requests over all
    groups. `token_budget`: tokens in a step (None: no limit). Neither may exceed the caches'
    size."""

    max_active: int
    token_budget: int | None = None


def step_limits(estimate: Estimate) -> StepLimits:
    """Limits that turn a running rule of the same groups into that of `estimate`."""
    controls = estimate.controls
    assert isinstance(controls, ContinuousControls), f"{estimate.policy = }"
    return StepLimits(max_active=controls.max_active, token_budget=controls.token_budget)


class ContinuousRule:
    """Groups, slots and waiting requests, shared by ORCA's rule and those of
    xrunner.rules.paged."""

    needs_tokens = True
    slot_use = SlotUse.REUSED

    def __init__(self, rooms: Rooms, max_active: int, token_budget: int = 0) -> None:
        """`max_active`: requests over all groups. `token_budget`: tokens in a step (0: no
        limit)."""
        self.rooms, self.num_groups, self.token_budget = rooms, len(rooms.of_group), token_budget
        self.turns, self.waiting = Turns(self.num_groups), deque[Waiting]()
        self.slots = slot_shares(max_active, self.num_groups)
        self._most = StepLimits(max_active=max_active, token_budget=token_budget)

    @property
    def reserved_tokens(self) -> int:
        return self.rooms.held

    @property
    def kv_budget(self) -> KvBudget:
        return self.rooms.budget

    def submit(self, query: int, reserve_tokens: int, input_tokens: int = 0,
               forecast: int = 0) -> bool:
        return self.rooms.submit(Waiting(query, reserve_tokens, input_tokens, forecast=forecast),
                                 self.waiting)

    def share_prefixes(self, prefixes: SharedPrefixes) -> None:
        """Lets requests share prefixes."""
        self.rooms.prefixes = prefixes

    def next_group(self) -> int | None:
        rooms = self.rooms.of_group
        return self.turns.find(lambda group: bool(self.waiting or rooms[group].at_work))

    def finish(self, query: int) -> None:
        self.rooms.finish(query)

    @property
    def group_max_active(self) -> int:
        return slot_shares(self._most.max_active, self.num_groups)[0]

    @property
    def next_phase(self) -> int:
        """The first step of the current group that a change can still apply to."""
        return self.turns.next_step

    def change(self, controls: StepLimits, *, phase: int) -> None:
        """Applies `controls` at once. Limits may not exceed those of the start. Active requests
        stay: if there are more than allowed, none joins until enough have ended."""
        budget, most = controls.token_budget or 0, self._most.token_budget or 0
        assert self.num_groups <= controls.max_active <= self._most.max_active, f"{controls = }"
        assert not most or 1 <= budget <= most, f"{controls = } {phase = }"
        self.token_budget = budget
        self.slots = slot_shares(controls.max_active, self.num_groups)


class OrcaRule(ContinuousRule):
    """ORCA's rule: MIXED steps; ENCODE if no request is active, DECODE if none can join."""

    def __init__(self, *, num_groups: int, max_active: int, kv_tokens: int,
                 admission: Admission | None = None) -> None:
        """`kv_tokens`: KV budget over all groups."""
        super().__init__(Rooms.even(num_groups, kv_tokens, admission), max_active)

    def decide(self) -> Step | None:
        group = self.turns.group
        room, joined, chunks = self.rooms.of_group[group], tuple[int, ...](), tuple[Chunk, ...]()
        evicted = self.rooms.make_room(group, self.waiting)
        is_decode = room.num_decoding > 0
        if is_decode:
            room.advance()
        if self.waiting and not evicted and self.rooms.admit(
                group, self.waiting[0], self.slots[group]):
            new = self.waiting.popleft()
            joined, chunks = (new.query,), whole_input(new, self.rooms.prefixes)
        number = self.turns.end()
        if not is_decode and not joined:
            return None
        starts, released = self.rooms.prefixes.end_step()
        return Step(kind=kind_of(is_decode, joined), group=group, phase=number,
                    iteration=int(is_decode), joined=joined, chunks=chunks, evicted=evicted,
                    starts=starts, released=released)


def orca_rule(estimate: Estimate) -> OrcaRule:
    """The rule that executes `estimate`."""
    controls, deployment = estimate.controls, estimate.deployment
    assert isinstance(controls, ContinuousControls), f"{estimate.policy = }"
    return OrcaRule(num_groups=deployment.num_groups, max_active=controls.max_active,
                    kv_tokens=deployment.kv_tokens, admission=controls.admission)
