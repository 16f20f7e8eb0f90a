"""What came from files or names never reaches a terminal as a command to it."""

import ast
import json
from pathlib import Path

import pytest
from job_folder import xgpt

from xgpt.core.errors import visible

ROOT = Path(__file__).resolve().parents[3]
EVIL = "x\x1b]0;owned\x07\x1b[31m\u202egpj\u2066\x9b2J\r"
FORBIDDEN = set("\x1b\x07\u202e\u2066\x9b\r")


def printed(*arguments: object) -> str:
    done = xgpt(*arguments)
    return done.stdout + done.stderr


def test_control_characters_are_shown_as_escapes_and_lines_stay_lines():
    assert visible("a\x1b[1m\n\tb\u202e\x9b") == "a\\x1b[1m\n\tb\\u202e\\x9b"
    assert visible("\ud800\U000e0041") == "\\ud800\\U000e0041"
    assert visible("é 漢字 🙂") == "é 漢字 🙂"


@pytest.mark.parametrize("text", [
    f"model: {json.dumps(EVIL)}\ncluster: a40-4\nworkload: {{task: S}}\n",
    f"{json.dumps(EVIL)}: 3\nmodel: opt-13b\ncluster: a40-4\nworkload: {{task: S}}\n",
    f"model: opt-13b\ncluster: {json.dumps(EVIL)}\nworkload: {{task: S}}\n",
    f"name: {json.dumps(EVIL)}\nmodel: opt-13b\ncluster: a40-4\nworkload: {{task: S}}\n",
    f"model: opt-13b\ncluster: a40-4\nworkload: {{requests: {json.dumps(EVIL)}}}\n",
    f"model: opt-13b\ncluster: a40-4\nworkload: {{task: S}}\noutput: {json.dumps(EVIL)}\n",
    f"!{EVIL} x", "a: \x1b[31m\n", "a: &\x1b[31m b\n"])
@pytest.mark.parametrize("command", ["schedule", "run", "status", "report"])
def test_a_job_file_does_not_write_to_the_terminal(tmp_path, text, command):
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    assert not FORBIDDEN & set(printed(command, path, "--set", "search.max_seconds=1"))


def test_names_of_files_options_and_models_do_not_either(tmp_path):
    folder = tmp_path / EVIL.replace("/", "")
    folder.mkdir()
    (folder / "job.yaml").write_text("model: opt-13b\n", encoding="utf-8")
    for arguments in (("schedule", folder / "job.yaml"), ("report", folder), ("status", folder),
                      ("stop", folder), (EVIL,), ("schedule", f"--{EVIL}"),
                      ("profile", "show", folder / "none.json"), ("models", EVIL),
                      ("schedule", folder / "none.yaml", "--set", f"{EVIL}=3")):
        assert not FORBIDDEN & set(printed(*arguments)), arguments
    model = tmp_path / f"m{EVIL}"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": EVIL, "architectures": [EVIL]}))
    assert not FORBIDDEN & set(printed("models", model))


def test_every_command_prints_through_one_function():
    found = []
    for path in sorted((ROOT / "xgpt/cli").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and (
                    (isinstance(node.func, ast.Attribute) and node.func.attr in ("echo", "secho"))
                    or (isinstance(node.func, ast.Name) and node.func.id == "print")):
                found.append((path.name, ast.unparse(node.args[0])[:60]))
    # the progress line's own return and its visible text, JSON, a script for a shell, a fixed text
    assert {name for name, _ in found} <= {"terminal.py", "options.py", "completion.py", "main.py"}
    assert len([one for one in found if one[0] == "main.py"]) <= 2, found


NAME = EVIL.replace("/", "")  # of a file


@pytest.fixture(scope="module")
def job(tmp_path_factory, cache):
    """A job that has run: ids, columns, error records, and the names of all its files."""
    pytest.importorskip("torch", reason="runs need the extra `run`")
    import toys

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
        patch.setattr("xgpt.app.profile.why_no_torch", lambda kind: "nothing is measured")
        done = xgpt("submit", path)
    assert done.returncode == 0, done.stderr
    assert not FORBIDDEN & set(done.stdout + done.stderr), done
    assert "\\x1b" in done.stdout + done.stderr
    return path


@pytest.mark.parametrize("words", [
    ("submit", "JOB"), ("run", "JOB"), ("status", "JOB"), ("status", "OUT"),
    ("status", "JOB", "--json"), ("top", "OUT"), ("report", "OUT"),
    ("report", "OUT", "OUT"), ("stop", "OUT"),
    ("models", "--check", "MODEL"), ("models", EVIL), ("profile", "JOB", "--tp", EVIL),
    ("export", "JOB", "--to", EVIL), ("score", "JOB"),
    ("init", "OUT"), *(pytest.param(words, marks=pytest.mark.slow) for words in (
        ("schedule", "JOB"), ("simulate", "JOB"), ("sweep", "JOB"), ("doctor",)))],
    ids=lambda words: " ".join(words)[:40].encode("unicode_escape").decode())
def test_no_command_about_it_writes_to_the_terminal(words, job, cache, monkeypatch):
    for name in ("PYTHONPATH", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, cache[name])
    monkeypatch.chdir(job.parent)
    monkeypatch.setattr("xgpt.app.profile.why_no_torch", lambda kind: "nothing is measured")
    place = {"JOB": job, "OUT": job.parent / "out", "MODEL": job.parent / "model"}
    done = xgpt(*(place.get(word, word) for word in words))
    assert done.stdout + done.stderr and "Traceback" not in done.stderr
    assert not FORBIDDEN & set(done.stdout + done.stderr), done


def test_no_file_that_people_read_holds_what_would(job):
    output = job.parent / "out"
    read = [path for path in output.rglob("*") if path.suffix in {".html", ".json", ".jsonl"}
            and "model" not in path.parts]
    assert {"report.html", "results.jsonl", "errors.jsonl", "metrics.json"} <= {
        path.name for path in read}
    for path in read:
        text = path.read_text(encoding="utf-8")
        shown = "\x1b\x07\u202e\u2066\x9b\r" if path.suffix == ".html" else "\x1b\x07\r"
        assert not set(shown) & set(text), path.name
