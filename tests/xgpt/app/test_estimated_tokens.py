"""Where a model's tokenizer cannot be had, planning estimates tokens from characters, says so, and
keeps a margin for it; a run does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from job_folder import xgpt

from xgpt.app import opened as opening
from xgpt.app.opened import OpenedJob, open_file
from xgpt.core.errors import MissingExtraError, XgptError
from xgpt.core.workload import Request
from xrunner.checkpoint.source import find_model
from xrunner.io.estimated import SPREAD, CharacterTokens, estimated_tokens

TEXT = "What did the town library lend while its roof was being repaired? "
JOB = """
model: opt-125m
cluster: a40-4
workload: {requests: prompts.jsonl, output_tokens: {mean: 20, std: 5, max: 40}}
constraint: {latency_s: 2}
schedule: {policy: rra, encode_chunk: 0, replicas: 1, tp_degree: 1}
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    lines = [{"id": str(i), "prompt": TEXT * (1 + i % 4)} for i in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.setattr(opening, "find_model", unreachable())
    monkeypatch.setattr(opening, "model_at_hand", lambda name: None)
    return tmp_path / "job.yaml"


def unreachable(cause: XgptError | None = None) -> Callable[..., object]:
    def find(name: str, say: object) -> object:
        raise cause or XgptError(f"model {name!r} is not to be had: ConnectError")

    return find


def inputs_of(session: OpenedJob) -> list[int]:
    assert session.requests is not None and session.requests.input_tokens is not None
    found: list[int] = session.requests.input_tokens.tolist()
    return found


def test_lengths_are_estimated_and_it_is_said_in_words_and_in_the_object(job: Path) -> None:
    done = xgpt("schedule", job, "--json")
    assert done.returncode == 0, done.stderr
    assert "ConnectError" not in done.stderr
    said = " ".join(done.stderr.split())
    assert said.count("estimated from their characters") == 1 and "32% off either way" in said
    found = json.loads(done.stdout)
    assert "inputs: estimated from characters, which may be 32% off" in found["notes"]
    assert "since prompts' lengths are estimated from characters, 32% off" in found["margin_note"]


def test_every_query_has_its_own_estimate_and_the_margin_grows_with_the_doubt(job: Path) -> None:
    session = open_file(job)
    own = estimated_tokens(TEXT)
    assert own == round(len(TEXT) / 3.6)
    assert inputs_of(session)[:4] == [estimated_tokens(TEXT * n) for n in (1, 2, 3, 4)]
    assert session.problem.queries is not None and session.problem.input_error == SPREAD


@pytest.mark.parametrize("command", ["sweep", "simulate"])
def test_sweep_and_simulate_plan_by_the_estimate_too(job: Path, command: str) -> None:
    done = xgpt(command, job, *(("--set", "schedule.encode_batch=4", "--set",
                                 "schedule.decode_iterations=8") if command == "simulate" else
                                ("--set", "schedule.policy=ft")))
    assert done.returncode == 0, done.stderr
    assert "estimated from their characters" in " ".join(done.stderr.split())


def test_without_the_packages_it_is_said_which_command_brings_them(
        job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "find_model", unreachable(
        MissingExtraError("huggingface_hub", "run", "fetching a model")))
    done = xgpt("schedule", job)
    assert done.returncode == 0 and "pip install" in done.stderr, done.stderr


def test_a_run_never_takes_an_estimate(job: Path) -> None:
    with pytest.raises(XgptError, match="not to be had"):
        open_file(job, need="run")


def test_a_model_whose_shape_nothing_tells_is_refused_with_the_way_out(job: Path) -> None:
    done = xgpt("schedule", job, "--set", "model=someone/unheard-of")
    assert done.returncode == 1 and "folder with its config.json" in done.stderr


def test_a_folder_without_a_tokenizer_is_planned_too(
        job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = job.parent / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({
        "model_type": "opt", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
        "ffn_dim": 128, "vocab_size": 120, "max_position_embeddings": 512}))
    monkeypatch.setattr(opening, "find_model", find_model)
    session = open_file(job, [f"model={folder}"])
    assert session.problem.input_error == SPREAD
    assert inputs_of(session)[0] == estimated_tokens(TEXT)


def test_letters_outside_ascii_count_each_and_given_tokens_as_they_are() -> None:
    assert estimated_tokens("\u0430" * 10) == 10 and estimated_tokens("") == 1
    asked = [Request(line=1, id="a", tokens=(5, 6, 7)), Request(line=2, id="b", messages=(
        {"role": "user", "content": "x" * 36}, {"role": "user", "content": "y" * 35}))]
    assert [len(ids) for ids in CharacterTokens().tokenise(asked)] == [3, 20]
