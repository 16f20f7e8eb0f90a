"""Batch invariance (`run.deterministic`): what is computed of a token depends on its own query
alone, not on who is computed beside it, so that a query's answer is the same, bit for bit, in every
batch, chunk and schedule of the same number of ranks a group.

Libraries choose a product's order of summation by its number of rows. So every product of theirs
takes the same number, a tile of rows, the last one filled up with zeros; and which tile is tried
when the weight is laid out: equal rows must give equal rows. Our own products sum every row alike.
Attention reads each query's entries from the first on, no query's divided between threads; norms,
rotations and sampling go row by row as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from xgpt.core.errors import XgptError
from xrunner.ops.cpu.native import library

_TILES = (32, 16, 8, 4, 2, 1)  # rows; larger ones are quicker where many are computed
_TRIALS = 3
_asked = [False]


def ask(is_asked: bool) -> None:
    """For all products that are laid out, and all attention, from now on in this process. Raises
    XgptError where it cannot be had."""
    if is_asked and library() is None:
        raise XgptError("run.deterministic needs the native operators (`xgpt doctor` says why they "
                        "are not there): torch's attention depends on the batch")
    _asked[0] = is_asked


def is_asked() -> bool:
    return _asked[0]


def tile_of(product: Callable[[Tensor], Tensor], inputs: int, dtype: torch.dtype) -> int:
    """The most rows of which the product gives each as if it were anywhere else among them. Raises
    XgptError where there is none."""
    generator = torch.Generator().manual_seed(inputs)
    for tile in _TILES:
        rows = torch.randn(_TRIALS, inputs, generator=generator).to(dtype)
        with torch.inference_mode():
            outs = [product(row.expand(tile, inputs).contiguous()) for row in rows]
            again = [product(row.expand(tile, inputs).contiguous()) for row in rows]
        if all(torch.equal(out, out[:1].expand_as(out)) and torch.equal(out, other)
               for out, other in zip(outs, again, strict=True)):
            return tile
    raise XgptError("run.deterministic: on this processor a product of one row differs from the "
                    "same product again; run without it")


def in_tiles(product: Callable[[Tensor], Tensor], x: Tensor, tile: int) -> Tensor:
    """product(x), `tile` rows at a time. Each lies in memory of its own, as the first did: a
    library may look at addresses, too."""
    outs = []
    for first in range(0, len(x), tile):
        here = min(tile, len(x) - first)
        rows = x.new_zeros(tile, x.shape[1])
        rows[:here] = x[first:first + here]
        outs.append(product(rows)[:here])
    return outs[0] if len(outs) == 1 else torch.cat(outs) if outs else product(x)
