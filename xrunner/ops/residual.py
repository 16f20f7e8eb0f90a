"""The residual stream of a step's tokens, to which products are added by the norm that reads it."""

from collections.abc import Callable

from torch import Tensor

from xrunner.ops.rows import layer_norm, rms_norm

AllReduce = Callable[[Tensor], Tensor]


class Residual:
    """hidden [T, H], which changes in place, and a product that is still to be added to it: the
    next norm does both in one pass over the rows."""

    def __init__(self, hidden: Tensor) -> None:
        """`hidden` belongs to the stream from now on."""
        self._hidden = hidden
        self._added: Tensor | None = None

    def add(self, product: Tensor, all_reduce: AllReduce | None = None) -> None:
        """product [T, H]; `all_reduce` sums it over a tensor-parallel group first, None: this rank
        has all of it."""
        self.total()
        self._added = product if all_reduce is None else all_reduce(product)

    def rms_norm(self, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(self._hidden, weight, eps, self._taken())

    def layer_norm(self, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return layer_norm(self._hidden, weight, bias, eps, self._taken())

    def total(self) -> Tensor:
        """hidden [T, H] with everything added."""
        added = self._taken()
        return self._hidden if added is None else self._hidden.add_(added)

    def become(self, rows: Tensor) -> None:
        """`rows` [T, H], which belong to the stream from now on, are what goes on; of a norm that
        is of the sum."""
        assert self._added is None, "something is still to be added"
        self._hidden = rows

    def _taken(self) -> Tensor | None:
        added, self._added = self._added, None
        return added
