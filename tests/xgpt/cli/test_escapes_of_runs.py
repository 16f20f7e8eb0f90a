"""A job whose folder, ids, keys and texts would command a terminal: no command about it does so,
and no file that people read holds what would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs need the extra `run`")
import toys  # noqa: E402
from job_folder import xgpt  # noqa: E402
from test_escapes import EVIL, FORBIDDEN  # noqa: E402

from xgpt.app.report import run_markdown  # noqa: E402
from xgpt.report.output import read_output  # noqa: E402

NAME = EVIL.replace("/", "")  # of a file


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, cache: dict[str, str]) -> Path:
    """A job that has run: ids, columns, error records, and the names of all its files."""
    folder = tmp_path_factory.mktemp("escapes") / NAME
    model = folder / "model"
    model.mkdir(parents=True)
    toys.make_model("llama", model)
    lines = [{"id": f"a{EVIL}", "tokens": [7, 8], "max_tokens": 3, f"k{EVIL}": EVIL},
             {"id": f"b{EVIL}", "tokens": [7, 999_999]}, {f"c{EVIL}": 1}, {"prompt": EVIL}]
    (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = folder / f"j{NAME}.yaml"  # within it such names are refused
    path.write_text(
        "model: model\ncluster: local\nworkload: {requests: requests.jsonl, output_tokens: "
        "{mean: 2, std: 1, max: 4}}\nschedule: {policy: rra, encode_batch: 1, "
        "decode_iterations: 2, tp_degree: 1}\nrun: {ranks: 1, dtype: float32, "
        "threads_per_rank: 1}\noutput: out\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PYTHONPATH", "XDG_CACHE_HOME"):
            patch.setenv(name, cache[name])
        # by data sheets: whether the plan is good does not matter
        patch.setattr("xgpt.app.timing.why_no_torch", lambda kind: "nothing is measured")
        done = xgpt("submit", path)
    assert done.returncode == 0, done.stderr
    assert not FORBIDDEN & set(done.stdout + done.stderr), done
    assert "\\x1b" in done.stdout + done.stderr
    return path


@pytest.mark.parametrize("words", [
    ("submit", "JOB"), ("run", "JOB"), ("status", "JOB"), ("status", "OUT"),
    ("status", "JOB", "--json"), ("top", "OUT"), ("report", "OUT"),
    ("report", "OUT", "OUT"), ("stop", "OUT"),
    ("models", "--check", "MODEL"), ("models", EVIL), ("profile", "JOB", "--budget", EVIL),
    ("export", "JOB", "--to", EVIL), ("score", "JOB"),
    ("init", "OUT"), *(pytest.param(words, marks=pytest.mark.slow) for words in (
        ("report", "OUT", "--format", "md"), ("schedule", "JOB"), ("simulate", "JOB"),
        ("sweep", "JOB"), ("doctor",)))],
    ids=lambda words: " ".join(words)[:40].encode("unicode_escape").decode())
def test_no_command_about_it_writes_to_the_terminal(words: tuple[str, ...], job: Path,
                                                    cache: dict[str, str],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, cache[name])
    monkeypatch.chdir(job.parent)
    monkeypatch.setattr("xgpt.app.timing.why_no_torch", lambda kind: "nothing is measured")
    place = {"JOB": job, "OUT": job.parent / "out", "MODEL": job.parent / "model"}
    done = xgpt(*(place.get(word, word) for word in words))
    assert done.stdout + done.stderr and "Traceback" not in done.stderr
    assert not FORBIDDEN & set(done.stdout + done.stderr), done


def test_no_file_that_people_read_holds_what_would(job: Path) -> None:
    output = job.parent / "out"
    (output / "without pictures.md").write_text(run_markdown(read_output(output), ()))
    read = [path for path in output.rglob("*") if path.suffix in {".html", ".md", ".json", ".jsonl"}
            and "model" not in path.parts]
    assert {"report.html", "results.jsonl", "errors.jsonl", "metrics.json",
            "without pictures.md"} <= {path.name for path in read}
    for path in read:
        text = path.read_text(encoding="utf-8")
        shown = "\x1b\x07\u202e\u2066\x9b\r" if path.suffix in {".html", ".md"} else "\x1b\x07\r"
        assert not set(shown) & set(text), path.name
