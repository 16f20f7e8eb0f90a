"""Batch invariance (`run.deterministic`): a request's answer is the same in every batch.

It is equal bit for bit in every batch, chunk and schedule with the same number of ranks per group.
Libraries choose a product's order of summation by its number of rows. So each of their products
takes a fixed number, a tile of rows, the last one padded with zeros. The tile is found by trial
when a weight is packed: equal rows must give equal rows. Our own products sum every row alike.
Attention reads each request's KV from its start, undivided between threads. Norms, rotations and
sampling are per row anyway."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from xgpt.core.errors import XgptError
from xrunner.ops.cpu.native import library

_TILES = (32, 16, 8, 4, 2, 1)  # chosen: rows; larger tiles are faster for many rows
_TRIALS = 3  # chosen
_is_wanted = [False]


def set_deterministic(is_wanted: bool) -> None:
    """Turns batch invariance on or off for all products packed, and all attention, from now on.
    Raises XgptError if it is not available."""
    if is_wanted and library() is None:
        raise XgptError("run.deterministic needs the native operators (`xgpt doctor` says why they "
                        "are not there): torch's attention depends on the batch")
    _is_wanted[0] = is_wanted


def is_deterministic() -> bool:
    """Whether batch invariance is on in this process."""
    return _is_wanted[0]


def tile_of(product: Callable[[Tensor], Tensor], inputs: int, dtype: torch.dtype) -> int:
    """Largest number of equal rows for which the product gives equal results. Raises XgptError if
    there is none."""
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
    """product(x), computed `tile` rows at a time. Each tile lies in fresh memory, since a library
    may depend on addresses too."""
    outs = []
    for first in range(0, len(x), tile):
        here = min(tile, len(x) - first)
        rows = x.new_zeros(tile, x.shape[1])
        rows[:here] = x[first:first + here]
        outs.append(product(rows)[:here])
    return outs[0] if len(outs) == 1 else torch.cat(outs) if outs else product(x)
