"""A query as the runner sees it: prepared input, growing output, finished result."""

from __future__ import annotations

from dataclasses import dataclass, field

from xrunner.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedQuery:
    """Tokenised and checked. `index` is its place among the job's valid requests."""

    index: int
    id: str
    input_ids: tuple[int, ...]
    max_new_tokens: int
    is_forced: bool = False  # exactly max_new_tokens; end-of-sequence does not end it
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    is_openai: bool = False
    is_chat: bool = False  # asked as messages: answered as one

    @property
    def reserve_tokens(self) -> int:
        """KV entries it may need at most, as the planner counts them. (A decoder-only model's last
        token leaves none; an encoder-decoder model's first is fed a token of its own.)"""
        return len(self.input_ids) + self.max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedQuery:
    """One line of results.jsonl, before it is written."""

    query: PreparedQuery
    output_ids: tuple[int, ...]
    finish_reason: str  # "stop" | "length"
    encode_start_s: float
    latency_s: float
    text: str


class ActiveQuery:
    """A query in flight, owned by the head."""

    __slots__ = ("encode_start_s", "output_ids", "query")

    def __init__(self, query: PreparedQuery, encode_start_s: float) -> None:
        self.query, self.encode_start_s = query, encode_start_s
        self.output_ids: list[int] = []

    def append(self, token: int, eos_ids: frozenset[int]) -> str | None:
        """Take one sampled token; the finish reason if it was the last (stop strings apart)."""
        self.output_ids.append(token)
        if not self.query.is_forced and token in eos_ids:
            return "stop"
        return "length" if len(self.output_ids) >= self.query.max_new_tokens else None
