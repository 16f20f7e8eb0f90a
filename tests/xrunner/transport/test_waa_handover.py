"""Entries between pools: every one a decode rank holds comes once, from a rank that holds it."""

import threading
import time
from dataclasses import replace
from itertools import product

import pytest
import torch
from toy_runs import pool_of, transfers_of

from xgpt.core import catalog
from xgpt.core.deployment import Pool, StageAssignment
from xgpt.core.model import ModelSpec
from xrunner.comm import handover as courier
from xrunner.comm.handover import EntryReceiver, EntrySender, pack
from xrunner.comm.messages import BlockMessage, Joined, StepMessage, StopMessage
from xrunner.comm.point_to_point import local_comms
from xrunner.devices import Arriving
from xrunner.engine.kv import KvCache, kv_shape
from xrunner.query import Sampling
from xrunner.rules.steps import StepKind

LAYERS = 6


def spec() -> ModelSpec:
    """4 KV heads, 6 layers."""
    return replace(catalog.model("opt-125m"), num_layers=LAYERS, num_heads=4, num_kv_heads=4,
                   hidden_size=8)


def pools_of(encode: tuple[tuple[int, int], ...],
             decode: tuple[tuple[int, int], ...]) -> list[Pool]:
    """An encode and a decode pool of stages, each of (degree, layers)."""
    found: list[list[StageAssignment]] = []
    first_rank = index = 0
    for sizes in (encode, decode):
        stages: list[StageAssignment] = []
        first = 0
        for degree, layers in sizes:
            stages.append(StageAssignment(
                index=index, ranks=tuple(range(first_rank, first_rank + degree)),
                first_layer=first, num_layers=layers))
            first, first_rank, index = first + layers, first_rank + degree, index + 1
        found.append(stages)
    return [pool_of(found[0], "encode"), pool_of(found[1], "decode")]


POOLS = [((1, 6),), ((2, 6),), ((4, 6),), ((1, 2), (1, 4)), ((2, 5), (1, 1)), ((1, 3), (4, 3)),
         ((1, 1), (2, 2), (1, 3))]


@pytest.mark.parametrize(("encode", "decode"), list(product(POOLS, POOLS)))
def test_every_entry_comes_once_and_is_what_was_encoded(encode, decode):
    pools = pools_of(encode, decode)
    caches = {rank: cache_of(s) for pool in pools for s in pool.stages for rank in s.ranks}
    for stage in pools[0].stages:
        for place, rank in enumerate(stage.ranks):
            caches[rank].allocate([3, 2])
            fill(caches[rank], stage, place)
    for one in transfers_of(pools, spec()):
        block = pack(caches[one.source], [0, 1], one.source_layers, one.source_heads)
        target = caches[one.target].store[one.target_layers, :, 0, one.target_heads, :5]
        assert not target.any(), "comes twice"
        target += block
    for stage in pools[1].stages:
        for place, rank in enumerate(stage.ranks):
            wanted = cache_of(stage)
            wanted.allocate([3, 2])
            fill(wanted, stage, place)
            assert torch.equal(caches[rank].store[:, :, 0, :, :5],
                               pack(wanted, [0, 1])), f"{rank = }"


def test_an_encoders_output_goes_to_every_decode_rank_once():
    t5 = catalog.model("t5-11b")
    found = transfers_of(pools_of(((1, 1), (2, 1)), ((1, 3), (2, 3))), t5)
    assert [(transfer.source, transfer.target) for transfer in found] == [(1, 3), (1, 4), (2, 5)]


