"""What travels between ranks is JSON of stated types: it comes back as it was, and what is none of
it is refused. Of entries between pools every one comes once, from a rank that holds it."""

import ast
import math
import threading
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from toy_runs import pool_of, transfers_of

import xrunner.comm.messages as m
from xgpt.core import catalog
from xgpt.core.deployment import Pool, StageAssignment
from xgpt.core.model import ModelSpec
from xrunner.comm.exchange import ForeignMessage, from_bytes, to_bytes
from xrunner.comm.handover import EntryReceiver, EntrySender, pack
from xrunner.comm.messages import BlockMessage, Joined, StepMessage, StopMessage
from xrunner.comm.point_to_point import header_of, local_comms, read_header
from xrunner.engine.kv import KvCache, kv_shape
from xrunner.engine.pipeline import RankReport
from xrunner.query import FinishedQuery, PreparedQuery, Sampling
from xrunner.rules.rra import PhaseControls
from xrunner.rules.slots import Span
from xrunner.rules.steps import StepKind
from xrunner.step_record import StepRecord

ROOT = Path(__file__).resolve().parents[3]
QUERY = PreparedQuery(index=3, id="é\"", input_ids=[1, 2], max_new_tokens=9,
                      sampling=Sampling(temperature=0.1, top_k=5, seed=2**62), stop=("a", "b"))
RESULT = FinishedQuery(query=QUERY, output_ids=(7, 8), finish_reason="stop", text="\x1b[31m",
                       encode_start_s=0.1 + 0.2, first_token_s=math.inf, last_token_s=1e-300,
                       error=None, replica=1)
REPORT = RankReport(rank=0, stage=1, log=(StepRecord("decode", 0, 1, 2, 3, 4, 0.5, 0.75, 1),),
                    busy_s=0.1 + 0.2, load_s=0.0, bytes_read=2**40, rows_compacted=0,
                    peak_memory_bytes=1, operators=None)
MESSAGES: list[m.Message] = [
    m.StepMessage(kind=StepKind.MIXED, group=0, phase=1, iteration=2, removed=(1, 5), ended=(4,),
                  joined=(m.Joined(query=1, input_tokens=4, sampling=QUERY.sampling,
                                   goes_on=True),),
                  replaced=(0,), spans=(Span(0, 1, 2, True),), resting=(3,)),
    m.StartMessage(num_groups=1, slots=2, capacity=3), m.StopMessage(), m.EncodedMessage(group=1),
    m.TokensMessage(group=2), m.ReceivedMessage(batch=1),
    m.HandedMessage(batch=1, queries=(m.HandedQuery(
        query=QUERY, input_tokens=2, output_ids=(1,), encode_start_s=0.5, first_token_s=None,
        likelihoods=()),)),
    m.InputsMessage(queries=(QUERY,)), m.FinishedMessage(results=(RESULT,), output_tokens=5),
    m.BlockMessage(batch=0, queries=(1, 2), lengths=(3, 4)),
    m.PortionMessage(queries=(1,), change=PhaseControls(
        encode_batch=1, decode_iterations=2, group_max_active=3, group_kv_tokens=4)),
    m.ReplicaMessage(replica=1, begun=2, output_tokens=3, results=(RESULT,),
                   at_work={4: (5, 6)}, changed=(7, 8), has_ended=True)]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was(message):
    again, shape = read_header(header_of(message, ((2, 3), "bool")))
    assert again == message and type(again) is type(message) and shape == ((2, 3), "bool")


def test_every_kind_is_tried_and_whole_numbers_of_numpy_arrive_as_plain_ones():
    assert {type(message) for message in MESSAGES} == set(get_args(m.Message))
    again, _ = read_header(header_of(m.TokensMessage(group=np.int64(3)), None))
    assert again == m.TokensMessage(group=3) and type(again.group) is int


STEP = b'StepMessage [[{"kind":"%s","group":0,"phase":1,"iteration":2},null]]'


