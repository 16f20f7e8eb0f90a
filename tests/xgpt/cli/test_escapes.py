"""What came from files or names never reaches a terminal as a command to it."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from job_folder import xgpt

from xgpt.core.visible import visible

ROOT = Path(__file__).resolve().parents[3]
EVIL = "x\x1b]0;owned\x07\x1b[31m\u202egpj\u2066\x9b2J\r"
FORBIDDEN = set("\x1b\x07\u202e\u2066\x9b\r")


def printed(*arguments: object) -> str:
    done = xgpt(*arguments)
    return done.stdout + done.stderr


def test_control_characters_are_shown_as_escapes_and_lines_stay_lines() -> None:
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
def test_a_job_file_does_not_write_to_the_terminal(tmp_path: Path, text: str,
                                                   command: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    assert not FORBIDDEN & set(printed(command, path, "--set", "search.max_seconds=1"))


def test_names_of_files_and_options_do_not_either(tmp_path: Path) -> None:
    folder = tmp_path / EVIL.replace("/", "")
    folder.mkdir()
    (folder / "job.yaml").write_text("model: opt-13b\n", encoding="utf-8")
    for arguments in (("schedule", folder / "job.yaml"), ("report", folder), ("status", folder),
                      ("stop", folder), (EVIL,), ("schedule", f"--{EVIL}"),
                      ("profile", "show", folder / "none.json"), ("models", EVIL),
                      ("schedule", folder / "none.yaml", "--set", f"{EVIL}=3")):
        assert not FORBIDDEN & set(printed(*arguments)), arguments


def test_what_a_model_folder_is_called_and_says_is_not_obeyed(tmp_path: Path) -> None:
    model = tmp_path / f"m{EVIL}"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": EVIL, "architectures": [EVIL]}))
    assert not FORBIDDEN & set(printed("models", model))


def test_every_command_prints_through_one_function() -> None:
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
