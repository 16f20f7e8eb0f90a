"""Sums of a tensor-parallel group are timed within real steps of a shard's layers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from xgpt.core.model import ModelSpec
from xprofiler.measure.sums import Sums, seconds_of_sums, summing_bench

TOY = ModelSpec(name="toy", family="llama", num_layers=9, hidden_size=32, num_heads=2,
                num_kv_heads=2, vocab_size=64, intermediate_size=48, max_positions=200)


class Alone:
    """A communicator of this rank."""

    def __init__(self) -> None:
        self.barriers = 0

    def Barrier(self) -> None:  # noqa: N802
        self.barriers += 1

    def Get_rank(self) -> int:  # noqa: N802
        return 0

    def Bcast(self, mine: Any, root: int) -> None:  # noqa: N802
        assert root == 0


class Noting:
    """A group that leaves every tensor as it is."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.rows.append(len(tensor))
        return tensor


@pytest.mark.parametrize(("rows", "layers"), [(1, 6), (36, 6), (900, 4)])
def test_steps_with_sums_take_turns_with_steps_without(rows: int, layers: int) -> None:
    sums, comm, group = Sums(), Alone(), Noting()
    with torch.inference_mode():
        bench = summing_bench(TOY, torch.float32, 2, sums, device=torch.device("cpu"),
                              weight_dtype=torch.float32)
        added = seconds_of_sums(comm, group, bench, sums, rows)
    assert comm.barriers == 2 * (len(added) + 1), "all ranks begin each step together"
    # two a layer, all of the step's rows, in every other step
    assert sums.count == 2 * layers and group.rows == [rows] * (2 * layers * (len(added) + 1))
    assert len(added) >= 5 and all(s >= 0 for s in added)
