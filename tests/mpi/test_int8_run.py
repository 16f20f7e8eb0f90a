"""A whole job of 8-bit products: the tokens of every layout are the same, and how far they are the
model's own is measured and said."""

import json
import subprocess

import pytest

pytest.importorskip("torch", reason="runs need the extra `run`")
import toys  # noqa: E402
from job_folder import XGPT, as_requests, read_lines, write_job  # noqa: E402

from xrunner.ops.int8 import is_int8_served  # noqa: E402

# with a profile of its own for each layout
pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.skipif(
    not is_int8_served(), reason="this processor has no VNNI")]


def test_a_job_says_how_far_its_tokens_are_the_models_own(tmp_path, cache):
    toys.make_model("llama", tmp_path / "model")
    queries, answers = toys.random_queries(12, seed=5), []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        job = write_job(folder, tmp_path / "model", as_requests(queries), ranks=ranks, schedule=(
            "policy: rra, encode_batch: 3, decode_iterations: 4, tp_degree: 1"))
        done = subprocess.run(
            [*XGPT, "submit", str(job), "--json", "--set", "run.weight_dtype=int8"],
            capture_output=True, text=True, env=cache, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        answers.append([row["output_ids"] for row in read_lines(folder / "out" / "results.jsonl")])
        agreement = json.loads(done.stdout)["agreement"]
        assert agreement["positions"] == sum(len(query.input_ids) for query in queries)
        assert 0 < agreement["agreeing"] <= agreement["positions"]
        said = " ".join(done.stderr.split())
        assert said.count("int8: the most likely next token is that of float32") == 2
    assert answers[0] == answers[1] and len(answers[0]) == 12
