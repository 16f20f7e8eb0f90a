"""The command line as a user meets it: exit codes, messages, and what it imports."""

import configparser
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result
from job_folder import xgpt
from screens import check_screen

from jobs import job_file
from xgpt.cli import terminal
from xgpt.cli.main import COMMANDS, cli
from xgpt.core.policies import policy
from xgpt.report.table import fact, paragraph, table

ROOT = Path(__file__).resolve().parents[3]


def fresh(*arguments: object, code: str = "") -> subprocess.CompletedProcess[str]:
    """Runs `xgpt ARGUMENTS` in a fresh interpreter; `code` runs after it, whatever the exit."""
    program = ("import sys\nfrom xgpt.cli.main import main\n"
               f"sys.argv = ['xgpt', *{[str(a) for a in arguments]!r}]\n"
               f"try:\n    main()\nfinally:\n    {code or 'pass'}\n")
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          check=False, timeout=120)


INTERRUPTED = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, *rest):
        if name == "{name}":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.argv = ["xgpt", "models"]
from {module} import main
main()
"""

def test_ctrl_c_before_the_command_is_there_ends_it_without_a_word():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    entry = parser["options.entry_points"]["console_scripts"].strip()
    module = entry.removeprefix("xgpt = ").removesuffix(":main")
    for name, code, said in (("click", -signal.SIGINT, ""),
                             ("xgpt.core.catalog", 1, "xgpt: interrupted\n")):
        done = subprocess.run([sys.executable, "-c", INTERRUPTED.format(name=name, module=module)],
                              capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stderr.lstrip()) == (code, said)


@pytest.fixture
def job(tmp_path):
    return job_file(tmp_path, workload="{requests: {count: 2000}, task: S}",
                    constraint="{latency_s: 11.5, confidence: 0.5}")


def test_help_names_every_command_and_imports_nothing_heavy():
    heavy = ("[print('IMPORTED', m) for m in ('torch', 'mpi4py', 'numpy', 'scipy', 'yaml', "
             "'pydantic') if m in sys.modules]")
    done = fresh("--help", code=heavy)
    assert done.returncode == 0 and "IMPORTED" not in done.stdout
    for name in ("profile", "simulate", "schedule", "run", "submit", "sweep", "report", "status",
                 "models"):
        assert f"\n  {name} " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_scheduling_imports_neither_torch_nor_mpi_and_submit_no_scipy(job):
    done = fresh("schedule", job, "--set=schedule={policy: rra, encode_chunk: 0, tp_degree: 1}",
                 code="print('HEAVY', {'torch', 'mpi4py', 'transformers'} & set(sys.modules))")
    assert done.returncode == 0, done.stderr
    assert "HEAVY set()" in done.stdout
    code = "import sys, xgpt.app.submit; print(sorted(m for m in sys.modules if 'scipy' in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          check=True, timeout=120)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("policy", "keys"), [
    ("rra", ("encode_batch", "decode_iterations", "encode_chunk", "tp_degree", "tp_gpus")),
    ("waa-c", ("encode_batch", "decode_micro_batches", "encode_chunk", "tp_degree",
               "tp_gpus"))])
def test_schedule_of_opt_13b_is_confirmed_by_simulate(job, tmp_path, policy, keys):
    fixed = f"--set=schedule.policy={policy}"
    found = xgpt("schedule", job, "--json", "--out", tmp_path / "s.json", fixed,
                 "--horizon", "steady")
    assert found.returncode == 0, found.stderr
    schedule = json.loads(found.stdout)
    assert schedule["policy"] == policy
    figures, proof = schedule["figures"], schedule["proof"]
    assert figures["latency_s"] <= 11.5 and figures["fits"]
    assert proof["status"] in ("optimal", "within gap")
    assert proof["gap"] == pytest.approx(proof["bound_qps"] / figures["throughput_qps"] - 1)
    assert schedule["margin"]["cost"] < 0.03
    assert proof["bound_qps"] >= figures["throughput_qps"] > 0
    checked = xgpt("simulate", job, "--json", "--schedule", tmp_path / "s.json")
    assert checked.returncode == 0, checked.stderr
    simulated = json.loads(checked.stdout)
    for key in ("throughput_qps", "latency_s", "period_s"):  # by the closed form
        assert simulated["estimate"]["figures"][key] == pytest.approx(figures[key], rel=0.15), key
    variables = {**schedule["deployment"], **schedule["controls"]}
    by_keys = xgpt("simulate", job, "--json", fixed, *(
        f"--set=schedule.{key}={variables[key]}" for key in ("replicas", *keys)))
    assert json.loads(by_keys.stdout)["estimate"]["figures"]["throughput_qps"] == pytest.approx(
        figures["throughput_qps"], rel=0.15)
    # the replay of the whole job is an independent account; its ramp costs a few per cent
    replayed_qps = simulated["replay"]["throughput_qps"]
    assert replayed_qps == pytest.approx(figures["throughput_qps"], rel=0.2)


def test_sweep_rises_with_the_bound(job):
    few = "--set=schedule={policy: [rra, ft], encode_chunk: 0, replicas: 1}"
    done = xgpt("sweep", job, few, "--json", "--bounds", "0.01,5,inf")
    rows = json.loads(done.stdout)["rows"]
    rates = [row["throughput_qps"] for row in rows[1:]]
    assert rates == sorted(rates) and rates[0] < rates[-1]
    shown = xgpt("sweep", job, few, "--bounds", "0.01,5")
    assert shown.returncode == 0 and max(map(len, shown.stdout.splitlines())) <= 80
    assert re.search(rf"5.00 s +[\d.]+ {policy(rows[1]['chosen']).title}", shown.stdout)
    assert "rra+ft at 10 ms" in shown.stdout and "tightest" in shown.stdout
    assert "..." not in shown.stdout and "continuing: 2 of 2 points" in shown.stderr
    none = xgpt("sweep", job, few, "--bounds", "0.01", "--json")
    assert none.returncode == json.loads(none.stdout)["exit_code"] == 3


def test_the_options_are_frozen():
    """A job's meaning belongs in its file; a new flag needs a reason and a word in screens.txt."""
    context, lines = cli.make_context("xgpt", ["models"]), []
    for name in COMMANDS:
        command = cli.get_command(context, name)
        parts = command.commands if isinstance(command, click.Group) else {"": command}
        lines += [" ".join([*f"{name} {part}".split(), *sorted(
            flag for p in own.params for flag in p.opts if flag.startswith("--"))])
            for part, own in parts.items()]
    check_screen(Path(__file__).with_name("screens.txt"), "options", "\n".join(lines))


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_standard_streams_that_the_caller_closed_change_nothing_else(tmp_path, closed):
    """Nor does the next file that is opened take their number, where libraries print."""
    code = ("import os, sys\nfrom xgpt.cli.main import main\nsys.argv = ['xgpt', 'models']\n"
            "try:\n    main()\nfinally:\n    open('next', 'w').write(str(os.open('.', 0)))\n")
    done = subprocess.run(["bash", "-c", f'"$@" {closed}', "", sys.executable, "-c", code],
                          cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("opt-13b" in done.stdout) == (">&-" not in closed.split())
    assert int((tmp_path / "next").read_text()) > 2


@pytest.mark.parametrize("command", ["schedule", "simulate"])
def test_what_a_job_file_names_is_not_started(command, tmp_path):
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path / 'started'}\n")
    program.chmod(0o755)
    done = xgpt(command, job_file(
        tmp_path, model="opt-125m", schedule="{policy: ft}", output="out",
        workload="{requests: {count: 20}, task: T}", slurm=(
            f'{{prologue: ["{program}"], container: ["{program}"], modules: ["$({program})"], '
            f'extra: ["--comment=$({program})"]}}')))
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "started").exists() and not (tmp_path / "out").exists()


