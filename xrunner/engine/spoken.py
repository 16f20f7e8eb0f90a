"""What the queries of a group have said so far, where the model's files bar them from saying so
many tokens in a row twice (`no_repeat_ngram_size`), or make what was said less likely
(`repetition_penalty`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from xrunner.comm.messages import Joined
from xrunner.query import Sampling


class Spoken:
    """The last stage's account of the tokens it has chosen, query by query."""

    def __init__(self) -> None:
        self._texts: dict[int, tuple[Joined, _Text]] = {}

    def minding(self, seats: Sequence[Joined], positions: Sequence[int]) -> list[Sampling]:
        """How the next token of each of these is chosen: its own way, without what would be said
        twice, and with all that was said."""
        return [self._minding(seat, position)
                for seat, position in zip(seats, positions, strict=True)]

    def _minding(self, seat: Joined, position: int) -> Sampling:
        own = seat.sampling
        if not own.minds_said:
            return own
        known = self._texts.get(seat.query)
        if known is None or known[0] is not seat:  # who was evicted brings what it had said
            known = self._texts[seat.query] = seat, _Text(own.unrepeated, own.said)
        text = known[1]
        if barred := text.barred:
            also = own.barred if own.is_barred(position) else ()
            own = replace(own, barred=(*also, *barred), barred_until=position + 1)
        return replace(own, said=tuple(text.different)) if own.is_penalised else own

    def take(self, seats: Sequence[Joined], tokens: Sequence[int]) -> None:
        """The token that each of these was given."""
        for seat, token in zip(seats, tokens, strict=True):
            if seat.query in self._texts:
                self._texts[seat.query][1].add(token)

    def keep(self, seats: Sequence[Joined]) -> None:
        """Forgets who sits in none of the group's seats."""
        if len(self._texts) > len(seats):
            here = {seat.query for seat in seats}
            self._texts = {query: own for query, own in self._texts.items() if query in here}


class _Text:
    """The tokens of one query, and what has followed each `size - 1` of them in a row."""

    def __init__(self, size: int, said: Sequence[int]) -> None:
        """`size` 0: what follows what is of no matter. `said`: the tokens that it begins with."""
        self._size, self._tokens = size, list[int]()
        self.different: dict[int, None] = {}  # each token once
        self._followers: dict[tuple[int, ...], list[int]] = {}
        for token in said:
            self.add(token)

    def add(self, token: int) -> None:
        self.different[token] = None
        if not self._size:
            return
        if len(self._tokens) >= self._size - 1:
            self._followers.setdefault(self._last, []).append(token)
        self._tokens.append(token)

    @property
    def barred(self) -> Sequence[int]:
        return self._followers.get(self._last, ()) if self._size else ()

    @property
    def _last(self) -> tuple[int, ...]:
        return tuple(self._tokens[max(len(self._tokens) - self._size + 1, 0):])
