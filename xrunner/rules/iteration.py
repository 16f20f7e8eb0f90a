"""ORCA's batching rule: iteration-level scheduling (paper section 2; ORCA, OSDI '22).

Every step advances all active queries of a group by one token and encodes at most one waiting
query with them. There is one group per pipeline stage, several are in flight, and each has an even
share of the slots and of the KV budget; waiting queries go to groups as their turn comes. KV is
reserved at admission (input and most output tokens), and a query leaves with its last token."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from xgpt.core.controls import ContinuousControls
from xgpt.core.schedule import Estimate
from xrunner.rules.slots import SlotUse
from xrunner.rules.steps import KvBudget, ReserveFacts, Step, kind_of, take_last


class Turns:
    """Groups in turn; those without work are passed over. Counts each group's steps."""

    def __init__(self, num_groups: int) -> None:
        self.group = 0  # whose turn it is
        self._steps = [0] * num_groups

    def find(self, has_work: Callable[[int], bool]) -> int | None:
        """The first group from the current one on that has work; None if none has."""
        count = len(self._steps)
        for ahead in range(count):
            group = (self.group + ahead) % count
            if has_work(group):
                self.group = group
                return group
        return None

    @property
    def next_step(self) -> int:
        """Number of the next step of the group whose turn it is."""
        return self._steps[self.group]

    def end(self) -> int:
        """The current turn is over; number of the group's step, from 0."""
        group = self.group
        self.group = (group + 1) % len(self._steps)
        self._steps[group] += 1
        return self._steps[group] - 1


def slot_shares(max_active: int, num_groups: int) -> list[int]:
    """Slots of each group: as even as can be, `max_active` in all."""
    assert max_active >= num_groups >= 1, f"{max_active = } {num_groups = }"
    base, odd = divmod(max_active, num_groups)
    return [base + (group < odd) for group in range(num_groups)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What of continuous batching can change while it runs: how many queries are at work over all
    groups, and the tokens of a step (None: without limit), within the caches there are."""

    max_active: int
    token_budget: int | None = None


def step_limits(estimate: Estimate) -> StepLimits:
    """What turns a rule of the same groups into that of `estimate`."""
    controls = estimate.controls
    assert isinstance(controls, ContinuousControls), f"{estimate.policy = }"
    return StepLimits(max_active=controls.max_active, token_budget=controls.token_budget)


class OrcaRule:
    """MIXED steps; ENCODE where no query is active yet, DECODE where none waits or has room."""

    needs_tokens = True
    slot_use = SlotUse.REUSED

    def __init__(self, *, num_groups: int, max_active: int, kv_tokens: int) -> None:
        """`max_active` and `kv_tokens` bound all groups together."""
        self.num_groups = num_groups
        self.group_kv_tokens = kv_tokens // num_groups
        self._slots = slot_shares(max_active, num_groups)
        self._waiting: deque[tuple[int, int]] = deque()
        self.take_back = partial(take_last, self._waiting)
        self._active: list[dict[int, int]] = [{} for _ in range(num_groups)]  # query -> reserve
        self._reserved = [0] * num_groups
        self._group_of: dict[int, int] = {}
        self._turns = Turns(num_groups)
        self._most = max_active

    @property
    def group_max_active(self) -> int:
        return slot_shares(self._most, self.num_groups)[0]

    @property
    def next_phase(self) -> int:
        """The first step of the group whose turn it is that a change can still be made for."""
        return self._turns.next_step

    def change(self, controls: StepLimits, *, phase: int) -> None:
        """These hold from now on. Queries at work stay: where they are more than may be, none
        joins until enough have ended. No limit may exceed that of the beginning."""
        assert self.num_groups <= controls.max_active <= self._most, f"{controls = } {phase = }"
        self._slots = slot_shares(controls.max_active, self.num_groups)

    @property
    def reserved_tokens(self) -> int:
        return sum(self._reserved)

    @property
    def kv_budget(self) -> KvBudget:
        return KvBudget(self.group_kv_tokens, unit=1)

    @property
    def facts(self) -> ReserveFacts | None:
        """None of a rule that has begun."""
        if self._waiting or self._group_of or self._turns.group or self._turns.next_step:
            return None
        return ReserveFacts(group_kv_tokens=self.group_kv_tokens, slots=tuple(self._slots))

    def submit(self, query: int, reserve_tokens: int, input_tokens: int = 0) -> bool:
        if reserve_tokens > self.group_kv_tokens:
            return False
        self._waiting.append((query, reserve_tokens))
        return True

    def next_group(self) -> int | None:
        return self._turns.find(lambda group: bool(self._active[group] or self._waiting))

    def decide(self) -> Step | None:
        group = self._turns.group
        is_decode = bool(self._active[group])
        joined = self._admit(group)
        number = self._turns.end()
        if not is_decode and not joined:
            return None
        return Step(kind=kind_of(is_decode, joined), group=group, phase=number,
                    iteration=int(is_decode), joined=joined)

    def finish(self, query: int) -> None:
        group = self._group_of.pop(query)
        self._reserved[group] -= self._active[group].pop(query)

    def _admit(self, group: int) -> tuple[int, ...]:
        if not self._waiting or len(self._active[group]) >= self._slots[group]:
            return ()
        query, reserve = self._waiting[0]
        if self._reserved[group] + reserve > self.group_kv_tokens:
            return ()  # keep the input's order: a smaller query behind does not overtake
        self._waiting.popleft()
        self._active[group][query] = reserve
        self._reserved[group] += reserve
        self._group_of[query] = group
        return (query,)


def orca_rule(estimate: Estimate) -> OrcaRule:
    """The rule that executes `estimate`."""
    controls, deployment = estimate.controls, estimate.deployment
    assert isinstance(controls, ContinuousControls), f"{estimate.policy = }"
    return OrcaRule(num_groups=deployment.num_groups, max_active=controls.max_active,
                    kv_tokens=deployment.kv_tokens)
