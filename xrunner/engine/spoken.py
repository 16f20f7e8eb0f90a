"""What the queries of a group have said so far, where the model's files bar them from saying so
many tokens in a row twice (`no_repeat_ngram_size`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from xrunner.query import Sampling
from xrunner.transport.messages import Joined


class Spoken:
    """The last stage's account of the tokens it has chosen, query by query."""

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}

    def barring(self, seats: Sequence[Joined], positions: Sequence[int]) -> list[Sampling]:
        """How each seat's next token is chosen: its own way, without what would be said twice.
        Who has left its seat is forgotten."""
        texts, found = self._texts, []
        self._texts = {}
        for seat, position in zip(seats, positions, strict=True):
            own = seat.sampling
            if own.unrepeated is not None:
                text = self._texts[seat.query] = texts.get(seat.query) or _Text(*own.unrepeated)
                if barred := text.barred:
                    also = own.barred if own.is_barred(position) else ()
                    own = replace(own, barred=(*also, *barred), barred_until=position + 1)
            found.append(own)
        return found

    def take(self, seats: Sequence[Joined], tokens: Sequence[int]) -> None:
        """The token that each seat was given."""
        for seat, token in zip(seats, tokens, strict=True):
            if (text := self._texts.get(seat.query)) is not None:
                text.add(token)


class _Text:
    """The tokens of one query, and what has followed each `size - 1` of them in a row."""

    def __init__(self, size: int, first: int) -> None:
        """`first`: the token that the decoder is fed first, which counts."""
        self._size, self._tokens = size, [first]
        self._followers: dict[tuple[int, ...], list[int]] = {}
        if size == 1:
            self._followers[()] = [first]

    def add(self, token: int) -> None:
        if len(self._tokens) >= self._size - 1:
            self._followers.setdefault(self._last, []).append(token)
        self._tokens.append(token)

    @property
    def barred(self) -> Sequence[int]:
        return self._followers.get(self._last, ())

    @property
    def _last(self) -> tuple[int, ...]:
        return tuple(self._tokens[max(len(self._tokens) - self._size + 1, 0):])
