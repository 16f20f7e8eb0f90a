"""Batch sizes that decode steps are captured for, on a GPU (xrunner.engine.graphs).

A captured step has one size. A batch is filled up to the next of these with rows that hold no
query, which cost what rows of a product do: so sizes lie close together, and end where a step is
long enough to hide what it takes the host to launch it."""

_POWERS = 8  # up to here sizes are powers of two
_FINE, _COARSE = 8, 16  # from one size to the next, up to and beyond _FINE_UNTIL
_FINE_UNTIL = 128
MOST_CAPTURED = 512


def bucket_of(queries: int) -> int | None:
    """The least captured size that holds so many queries; None where there is none."""
    assert queries >= 1, f"{queries = }"
    if queries > MOST_CAPTURED:
        return None
    if queries <= _POWERS:
        return 1 << (queries - 1).bit_length()
    step = _FINE if queries <= _FINE_UNTIL else _COARSE
    return -(-queries // step) * step
