"""Every command that writes where it is told refuses a place for nothing before it computes, in a
line with the path and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from xgpt.cli.main import cli, main
from xgpt.core.errors import InputError

JOB = "model: opt-13b\ncluster: a40-4\nworkload: {requests: {count: 9}, task: S}\n"
# nothing is read or computed before: there is no such profile, folder, or file of prompts
COMMANDS = {
    "schedule": ("schedule", "JOB", "--out", "PATH"),
    "timeline": ("simulate", "JOB", "--timeline", "PATH.html"),
    "sweep": ("sweep", "JOB", "--bounds", "9", "--out", "PATH"),
    "export": ("export", "JOB", "--to", "jobset", "--image", "i", "--out", "PATH"),
    "init": ("init", "PATH", "--yes", "--prompts", "none.txt"),
    "plots": ("profile", "show", "none.json", "--plots", "PATH"),
    "merge": ("profile", "merge", "none.json", "none.json", "--out", "PATH"),
    "profile": ("profile", "JOB", "--set", "cluster=local", "--out", "PATH"),
    "page": ("report", ".", "--out", "PATH"),
    "pictures": ("report", ".", "--format", "png", "--out", "PATH")}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_place_where_nothing_can_be_written_is_refused_at_once(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)
    arguments = [one.replace("JOB", "job.yaml").replace("PATH", "/proc/none")
                 for one in COMMANDS[command]]
    result = CliRunner().invoke(cli, arguments)
    assert isinstance(result.exception, InputError), result.output
    (mistake,) = result.exception.mistakes
    assert str(mistake.value).startswith("/proc/none") and "can be written to: No such file" in (
        mistake.allowed)


def test_a_name_that_is_too_long_for_a_file_is_no_fault_of_xgpt(
        capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["xgpt", "schedule", "a" * 300])
    with pytest.raises(SystemExit):
        main()
    told = capsys.readouterr().err
    assert "File name too long" in told and "fault of xgpt" not in told
