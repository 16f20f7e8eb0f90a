"""Steps, which batching rules decide: the work of one group of requests through all stages."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol, runtime_checkable

from xgpt.core.lengths import FloatArray
from xgpt.core.policies import policy
from xgpt.core.schedule import Estimate
from xrunner.rules.forecast import Forecaster
from xrunner.rules.slots import SlotUse


class StepKind(Enum):
    """Kinds of step."""

    ENCODE = "encode"
    DECODE = "decode"
    MIXED = "mixed"  # encodes some requests and decodes the others, in one pass


def kind_of(is_decode: bool, encoded: Sequence[object]) -> StepKind:
    """Kind of a step that advances active requests (`is_decode`), encodes some, or both."""
    if not encoded:
        return StepKind.DECODE
    return StepKind.MIXED if is_decode else StepKind.ENCODE


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Part of a request's input that one step encodes: `tokens` of it from `first` on."""

    query: int
    first: int
    tokens: int


class Start(NamedTuple):
    """How a request begins whose prompt has shared prefixes (xrunner.rules.prefixes). Its `first`
    tokens lie in the blocks of prefix `node` (-1: none, and `first` is 0). `writes`: (prefix, its
    end in tokens) of those that it encodes for others."""

    query: int
    first: int
    node: int
    writes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One micro-batch's pass through the pipeline.

    `joined`: requests whose encoding this step ends, in the order of their new slots; they get
    their
      first token.
    `handed`: requests from the encode pool, which join with it and advance by one token.
    `chunks`: the tokens encoded, if not the whole inputs of those that join.
    `evicted`: requests that lose their KV before the step, and are encoded again later.
    `starts`: of the requests that begin with this step, if prefixes are shared.
    `released`: shared prefixes that are given up before the step.
    `iteration`: counts from 1 within a phase; 0 for ENCODE.

    A DECODE or MIXED step advances every active request of the group by one token."""

    kind: StepKind
    group: int
    phase: int
    iteration: int
    joined: tuple[int, ...] = ()
    handed: tuple[int, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    evicted: tuple[int, ...] = ()
    starts: tuple[Start, ...] = ()
    released: tuple[int, ...] = ()


class KvBudget(NamedTuple):
    """Most KV tokens of a group's requests (of all groups together if `is_shared`). Each request's
    tokens count in whole multiples of `unit`. `prefixes`: most shared prefixes at a time."""

    tokens: int
    unit: int
    is_shared: bool = False
    prefixes: int = 0


def kv_budget(rule: "BatchingRule", *, in_blocks: bool = False) -> KvBudget | None:
    """The budget by which the rule admits requests to KV blocks (xrunner.engine.kv).

    None: KV lies in rows, each as long as the longest request. Rules of continuous batching have a
    `kv_budget` and always use blocks. Rules that reserve tokens at admission have a `kv_reserve`
    and use blocks only if `in_blocks`. Other rules have neither."""
    names = ("kv_budget", "kv_reserve") if in_blocks else ("kv_budget",)
    budgets: list[KvBudget] = [getattr(rule, name) for name in names if hasattr(rule, name)]
    return budgets[0] if budgets else None


def may_evict(rule: "BatchingRule") -> bool:
    """Tells whether the rule may evict a request that has begun (`Step.evicted`): it, or its
    `rooms` (xrunner.rules.room), have `evicts`. The request's output so far must be known then."""
    return bool(getattr(getattr(rule, "rooms", rule), "evicts", False))


def set_forecaster(rule: "BatchingRule", forecaster: Forecaster) -> None:
    """Lets the rule forecast outputs by `forecaster`, if it forecasts any."""
    owner: Any = getattr(rule, "rooms", rule)
    if hasattr(owner, "forecaster"):
        owner.forecaster = forecaster


def set_deadlines(rule: "BatchingRule", deadlines_s: FloatArray | None) -> None:
    """Lets the rule form batches by deadlines, if it forms any. `deadlines_s`: [requests] seconds
    from the job's start; None: there are none."""
    if (former := getattr(rule, "former", None)) is not None and deadlines_s is not None:
        former.deadlines_s = deadlines_s.tolist()


class BatchingRule(Protocol):
    """Decides the order of steps. The loop of the driver (XRunner's head, or the replay):

        while (group := rule.next_group()) is not None:
            if rule.needs_tokens:
                ... read the tokens of the group's steps; rule.finish(query) for each done
            step = rule.decide()
            if step is not None: execute it"""

    @property
    def num_groups(self) -> int:
        """Number of groups that active requests are split into."""

    @property
    def group_max_active(self) -> int:
        """Most requests a group ever holds."""

    @property
    def needs_tokens(self) -> bool:
        """Whether the next decision waits for the tokens of the group's steps so far."""

    @property
    def slot_use(self) -> SlotUse:
        """Use of the slot of a finished request."""

    @property
    def reserved_tokens(self) -> int:
        """Number of KV tokens held, over all groups."""

    def submit(self, query: int, reserve_tokens: int, input_tokens: int = 0,
               forecast: int = 0) -> bool:
        """Queues a request; returns False if it can never fit. `reserve_tokens`: most KV tokens it
        needs. `input_tokens`: tokens of its input. `forecast`: its output tokens, if forecast."""

    def next_group(self) -> int | None:
        """Group of the next step; None if all requests are done or with another pool."""

    def decide(self) -> Step | None:
        """The group's next step; None if it has nothing to do in this turn."""

    def finish(self, query: int) -> None:
        """Frees the slot and tokens of a request that has its last token."""


@runtime_checkable
class EncodingRule(BatchingRule, Protocol):
    """Rule of a pool that only encodes. `finish` says that a request has left its pool."""

    def release(self, query: int) -> None:
        """Records that the other pool has finished a request: the system has room again."""


def withdraw_waiting(rule: "BatchingRule", count: int) -> list[int]:
    """Removes the last `count` waiting requests that are not begun (all if there are fewer) from
    the rule. Returns their numbers in their order. A rule that allows this keeps them in a deque
    `waiting` of tuples that begin with the number."""
    waiting: deque[Any] = getattr(rule, "waiting", deque())
    prefixes: Any = getattr(getattr(rule, "rooms", None), "prefixes", None)
    taken, kept = list[int](), list[Any]()
    while waiting and len(taken) < count:
        one = waiting.pop()
        if getattr(one, "has_begun", False):  # it was evicted
            kept.append(one)
        else:
            taken.append(one[0])
            if prefixes is not None and prefixes.is_shared:
                prefixes.withdraw(one[0])
    waiting.extend(reversed(kept))
    return taken[::-1]


def rules_for(estimate: Estimate) -> tuple[BatchingRule, ...]:
    """The rules that execute `estimate`, one per pool in the order of their stages. Raises
    UnknownNameError for an unknown policy."""
    rules = policy(estimate.policy).load("rules")(estimate)
    return rules if isinstance(rules, tuple) else (rules,)
