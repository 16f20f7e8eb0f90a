"""Where a model's tokenizer cannot be had, planning estimates tokens from characters, says so, and
keeps a margin for it; a run does not."""

import io
import json
from collections.abc import Callable

import pytest
from job_folder import xgpt
from runs import Told

from jobs import job as job_of
from jobs import job_file
from xgpt.app import opened_job as opening
from xgpt.app.opened_job import OpenedJob, open_file, open_job
from xgpt.core.errors import InputError, XgptError
from xgpt.job.job_file import load_job
from xgpt.requests.request import Request
from xgpt.run_folder.files import KEPT_FILE, standard_input
from xrunner.checkpoint.source import find_model
from xrunner.files.runnable import SPREAD, CharacterTokens, estimated_tokens

TEXT = "What did the town library lend while its roof was being repaired? "

@pytest.fixture
def job(tmp_path, monkeypatch):
    lines = [{"id": str(i), "prompt": TEXT * (1 + i % 4)} for i in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job_file(tmp_path, model="opt-125m", constraint="{latency_s: 2}", workload=(
        "{requests: prompts.jsonl, output_tokens: {mean: 20, std: 5, max: 40}}"),
        schedule="{policy: rra, encode_chunk: 0, replicas: 1, tp_degree: 1}")
    monkeypatch.setattr(opening, "find_model", unreachable())
    monkeypatch.setattr(opening, "model_at_hand", lambda name: None)
    return tmp_path / "job.yaml"


def unreachable(cause: XgptError | None = None) -> Callable[..., object]:
    def find(name: str, say: object) -> object:
        raise cause or XgptError(f"model {name!r} is not to be had: ConnectError")

    return find


def inputs_of(session: OpenedJob) -> list[int]:
    found: list[int] = session.requests.input_tokens.tolist()
    return found


def test_lengths_are_estimated_with_a_margin_and_it_is_said(job):
    done = xgpt("schedule", job, "--json", "--verbose")
    assert done.returncode == 0, done.stderr
    assert "ConnectError" not in done.stderr
    said = " ".join(done.stderr.split())
    assert said.count("estimated from their characters") == 1 and "32% off either way" in said
    found = json.loads(done.stdout)
    assert "inputs: estimated from characters, which may be 32% off" in found["notes"]
    assert ("for input lengths (estimated from characters, 32% off)"
            in found["margin"]["note"])
    session = open_file(job)
    own = estimated_tokens(TEXT)
    assert own == round(len(TEXT) / 3.6)
    assert inputs_of(session)[:4] == [estimated_tokens(TEXT * n) for n in (1, 2, 3, 4)]
    assert session.problem.queries is not None and session.problem.input_error == SPREAD


def test_a_run_never_takes_an_estimate_nor_a_plan_without_a_shape(job):
    with pytest.raises(XgptError, match="not to be had"):
        open_file(job, need="run")
    done = xgpt("schedule", job, "--set", "model=someone/unheard-of")
    assert done.returncode == 1 and "folder with its config.json" in done.stderr


def test_a_folder_without_a_tokenizer_is_planned_too(job, monkeypatch):
    folder = job.parent / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({
        "model_type": "opt", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
        "ffn_dim": 128, "vocab_size": 120, "max_position_embeddings": 512}))
    monkeypatch.setattr(opening, "find_model", find_model)
    session = open_file(job, [f"model={folder}"])
    assert session.problem.input_error == SPREAD
    assert inputs_of(session)[0] == estimated_tokens(TEXT)


def test_letters_outside_ascii_count_each_and_given_tokens_as_they_are():
    assert estimated_tokens("\u0430" * 10) == 10 and estimated_tokens("") == 1
    asked = [Request(line=1, id="a", tokens=(5, 6, 7)), Request(line=2, id="b", messages=(
        {"role": "user", "content": "x" * 36}, {"role": "user", "content": "y" * 35}))]
    assert [len(ids) for ids in CharacterTokens().tokenise(asked)] == [3, 20]


LINES = b'{"tokens": [1, 2, 3]}\n{"tokens": [4]}\nbad\n'


@pytest.fixture
def piped(tmp_path):
    return job_of(tmp_path, output="out", workload=(
        "{requests: '-', output_tokens: {mean: 5, std: 1, max: 9}}"))


def comes(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw)))


def test_it_is_read_once_however_often_the_job_is_opened(piped, monkeypatch):
    comes(monkeypatch, LINES)
    for _ in range(2):
        requests = open_job(piped, Told(), "lengths").requests
        assert requests.input_tokens.tolist() == [3, 1] and len(requests.bad_lines) == 1
    assert not piped.output.exists()


def test_a_run_keeps_it_and_goes_on_without(piped, monkeypatch):
    comes(monkeypatch, LINES)
    assert standard_input(piped, Told(), is_kept=True).seek(0, 2) == len(LINES)
    assert (piped.output / KEPT_FILE).read_bytes() == LINES
    told, digests = Told(), []
    for raw in (b"", LINES):
        comes(monkeypatch, raw)
        requests = open_job(piped, told, "lengths").requests
        digests.append(requests.digest)
    assert digests[0] == digests[1]
    assert sum("nothing came on standard input" in line for line in told.lines) == 1
    comes(monkeypatch, b'{"tokens": [9]}\n')
    other = open_job(piped, told, "lengths").requests
    assert other is not None and other.digest != digests[0]


class Typed(io.BytesIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("stream", "said"), [
    (io.BytesIO(), r"cat prompts.jsonl \| xgpt submit"), (None, r"cat prompts.jsonl \| xgpt"),
    (Typed(LINES), "nothing came"),  # a terminal is not waited for
    (io.BytesIO(b"What is it?\n"), "standard input.*format: text")])
def test_what_holds_no_requests_is_wrong_input(piped, monkeypatch, stream, said):
    monkeypatch.setattr("sys.stdin", stream and io.TextIOWrapper(stream))
    with pytest.raises(InputError, match=said):
        open_job(piped, Told(), "run")


def test_files_without_a_request_say_what_may_be_meant(piped, tmp_path):
    path = tmp_path / "prompts.jsonl"
    for content, said in (("What is it?\n", "line 1: not JSON.*format: text"), ("\n", "is empty")):
        path.write_text(content)
        with pytest.raises(InputError, match=said):
            open_job(load_job(piped.source, ["workload.requests=prompts.jsonl"]), Told(), "lengths")
