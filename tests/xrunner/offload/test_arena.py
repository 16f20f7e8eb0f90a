"""Memory of a tier, counted against its plan."""

import pytest
import torch

from xgpt.core.errors import XgptError
from xgpt.core.placement import SECTOR
from xrunner.offload.arena import Arena, raw


def test_bytes_are_counted_up_to_the_plan_and_not_one_beyond():
    arena = Arena("device", 3 * SECTOR)
    arena.take(SECTOR, "layer 1")
    arena.take(2 * SECTOR, "layer 2")
    arena.give_back(SECTOR)
    assert (arena.held, arena.peak) == (2 * SECTOR, 3 * SECTOR)
    with pytest.raises(XgptError) as raised:
        arena.take(SECTOR + 1, "the buffer of layer 3")
    assert str(raised.value) == (
        "offloading: the buffer of layer 3 needs 4,097 bytes (4 KiB) of the tier device, where "
        "8,192 of the 12,288 planned bytes are taken")
    assert (arena.held, arena.peak) == (2 * SECTOR, 3 * SECTOR), "a refusal changes nothing"


def test_a_tensor_counts_whole_sectors_and_begins_at_one():
    arena = Arena("host", 10 * SECTOR)
    tensor = arena.tensor((3, 1000), torch.bfloat16, "entries")
    assert tensor.shape == (3, 1000) and tensor.dtype == torch.bfloat16
    assert tensor.data_ptr() % SECTOR == 0 and not tensor.any()
    assert arena.held == 2 * SECTOR
    tensor[1] = 3
    assert len(raw(tensor)) == 6000 and bytes(raw(tensor)[2000:2002]) == b"\x40\x40"
    arena.free(tensor)
    assert arena.held == 0 and arena.peak == 2 * SECTOR
    assert tensor[1].eq(3).all(), "a view that is left keeps the memory"


def test_a_tensor_beyond_the_plan_is_refused_before_it_is_made():
    arena = Arena("host", SECTOR)
    with pytest.raises(XgptError, match="entries needs 1,000,000,000,000,000 .*tier host"):
        arena.tensor((10**15,), torch.uint8, "entries")
    without_limit = Arena("host")
    with pytest.raises(XgptError, match="tier host for entries cannot be allocated"):
        without_limit.tensor((10**15,), torch.uint8, "entries")
    assert arena.held == without_limit.held == 0


@pytest.mark.gpu
def test_pinned_memory_takes_no_more_than_it_holds():
    arena = Arena("host")
    tensor = arena.tensor((5 * 2**20,), torch.uint8, "weights", pin=True)
    assert tensor.is_pinned()
    there = torch.empty(5 * 2**20, dtype=torch.uint8, device="cuda")
    tensor.fill_(5)
    there.copy_(tensor, non_blocking=True)
    assert bool((there == 5).all())
    address = tensor.data_ptr()
    arena.free(tensor)
    del tensor  # with its memory CUDA forgets it: the same pages may be pinned again
    again = [arena.tensor((5 * 2**20,), torch.uint8, "weights", pin=True) for _ in range(4)]
    assert all(one.is_pinned() for one in again), f"{address = }"
