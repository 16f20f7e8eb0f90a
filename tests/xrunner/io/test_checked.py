"""results.jsonl is checked, not counted: what was changed is told, what is left is kept, and what
is missing is run again."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_run import write_spool

from xgpt.core.spool import Record
from xrunner.io.results import Answered, ResultWriter, answered, count_results
from xrunner.query import FinishedQuery, PreparedQuery

COUNT = 8
Lines = list[bytes]
EDITS: list[tuple[Callable[[Lines], Lines], set[int], str]] = [
    (lambda all_: all_[:3] + all_[4:], {3}, "line 4 of results.jsonl is the result of query 4"),
    (lambda all_: all_[:4] + all_[3:], set(), "line 5 of results.jsonl is the result of query 3"),
    (lambda all_: [*all_[:3], all_[4], all_[3], *all_[5:]], set(), "the result of query 4"),
    (lambda all_: all_[::-1], set(), "line 1 of results.jsonl is the result of query 7"),
    (lambda all_: [*all_[:3], all_[3].replace("é".encode(), b"x"), *all_[4:]], {3},
     "line 4 of results.jsonl is no result of this job"),
    (lambda all_: [*all_[:3], b"\n", *all_[3:]], set(), "line 4 of results.jsonl is no result"),
    (lambda all_: [*all_[:3], bytes(len(all_[3])), *all_[4:]], {3, 4}, "no result of this job"),
    (lambda all_: [*all_[:3], all_[3][:30] + b"\n", *all_[4:]], {3}, "no result of this job"),
    (lambda all_: [*all_, all_[-1]], set(), "line 9 of results.jsonl is the result of query 7"),
    (lambda all_: [*all_[:-1], all_[-1].rstrip()], set(), ""),
    (lambda all_: [*all_[:-1], all_[-1][:30]], {7}, ""),
]


def finished(index: int, *, is_openai: bool, text: str = "so") -> FinishedQuery:
    query = PreparedQuery(index=index, id=f"é{index}", input_ids=(5, 6, 7), max_new_tokens=9,
                          is_openai=is_openai)
    return FinishedQuery(query=query, output_ids=(4, 5), finish_reason="stop", text=text,
                         encode_start_s=0.0, first_token_s=0.5, last_token_s=1.0)


def _of_no_second(lines: bytes) -> bytes:
    """Without the second in which each OpenAI answer was made."""
    return re.sub(rb'"created": \d+', b"", lines)


def writer_of(path: Path) -> ResultWriter:
    return ResultWriter(path, first_index=count_results(path), model="toy")


@pytest.mark.parametrize("is_openai", [False, True])
@pytest.mark.parametrize(("edit", "missing", "fault", "length"), [
    *((*edit, 9) for edit in EDITS), (*EDITS[0], 2**23)])  # the last beyond what is parsed
def test_what_was_changed_is_told_and_put_right(tmp_path, edit, missing, fault, length, is_openai):
    path = tmp_path / "results.jsonl"
    write_spool(tmp_path, [Record(id=f"é{i}", line=i + 1) for i in range(COUNT)])
    results = [finished(index, is_openai=is_openai, text="so " * (length // 3))
               for index in range(COUNT)]
    writer = writer_of(path)
    for result in results:
        writer.write(result)
    writer.close()
    whole = path.read_bytes()
    path.write_bytes(b"".join(edit(whole.splitlines(keepends=True))))
    found = answered(path)
    assert set(range(COUNT)) - set(range(found.written)) - found.held == missing
    assert fault in found.fault and bool(fault) == bool(found.fault)
    writer = writer_of(path)
    for index in sorted(missing):
        writer.write(results[index])
    writer.close()
    assert _of_no_second(path.read_bytes()) == _of_no_second(whole)
    assert answered(path) == Answered(COUNT, frozenset())
