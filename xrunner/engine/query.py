"""A query that is being answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xrunner.query import PreparedQuery

_RECENT_TOKENS = 32  # a power of two: a stop string is looked for in so many at least
# What decoding from the middle of a text may change: a space at the cut, part of a character there;
# and at the end a character whose last bytes are still to come.
_CUT_CHARACTERS = 16


class ActiveQuery:
    """A query in flight, owned by the head."""

    __slots__ = ("_recent", "encode_start_s", "first_token_s", "output_ids", "query")

    def __init__(self, query: PreparedQuery, encode_start_s: float) -> None:
        self.query, self.encode_start_s = query, encode_start_s
        self.first_token_s: float | None = None
        self.output_ids: list[int] = []
        self._recent = 0  # a stop string that has not appeared ends behind this many tokens' text

    def append(self, token: int, eos_ids: frozenset[int]) -> str | None:
        """Take one sampled token; the finish reason if it was the last (stop strings apart)."""
        self.output_ids.append(token)
        if not self.query.is_forced and token in eos_ids:
            return "stop"
        return "length" if len(self.output_ids) >= self.query.max_new_tokens else None

    def stopped_text(self, decode_text: Callable[[Sequence[int]], str]) -> str | None:
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
