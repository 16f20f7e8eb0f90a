"""`import xgpt`: what it loads, and that every example of docs/python.md runs."""

import json
import re
import subprocess
import sys
from html import escape
from pathlib import Path

import pytest
from begun_runs import CONFIG, roofline
from job_folder import xgpt as command
from schemas import faults, faults_of_folder

import xgpt
from jobs import job_file
from xgpt.core.errors import InputError

ROOT = Path(__file__).resolve().parents[3]
DOCS = (ROOT / "docs" / "python.md").read_text()
EXAMPLES = re.findall(r"^## ([^\n]*)$|^```python\n(.*?)^```", DOCS, re.M | re.S)


def test_import_alone_loads_nothing():
    code = ("import sys, xgpt; print({'numpy', 'scipy', 'yaml', 'pydantic', 'torch', 'mpi4py', "
            "'transformers', 'click'} & set(sys.modules))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          check=True)
    assert done.stdout == "set()\n" and not done.stderr


def test_the_names_are_there_and_no_others_and_every_block_is_an_example():
    assert all(callable(getattr(xgpt, name)) and name in dir(xgpt) for name in xgpt.__all__)
    with pytest.raises(AttributeError, match="no attribute 'plans'"):
        xgpt.plans  # noqa: B018
    assert DOCS.count("\n```") == 2 * sum(map(len, examples().values()))


def test_keys_are_overridden_by_values_of_python():
    path = ROOT / "jobs" / "opt-13b-summarise.yaml"
    job = xgpt.load(path, {"constraint.latency_s": float("inf"), "run.top_k": 3,
                           "run.ignore_eos": True, "schedule": {"policy": "rra"}}).job
    assert (job.constraint.latency_s, job.run.top_k) == (float("inf"), 3)
    assert job.run.ignore_eos and job.schedule.policy == "rra"
    with pytest.raises(InputError, match="run.top_k"):
        xgpt.load(path, {"run.top_k": -1, "run.top_p": 0.5})


def test_a_job_may_be_a_mapping_and_messages_go_to_a_function():
    lines: list[str] = []
    job = xgpt.load({"model": "opt-1.3b", "cluster": "1xA40", "workload": {"task": "S"},
                     "schedule": {"policy": "ft"}}, {"constraint.latency_s": 20}, tell=lines.append)
    plan = xgpt.plan(job)
    assert repr(plan) == (f"<Plan of job: ft, {plan.schedule.figures.throughput_qps:.4g} "
                          "requests/s in steady state>")
    assert plan._repr_html_() == f"<pre>{escape(str(plan))}</pre>"
    table = plan.to_pandas()
    assert list(table["name"])[0] == "ft" and table["throughput_qps"][0] > 0
    with pytest.raises(InputError, match="job.yaml:1: cluster"):
        xgpt.load({"model": "opt-1.3b", "cluster": "moon", "workload": {"task": "S"}})


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
    job_file(path.parent, path.stem, model=str(path.parent), cluster="local", output="out",
             run="{ranks: 1, dtype: float32, threads_per_rank: 1, weights: random}", workload=(
                 "{requests: {count: 6}, input_tokens: {mean: 20, std: 5, max: 30}, "
                 "output_tokens: {mean: 6, std: 2, max: 10}}"))


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
    if section == "Running":
        assert not faults_of_folder(tmp_path / "jobs" / "out")
        status = command("status", tmp_path / "jobs" / "out", "--json")
        assert not faults("status-json", json.loads(status.stdout))
