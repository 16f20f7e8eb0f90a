"""A query that is being answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xrunner.query import FinishedQuery, PreparedQuery

_RECENT_TOKENS = 32  # a power of two: a stop string is looked for in so many at least
# What decoding from the middle of a text may change: a space at the cut, part of a character there;
# and at the end a character whose last bytes are still to come.
_CUT_CHARACTERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What a model's tokens mean: which of them end a text, which text they are, and which one an
    encoder-decoder model's decoder is fed first (None for a decoder-only model)."""

    eos_ids: frozenset[int]
    decode_text: Callable[[Sequence[int]], str]
    start_token: int | None = None


class Ending(NamedTuple):
    """How a query ended. `text` None: its text is that of all its tokens."""

    reason: str  # "stop" | "length"
    text: str | None


class ActiveQuery:
    """A query in flight, owned by the head. `ending` is set with its last token."""

    __slots__ = ("_recent", "encode_start_s", "ending", "first_token_s", "input_tokens",
                 "output_ids", "query")

    def __init__(self, query: PreparedQuery, encode_start_s: float,
                 input_tokens: int | None = None) -> None:
        """`input_tokens`: where `query` comes without them, from another pool."""
        self.query, self.encode_start_s = query, encode_start_s
        self.input_tokens = len(query.input_ids) if input_tokens is None else input_tokens
        self.first_token_s: float | None = None
        self.output_ids: list[int] = []
        self.ending: Ending | None = None
        self._recent = 0  # a stop string that has not appeared ends behind this many tokens' text

    @property
    def num_tokens(self) -> int:
        """Tokens of its input, and of its output so far."""
        return self.input_tokens + len(self.output_ids)

    def tokens(self, first: int, end: int) -> Sequence[int]:
        """Tokens first .. end - 1 of its input and, behind that, its output so far."""
        ids = self.query.input_ids
        return ids[first:end] if end <= len(ids) else [*ids, *self.output_ids][first:end]

    def take(self, token: int, now: float, vocabulary: Vocabulary) -> bool:
        """Takes up one sampled token; whether it was the last."""
        if self.first_token_s is None:
            self.first_token_s = now
        query, reason = self.query, None
        self.output_ids.append(token)
        if token in vocabulary.eos_ids and not query.is_forced:
            reason = "stop"
        elif len(self.output_ids) >= query.max_new_tokens:
            reason = "length"
        text = self._stopped_text(vocabulary.decode_text) if query.stop else None
        if text is not None:
            reason = "stop"
        if reason is not None:
            self.ending = Ending(reason, text)
        return reason is not None

    def finished(self, now: float, decode_text: Callable[[Sequence[int]], str]) -> FinishedQuery:
        """Its result, given out `now`."""
        assert self.ending is not None, f"{self.query.index = } is not done"
        assert self.first_token_s is not None, "who has ended has a token"
        reason, text = self.ending
        return FinishedQuery(
            query=self.query, output_ids=tuple(self.output_ids), finish_reason=reason,
            encode_start_s=self.encode_start_s, first_token_s=self.first_token_s,
            last_token_s=now,
            text=decode_text(self.output_ids) if text is None else text)

    def _stopped_text(self, decode_text: Callable[[Sequence[int]], str]) -> str | None:
        """The text up to the first stop string, once one has appeared. To be asked after every
        token: of a long output only the last tokens are decoded each time."""
        recent = decode_text(self.output_ids[self._recent:])
        if not any(stop in recent for stop in self.query.stop):
            self._forget(decode_text)
            return None
        text = decode_text(self.output_ids)
        ends = [at for stop in self.query.stop if (at := text.find(stop)) >= 0]
        return text[:min(ends)] if ends else None

    def _forget(self, decode_text: Callable[[Sequence[int]], str]) -> None:
        """Half of the recent tokens, as often as they have doubled, if the other half's text is
        longer than any stop string."""
        count = len(self.output_ids) - self._recent
        if count < _RECENT_TOKENS or count & (count - 1):
            return
        middle, reach = self._recent + count // 2, max(map(len, self.query.stop)) + _CUT_CHARACTERS
        if len(decode_text(self.output_ids[middle:])) >= reach:
            self._recent = middle