@pytest.mark.parametrize("data", [
    b"", b"\x80\x04K\x01.", b"3", b"{}", b"[]", b"TokensMessage", b"TokensMessage []",
    b"TokensMessage [[{}]]", b"TokensMessage [[{},null]]", b'TokensMessage [[{"group":1}]]',
    b'TokensMessage [[{"group":"1"},null]]', b'TokensMessage [[{"group":true},null]]',
    b'TokensMessage [[{"group":1.0},null]]', b'TokensMessage [[{"group":null},null]]',
    b'TokensMessage [[{"group":1,"groups":1},null]]', b'os.system [["true"]]',
    b'TokensMessage [[{"group":1},[[1.5],"int64"]]]', STEP % b"eat",
    b'BlockMessage [[{"batch":1,"queries":[1,"2"],"lengths":[3]},null]]',
    b'BlockMessage [[{"batch":1,"queries":[1,[2]],"lengths":[3]},null]]',
    b"TokensMessage " + b"[" * 100_000])
def test_what_is_none_of_ours_is_refused(data):
    assert read_header(STEP % b"mixed")
    with pytest.raises(ForeignMessage, match="same version"):
        read_header(data)


@pytest.mark.parametrize("value, kind", [
    (float("inf"), float), ([0.1 + 0.2, -math.inf], list[float]), ((1, "é"), tuple[int, str]),
    (None, int | None), (REPORT, RankReport)])
def test_what_all_ranks_exchange_comes_back_as_it_was(value, kind):
    assert from_bytes(to_bytes(value, kind), kind) == value


# mpi4py's methods for any object, which pickle it; those for memory are capitalised
PICKLING = frozenset({"bcast", "allgather", "alltoall", "allreduce", "isend", "issend", "ibsend",
                      "irecv", "ssend", "bsend", "sendrecv", "mprobe", "improbe", "recv"})


def test_no_rank_pickles():
    """The few others that are called so: a socket's recv, and those of the sweep's own processes,
    which are no ranks. A rank and the vLLM process that it started pickle on a socket that nobody
    else has."""
    found = []
    for path in (path for package in ("xrunner", "xprofiler") for path in
                 (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in PICKLING and not (
                    isinstance(node.value, ast.Name) and node.value.id == "distributed"):
                if path.parent.name == "vllm" and node.attr == "recv":
                    continue
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.attr}")
    assert not found


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
         ((1, 1), (2, 2), (1, 3)), ((8, 6),), ((8, 2), (1, 4))]  # 8 ranks hold each head twice


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
    assert not head.has_arrived(5), "rank 3 has not got its block"
    other = EntryReceiver(comms[3], found, [2, 3])
    until = time.monotonic() + 10
    while not head.has_arrived(5):
        assert time.monotonic() < until
        time.sleep(0.001)
    assert not head.has_arrived(5), "told once"
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


def test_a_failing_courier_is_not_kept_quiet():
    pools = pools_of(((1, 6),), ((1, 6),))
    comms = local_comms(2)
    found, told = transfers_of(pools, spec()), threading.Event()
    receiver = EntryReceiver(comms[1], found, [1], abort=told.set)
    comms[0].send(1, BlockMessage(batch=0, queries=(1,), lengths=(2,)))  # without its block
    assert told.wait(10)
    comms[0].send(1, StopMessage())
    with pytest.raises(AssertionError):
        receiver.has_arrived(0)


def cache_of(stage: StageAssignment) -> KvCache:
    return KvCache(kv_shape(spec(), torch.float32, slots=4, capacity=6,
                            num_layers=stage.num_layers, kv_heads=max(4 // stage.tp_degree, 1)))


def fill(cache: KvCache, stage: StageAssignment, place: int) -> None:
    """Every entry another number, of its layer and head in the model, and its token."""
    share, copies = max(4 // stage.tp_degree, 1), max(stage.tp_degree // 4, 1)
    layers = torch.arange(stage.num_layers) + stage.first_layer + 1
    heads = torch.arange(share) + place // copies * share + 1
    pair = layers[:, None] * 100 + heads[None, :] * 10
    cache.store[:] = pair[:, None, None, :, None, None] + torch.arange(6)[:, None]
