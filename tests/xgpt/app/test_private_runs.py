"""`run.private`, secrets, and what of a model's folder is trusted, on a real run of a toy."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import toys  # noqa: E402
from job_folder import read_lines, write_job, xgpt  # noqa: E402

from jobs import job as job_of
from xgpt.app import submit as compiling

torch = pytest.importorskip("torch", reason="runs need the extra `run`")

from xgpt.core.errors import InputError  # noqa: E402
from xrunner.checkpoint.tensors import check_weights  # noqa: E402

SECRET = "hf_" + "PlantedSecretOfTheTests" * 2
SCHEDULE = "policy: rra, encode_batch: 2, decode_iterations: 3, tp_degree: 1"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("private-llama")
    toys.make_model("llama", directory)
    return directory


def test_a_private_runs_files_are_its_users_alone_and_hold_no_secret(
        model, tmp_path, monkeypatch, cache):
    for name in ("PYTHONPATH", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, cache[name])
    # by data sheets: whether the plan is good does not matter
    monkeypatch.setattr("xgpt.app.profile.why_no_torch", lambda kind: "nothing is measured")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, SECRET)
    before = os.umask(0o022)
    try:
        job = write_job(tmp_path, model, [{"tokens": [7, 8, 9], "max_tokens": 3}] * 3,
                        schedule=SCHEDULE, ranks=1)
        text = job.read_text(encoding="utf-8").replace("run: {", "run: {private: true, ", 1)
        assert "private" in text
        job.write_text(text, encoding="utf-8")
        done = xgpt("submit", job, "--json")
    finally:
        os.umask(before)
    assert done.returncode == 0, done.stderr
    output = tmp_path / "out"
    files = [path for path in output.rglob("*") if path.is_file()]
    assert len(files) > 5 and stat.S_IMODE(output.stat().st_mode) == 0o700
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
        assert SECRET.encode() not in path.read_bytes(), path
    assert SECRET not in done.stdout + done.stderr


def test_pickled_weights_are_refused_unless_they_are_asked_for(model, tmp_path):
    from safetensors.torch import load_file

    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    torch.save(load_file(model / "model.safetensors"), tmp_path / "pytorch_model.bin")
    spec = toys.spec_of(tmp_path)
    with pytest.raises(InputError, match=r"pytorch_model\.bin.*can run code.*pickles: true"):
        check_weights(tmp_path, spec)
    check_weights(tmp_path, spec, may_unpickle=True)


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_an_index_names_files_of_its_own_folder_alone(model, tmp_path, file):
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(
        {"weight_map": {"model.norm.weight": file}}))
    with pytest.raises(InputError, match="the name of a file of this folder"):
        check_weights(tmp_path, toys.spec_of(tmp_path))


def test_transformers_is_never_told_to_trust_a_folder():
    import ast

    calls: list[Any] = []
    root = Path(__file__).resolve().parents[3]
    for path in (path for package in ("xgpt", "xrunner", "xprofiler", "benchmarks") for path in
                 (root / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and (
                    node.func.attr in ("from_pretrained", "from_config")):
                trust = [k.value for k in node.keywords if k.arg == "trust_remote_code"]
                calls.append((path.name, node.lineno, trust))
    assert calls
    for name, line, trust in calls:
        assert trust and getattr(trust[0], "value", None) is False, f"{name}:{line}"


POISON = 41  # a token whose embedding is finite, and whose layers' sums are not


@pytest.fixture
def job(tmp_path, monkeypatch, cache):
    for name in ("PYTHONPATH", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, cache[name])
    # by data sheets: whether the plan is good does not matter
    monkeypatch.setattr("xgpt.app.profile.why_no_torch", lambda kind: "nothing is measured")
    model = toys.make_model("gpt2-untied", tmp_path / "model")
    with torch.no_grad():
        model.transformer.wte.weight[POISON] = 3e38
    model.save_pretrained(tmp_path / "model")
    return write_job(tmp_path, tmp_path / "model", [
        {"id": f"q{n}", "tokens": [7, 8 + n, POISON], "max_tokens": 3} for n in range(3)],
        schedule=SCHEDULE, ranks=1)


def test_a_run_without_any_answer_fails_in_words_also_when_it_is_asked_for_again(job):
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


# A compiler that says when it is at work, and never ends by itself.
SLOW = """#!/bin/sh
case "$1" in --version) echo slow 1; exit;; esac
while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2" && : > "$AT_WORK"; shift; done
sleep 600
"""

@pytest.mark.parametrize(("cluster", "is_compiled"), [("local", True), ("a40-4", False)])
def test_operators_are_compiled_beside_the_beginning_of_a_run_on_this_machine(
        tmp_path, monkeypatch, cluster, is_compiled):
    asked: list[Path] = []
    monkeypatch.setattr(compiling, "start_compiling", asked.append)
    monkeypatch.setattr(compiling, "cache_dir", lambda: tmp_path)
    compiling.begin_compiling(job_of(tmp_path, model="opt-125m", cluster=cluster))
    assert asked == [tmp_path / "native"] * is_compiled


@pytest.mark.parametrize(("end", "code"), [
    ("raise SystemExit(2)", 2), ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL)])
def test_a_command_that_ends_before_the_compiler_ends_it_and_leaves_no_file(
        tmp_path, monkeypatch, end, code):
    compiler, at_work = tmp_path / "slow", tmp_path / "at_work"
    compiler.write_text(SLOW, encoding="utf-8")
    compiler.chmod(0o755)
    for name, value in (("CXX", str(compiler)), ("AT_WORK", str(at_work)), ("XGPT_NATIVE", ""),
                        ("XGPT_NATIVE_LEVELS", "all"), ("TMPDIR", str(tmp_path / "tmp"))):
        monkeypatch.setenv(name, value)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "native").mkdir()
    command = f"""
import os
import signal
import time
from pathlib import Path
from xgpt.app.submit import start_compiling
print(start_compiling(Path({str(tmp_path / "native")!r})).pid, flush=True)
while not Path({str(at_work)!r}).exists():
    time.sleep(0.01)
{end}
"""
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert _are_gone(int(done.stdout)), "its compilers too"
    assert [path.suffix for path in (tmp_path / "native").iterdir()] == [".lock"]
    assert not list((tmp_path / "tmp").iterdir())


def _are_gone(group: int) -> bool:
    for _ in range(500):
        states = subprocess.run(["ps", "-o", "stat=", "-s", str(group)], capture_output=True,
                                text=True, check=False).stdout.split()
        if all(state.startswith("Z") for state in states):
            return True
        time.sleep(0.01)
    return False
