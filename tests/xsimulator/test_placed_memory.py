"""Bytes by tier of placed pools: linear and exact ones, and what the runner's cache takes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_placed import ON_DEVICE, ON_DISK, ON_HOST, problem_of

from xgpt.core import catalog
from xgpt.core.cluster import Device
from xgpt.core.deployment import StageAssignment
from xgpt.core.placement import HOST, SECTOR, Placement
from xrunner.engine.kv import kv_shape
from xrunner.models import stage_model
from xrunner.offload.arena import Arena
from xrunner.offload.kv_parts import Tiers
from xrunner.offload.mover import Mover
from xrunner.offload.placed_cache import placed_caches
from xsimulator import placed_memory
from xsimulator.placed_memory import WORK, PlacedMemory

CPU = Device(name="cpu", kind="cpu", memory_bytes=2**30, bandwidth_bytes_per_s=14e9,
             flops_per_s=(("float32", 2e11), ("bfloat16", 2e11)))


def stages_of(layers, count=1):
    """Equal stages of one device."""
    return tuple(StageAssignment(index=i, ranks=(i,), first_layer=i * layers // count,
                                 num_layers=layers // count) for i in range(count))


def memory_of(model, count=1, tiers=("host", "disk"), device="T4"):
    """The bytes of a model's stages on T4s or CPU ranks."""
    problem = problem_of(model, tiers, count)
    if device == "cpu":
        problem = replace(problem, cluster=replace(problem.cluster, device=CPU))
    return PlacedMemory(problem, stages_of(catalog.model(model).num_layers, count))


def placement_of(weights, kv, hidden=ON_HOST, **options):
    return Placement(weights=weights, kv=kv, hidden=hidden, **{"device_batch": 32, **options})


def needed(memory, placement, slots, groups=1):
    """[3] bytes of the fullest stage on each tier."""
    return memory.held(placement, slots, 544, groups).sum(-1).max(0)


def test_opt_175b_needs_a_disk():
    """FlexGen, Table 5: half of the weights on host and disk each, entries on disk; out of memory
    without a disk. By our rows 256 requests fit in device batches of 16."""
    memory = memory_of("gpt3-175b")
    placement = placement_of((0, 0.5, 0.5), ON_DISK, device_batch=16, host_attention=True)
    assert (needed(memory, placement, 256) <= memory.room).all()
    assert (needed(memory, placement_of(ON_HOST, ON_HOST), 256) > memory.room).any()
    assert (needed(memory, placement_of(ON_HOST, ON_HOST), 1) > memory.room).any()


@pytest.mark.parametrize(("batch", "slots", "weights", "kv"), [
    (64, 128, ON_HOST, ON_HOST), (8, 8, ON_HOST, ON_DEVICE)])
def test_published_placements_of_opt_30b_fit_one_t4(batch, slots, weights, kv):
    memory = memory_of("opt-30b")
    placement = placement_of(weights, kv, device_batch=batch, host_attention=True)
    assert (needed(memory, placement, slots) <= memory.room).all()


@pytest.mark.parametrize(("tiers", "device"), [
    (("host", "disk"), "T4"), (("disk",), "cpu"), (("host",), "T4"), (("host", "disk"), "cpu")])
@pytest.mark.parametrize(("stages", "bits"), [(1, 16), (2, 16), (1, 4)])
def test_linear_rows_are_near_the_bytes_of_whole_tensors_and_requests(tiers, device, stages, bits):
    memory = memory_of("opt-30b", stages, tiers, device)
    share = {"host": 0.3 if "disk" in tiers else 0.75, "disk": 0.45 if "host" in tiers else 0.75}
    own = (0.25, *(share[name] if name in tiers else 0.0 for name in ("host", "disk")))
    hidden = ON_HOST if "host" in tiers else ON_DEVICE
    placement = placement_of(own, own, hidden, weight_bits=bits)
    rows = memory.rows(placement, np.array([128, 256]), 544, groups=2)
    shares = np.concatenate((own, own, hidden))
    for index, slots in enumerate((128, 256)):
        linear = rows.by_share[index] @ shares + rows.fixed[index]
        exact = memory.held(placement, slots, 544, 2).sum(-1)
        tensor = 2 * catalog.model("opt-30b").hidden_size**2 * 4 * 2
        for found, stage, tier in zip(linear, np.repeat(range(stages), len(tiers) + 1), rows.tiers,
                                      strict=True):
            assert found == pytest.approx(exact[stage, tier], rel=0.02, abs=2.5 * tensor)
    assert [rows.capacity[i] for i in range(len(tiers) + 1)] == [
        memory.room[tier] for tier in rows.tiers[:len(tiers) + 1]]


@pytest.mark.parametrize(("attention", "bits"), [(False, 16), (True, 16), (False, 4)])
@pytest.mark.parametrize("kv", [(0.3, 0.3, 0.4), (0.0, 0.0, 1.0), (0.5, 0.5, 0.0)])
def test_entries_take_of_each_tier_what_was_planned(tmp_path, kv, attention, bits):
    problem = replace(problem_of("smollm2-135m"), dtype="bfloat16", kv_dtype="bfloat16",
                      weight_dtype="bfloat16")
    problem = replace(problem, cluster=replace(problem.cluster, device=CPU))
    memory = PlacedMemory(problem, stages_of(30))
    placement = placement_of(ON_HOST, kv, device_batch=3, kv_bits=bits,
                             host_attention=attention)
    arenas = Arena("device"), Arena("host"), Arena("disk")
    tiers = Tiers(placement, torch.device("cpu"), arenas, Mover(), tmp_path)
    shape = kv_shape(problem.model, torch.bfloat16, slots=10, capacity=150)
    caches = placed_caches(2, shape, tiers)
    held, without = (memory.held(replace(placement, kv=own), 10, 150, 2)[0]
                     for own in (kv, ON_DEVICE))
    planned = held[:, 1] + held[:, WORK] - without[:, WORK]
    taken, ends = np.array([arena.held for arena in arenas]), 6 * SECTOR  # of 2 caches, 2 buffers
    assert (np.abs(planned - taken) <= ends).all()
    for cache in caches:
        cache.close()
    tiers.mover.close()


def test_pieces_are_those_of_the_runner():
    assert placed_memory.STEP_PIECE == stage_model.PIECE_TOKENS


def test_four_bits_leave_more_room():
    memory = memory_of("opt-30b")
    whole, packed = (needed(memory, placement_of(ON_HOST, ON_HOST, weight_bits=bits), 64)
                     for bits in (16, 4))
    weights = 2 * catalog.model("opt-30b").decoder_layer_params * 48
    assert whole[HOST] - packed[HOST] == pytest.approx(weights * (1 - 4.5 / 16), rel=0.05)
