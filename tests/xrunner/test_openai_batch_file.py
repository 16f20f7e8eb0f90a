"""A file of OpenAI's batch format through our own runner: every line is answered or refused as
OpenAI promises, and what is refused is only what the runner lacks, by name."""

import numpy as np
import pytest

pytest.importorskip("openai", reason="its types are in the extra `dev`")
import openai_batch  # noqa: E402
import toys  # noqa: E402
from given_runs import given, toy_plan  # noqa: E402
from replayed import problem_of  # noqa: E402
from replays import estimated  # noqa: E402

from xrunner.rank.loading import Shelf  # noqa: E402
from xrunner.rank.worker import work  # noqa: E402
from xrunner.rank.world import connect  # noqa: E402


def test_every_line_is_what_openai_promises(tmp_path):
    model, out, requests = tmp_path / "model", tmp_path / "out", tmp_path / "requests.jsonl"
    out.mkdir()
    openai_batch.write_model(model)
    openai_batch.write_lines(requests)
    problem = problem_of(model, np.array([[30, 12], [60, 60]]), 1)
    estimate = estimated("rra", problem, encode_batch=3, decode_iterations=4)
    given(estimate.changed(kv_tokens=20_000), problem, out / "schedule.json")
    plan = toy_plan(model, out, query_kv_tokens=256, is_chat=True)
    toys.write_spool(plan, requests)
    work(plan, connect("cpu"), Shelf())
    by_name = openai_batch.checked(out)
    openai_batch.check_plain(by_name)
    lacking = {"schema": "response_format", "choice": "structured_outputs",
               "pattern": "structured_outputs", "bias": "logit_bias", "call": "structured_outputs",
               "no schema": "response_format"}
    for name, key in lacking.items():
        assert key in openai_batch.why_not(by_name[name])
    # calls are not looked for: the answer is what the model wrote
    assert "tool_calls" not in openai_batch.choice_of(by_name["tools"])["message"]
