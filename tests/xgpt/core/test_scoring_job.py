"""A job that scores continuations, as its file says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from xgpt.core.errors import InputError
from xgpt.core.job_file import load_job


def test_a_job_that_scores_encodes_whole_inputs_by_our_own_engine(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"prompt": "a", "continuation": " b"}\n')
    path = tmp_path / "job.yaml"
    path.write_text("model: opt-13b\ncluster: a40-4\nworkload: {requests: r.jsonl, score: true}\n")
    job = load_job(path)
    assert job.schedule.policies == ("rra",) and job.schedule.encode_chunk == 0
    assert not job.workload.chat and job.workload.output_tokens.maximum == 1
    for override, key in (("schedule.policy=waa-c", "schedule.policy"),
                          ("workload.max_tokens=3", "workload.max_tokens"),
                          ("run.engine=vllm", "run"),
                          ("workload.requests={count: 3}", "workload.requests")):
        with pytest.raises(InputError) as caught:
            load_job(path, (override,))
        assert key in [mistake.key for mistake in caught.value.mistakes], override
