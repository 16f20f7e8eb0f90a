"""What travels between ranks is JSON of stated types: it comes back as it was, and what is none of
it is refused."""

import ast
import math
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

import xrunner.comm.messages as m
from xrunner.comm.exchange import ForeignMessage, from_bytes, to_bytes
from xrunner.comm.point_to_point import header_of, read_header
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
    m.TokensMessage(group=2), m.ArrivedMessage(batch=1), m.HeldMessage(batch=1),
    m.HandedMessage(batch=1, queries=(m.HandedQuery(
        query=QUERY, input_tokens=2, output_ids=(1,), encode_start_s=0.5, first_token_s=None,
        likelihoods=()),)),
    m.LeftMessage(queries=(QUERY,)), m.FinishedMessage(results=(RESULT,), output_tokens=5),
    m.BlockMessage(batch=0, queries=(1, 2), lengths=(3, 4)),
    m.PortionMessage(queries=(1,), change=PhaseControls(
        encode_batch=1, decode_iterations=2, group_max_active=3, group_kv_tokens=4)),
    m.ReplicaMessage(replica=1, begun=2, output_tokens=3, results=(RESULT,),
                   at_work={4: (5, 6)}, changed=(7, 8), has_ended=True)]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was(message):
    again, shape = read_header(header_of(message, ((2, 3), "bool")))
    assert again == message and type(again) is type(message) and shape == ((2, 3), "bool")


def test_every_kind_of_message_is_tried():
    assert {type(message) for message in MESSAGES} == set(get_args(m.Message))


def test_whole_numbers_of_numpy_arrive_as_plain_ones():
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
    which are no ranks."""
    found = []
    for path in (path for package in ("xrunner", "xprofiler") for path in
                 (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in PICKLING and not (
                    isinstance(node.value, ast.Name) and node.value.id == "distributed"):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.attr}")
    assert not found
