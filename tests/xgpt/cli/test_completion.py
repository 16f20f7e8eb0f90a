"""What a shell proposes: commands, job files, keys of `--set` and the names of the catalog."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from xgpt.cli.main import cli
from xgpt.cli.options import KEYS

ROOT = Path(__file__).resolve().parents[3]


def proposed(*words: str) -> list[str]:
    """For the last word, after those before it."""
    shell = ShellComplete(cli, {}, "xgpt", "_XGPT_COMPLETE")
    return [item.value for item in shell.get_completions(list(words[:-1]), words[-1])]


def test_commands_and_keys_and_catalog_names() -> None:
    assert {"schedule", "submit"} <= set(proposed("s")) and "models" in proposed("mo")
    assert proposed("schedule", "job.yaml", "--set", "constraint.la") == ["constraint.latency_s="]
    assert "model=opt-13b" in proposed("schedule", "job.yaml", "--set", "model=opt-1")
    assert "cluster=local" in proposed("schedule", "job.yaml", "--set", "cluster=")
    assert "schedule.policy=rra" in proposed("submit", "job.yaml", "--set", "schedule.policy=")
    assert "run.weight_dtype=int8" in proposed("run", "job.yaml", "--set", "run.weight_dtype=")
    assert proposed("run", "job.yaml", "--set", "run.seed=") == []


def test_job_files_and_folders_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs").mkdir()
    for name in ("a.yaml", "jobs/b.yml", "jobs/notes.txt", ".hidden.yaml"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    assert proposed("schedule", "") == ["a.yaml", "jobs/"]
    assert proposed("submit", "jobs/") == ["jobs/b.yml"]
    assert proposed("status", "nowhere/") == []


def test_every_key_that_is_proposed_is_documented() -> None:
    documented = (ROOT / "docs" / "job-file.md").read_text("utf-8")
    assert not [key for key in KEYS if f"`{key}`" not in documented and not (
        key.startswith("schedule.") and f"`{key.removeprefix('schedule.')}`" in documented)]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_is_told_how(shell: str) -> None:
    shown = CliRunner().invoke(cli, ["completion", shell], catch_exceptions=False)
    assert shown.exit_code == 0 and "_XGPT_COMPLETE" in shown.stdout
    if (path := shutil.which(shell)) is not None:
        flags = ["-n"] if shell != "fish" else ["--no-execute"]
        done = subprocess.run([path, *flags], input=shown.stdout, text=True, capture_output=True,
                              check=False)
        assert done.returncode == 0, done.stderr
