"""Which requests a schedule can run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toys import spec_of

from xgpt.core.workload import Request
from xrunner.io.prepare import prepare
from xrunner.io.tokenizer import TextTokenizer
from xrunner.plan import RunPlan


@pytest.mark.parametrize(("most", "fitting"), [(None, 4), (9, 4), (5, 3), (2, 2)])
def test_an_input_that_the_encode_pool_cannot_hold_becomes_an_error_record(
        llama: tuple[Path, Any], tmp_path: Path, most: int | None, fitting: int) -> None:
    plan = RunPlan(
        name="toy", output=tmp_path, model_dir=llama[0], model_name="toy", served_by="test",
        requests=tmp_path / "requests.jsonl", is_chat=False, max_tokens=8, dtype="float32", seed=0,
        temperature=0.0, top_k=None, top_p=1.0, ignore_eos=False, threads_per_rank=1,
        query_kv_tokens=40)
    requests = [Request(index=i, line=i + 1, id=f"q{i}", tokens=(7,) * n)
                for i, n in enumerate((1, 9, 5, 2))]
    queries, errors = prepare(requests, TextTokenizer(llama[0]), plan, spec_of(llama[0]),
                              most_input_tokens=most)
    assert len(queries) == fitting
    assert [q.index for q in queries] == list(range(fitting))
    assert all(f"planned to encode {most}" in e.error for e in errors)
