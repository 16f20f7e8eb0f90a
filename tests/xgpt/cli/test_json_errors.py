"""`--json` prints one object on stdout however a command ends, beside the words on stderr."""

import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import pytest
from fake_run import write_fake_run
from job_folder import xgpt

from jobs import job_file
from xgpt.cli import main as entry
from xgpt.core.errors import InputError, Mistake, StoppedEarly, XgptError
from xgpt.launch.launcher import LocalLauncher, RankProgram
from xgpt.launch.stop_signals import STOP_SIGNALS

NO_ROOM = ("what is printed, or a file: No space left on device; once that is repaired, call it "
           "again")


def end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
        *arguments: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command line."""
    monkeypatch.setattr("sys.argv", ["xgpt", *map(str, arguments)])
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with pytest.raises(SystemExit) as left:
        entry.main()
    for number, handler in before.items():  # a process that was asked to stop ignores them
        signal.signal(number, handler)
    shown = capsys.readouterr()
    return int(str(left.value.code)), shown.out, shown.err


def test_a_deep_value_is_text(monkeypatch, tmp_path, capsys):
    deep = "[" * 400 + "]" * 400  # read, and more than copying it piece by piece would bear
    (tmp_path / "config.json").write_text(f'{{"model_type": "llama", "hidden_size": {deep}}}')
    code, out, _ = end(monkeypatch, capsys, "schedule", job_file(tmp_path, model=str(tmp_path)),
                       "--json")
    found = json.loads(out)
    values = [str(mistake["value"]) for mistake in found["mistakes"]]
    assert code == found["exit_code"] == 2 and any(
        value.startswith("[[[") and value.endswith("...") for value in values), values


@pytest.mark.parametrize("words", ["schedule", "schedul", "schedule job.yaml --fast"])
def test_what_click_refuses_is_an_object_too(monkeypatch, capsys, words):
    code, out, err = end(monkeypatch, capsys, *words.split(), "--json")
    found = json.loads(out)
    assert code == found["exit_code"] == 2 and found["error"] in err.replace("Error: ", "")


@pytest.mark.parametrize(("error", "code", "expected"), [
    (XgptError("the ranks failed"), 1, {"error": "the ranks failed", "mistakes": []}),
    (KeyError("x"), 1, {"error": "a bug of xgpt: KeyError: 'x'", "mistakes": []}),
    (click.Abort(), 75, {"status": "stopped", "message": "interrupted; the same command goes on"}),
    (InputError([Mistake(file="f", line=None, key="k", value=[float("inf")], allowed="less")]), 2,
     {"error": "f: k = [inf]: less", "mistakes": [
         {"file": "f", "line": None, "key": "k", "value": ["inf"], "allowed": "less"}]}),
    (StoppedEarly("go on"), 75, {"status": "stopped", "message": "go on"}),
])
def test_any_end_is_one_object(monkeypatch, error, code, expected, capsys):
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(entry, "cli", fail)
    got, out, err = end(monkeypatch, capsys, "submit", "job.yaml", "--json")
    assert got == code and json.loads(out) == {**expected, "exit_code": code} and err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT])
def test_a_signal_while_the_command_is_imported_says_so(number, monkeypatch, tmp_path, capsys):
    """It ended the process without a word."""
    before = signal.getsignal(number)
    if before is signal.SIG_IGN:
        pytest.skip("ignored here, as under nohup, which the command respects")

    def import_slowly(place: str) -> click.Command:
        assert place == "xgpt.cli.run:submit"
        if callable(signal.getsignal(number)):  # else it would end the tests
            os.kill(os.getpid(), number)
        pytest.fail("it is not heard")

    monkeypatch.setattr(entry, "load_row", import_slowly)
    code, out, err = end(monkeypatch, capsys, "submit", job_file(tmp_path), "--json")
    said = json.loads(out)
    assert code == said["exit_code"] == 75 and said["status"] == "stopped"
    assert f"{number.name} came while no ranks were at work" in said["message"]
    assert "Traceback" not in err


# From the moment on at which a module is looked for, signals come without end.
STORM = """
import os, signal, sys, threading, time

