"""Control variables of a schedule: what a policy's batching rule is told (paper sections 4 and 5),
and those that a job fixes.

Each policy's row (xgpt.core.policies) names its class here, or one of a package of its own."""

from dataclasses import dataclass
from typing import Protocol

from xgpt.core.units import Amount, Count, Positive, Share


class Controls(Protocol):
    """What all have in common: a frozen dataclass of plain values that names its policy."""

    @property
    def policy(self) -> str:
        """The name of the policy's row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenBatches:
    """How encode batches are kept even while a job runs (paper section 5.2): their tokens may leave
    the mean, of `mean_input_tokens` a query, by the share `adjustment`, and they lead the number of
    active queries (RRA: when a phase begins; WAA: in the decode pool) back to `target_active`.
    0: they do not."""

    adjustment: Share = 0.0
    mean_input_tokens: Amount = 0.0
    target_active: Amount = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RraControls:
    """RRA: B_E queries are encoded together, then N_D decode iterations, in G groups. Where
    `encode_chunk` is not 0 (without limit), the B_E queries of every N_D iterations are encoded
    beside decoding, in chunks of at most so many tokens, and a group has room for twice
    the queries of a mean input that join it with one of them."""

    policy: str = "rra"
    encode_batch: Positive
    decode_iterations: Positive
    decode_micro_batches: Positive
    encode_chunk: Count = 0
    even: EvenBatches = EvenBatches()


@dataclass(frozen=True, slots=True, kw_only=True)
class WaaControls:
    """WAA: B_E queries are encoded together in the encode pool, decoded in G groups in the decode
    pool; `max_in_system` queries are between the start of encoding and the last token. Where
    `encode_chunk` is not 0 (none), the decode pool encodes up to so many tokens of waiting inputs
    in each of its steps while it has fewer queries than `planned_active`; of these inputs it has
    `stock_tokens` beforehand."""

    policy: str
    encode_batch: Positive
    decode_micro_batches: Positive
    max_in_system: Positive
    encode_chunk: Count = 0
    planned_active: Count = 0
    stock_tokens: Count = 0
    even: EvenBatches = EvenBatches()


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticControls:
    """FT, DSI: a batch is encoded in `encode_micro_batches` steps and decoded in
    `decode_micro_batches` groups until its longest query is done."""

    policy: str
    encode_batch: Positive
    decode_micro_batches: Positive
    encode_micro_batches: Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuousControls:
    """ORCA, vLLM, Sarathi: at most `max_active` queries at a time over all groups, and at most
    `token_budget` tokens in a step (None: no limit)."""

    policy: str
    max_active: Positive
    token_budget: Positive | None = None


def max_in_system(controls: Controls) -> int:
    """Queries that may be between the start of encoding and the last token; 0 where the policy has
    no such variable."""
    most: int = getattr(controls, "max_in_system", 0)
    return most


# Which copy of the model takes a query: the next in turn, or the one with the fewest tokens so far
# (known, or expected of its output), so that all end together. Fixed: the latter, and each keeps
# what it was dealt, however slow it is.
ROUND_ROBIN, LEAST_TOKENS, FIXED = "round-robin", "least-tokens", "fixed"
ROUTINGS = (LEAST_TOKENS, ROUND_ROBIN, FIXED)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedSchedule:
    """Control variables the user fixed; None is left to the scheduler. `replicas`: copies of the
    model, all alike."""

    policies: tuple[str, ...] = ()  # among which is chosen; (): all that the engine executes
    replicas: int | None = None
    encode_batch: int | None = None
    decode_iterations: int | None = None
    decode_micro_batches: int | None = None
    encode_chunk: int | None = None  # RRA; 0: without limit, before decoding
    encode_micro_batches: int | None = None  # DSI
    max_active: int | None = None  # ORCA, vLLM, Sarathi
    token_budget: int | None = None  # vLLM, Sarathi
    tp_degree: int | None = None
    tp_gpus: int | None = None
    others: tuple[tuple[str, int], ...] = ()  # (name, value) of variables of policies elsewhere

    @property
    def policy(self) -> str | None:
        """The only policy that is left; None where there is a choice."""
        return self.policies[0] if len(self.policies) == 1 else None

    def value_of(self, variable: str) -> int | None:
        """What the user fixed a control variable to, of a policy of ours or of another package."""
        value: int | None = getattr(self, variable, None)
        return dict(self.others).get(variable) if value is None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustment:
    """How the workload is kept even while a job runs (paper section 5.2); None: as is usual.
    `shuffle`: queries of a window that are taken in random order, or whether one of the usual size
    is. `routing`: by which queries are shared out among copies of the model."""

    share: float | None = None  # by which an encode batch's tokens may leave their mean; 0: as come
    steers: bool | None = None  # whether encode batches lead the decode batch back to its mean
    shuffle: bool | int = False
    routing: str = LEAST_TOKENS
