"""A stop string is found when it appears, at a cost that does not grow with the output."""

import random
from collections.abc import Sequence

from xrunner.engine.roster import ActiveQuery, Ending, Vocabulary
from xrunner.query import PreparedQuery

# as tokenizers have them: pieces of bytes, of which some are half a character, and silent specials
PIECES = ["a", "b", "ab", " a", " b", "\n", "\u00e9", "\u6f22", "".ljust(40), "ba b", ""]
BYTES = [piece.encode() for piece in PIECES] + [bytes([b]) for b in "\u00e9\u6f22".encode()]


def decode(ids: Sequence[int]) -> str:
    """Byte pieces, put together; the first loses its leading space, as SentencePiece's does."""
    return b"".join(BYTES[i] for i in ids).decode(errors="replace").removeprefix(" ")


def naive(ids: Sequence[int], stops: Sequence[str]) -> str | None:
    text = decode(ids)
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[:min(ends)] if ends else None


def active_query(stops: Sequence[str]) -> ActiveQuery:
    return ActiveQuery(PreparedQuery(index=0, id="q", input_ids=(1,), max_new_tokens=10**6,
                                     stop=tuple(stops)), encode_start_s=0.0)


def test_it_is_found_with_the_token_that_ends_it():
    source, found = random.Random(3), 0
    for _ in range(120):
        # texts of few kinds of piece, so that a long stop string does come, and late
        kinds = source.sample(range(len(BYTES)), source.randint(2, len(BYTES)))
        ids = source.choices(kinds, k=300)
        text = decode(ids)
        at = source.randrange(max(len(text), 1))
        stops = [text[at:at + source.randint(1, 30)] or "x", "never"]
        active = active_query(stops)
        for count, token in enumerate(ids, start=1):
            is_last = active.take(token, 0.0, Vocabulary(eos_ids=frozenset(), decode_text=decode))
            expected = naive(ids[:count], stops)
            assert active.ending == (None if expected is None else Ending("stop", expected)), (
                f"{stops = } {count = }")
            if is_last:
                found += count > 64
                break
    assert found > 10


def test_a_long_output_is_not_decoded_again_with_every_token():
    active, decoded = active_query(["never"]), 0

    def counted(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode(ids)

    vocabulary = Vocabulary(eos_ids=frozenset(), decode_text=counted)
    assert not any(active.take(token, 0.0, vocabulary)
                   for token in random.Random(4).choices(range(5), k=2000))
    assert decoded < 40 * 2000


def test_an_exception_of_the_tokenizer_is_the_end_of_its_query_alone():
    def fails(ids: Sequence[int]) -> str:
        raise OverflowError("no such piece")

    vocabulary = Vocabulary(eos_ids=frozenset([0]), decode_text=fails)
    looking, ended = active_query(["x"]), active_query([])
    assert looking.take(3, 0.0, vocabulary) and ended.take(0, 0.0, vocabulary)
    for active in (looking, ended):
        result = active.finished(1.0, fails)
        assert (result.finish_reason, result.text) == ("error", "")
        assert "OverflowError" in (result.error or "") and "no such piece" in (result.error or "")
