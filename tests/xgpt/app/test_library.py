"""`import xgpt`: what it loads, and that every example of docs/python.md runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from begun_runs import CONFIG, roofline
from job_folder import xgpt as command
from schemas import faults, faults_of_folder

import xgpt
from xgpt.core.errors import InputError
from xgpt.core.schedule_file import load_schedule

ROOT = Path(__file__).resolve().parents[3]
DOCS = (ROOT / "docs" / "python.md").read_text()
EXAMPLES = re.findall(r"^## ([^\n]*)$|^```python\n(.*?)^```", DOCS, re.M | re.S)
HEAVY = ("torch", "mpi4py", "transformers", "click")


def loaded(program: str, names: tuple[str, ...]) -> tuple[set[str], list[str], str]:
    """Which of the modules a program of its own has loaded at its end, the lines that it printed
    before, and what it said on stderr."""
    code = f"import sys\n{program}\nprint('LOADED', *({set(names)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          check=True)
    *printed, last = done.stdout.splitlines()
    return set(last.split()[1:]), printed, done.stderr


def test_import_alone_loads_nothing():
    assert loaded("import xgpt", ("numpy", "scipy", "yaml", "pydantic", *HEAVY)) == (set(), [], "")


def test_the_plan_prints_without_torch_or_mpi():
    program = ("import xgpt; print(xgpt.plan(xgpt.load('jobs/opt-13b-summarise.yaml', "
               "{'schedule': {'policy': 'rra', 'replicas': 1, 'encode_chunk': 0}})))")
    modules, printed, told = loaded(program, HEAVY)
    assert not modules and not told
    assert printed[0].startswith("opt-13b on a40-4")
    assert "this job's 2,000 queries" in "\n".join(printed) and max(map(len, printed)) <= 80


def test_the_names_are_there_and_no_others():
    assert all(callable(getattr(xgpt, name)) and name in dir(xgpt) for name in xgpt.__all__)
    with pytest.raises(AttributeError, match="no attribute 'plans'"):
        xgpt.plans  # noqa: B018


def test_keys_are_overridden_by_values_of_python():
    path = ROOT / "jobs" / "opt-13b-summarise.yaml"
    job = xgpt.load(path, {"constraint.latency_s": float("inf"), "run.top_k": 3,
                           "run.ignore_eos": True, "schedule": {"policy": "rra"}}).job
    assert (job.constraint.latency_s, job.run.top_k) == (float("inf"), 3)
    assert job.run.ignore_eos and job.schedule.policy == "rra"
    with pytest.raises(InputError, match="run.top_k"):
        xgpt.load(path, {"run.top_k": -1, "run.top_p": 0.5})


def test_every_block_of_code_is_an_example():
    assert DOCS.count("\n```") == 2 * sum(map(len, examples().values()))


def examples() -> dict[str, list[str]]:
    """Section -> its examples."""
    sections: dict[str, list[str]] = {}
    for title, code in EXAMPLES:
        if title:
            section = title
        else:
            sections.setdefault(section, []).append(code)
    return sections


def write_toy_job(path: Path) -> None:
    """A job of six queries on one rank, with a model of random weights beside it."""
    (path.parent / "config.json").write_text(json.dumps(CONFIG))
    path.write_text(f"""
model: {path.parent}
cluster: local
workload: {{requests: {{count: 6}}, input_tokens: {{mean: 20, std: 5, max: 30}},
           output_tokens: {{mean: 6, std: 2, max: 10}}}}
run: {{ranks: 1, dtype: float32, threads_per_rank: 1, weights: random}}
output: out
""")


@pytest.mark.parametrize("section", examples())
def test_every_example_of_the_docs_runs(section, tmp_path, monkeypatch, capsys):
    if section == "Running":  # the quickstart's model would have to be fetched and measured
        pytest.importorskip("torch", reason="runs need the extra `run`")
        monkeypatch.setattr("xgpt.app.schedule.timing_of", roofline)
        (tmp_path / "jobs").mkdir()
        write_toy_job(tmp_path / "jobs" / "quickstart.yaml")
    else:
        (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"xgpt": xgpt}
    for code in examples()[section]:
        exec(compile(code, f"docs/python.md, {section}", "exec"), names)
    assert capsys.readouterr().out


@pytest.mark.slow  # the example of the docs above runs such a plan
def test_a_plan_runs_and_its_report_is_written(tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="runs need the extra `run`")
    monkeypatch.setattr("xgpt.app.schedule.timing_of", roofline)
    write_toy_job(tmp_path / "job.yaml")
    job = xgpt.load(tmp_path / "job.yaml")
    plan = xgpt.plan(job)
    metrics = xgpt.run(job, plan)
    assert metrics["queries"] == 6 and metrics["throughput_qps"]["measured"] > 0
    assert load_schedule(tmp_path / "out" / "schedule.json") == plan.schedule
    assert xgpt.write_report(job) == tmp_path / "out" / "report.html"
    assert not faults_of_folder(tmp_path / "out")
    status = command("status", tmp_path / "out", "--json")
    assert not faults("status-json", json.loads(status.stdout))
