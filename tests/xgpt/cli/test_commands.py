"""The command line as a user meets it: exit codes, messages, and what it imports."""

from __future__ import annotations

import configparser
import json
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from job_folder import xgpt

ROOT = Path(__file__).resolve().parents[3]
OPT_13B = """
model: opt-13b
cluster: a40-4
workload: {requests: {count: 2000}, task: S}
constraint: {latency_s: 11.5, confidence: 0.5}
"""


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


def test_ctrl_c_before_the_command_is_there_ends_it_without_a_word() -> None:
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
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(OPT_13B)
    return path


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    heavy = ("[print('IMPORTED', m) for m in ('torch', 'mpi4py', 'numpy', 'scipy', 'yaml', "
             "'pydantic') if m in sys.modules]")
    done = fresh("--help", code=heavy)
    assert done.returncode == 0 and "IMPORTED" not in done.stdout
    for name in ("profile", "simulate", "schedule", "run", "submit", "sweep", "report", "status",
                 "models"):
        assert f"\n  {name} " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_scheduling_imports_neither_torch_nor_mpi(job: Path) -> None:
    done = fresh("schedule", job, "--set=schedule.tp_degree=1", "--set=schedule.replicas=1",
                 code="print('HEAVY', {'torch', 'mpi4py', 'transformers'} & set(sys.modules))")
    assert done.returncode == 0, done.stderr
    assert "HEAVY set()" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_what_submit_imports_has_no_scipy_in_it() -> None:
    """It would take a third as long again; what asks for it imports it then."""
    code = "import sys, xgpt.app.submit; print(sorted(m for m in sys.modules if 'scipy' in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          check=True, timeout=120)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("policy", "keys"), [
    ("rra", ("encode_batch", "decode_iterations", "encode_chunk", "tp_degree", "tp_gpus")),
    ("waa-c", ("encode_batch", "decode_micro_batches", "encode_chunk", "tp_degree",
               "tp_gpus"))])
def test_schedule_of_opt_13b_is_confirmed_by_simulate(
        job: Path, tmp_path: Path, policy: str, keys: tuple[str, ...]) -> None:
    fixed = f"--set=schedule.policy={policy}"
    found = xgpt("schedule", job, "--json", "--out", tmp_path / "s.json", fixed,
                 "--horizon", "steady")
    assert found.returncode == 0, found.stderr
    schedule = json.loads(found.stdout)
    assert schedule["policy"] == policy
    assert schedule["latency_s"] <= 11.5 and schedule["fits"]
    assert schedule["status"] in ("optimal", "within gap")
    assert schedule["gap"] == pytest.approx(
        schedule["bound_qps"] / schedule["throughput_qps"] - 1)
    assert schedule["margin_cost"] < 0.03
    assert schedule["bound_qps"] >= schedule["throughput_qps"] > 0
    checked = xgpt("simulate", job, "--json", "--schedule", tmp_path / "s.json")
    assert checked.returncode == 0, checked.stderr
    estimate = json.loads(checked.stdout)
    for key in ("throughput_qps", "latency_s", "period_s"):  # by the closed form
        assert estimate[key] == pytest.approx(schedule[key], rel=0.15), key
    by_keys = xgpt("simulate", job, "--json", fixed, *(
        f"--set=schedule.{key}={schedule[key]}" for key in ("replicas", *keys)))
    assert json.loads(by_keys.stdout)["throughput_qps"] == pytest.approx(
        schedule["throughput_qps"], rel=0.15)
    # the replay of the whole job is an independent account; its ramp costs a few per cent
    replayed_qps = estimate["replay"]["throughput_qps"]
    assert replayed_qps == pytest.approx(schedule["throughput_qps"], rel=0.2)


def test_five_mistakes_are_five_lines_and_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("model: opt-13c\ncluster: a40-5\nworkload: {requests: {count: 0}, task: S}\n"
                    "constraint: {latency_s: -1}\nschdule: auto\n")
    done = fresh("schedule", path)
    assert done.returncode == 2 and done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 5
    for key, line in (("model", 1), ("cluster", 2), ("count", 3), ("latency_s", 4), ("schdule", 5)):
        assert any(key in e and f"bad.yaml:{line}:" in e for e in errors), (key, errors)
    assert "opt-13b" in done.stderr and "did you mean" in done.stderr


def test_a_bound_that_cannot_be_met_is_exit_code_3_with_the_tightest_that_can(job: Path) -> None:
    done = fresh("schedule", job, "--set", "constraint.latency_s=0.01")
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert "tightest" in done.stderr


def test_unknown_files_options_and_overrides_are_exit_code_2(job: Path, tmp_path: Path) -> None:
    assert xgpt("schedule", tmp_path / "none.yaml").returncode == 2
    assert xgpt("schedule", job, "--fast").returncode == 2
    assert xgpt("schedule", job, "--set", "constraint.latenzy_s=3").returncode == 2
    misspelt = xgpt("schedul", job)
    assert misspelt.returncode == 2 and "did you mean 'schedule'?" in misspelt.stderr
    assert "xgpt init" in xgpt("schedule", tmp_path / "none.yaml").stderr
    (tmp_path / "prompts.csv").write_text("id,prompt\n1,Why?\n")
    assert "xgpt init --prompts" in xgpt("schedule", tmp_path / "prompts.csv").stderr
    wrong = xgpt("simulate", job, "--set", "schedule.encode_batch=4")
    assert wrong.returncode == 2 and "schedule.decode_iterations" in wrong.stderr
    wrong = xgpt("simulate", job, "--timeline", tmp_path)
    assert wrong.returncode == 2 and "not a folder" in wrong.stderr