def proposed(*words: str) -> list[str]:
    """For the last word, after those before it."""
    shell = ShellComplete(cli, {}, "xgpt", "_XGPT_COMPLETE")
    return [item.value for item in shell.get_completions(list(words[:-1]), words[-1])]


@pytest.mark.parametrize(("words", "values"), [
    ("mo", ["models"]), ("schedule job.yaml --set constraint.la", ["constraint.latency_s="]),
    ("schedule job.yaml --set cluster=loc", ["cluster=local"]),
    ("submit job.yaml --set schedule.policy=rr", ["schedule.policy=rra"]),
    ("run job.yaml --set run.weight_dtype=i", ["run.weight_dtype=int8"]),
    ("run job.yaml --set model=smollm2-135", ["model=smollm2-135m"]),
    ("run job.yaml --set run.seed=", [])])
def test_commands_and_keys_and_catalog_names_are_proposed(words, values):
    assert proposed(*words.split()) == values


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False)


def check_width(text: str) -> None:
    assert text and max(map(len, text.splitlines())) <= 80, text


def test_the_catalog_fits_and_nothing_of_it_is_cut_off():
    known = json.loads(invoke("models", "--json").stdout)
    for words in (("models",), ("models", "--verbose")):
        shown = invoke(*words).stdout
        check_width(shown)
        assert "..." not in shown
        there = shown.replace(",", " ").split()
        assert not [name for rows in known.values() for name in rows if name not in there]
    assert len(invoke("models").stdout.splitlines()) <= 25


@pytest.mark.parametrize("words", [
    *([name] for name in COMMANDS), *(["profile", part] for part in ("measure", "show", "import"))])
def test_every_help_fits(words):
    check_width(invoke(*words, "--help").stdout)


def test_a_last_column_of_words_goes_on_below_and_loses_none():
    words = "188 at a time, 219 tokens, 2 groups, TP 8 on 16, and " + "more " * 20
    shown = table(("policy", "requests/s", "configuration"), [("Sarathi", "4.96", words),
                                                             ("FT", "2.1", "")], right=(1,))
    check_width(shown)
    lines = shown.splitlines()
    assert " ".join(line[21:] for line in lines[2:-1]).split() == words.split()
    assert lines[2].startswith("Sarathi ") and lines[3].startswith(" " * 21)
    assert lines[-1] == "FT              2.1"
    check_width(table(("a", "b"), [("x" * 90, "y")], right=(0,)))


def test_what_is_said_fits_the_terminal_and_a_file_keeps_whole_lines(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    message = "no schedule satisfies the bound: " + "the tightest that can be met, " * 5 + "\n  end"
    terminal.say(message)
    assert capsys.readouterr().err == message + "\n"
    monkeypatch.setattr(terminal, "is_terminal", lambda: True)
    terminal.say(message)
    shown = capsys.readouterr().err
    assert max(map(len, shown.splitlines())) <= 60 and shown.split() == message.split()
    assert shown.endswith("\n  end\n")


@pytest.mark.parametrize("columns", [48, 60, 200])
def test_tables_fit_a_narrow_terminal_and_keep_80_columns_elsewhere(columns, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    words = "the schedule uses 4.772 s of the bound of 5.90 s " * 4
    assert max(map(len, fact("why", words).splitlines())) > 70, "a pipe has no width"
    monkeypatch.setenv("COLUMNS", str(columns))
    assert max(map(len, fact("why", words).splitlines())) <= min(columns, 80), "but for COLUMNS"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for text in (fact("why", words), paragraph(words), table(
            ("policy", "requests/s", "words"), [("RRA", "1.5", words)], right=(1,))):
        assert max(map(len, text.splitlines())) <= min(columns, 80), text
