"""A request as the runner receives it, and its answer; free of torch, as the launcher is."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

EXPIRED = "expired"  # a request that had not begun when its deadline passed
_GREEDY_BELOW = 1e-5  # chosen: logits divided by less may overflow float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one request's tokens are chosen, and what is reported with them.

    `temperature`: 0 is greedy.
    `top_logprobs`: number of likeliest tokens reported with each token, besides its own
      log-likelihood (None: neither).
    `targets`: tokens to score instead of generating (`xgpt score`); all but the last end the input.
    `barred`: tokens that may not be chosen before position `barred_until`. With a form and another
      engine, the tokens that may end its output.
    `passed`: options of the engine's sampler, as JSON (xgpt.requests.chat); of our own engine, the
      form of the output alone.
    `fixed`: (position, token) that are output whatever the model computes; the last of one position
      counts.
    `no_repeat_size`: length of token sequences that may not occur twice (0: any may).
    `repetition_penalty`: divides the logit of a token that occurred if positive, else multiplies
    it.
    `history`: tokens that count as having occurred from the start: the input or, with an
      encoder-decoder model, the decoder's first tokens. () where neither rule above applies.
    `written`: output tokens so far, of a request that was evicted or comes from another pool.
    `allowed`: bit mask of the tokens that its form lets come next (xrunner.files.forms); b"": all.
    `pooled`: "last" or "mean" hidden state to return as an embedding; "": no embedding."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    top_logprobs: int | None = None
    targets: tuple[int, ...] = ()
    barred: tuple[int, ...] = ()
    barred_until: int = 0
    passed: str = ""
    fixed: tuple[tuple[int, int], ...] = ()
    no_repeat_size: int = 0
    repetition_penalty: float = 1.0
    history: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    allowed: bytes = b""
    pooled: str = ""

    @property
    def is_drawn(self) -> bool:
        """Whether tokens are drawn at random; else the likeliest one is taken."""
        return self.temperature > _GREEDY_BELOW

    def is_barred(self, position: int) -> bool:
        """Whether `barred` applies to the output token at `position`, from 0."""
        return bool(self.barred) and position < self.barred_until

    @property
    def is_penalised(self) -> bool:
        return self.repetition_penalty != 1

    @property
    def needs_history(self) -> bool:
        """Whether the next token depends on earlier tokens, and not on logits alone."""
        return bool(self.no_repeat_size or self.passed) or self.is_penalised

    def fixed_at(self, position: int) -> int | None:
        """The fixed output token at `position`, from 0; None if the model chooses it."""
        return dict(self.fixed).get(position)


class TokenLikelihood(NamedTuple):
    """Natural logarithm of a token's probability, before temperature, top-k and top-p. `top`:
    (token, log-probability) of the likeliest tokens, likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedQuery:
    """A request, tokenised and checked. `index`: its place among the job's valid requests."""

    index: int
    id: str
    input_ids: Sequence[int]
    max_new_tokens: int
    is_forced: bool = False  # ends at max_new_tokens exactly, not at end-of-sequence
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    is_openai: bool = False
    is_chat: bool = False  # the request is a list of messages, and so is its answer
    sample: int = 0  # which of several answers to one request
    tools: str = ""  # tools that a chat may call, as JSON
    choices: int = 1  # answers in one line of results
    asked: int = 0  # which input of its line it answers
    forecast: int = 0  # output tokens that admission counts with; 0: forecast when it is admitted
    expires_at: float = math.inf  # clock time (or seconds from its arrival, until it arrives) after
    # which it does not begin
    arrival_s: float | None = None  # by the run's clock; None: it was there at the start

    @property
    def reserve_tokens(self) -> int:
        """Most tokens it may need in the KV cache, as the planner counts them. A decoder-only model
        does not store its last token; an encoder-decoder model stores a start token."""
        return len(self.input_ids) + self.max_new_tokens

    def arrived(self, arrival_s: float, now_s: float) -> PreparedQuery:
        """The request that arrived at `arrival_s`. `now_s`: the run's clock, as that."""
        return replace(self, arrival_s=arrival_s,
                       expires_at=self.expires_at + time.time() - now_s + arrival_s)


class ToolCall(NamedTuple):
    """A tool call in an answer; `arguments` is JSON."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedQuery:
    """One answer, as a line of results.jsonl shows it. Times: seconds since the run's start."""

    query: PreparedQuery
    output_ids: tuple[int, ...]
    finish_reason: str  # "stop" | "length" | "error" | EXPIRED
    text: str
    encode_start_s: float  # when its prefill began
    first_token_s: float
    last_token_s: float
    arrival_s: float | None = None  # None: it was there at the start
    error: str | None = None  # why there is no answer, or only a part of one
    replica: int | None = None  # the replica that answered it, if there are several
    # of each output token (xrunner.ops.likelihoods) or, when scoring, of each target
    likelihoods: tuple[TokenLikelihood, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    embedding: tuple[float, ...] = ()  # [H], where asked for

    @property
    def latency_s(self) -> float:
        """Seconds to the last token from the arrival, else from the start of the prefill."""
        return self.last_token_s - (
            self.encode_start_s if self.arrival_s is None else self.arrival_s)

    @property
    def ttft_s(self) -> float:
        """Time to first token in seconds, queueing included."""
        return self.first_token_s - (self.arrival_s or 0.0)

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first; None if there is one token only."""
        after = len(self.output_ids) - 1
        return (self.last_token_s - self.first_token_s) / after if after > 0 else None