def send(first):
    while True:
        for number in (first, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
            time.sleep(.0005)

class Sending:
    def find_spec(self, name, *rest):
        if name == "{module}":
            threading.Thread(target=send, args=({first},), daemon=True).start()
            time.sleep(.1)

sys.meta_path.insert(0, Sending())
sys.argv = ["xgpt", "{command}", {job!r}]
from xgpt.__main__ import main
main()
"""

@pytest.mark.parametrize(("first", "command", "module"), [
    (signal.SIGINT, "submit", "xgpt.cli.run"), (signal.SIGTERM, "submit", "xgpt.app.schedule"),
    (signal.SIGINT, "submit", "xgpt.app.schedule"), (signal.SIGHUP, "sweep",
                                                     "xgpt.app.sweeps.sweep")])
def test_signals_after_the_first_change_nothing(first, command, module, tmp_path):
    job = job_file(tmp_path, model="opt-125m", cluster="local")
    program = STORM.format(first=int(first), command=command, module=module, job=str(job))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          check=False, timeout=60)
    assert done.returncode == 75, done.stderr
    assert "the same command goes on" in " ".join(done.stderr.split())


@pytest.mark.parametrize(("number", "words", "code"), [
    (signal.SIGINT, ("models", "--json"), 0), (signal.SIGUSR1, ("models", "x"), 2)])
def test_a_signal_once_all_is_told_does_not_take_the_exit_code(number, words, code):
    # at its end the interpreter calls what is registered here, as late as a signal may come
    program = (f"import atexit, os, sys; atexit.register(os.kill, os.getpid(), {int(number)})\n"
               f"sys.argv = ['xgpt', *{words!r}]\n"
               "from xgpt.cli.main import main; main()")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          check=False)
    assert done.returncode == code and (done.stdout if code == 0 else done.stderr)
    assert "Traceback" not in done.stderr and "ignored" not in done.stderr


@pytest.mark.parametrize("words", [("models",), ("--help",)])
def test_no_room_for_what_is_printed_is_no_fault_of_xgpt(words):
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-m", "xgpt.cli.main", *words], stdout=full,
                              stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1, f"xgpt: {NO_ROOM}\n")


@pytest.mark.parametrize(("error", "words"), [
    (OSError(errno.ENOSPC, "No space left on device"), NO_ROOM),
    (OSError(errno.EROFS, "Read-only file system", "/kept/xgpt/models"),
     "/kept/xgpt/models: Read-only file system; once that is repaired, call it again, or set "
     "XDG_CACHE_HOME to another folder"),
    (OSError(errno.EACCES, "Permission denied", "/elsewhere/s.json"),
     "/elsewhere/s.json: Permission denied; once that is repaired, call it again")])
def test_a_file_system_that_refuses_is_no_fault_of_xgpt(monkeypatch, capsys, error, words):
    monkeypatch.setenv("XDG_CACHE_HOME", "/kept")

    def refused(**_: object) -> None:
        raise error

    monkeypatch.setattr(entry, "cli", refused)
    code, out, err = end(monkeypatch, capsys, "models", "--json")
    assert code == 1 and json.loads(out)["error"] == words and err == f"xgpt: {words}\n"


XGPT = [sys.executable, "-m", "xgpt"]
PLANNED = {"output": "résultat", "schedule": (
    "{policy: rra, encode_batch: 4, decode_iterations: 4, encode_chunk: 0, tp_degree: 1}")}
CONFIG = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
          "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
          "vocab_size": 256, "max_position_embeddings": 1024}
_WORDS = ("HOME", "XDG_CACHE_HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "PYTHONUTF8")


def call(*command: str | Path, **words: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name not in _WORDS}
    return subprocess.run([*map(str, command)], check=False, timeout=100,
                          env={**own, "XGPT_NATIVE": "off", **words}, capture_output=True,
                          text=True, encoding="utf-8")


# reads what root may read, and is nobody that the system knows
_NOBODY = ["setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups", "--inh-caps",
           "+dac_read_search", "--ambient-caps", "+dac_read_search"]


@pytest.fixture
def open_to_all():
    """Beside those of pytest, in which nobody else may look."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_a_user_without_a_home_has_a_folder_that_is_nobody_elses(open_to_all):
    if shutil.which("setpriv") is None or call(*_NOBODY, "true").returncode:
        pytest.skip("needs rights to be another user")
    open_to_all.chmod(0o777)
    words = {"TMPDIR": str(open_to_all)}
    for home in ({}, {"HOME": "/nonexistent"}):
        done = call(*_NOBODY, *XGPT, "models", **words, **home)
        assert done.returncode == 0, done.stderr
        assert f"{open_to_all}/xgpt-54321 is used instead" in done.stderr
    folder = open_to_all / "xgpt-54321"
    assert (folder.stat().st_uid, folder.stat().st_mode & 0o777) == (54321, 0o700)
    shutil.rmtree(folder)
    folder.mkdir(mode=0o777)  # another's
    done = call(*_NOBODY, *XGPT, "models", **words)
    assert done.returncode == 1 and "other users can use" in done.stderr


@pytest.mark.parametrize(("words", "more", "code"), [
    ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, [], 0),
    ({"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
     ["--set", "model=modèlé"], 2)])
def test_names_are_utf8_whatever_the_locale(tmp_path, words, more, code):
    model = tmp_path / "é" / "modèle"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    job = job_file(model.parent, "jöb", model="modèle", **PLANNED)
    done = call(*XGPT, "schedule", job, *more, XDG_CACHE_HOME=str(tmp_path), **words)
    assert done.returncode == code, done.stderr
    assert ("model = 'modèlé': unknown model" in done.stderr) == (code == 2)


def test_a_name_that_mpi_cannot_hold_is_refused(tmp_path):
    pytest.importorskip("mpi4py", reason="ranks need the extra `run`")
    program = RankProgram(module="surroundings", argument=tmp_path, count=2)
    assert "-launcher fork -rmk user" in " ".join(LocalLauncher().command(program))
    ranks = ("from pathlib import Path\n"
             "from xgpt.core.errors import InputError\n"
             "from xgpt.launch.launcher import RankProgram\n"
             "from xgpt.launch.launcher import LocalLauncher\n"
             "try: LocalLauncher().run(RankProgram(module='x', argument=Path(), count=2), "
             "watch=lambda: None)\nexcept InputError as error: print(error)")
    done = call("unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', "h" * 64,
                sys.executable, "-c", ranks, HOME=str(tmp_path))
    if "unshare failed" in done.stderr:
        pytest.skip("needs rights to give a process another host's name")
    assert "at most 63 characters" in done.stdout, done.stderr


# The corpus of wrong commands (wrong_commands.txt): each ends with its exit code, in words that say
# what is allowed, prints nothing on stdout and leaves no file.


ROWS = [tuple(part.strip() for part in line.split(" | "))
        for line in Path(__file__).with_name("wrong_commands.txt").read_text("utf-8").splitlines()
        if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    job_file(folder, constraint="{latency_s: 11.5}")
    (folder / "folder").mkdir()
    (folder / "prompts.csv").write_text("id,prompt\n1,Why?\n")
    (folder / "bare.csv").write_text("nr,question\n")
    (folder / "empty.jsonl").touch()
    write_fake_run(folder / "run", num_queries=2)
    return folder


@pytest.mark.parametrize(("command", "code", "said"), ROWS, ids=[row[0][:60] for row in ROWS])
def test_a_wrong_command_ends_in_words(folder, monkeypatch, command, code, said):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = sorted(folder.rglob("*"))
    words = ["a" * 300 if word == "LONG" else word for word in shlex.split(command)]
    done = xgpt(*words)
    told = " ".join(done.stderr.split())
    assert (done.returncode, done.stdout) == (int(code), ""), told
    assert all(words in told for words in said.split(" / ")), told
    assert "Traceback" not in told and "bug of xgpt" not in told
    assert sorted(folder.rglob("*")) == before


def test_a_run_before_any_plan_names_submit(tmp_path):
    path = job_file(tmp_path, model="smollm2-135m", cluster="local", run="{weights: random}")
    done = xgpt("run", path)
    assert done.returncode == 2 and "none yet: `xgpt submit` plans and runs it" in done.stderr


def test_five_mistakes_are_five_lines_and_as_many_objects(tmp_path):
    path = job_file(tmp_path, model="opt-13c", cluster="a40-5", constraint="{latency_s: -1}",
                    workload="{requests: {count: 0}, task: S}", schdule="auto")
    done = xgpt("schedule", path)
    assert done.returncode == 2 and done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    keys = ("model", "cluster", "workload.requests.count", "constraint.latency_s", "schdule")
    lines = [path.read_text().splitlines().index(line) + 1 for key in keys for line in
             path.read_text().splitlines() if line.startswith(key.partition(".")[0])]
    assert sorted(zip(lines, keys, strict=True)) == sorted(
        (mistake["line"], mistake["key"]) for mistake in json.loads(
            xgpt("schedule", path, "--json").stdout)["mistakes"])
    for line, key in zip(lines, keys, strict=True):
        assert any(f"job.yaml:{line}: {key}" in error for error in errors), (key, errors)
    assert len(errors) == 5 and "did you mean 'opt-13b'" in done.stderr
