"""A query as it comes to the runner and as it leaves it; free of torch, as the launcher is."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_GREEDY_BELOW = 1e-5  # logits divided by less overflow float32; the draw is the largest anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one query's tokens are chosen, and what is told of them. temperature 0: greedy.

    top_logprobs: with each token come its log-likelihood and the likeliest so many; None: the token
    alone. targets: tokens that are scored instead, of which all but the last end the input
    (`xgpt score`). pooled: its embedding is told instead, the "last" of its last hidden states or
    their "mean"; "": it is not. barred: tokens that are not chosen at a position before
    `barred_until`. passed: what another engine's sampler is told besides (xgpt.requests.chat);
    where that is a form of the output, `barred` are the tokens that may end it. fixed:
    (position, token) of what is given whatever the model finds, of one position the last.
    unrepeated: so many tokens in a row are not said twice, 0: may be; repetition_penalty: the
    logit of a token that was said is divided by it where it is above 0, else multiplied. `said`
    are the tokens that both begin with: the input, or what an encoder-decoder model's decoder
    is fed first; () where neither asks."""

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
    unrepeated: int = 0
    repetition_penalty: float = 1.0
    said: tuple[int, ...] = ()
    pooled: str = ""

    @property
    def is_drawn(self) -> bool:
        return self.temperature > _GREEDY_BELOW

    def is_barred(self, position: int) -> bool:
        """Whether some tokens may not be chosen after so many."""
        return bool(self.barred) and position < self.barred_until

    @property
    def is_penalised(self) -> bool:
        return self.repetition_penalty != 1

    @property
    def minds_said(self) -> bool:
        """Whether the next token depends on which were said, and not on logits alone."""
        return bool(self.unrepeated) or self.is_penalised

    def fixed_at(self, position: int) -> int | None:
        """The token that is given after so many."""
        return dict(self.fixed).get(position)


class TokenLikelihood(NamedTuple):
    """The natural logarithm of a token's probability by the model alone, before temperature, top-k
    and top-p; and (token, the same of it) of the likeliest ones, in that order."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedQuery:
    """A query tokenised and checked. `index` is its place among the job's valid requests."""

    index: int
    id: str
    input_ids: Sequence[int]
    max_new_tokens: int
    is_forced: bool = False  # exactly max_new_tokens; end-of-sequence does not end it
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    is_openai: bool = False
    is_chat: bool = False  # asked as messages: answered as one
    sample: int = 0  # which of several answers to one request it is
    tools: str = ""  # that a chat may call, as JSON
    choices: int = 1  # answers that stand in one line of results
    asked: int = 0  # which input of its line it answers

    @property
    def reserve_tokens(self) -> int:
        """KV entries it may need at most, as the planner counts them. (A decoder-only model's last
        token leaves none; an encoder-decoder model's first is fed a token of its own.)"""
        return len(self.input_ids) + self.max_new_tokens


class ToolCall(NamedTuple):
    """A call of a tool that an answer makes; its arguments are JSON."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedQuery:
    """One line of results.jsonl, before it is written."""

    query: PreparedQuery
    output_ids: tuple[int, ...]
    finish_reason: str  # "stop" | "length" | "error"
    text: str
    encode_start_s: float  # seconds since the run's start, as the following
    first_token_s: float
    last_token_s: float
    arrival_s: float = 0.0
    error: str | None = None  # why it has no answer, or no more of one
    replica: int | None = None  # which answered it, where there are several
    # of each output token (xrunner.ops.likelihoods); of a query that is scored, of each target
    likelihoods: tuple[TokenLikelihood, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    embedding: tuple[float, ...] = ()  # where it is asked for: [H]

    @property
    def latency_s(self) -> float:
        return self.last_token_s - self.encode_start_s

    @property
    def ttft_s(self) -> float:
        """Time to first token, waiting for its turn included."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None of one token alone."""
        after = len(self.output_ids) - 1
        return (self.last_token_s - self.first_token_s) / after if after > 0 else None
