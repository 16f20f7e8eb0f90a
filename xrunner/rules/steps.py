"""What a batching rule decides: `Step`, the work one group of queries takes through all stages."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol, runtime_checkable

from xgpt.core.policies import policy
from xgpt.core.schedule import Estimate
from xrunner.rules.slots import SlotUse


class StepKind(Enum):
    ENCODE = "encode"
    DECODE = "decode"
    MIXED = "mixed"  # encodes some queries and decodes the others, in one pass


def kind_of(is_decode: bool, encoded: Sequence[object]) -> StepKind:
    """Of a step that advances queries or encodes some, or both."""
    if not encoded:
        return StepKind.DECODE
    return StepKind.MIXED if is_decode else StepKind.ENCODE


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Part of a query's input, encoded in one step: `tokens` of it from `first` on."""

    query: int
    first: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One micro-batch's pass through the pipeline.

    `joined` are the queries whose encoding this step ends, in the order of their new slots: they
    get their first token. A DECODE or MIXED step also advances every query that was active in the
    group before it by one token, and those `handed` over to the pool, who join with it. `iteration`
    counts from 1 within a phase and is 0 for ENCODE.
    `chunks` says which tokens are encoded where that is not the whole input of those who joined;
    `evicted` loses its KV entries before the step, and is encoded again later."""

    kind: StepKind
    group: int
    phase: int
    iteration: int
    joined: tuple[int, ...] = ()
    handed: tuple[int, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    evicted: tuple[int, ...] = ()


class Waiting(NamedTuple):
    """A query that is not begun: tokens of KV that it reserves, and of its input."""

    query: int
    reserve: int
    tokens: int


class KvBudget(NamedTuple):
    """What a group's queries hold at most (those of all groups together, where it `is_shared`):
    `tokens`, each query's counted in whole multiples of `unit`."""

    tokens: int
    unit: int
    is_shared: bool = False


class Admitted:
    """The queries that are begun, by group, and the tokens of KV that each reserves."""

    def __init__(self, num_groups: int) -> None:
        self.active: list[dict[int, int]] = [{} for _ in range(num_groups)]  # query -> reserve
        self.reserved = [0] * num_groups
        self.group_of: dict[int, int] = {}

    def admit(self, group: int, query: int, reserve: int, most: float = math.inf,
              tokens: float = math.inf) -> bool:
        """The query is active from now on, if the group then has no more than `most` queries and
        reserves no more than so many tokens."""
        active = self.active[group]
        if len(active) >= most or self.reserved[group] + reserve > tokens:
            return False
        active[query] = reserve
        self.reserved[group] += reserve
        self.group_of[query] = group
        return True

    def finish(self, query: int) -> int:
        """The query is active no more. Returns the tokens that it reserved."""
        group = self.group_of.pop(query)
        reserve = self.active[group].pop(query)
        self.reserved[group] -= reserve
        return reserve


def kv_budget(rule: "BatchingRule", *, in_blocks: bool = False) -> KvBudget | None:
    """By how many tokens the rule admits queries, where their KV entries lie in blocks
    (xrunner.engine.kv). None: in rows, each as long as the longest query.

    The rules of continuous batching have a `kv_budget`, and their entries lie in blocks always.
    Those that reserve a query's tokens when they admit it have a `kv_reserve`: their entries lie in
    rows unless `in_blocks` is asked for. Other rules have neither: they count no tokens."""
    names = ("kv_budget", "kv_reserve") if in_blocks else ("kv_budget",)
    budgets: list[KvBudget] = [getattr(rule, name) for name in names if hasattr(rule, name)]
    return budgets[0] if budgets else None


def may_evict(rule: "BatchingRule") -> bool:
    """Whether the rule may take back a query that has begun (`Step.evicted`): it has an `evicts`
    that is true. What such a query has said must be known by then."""
    return bool(getattr(rule, "evicts", False))


class BatchingRule(Protocol):
    """Decides the order of steps. The driver's loop (XRunner's head, the replay) is

        while (group := rule.next_group()) is not None:
            if rule.needs_tokens:
                ... take up the tokens of the group's steps; rule.finish(query) for each done
            step = rule.decide()
            if step is not None: execute it"""

    @property
    def num_groups(self) -> int:
        """Groups the active queries are split into."""

    @property
    def group_max_active(self) -> int:
        """Most queries a group ever holds."""

    @property
    def needs_tokens(self) -> bool:
        """Whether the next decision waits for the tokens of the group's steps so far."""

    @property
    def slot_use(self) -> SlotUse:
        """What becomes of the slot of a query that is done."""

    @property
    def reserved_tokens(self) -> int:
        """KV entries (tokens) held, over all groups."""

    def submit(self, query: int, reserve_tokens: int, input_tokens: int = 0) -> bool:
        """Queue a query of `input_tokens`, needing `reserve_tokens` of KV at most; False if it can
        never fit."""

    def next_group(self) -> int | None:
        """Group the next step concerns; None while there is nothing to do: every query is done, or
        those left are with another pool."""

    def decide(self) -> Step | None:
        """The step for that group, or None if it has nothing to do at this place."""

    def finish(self, query: int) -> None:
        """An active query has its last token: its slot and tokens are free from now on."""


@runtime_checkable
class EncodingRule(BatchingRule, Protocol):
    """Decides what a pool that encodes alone hands to one that decodes. `finish` tells it that a
    query has left its pool."""

    def release(self, query: int) -> None:
        """A query is done in the other pool: there is room in the system again."""


def taken_back(rule: "BatchingRule", count: int) -> list[int]:
    """The last `count` of the queries that wait (all of them, where they are fewer) are not the
    rule's any more: their numbers, in the order in which they came. A rule that gives them up has
    them in a deque `waiting`, the number the first of each tuple."""
    waiting: deque[Any] = getattr(rule, "waiting", deque())
    return [waiting.pop()[0] for _ in range(min(count, len(waiting)))][::-1]


def rules_for(estimate: Estimate) -> tuple[BatchingRule, ...]:
    """The rules that execute `estimate`, as its policy's row says: one per pool, in the order of
    their stages. Raises UnknownNameError for a policy that no row describes."""
    rules = policy(estimate.policy).load("rules")(estimate)
    return rules if isinstance(rules, tuple) else (rules,)
