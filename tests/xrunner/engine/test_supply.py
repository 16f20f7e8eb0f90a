"""A job of many queries: so many wait in memory, all are taken up in their order, and the launcher
holds a few bytes a line."""

import json
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

from xgpt.requests.request_files import RequestFiles
from xgpt.requests.spool import SpoolWriter
from xrunner.engine.head import FromSpool
from xrunner.engine.roster import Roster
from xrunner.files.intake import take_in
from xrunner.query import PreparedQuery
from xrunner.rules.order import in_run_order, run_order
from xrunner.rules.routing import LEAST_WAITING
from xrunner.rules.rra import RraRule
from xrunner.rules.slots import SlotUse


class Characters:
    """A token a character, where a request has a text."""

    vocab_size = 256

    def tokenise(self, requests: Any) -> list[list[int]]:
        return [list((request.prompt or "").encode()) if request.tokens is None
                else list(request.tokens) for request in requests]


class Counted:
    """Queries that count how often each is read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return SimpleNamespace(id=str(index), index=index, reserve_tokens=1)


def test_queries_come_in_their_order_and_no_more_wait_than_need_to():
    count, queries, told, waiting = 5 * LEAST_WAITING, Counted(), list[int](), list[Any]()
    roster = SimpleNamespace(num_waiting=0)

    def submit(query: Any) -> bool:
        waiting.append(query)
        roster.num_waiting = len(waiting)
        return True

    head: Any = SimpleNamespace(roster=roster, submit=submit)
    order = run_order(count, 100, 3)
    supply = FromSpool(queries, in_run_order(count, 100, 3), count,
                       least=10, begin=told.extend)
    taken, most = [], 0
    while True:
        supply.look(head)
        most = max(most, len(waiting))
        if not waiting:
            break
        assert supply.is_open or len(queries.read) == count
        taken += [query.index for query in waiting[:1000]]
        del waiting[:1000]
        roster.num_waiting = len(waiting)
    assert taken == queries.read == told == order and supply.close(head)
    assert most == 2 * LEAST_WAITING


@pytest.mark.slow  # every line of 48,000 is traced
def test_the_launcher_holds_few_bytes_a_line(tmp_path, monkeypatch):
    """13 of columns, which grow by an eighth, and up to 46 of the ids' tables; texts and tokens are
    in files."""
    monkeypatch.setattr("xgpt.requests.spool_columns._BYTES_IN_MEMORY", 2**16)

    def held(lines: int) -> int:
        path = tmp_path / f"{lines}.jsonl"
        path.write_text("".join(json.dumps({"id": f"request-{n:040}", "prompt": "x" * 500}) + "\n"
                                for n in range(lines)))
        tracemalloc.start()
        spool = SpoolWriter()
        take_in(RequestFiles(paths=(path,)), Characters(), spool)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    few, many = held(16_000), held(32_000)
    assert (many - few) / 16_000 < 100, f"{(many - few) / 16_000:.0f} bytes"


def test_a_group_gets_no_more_slots_than_there_are_queries():
    rule = RraRule(encode_batch=4, decode_iterations=5, num_groups=2, max_active=12, kv_tokens=999)
    found = []
    for count in (5, 50):
        roster = Roster(SlotUse.COMPACTED, None)
        for i in range(count):
            roster.add(PreparedQuery(index=i, id=f"q{i}", input_ids=(1, 2, 3), max_new_tokens=5))
        found.append(roster.start_message(rule))
    assert [message.slots for message in found] == [5, 6]
    assert found[0].capacity == 3 + 5, "input and most output of a query"
