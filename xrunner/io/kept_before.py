"""How many of the queries that earlier runs of a job answered took longer than its bound: a run
that goes on after them makes up for these, too."""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from xrunner.io.results import HELD_FILE, read_held

# Lines are searched, not parsed: a job may have left millions. In a string of JSON every quote has
# a backslash before it, so no answer's text looks like these.
_LATENCY_S = re.compile(rb'"latency_s": ([-+.0-9eE]+)')
_NO_ANSWER = b'"output_ids": []'
_EMBEDDING = re.compile(rb'"embedding": \[[^\]]')  # an answer without tokens


class Kept(NamedTuple):
    """Of the queries from `first` on, which are counted: how many are done with an answer, how many
    of these took longer than the bound on latency, and how many failed."""

    first: int
    done: int
    over: int
    failed: int = 0


def kept_before(results: Path, num_answered: int, limit_s: float) -> Kept:
    """Of the `num_answered` queries whose lines are in the file `results` or held beside it. Where
    there is no bound, or no such file, `first` is the first after them."""
    none = Kept(num_answered, 0, 0)
    if math.isinf(limit_s) or not num_answered or not results.is_file():
        return none
    with results.open("rb") as file:
        written = _counted(file, limit_s)
    held = read_held(results.with_name(HELD_FILE), written.done + written.failed)
    left = _counted((line.encode() for line in held.values()), limit_s)
    done, over, failed = (own + other for own, other in zip(written[1:], left[1:], strict=True))
    return Kept(max(num_answered - done - failed, 0), done, over, failed)


def _counted(lines: Iterable[bytes], limit_s: float) -> Kept:
    """Of lines of results, each of one answer or of all answers to one request."""
    count = over = failed = 0
    for line in lines:
        took_s = [float(own) for own in _LATENCY_S.findall(line)]
        without = 0 if _EMBEDDING.search(line) else line.count(_NO_ANSWER)
        count, failed = count + len(took_s), failed + without
        over += sum(own > limit_s for own in took_s) if not without else 0
    return Kept(0, count - failed, over, failed)
