"""What is too long or too deep is an error record of its own line, and takes no memory."""

import io
import json
import tracemalloc
from pathlib import Path

import pytest

from xgpt.core.errors import InputError
from xgpt.requests import formats as lines
from xgpt.requests.reader import SeenIds, read_requests
from xgpt.requests.request import Request, RequestError
from xgpt.requests.request_files import RequestFiles


def read(path: Path) -> list[Request | RequestError]:
    return list(read_requests(RequestFiles(paths=(path,))))


@pytest.mark.parametrize("suffix", [".jsonl", ".txt", ".csv"])
def test_a_line_of_50_megabytes_costs_itself_alone(tmp_path, suffix):
    path, long = tmp_path / f"requests{suffix}", "x" * 50_000_000
    texts = {".jsonl": ['{"prompt": "a"}', json.dumps({"prompt": long}), '{"prompt": "b"}'],
             ".txt": ["a", long, "b"], ".csv": ["prompt", "a", long, "b"]}
    path.write_text("\n".join(texts[suffix]) + "\n")
    del long, texts
    tracemalloc.start()
    first, bad, last = read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(first, Request) and first.prompt == "a"
    assert isinstance(bad, RequestError) and "longer than 16 MiB" in bad.error
    assert isinstance(last, Request) and last.prompt == "b"
    assert last.line == bad.line + 1
    assert peak < 120e6, f"{peak / 1e6:.0f} MB"


def test_a_cell_of_50_megabytes_costs_its_row_alone(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "requests.parquet"
    pq.write_table(pa.table({"prompt": ["a", "x" * 50_000_000, "b"]}), path)
    first, bad, last = read(path)
    assert isinstance(first, Request) and isinstance(last, Request) and last.prompt == "b"
    assert isinstance(bad, RequestError) and "prompt is longer than 16 MiB" in bad.error


def test_an_array_beyond_what_is_held_in_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_ARRAY_BYTES", 2**20)
    path = tmp_path / "requests.json"
    path.write_text(json.dumps(["x" * 2**20]))
    with pytest.raises(InputError, match="more than 1 MiB: .*jsonl"):
        read(path)
    assert list(lines.read_text(io.BytesIO(b"x" * (2**24 + 2))))[0].record == lines._TOO_LONG


@pytest.mark.parametrize("value", ["[" * 500 + "]" * 500, '{"a":' * 500 + "1" + "}" * 500])
def test_what_is_nested_too_deeply_is_an_error_record(tmp_path, value):
    path = tmp_path / "requests.jsonl"
    path.write_text(f'{{"prompt": "a", "extra": {value}}}\n{{"prompt": "b"}}\n')
    bad, good = read(path)
    assert isinstance(bad, RequestError) and "nested more than 100 deep" in bad.error
    assert isinstance(good, Request)


@pytest.mark.parametrize("line", [
    {"prompt": "a", "id": "i" * 2000}, {"prompt": "a", "stop": ["s"] * 65},
    {"prompt": "a", "stop": "s" * 1001}, {"prompt": "a", "max_tokens": 2**63 - 1},
    {"prompt": "a", "top_k": 2**63 - 1}, {"prompt": "a", "forced_tokens": 2**63 - 1},
    {"prompt": "a", "seed": 2**63}, {"prompt": "a", "temperature": 1e300},
    {"prompt": "a", "temperature": float("inf")}, {"tokens": [2**63 - 1]},
    {"messages": [{"role": "r" * 10**6, "content": "a"}]}])
def test_every_number_and_text_of_a_request_has_a_range(tmp_path, line):
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps(line) + "\n")
    [bad] = read(path)
    assert isinstance(bad, RequestError) and len(bad.error) < 300, bad


def test_ids_are_told_apart_in_few_bytes_each():
    """16 bytes each, and as many of a column while some are sorted in; the last ones by themselves
    take more."""
    seen = SeenIds()
    tracemalloc.start()
    for line in range(1, 8_151):
        name = f"a rather long id of a request, number {line}"
        assert seen.place(name) is None
        seen.add(name, 0, line)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [seen.place(f"a rather long id of a request, number {n}") for n in (1, 8_150, 0)
            ] == [(0, 1), (0, 8_150), None]
    assert len(seen) == 8_150 and peak / 8_150 < 48, f"{peak / 8_150:.0f} bytes an id"
    seen, places = SeenIds(), [(0, 1), (0, 7), (2, 1), (2, 2), (5, 4)]
    for file, line in places:
        seen.add(f"{file}/{line}", file, line)
    assert [seen.place(f"{file}/{line}") for file, line in places] == places
    assert seen.place("1/1") is None
