"""Control variables of a schedule: what a policy's batching rule is told (paper sections 4 and 5).

Each policy's row (xgpt.core.policies) names its class here, or one of a package of its own."""

from dataclasses import dataclass
from typing import Protocol

from xgpt.core.ranges import Amount, Count, Positive, Share


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
    beside decoding, in chunks of at most so many tokens, and a group has room for `chunk_queries`
    that join it with one of them (0: twice as many as have a mean input)."""

    policy: str = "rra"
    encode_batch: Positive
    decode_iterations: Positive
    decode_micro_batches: Positive
    encode_chunk: Count = 0
    chunk_queries: Count = 0
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