def test_running_elsewhere_than_here_is_refused_in_words(job: Path) -> None:
    done = xgpt("run", job, "--set", "model=no-such-model")
    assert done.returncode == 2
    done = xgpt("profile", job)
    assert done.returncode == 2 and "local" in done.stderr


def test_sweep_rises_with_the_bound(job: Path) -> None:
    done = xgpt("sweep", job, "--json", "--bounds", "0.01,5,inf")
    rows = json.loads(done.stdout)["rows"]
    assert rows[0]["status"] == "infeasible" and "tightest" in rows[0]["reason"]
    rates = [row["throughput_qps"] for row in rows[1:]]
    assert rates == sorted(rates) and rates[0] < rates[-1]
    shown = xgpt("sweep", job, "--bounds", "0.01,5")
    assert shown.returncode == 0 and max(map(len, shown.stdout.splitlines())) <= 80
    lines = shown.stdout.splitlines()
    assert lines[2].split()[2:4] == ["auto", "-"] and "tightest" in shown.stdout
    copies = [str(rows[1]["replicas"])] * (rows[1]["replicas"] > 1)  # else no column says so
    assert lines[3].split()[2:][:2 + len(copies)] == [rows[1]["chosen"], *copies,
                                                      f"{rates[0]:.4g}"]
    assert "..." not in shown.stdout and "going on: 2 of 2 points" in shown.stderr
    assert xgpt("sweep", job, "--bounds", "soon").returncode == 2
    assert xgpt("sweep", job, "--format", "xls").returncode == 2
    none = xgpt("sweep", job, "--bounds", "0.01")
    assert none.returncode == 3 and "no schedule" in none.stdout
    told = json.loads(xgpt("sweep", job, "--bounds", "0.01", "--json").stdout)
    assert told["exit_code"] == 3 and told["rows"][0]["status"] == "infeasible"


def test_the_options_are_frozen() -> None:
    """A job's meaning belongs in its file; a new flag needs a reason and a line here."""
    from xgpt.cli.main import COMMANDS, LazyGroup, cli

    assert isinstance(cli, LazyGroup)
    context = cli.make_context("xgpt", ["models"])
    flags = {}
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        parts = command.commands if isinstance(command, click.Group) else {"": command}
        for part, own in parts.items():
            flags[f"{name} {part}".strip()] = {
                flag for p in own.params for flag in p.opts if flag.startswith("--")}
    shared = {"--set", "--json"}
    assert flags == {
        "submit": shared | {"--slurm", "--dry-run", "--again", "--results", "--max-seconds",
                            "--strict", "--verify"},
        "schedule": shared | {"--out", "--price", "--drift", "--from", "--gap", "--max-nodes",
                              "--max-seconds", "--horizon", "--export", "--engines",
                              "--engine-python"},
        "profile measure": shared | {"--out", "--again", "--budget", "--tp"},
        "profile show": {"--plots", "--json"}, "profile merge": {"--out"},
        "profile import": {"--model", "--device", "--dtype", "--engine", "--engine-version",
                           "--out"},
        "simulate": shared | {"--schedule", "--timeline", "--baselines", "--max-seconds"},
        "sweep": shared | {"--bounds", "--over", "--out", "--format", "--horizon", "--cores",
                           "--max-seconds", "--run"},
        "run": shared | {"--schedule", "--strict", "--verify"},
        "report": shared | {"--format", "--out"},
        "status": shared, "stop": shared,
        "models": {"--check", "--accuracy", "--measured", "--json"},
        "top": set(), "completion": set(),
        "init": {"--prompts", "--column", "--model", "--max-tokens", "--latency", "--force",
                 "--yes", "--json"},
        "doctor": {"--gpu", "--json"},
            "score": shared | {"--again", "--dry-run", "--strict", "--verify"},
        "export": shared | {"--to", "--image", "--claim", "--out"},
    }


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&-", "<&- >&- 2>&-"])
def test_standard_streams_that_the_caller_closed_change_nothing_else(tmp_path: Path,
                                                                     closed: str) -> None:
    """Nor does the next file that is opened take their number, where libraries print."""
    code = ("import os, sys\nfrom xgpt.cli.main import main\nsys.argv = ['xgpt', 'models']\n"
            "try:\n    main()\nfinally:\n    open('next', 'w').write(str(os.open('.', 0)))\n")
    done = subprocess.run(["bash", "-c", f'"$@" {closed}', "", sys.executable, "-c", code],
                          cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("opt-13b" in done.stdout) == (">&-" not in closed.split())
    assert int((tmp_path / "next").read_text()) > 2
