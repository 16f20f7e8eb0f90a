"""The prefixes that a job's requests share, found over all their tokens at once, and their file."""

from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from xgpt.core.errors import XgptError
from xgpt.core.lengths import BoolArray, IntArray
from xgpt.core.prefixes import Prefixes

LEAST_TOKENS = 32  # chosen: a node saves at least so many
# chosen: a job saves at least this share of its input tokens, and so many tokens a request that has
# a prefix; of less, copying blocks takes as long as encoding
LEAST_SHARE, LEAST_EACH = 0.01, 8
_WIDTH = 8  # chosen: tokens that are read of each request at first; twice as many each time
_TOKENS_AT_ONCE = 2**25  # chosen: tokens in memory


def find_prefixes(tokens: IntArray, begins: IntArray, limits: IntArray) -> Prefixes | None:
    """The forest of the prefixes that requests share; None where nothing is worth sharing.

    `tokens`: token ids of all requests, [tokens]. `begins`: where each request begins in them,
    [requests]. `limits`: most tokens from its beginning that each may share, [requests].

    A node is kept where its tokens, counted for all its requests but one, are LEAST_TOKENS or more.
    The children of another attach to its parent, and have its tokens as their own."""
    order, common = _sorted(tokens, begins, limits)
    nodes = np.full(len(limits), -1, np.int64)
    kept = list[tuple[int, int]]()  # parent and end
    open_nodes = list[tuple[int, int]]()  # kept nodes above, each with the last of its places
    for first, last, end in _branchings(common):
        while open_nodes and open_nodes[-1][1] < first:
            open_nodes.pop()
        parent = open_nodes[-1][0] if open_nodes else -1
        own = end - (kept[parent][1] if open_nodes else 0)
        if (last - first) * own >= LEAST_TOKENS:
            open_nodes.append((len(kept), last))
            nodes[order[first:last + 1]] = len(kept)
            kept.append((parent, end))
    if not kept:
        return None
    parents, ends = np.array(kept, np.int64).T
    return Prefixes(parents=parents, ends=ends, nodes=nodes)


def encoded_tokens(prefixes: Prefixes, input_tokens: IntArray) -> int:
    """Input tokens that are encoded if each node is encoded once."""
    own = prefixes.own_tokens[prefixes.used]
    return int(input_tokens.sum() - prefixes.shared.sum() + own.sum())


def is_worth_sharing(prefixes: Prefixes, input_tokens: IntArray) -> bool:
    """Whether encoding each prefix once saves enough of a job's tokens."""
    total = int(input_tokens.sum())
    least = max(LEAST_SHARE * total, LEAST_EACH * int((prefixes.nodes >= 0).sum()))
    return total - encoded_tokens(prefixes, input_tokens) >= least


def save_prefixes(path: Path, prefixes: Prefixes) -> None:
    """Writes int64 [nodes + requests, 2]: parent and end of each node, then node and shared tokens
    of each request."""
    np.save(path, np.concatenate([np.stack([prefixes.parents, prefixes.ends], axis=1),
                                  np.stack([prefixes.nodes, prefixes.shared], axis=1)]))


def load_prefixes(path: Path, input_tokens: IntArray) -> Prefixes | None:
    """The prefixes in a file; None if there is none. `input_tokens`: of each request. Raises
    XgptError for a file that does not fit these requests."""
    try:
        table = np.load(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError):
        table = np.empty(0)
    if table.ndim == 2 and table.shape[1] == 2 and table.dtype == np.int64 and (
            (count := len(table) - len(input_tokens)) > 0):
        (parents, ends), (nodes, shared) = table[:count].T, table[count:].T
        places = np.arange(count)
        if (parents < places).all() and (parents >= -1).all() and (
                ends > np.where(parents < 0, 0, ends[parents])).all() and (
                nodes >= -1).all() and (nodes < count).all():
            found = Prefixes(parents=parents, ends=ends, nodes=nodes)
            if (found.shared == shared).all() and (shared < input_tokens).all():
                return found
    raise XgptError(f"{path} does not fit the requests of its spool: remove it, and the same "
                    "command goes on")