def test_the_decode_head_learns_of_a_batch_when_all_ranks_have_all_of_it():
    """Ranks 0 and 1 encode halves of the layers, 2 and 3 decode unlike halves; 3 lags behind."""
    pools = pools_of(((1, 2), (1, 4)), ((1, 4), (1, 2)))
    comms, found = local_comms(4), transfers_of(pools, spec())
    assert [(transfer.source, transfer.target) for transfer in found] == [(0, 2), (1, 2), (1, 3)]
    senders = [EntrySender(comms[rank], found) for rank in (0, 1)]
    head = EntryReceiver(comms[2], found, [2, 3])
    message = StepMessage(kind=StepKind.ENCODE, group=0, phase=5, iteration=0, joined=tuple(
        Joined(query=q, input_tokens=n, sampling=Sampling(), goes_on=q != 8)
        for q, n in ((7, 3), (8, 1), (9, 2))))
    for rank, sender in enumerate(senders):
        cache = cache_of(pools[0].stages[rank])
        cache.allocate([4, 3, 1, 2])
        fill(cache, pools[0].stages[rank], 0)
        sender.hand_over(message, cache, first_slot=1)
    time.sleep(0.05)
    assert not head.is_held(5), "rank 3 has not got its block"
    other = EntryReceiver(comms[3], found, [2, 3])
    until = time.monotonic() + 10
    while not head.is_held(5):
        assert time.monotonic() < until
        time.sleep(0.001)
    assert not head.is_held(5), "told once"
    target = cache_of(pools[1].stages[0])
    target.allocate([2])
    head.put_into(target, 0, 9)
    head.forget([7])
    with pytest.raises(KeyError):
        head.forget([8])  # stayed behind
    assert head.num_bytes == 4 * 2 * 4 * 5 * 2 * 4  # layers, 2, heads, tokens, size, bytes
    threads = [threading.Thread(target=c.close) for c in (*senders, head, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert senders[0].num_bytes + senders[1].num_bytes == head.num_bytes + other.num_bytes


def test_who_encodes_goes_on_while_entries_are_on_their_way_to_the_host(monkeypatch):
    """As a GPU's are: the thread that sends them waits for them."""
    are_here = threading.Event()

    class Later(Arriving):
        def wait(self) -> torch.Tensor:
            assert are_here.wait(10)
            return super().wait()

    monkeypatch.setattr(courier, "Arriving", Later)
    pools = pools_of(((1, 6),), ((1, 6),))
    comms, found = local_comms(2), transfers_of(pools, spec())
    sender, receiver = EntrySender(comms[0], found), EntryReceiver(comms[1], found, [1])
    cache = cache_of(pools[0].stages[0])
    cache.allocate([3])
    fill(cache, pools[0].stages[0], 0)
    sender.hand_over(StepMessage(kind=StepKind.ENCODE, group=0, phase=2, iteration=0, joined=(
        Joined(query=7, input_tokens=3, sampling=Sampling(), goes_on=True),)), cache, 0)
    assert not receiver.is_held(2)
    are_here.set()
    sender.close()
    receiver.close()
    assert receiver.is_held(2)
    target = cache_of(pools[1].stages[0])
    target.allocate([3])
    receiver.put_into(target, 0, 7)
    assert torch.equal(target.store[:, :, 0, :, :3], cache.store[:, :, 0, :, :3])


def test_a_failing_courier_is_not_kept_quiet():
    pools = pools_of(((1, 6),), ((1, 6),))
    comms = local_comms(2)
    found, told = transfers_of(pools, spec()), threading.Event()
    receiver = EntryReceiver(comms[1], found, [1], abort=told.set)
    comms[0].send(1, BlockMessage(batch=0, queries=(1,), lengths=(2,)))  # without its block
    assert told.wait(10)
    comms[0].send(1, StopMessage())
    with pytest.raises(AssertionError):
        receiver.is_held(0)


def cache_of(stage: StageAssignment) -> KvCache:
    return KvCache(kv_shape(spec(), torch.float32, slots=4, capacity=6,
                            num_layers=stage.num_layers, kv_heads=4 // stage.tp_degree))


def fill(cache: KvCache, stage: StageAssignment, place: int) -> None:
    """Every entry another number, of its layer and head in the model, and its token."""
    share = 4 // stage.tp_degree
    layers = torch.arange(stage.num_layers) + stage.first_layer + 1
    heads = torch.arange(share) + place * share + 1
    pair = layers[:, None] * 100 + heads[None, :] * 10
    cache.store[:] = pair[:, None, None, :, None, None] + torch.arange(6)[:, None]
