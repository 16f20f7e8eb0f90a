"""The examples of the documents: job files load, planning commands run, and every command and
option that a page names is one that there is. (docs/python.md: tests/xgpt/app/test_library.py.)"""

import re
import shlex
import textwrap
from pathlib import Path

import click
import pytest
import yaml
from job_folder import xgpt

from xgpt.cli.main import cli
from xgpt.job.job_file import load_job

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "jobs" / "README.md"])
FILES = dict(re.findall(r"Save\s+this\s+as\s+`([\w.]+)`:\n\n```\w+\n(.*?)```", TUTORIAL, re.S))
COMMANDS = re.findall(r"^\$ (xgpt .+)$", TUTORIAL, re.M)
PLANNED = [command for command in COMMANDS if "elsewhere.yaml" in command]
NAMES = {*cli.list_commands(click.Context(cli))}
_COMMAND = re.compile(r"(?<![\w/.-])xgpt +([a-z][\w-]*)((?: +[^`\n|]+)?)")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """One with the tutorial's files in it, and in which its commands are called."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_tutorial_has_files_and_commands():
    assert {"small.yaml", "bounded.yaml", "elsewhere.yaml", "slurm.yaml"} <= {*FILES}
    assert len(PLANNED) == 3


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".yaml")])
def test_a_job_of_the_tutorial_loads(folder, name):
    assert load_job(folder / name).workload is not None


@pytest.mark.parametrize("command", PLANNED)
def test_a_planning_command_of_the_tutorial_runs(folder, command):
    done = xgpt(*shlex.split(command)[1:])
    assert done.returncode == 0, done.stderr
    if "sweep" in command:  # its table stands on the page
        (table,) = re.findall(r"^    limit +best.*?(?=\n\n)", TUTORIAL, re.M | re.S)
        shown, printed = rows_of(table), rows_of(done.stdout)
        assert len(shown) == 4 and printed[0] == shown[0]
        # which of several schedules that are as good is taken, is no promise
        for (limit, own), (again, others) in zip(shown[1:], printed[1:], strict=True):
            assert limit == again
            assert float(own.split()[0]) == pytest.approx(float(others.split()[0]), rel=0.03)


def rows_of(printed: str) -> list[list[str]]:
    """(limit, requests/s and policy) of each row of a sweep's table, and their titles."""
    rows = [re.split(r"  +", line.strip())[:2] for line in printed.splitlines()]
    return [row for row in rows if len(row) == 2 and (row[0] in ("limit", "none") or (
        row[0].endswith(" s")))]


def test_the_tutorial_s_first_job_is_written(folder):
    (command,) = [each for each in COMMANDS if each.startswith("xgpt init")]
    done = xgpt(*shlex.split(command)[1:])
    assert done.returncode == 0, done.stderr
    assert load_job(folder / "job.yaml").output == folder / "out" / "reviews"


def options_of(words: list[str]) -> tuple[set[str], list[str]]:
    """(options of the command that these words call, the words after it)"""
    command: click.Command = cli
    while words and isinstance(command, click.Group):
        following = command.get_command(click.Context(command), words[0])
        if following is None:
            break
        command, words = following, words[1:]
    named = {option for parameter in command.params for option in parameter.opts}
    if isinstance(command, click.Group):  # the rest of `xgpt profile JOB.yaml` is of one of these
        for each in command.commands.values():
            named |= {option for parameter in each.params for option in parameter.opts}
    return named | {"--help", "-h", "--version"}, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_and_option_that_a_page_names_is_there(page):
    wrong = []
    for name, rest in _COMMAND.findall(re.sub(r"\\\n", " ", page.read_text("utf-8"))):
        if name not in NAMES:
            continue
        allowed, _ = options_of([name, *rest.split()])
        wrong += [f"xgpt {name} {option}" for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", rest)
                  if option not in allowed]
    assert not wrong


def test_a_command_that_a_page_s_console_shows_is_there():
    shown = {re.split(r"\s+", command)[1] for command in COMMANDS}
    assert shown and shown <= NAMES


SNIPPETS = [(page.stem, text) for page in PAGES if page.stem in (
    "cluster", "deadline", "engines", "hosts", "job-file", "prompts", "slurm")
    for text in re.findall(r"^ *```yaml\n(.*?)^ *```", page.read_text("utf-8"), re.M | re.S)]


@pytest.mark.parametrize(("page", "text"), SNIPPETS, ids=lambda value: value[:20])
def test_a_part_of_a_job_file_that_a_guide_shows_loads(page, text, tmp_path):
    (tmp_path / "reviews.csv").write_text("nr,review\n1,good\n", encoding="utf-8")
    part = yaml.safe_load(textwrap.dedent(text))
    job = {"model": "opt-13b", "cluster": "a40-4", "workload": {
        "requests": {"count": 10}, "task": "S"}, **part}
    if "hosts" in job.get("run", {}) or "slurm" in job:
        job["cluster"] = "local"
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")
    assert load_job(tmp_path / "job.yaml").workload is not None


def test_guides_show_parts_of_job_files():
    assert {page for page, _ in SNIPPETS} >= {"cluster", "deadline", "hosts", "prompts", "slurm"}