def _branchings(common: IntArray) -> list[tuple[int, int, int]]:
    """(first place, last place, tokens in common) of all sets of sorted requests that have more
    tokens in common than with any other; sets before those within them. `common`: tokens that each
    place has in common with the one before, [places]."""
    found, open_sets = list[tuple[int, int, int]](), list[tuple[int, int]]()
    closed = np.append(common, 0)
    changes = np.flatnonzero(np.diff(closed, prepend=0))
    for place, end in zip(changes.tolist(), closed[changes].tolist(), strict=True):
        first = place - 1
        while open_sets and open_sets[-1][1] > end:
            first, longest = open_sets.pop()
            found.append((first, place - 1, longest))
        if end and (not open_sets or open_sets[-1][1] < end):
            open_sets.append((first, end))
    return sorted(found, key=lambda one: (one[0], one[2]))


def _sorted(tokens: IntArray, begins: IntArray, limits: IntArray) -> tuple[IntArray, IntArray]:
    """(requests sorted by their tokens up to their limits, tokens that each has in common with the
    one before), both [requests with a limit above 0]."""
    order = np.flatnonzero(limits > 0)
    common, places = np.zeros(len(order), np.int64), np.arange(len(order))
    is_first = places == 0  # of a group of requests that are equal so far
    offset, width = 0, _WIDTH
    while len(places) > 1:
        width = max(1, min(width, _TOKENS_AT_ONCE // len(places)))
        rows = order[places]
        block = _block(tokens, begins[rows] + offset, limits[rows] - offset, width)
        if (by := _sorting(block, is_first)) is not None:
            order[places], block = rows[by], block[by]
        unequal = block[1:] != block[:-1]
        is_cut = ~is_first
        is_cut[1:] &= unequal.any(axis=1)
        common[places[is_cut]] = offset + unequal[is_cut[1:]].argmax(axis=1)
        is_first |= is_cut
        is_over = block[:, -1] == 0
        equal = np.flatnonzero(is_over & ~is_first)  # to the end, with the one before
        common[places[equal]] = offset + np.count_nonzero(block[equal], axis=1)
        is_read = ~is_over & ~(is_first & np.append(is_first[1:], True))
        places, is_first = places[is_read], is_first[is_read]
        offset, width = offset + width, 2 * width
    return order, common


def _block(tokens: IntArray, first: IntArray, left: IntArray, width: int) -> NDArray[np.uint32]:
    """Tokens `first` to `first` + `width` of each request, each plus 1, [requests, width]; 0 from
    the `left`-th on."""
    width_here = min(width, len(tokens))
    starts = np.minimum(first, len(tokens) - width_here)
    block = np.zeros((len(first), width), np.uint32)
    block[:, :width_here] = sliding_window_view(tokens, width_here)[starts]
    for row in np.flatnonzero(starts < first).tolist():  # at the end of all tokens
        block[row] = np.roll(block[row], starts[row] - first[row])
    block += 1
    block[np.arange(width) >= left[:, None]] = 0
    return block


def _sorting(block: NDArray[np.uint32], is_first: BoolArray) -> IntArray | None:
    """The order of the rows in which each group is sorted by its block; None as they are. Groups
    stay where they are. `is_first`: whether a row begins a group, [rows]."""
    group = np.cumsum(is_first) - 1
    begins = np.flatnonzero(is_first)
    is_mixed = np.logical_or.reduceat((block != block[begins[group]]).any(axis=1), begins)
    rows = np.flatnonzero(is_mixed[group])
    if not len(rows):
        return None
    # as bytes with the highest first, a row's words are compared as one text
    keys = np.column_stack((group[rows], block[rows])).astype(">u4")
    text = keys.view(f"S{keys.itemsize * keys.shape[1]}")[:, 0]
    by = np.arange(len(group))
    by[rows] = rows[np.argsort(text, kind="stable")]
    return by
