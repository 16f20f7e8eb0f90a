"""A run none of whose queries has an answer ends with what is wrong, each time it is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="runs need the extra `run`")
import toys  # noqa: E402
from job_folder import read_lines, write_job, xgpt  # noqa: E402

POISON = 41  # a token whose embedding is finite, and whose layers' sums are not
SCHEDULE = "policy: rra, encode_batch: 2, decode_iterations: 3, tp_degree: 1"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: dict[str, str]) -> Path:
    for name in ("PYTHONPATH", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, cache[name])
    # by data sheets: whether the plan is good does not matter
    monkeypatch.setattr("xgpt.app.timing.why_no_torch", lambda kind: "nothing is measured")
    model = toys.make_model("gpt2-untied", tmp_path / "model")
    with torch.no_grad():
        model.transformer.wte.weight[POISON] = 3e38
    model.save_pretrained(tmp_path / "model")
    return write_job(tmp_path, tmp_path / "model", [
        {"id": f"q{n}", "tokens": [7, 8 + n, POISON], "max_tokens": 3} for n in range(3)],
        schedule=SCHEDULE, ranks=1)


def test_a_run_without_any_answer_fails_in_words_also_when_it_is_asked_for_again(
        job: Path) -> None:
    output = job.parent / "out"
    for _ in range(2):
        done = xgpt("submit", job, "--json")
        said = json.loads(done.stdout)
        assert done.returncode == said["exit_code"] == 1, (done.stdout, done.stderr)
        assert "none of the 3 queries has an answer" in said["error"]
        assert "logits not finite" in said["error"]
        assert (said["queries"], said["failed"]) == (3, 3) and "Traceback" not in done.stderr
        lines = read_lines(output / "results.jsonl")
        assert [line["id"] for line in lines] == ["q0", "q1", "q2"]
        assert all("logits not finite" in line["error"] for line in lines)
        assert json.loads((output / "metrics.json").read_text())["failed"] == 3
