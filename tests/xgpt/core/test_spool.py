"""The spool: what is put in comes out, by the index of a query."""

import json
from pathlib import Path

import numpy as np
import pytest
from examples import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from xgpt.requests import spool_columns
from xgpt.requests.spool import NUM_PROMPTS, SPOOL_VERSION, Record, Spool, SpoolWriter, num_queries

_RECORDS = st.builds(
    Record, id=st.text(max_size=5), line=st.integers(1, 10**9), is_forced=st.booleans(),
    seed=st.none() | st.integers(0, 2**63 - 1), temperature=st.none() | st.floats(0, 9),
    top_k=st.none() | st.integers(1, 99), top_p=st.none() | st.floats(0.01, 1),
    stop=st.lists(st.text(min_size=1, max_size=3), max_size=2).map(tuple),
    is_openai=st.booleans(), is_chat=st.booleans(), prompt=st.none() | st.text(max_size=9))
_TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=6)


@given(rows=st.lists(st.tuples(_RECORDS, _TOKENS), max_size=6), data=st.data())
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_put_in_comes_out_by_query(tmp_path, rows, data):
    chosen = data.draw(st.lists(st.integers(0, max(len(rows) - 1, 0)), unique=True,
                                max_size=len(rows)).map(sorted))
    writer = SpoolWriter()
    for record, ids in rows:
        writer.add(record, ids)
    assert [writer.record(i) for i in range(len(rows))] == [record for record, _ in rows]
    writer.save(tmp_path, np.array([(row, 7 + row) for row in chosen]).reshape(-1, 2), 3)
    spool = Spool(tmp_path)
    assert (len(spool), spool.num_errors, num_queries(tmp_path)) == (len(chosen), 3, len(chosen))
    assert list(spool.records()) == [rows[row][0] for row in chosen]
    for query, row in enumerate(chosen):
        tokens = spool.tokens(query)
        assert [*tokens] == rows[row][1] == tokens[:] and len(tokens) == len(rows[row][1])
        assert spool.most_output_tokens(query) == 7 + row


def test_tokens_outlive_their_spool_and_take_no_memory(tmp_path):
    """What is mapped would stay with rank 0: a gigabyte of ten million requests."""
    writer, count, length = SpoolWriter(), 64, 16_384
    for i in range(count):
        writer.add(Record(id=str(i), line=i + 1), np.full(length, i))
    writer.save(tmp_path, np.stack([np.arange(count), np.full(count, 1)], axis=1), 0)
    before = resident_bytes()
    tokens = [Spool(tmp_path).tokens(query) for query in range(count)]
    assert all(one[0] == one[-1] == i and len(one) == length for i, one in enumerate(tokens))
    assert resident_bytes() - before < 2e6, "of 4 MB"


def resident_bytes() -> int:
    """Of files that are mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssFile")).split()[1])


@pytest.mark.parametrize("in_memory", [2**26, 5])  # else it lies in a temporary file
def test_a_writer_saves_again_and_in_the_place_of_what_was_there(tmp_path, monkeypatch, in_memory):
    monkeypatch.setattr(spool_columns, "_BYTES_IN_MEMORY", in_memory)
    for count in (1, 3):
        writer = SpoolWriter()
        for i in range(count):
            writer.add(Record(id=str(i), line=i + 1), (i, i))
        for _ in range(2):
            writer.save(tmp_path, np.array([(i, 1) for i in range(count)]), 0)
            assert [[*Spool(tmp_path).tokens(i)] for i in range(count)] == [
                [i, i] for i in range(count)]
    assert [path.name for path in tmp_path.iterdir()] == ["spool"]


def test_prompts_are_kept_of_the_first_requests_alone(tmp_path):
    writer = SpoolWriter()
    for i in range(NUM_PROMPTS + 1):
        writer.add(Record(id=str(i), line=i + 1, prompt="text" if i == 1 else None), (5, 6))
    writer.save(tmp_path, np.array([(i, 1) for i in range(1, NUM_PROMPTS + 1)]), 0)
    shown = Spool(tmp_path).prompts(NUM_PROMPTS + 9)
    assert shown[:2] == ["text", "2 token ids"] and shown[-1] is None
    assert len(shown) == NUM_PROMPTS


def test_another_version_is_refused_and_nothing_is_no_spool(tmp_path):
    assert num_queries(tmp_path) is None
    with pytest.raises(OSError, match="No such file"):
        Spool(tmp_path)
    SpoolWriter().save(tmp_path, np.empty((0, 2), np.int64), 0)
    path = tmp_path / "spool" / "spool.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": SPOOL_VERSION + 1}))
    with pytest.raises(ValueError, match=f"of version {SPOOL_VERSION + 1}"):
        Spool(tmp_path)
