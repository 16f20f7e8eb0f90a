"""The schemas are what the code says today, and real files are of them. (The files of a run:
tests/xgpt/app/test_library.py.)"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from job_folder import xgpt
from schemas import OF_FILE, SCHEMAS, faults

ROOT = Path(__file__).resolve().parents[2]
SWEEP_KEYS = {"base", "cases", "grid"}
JOBS = sorted((ROOT / "jobs").glob("*.yaml"))


@pytest.fixture(scope="module")
def made():
    """The schemas' texts, made anew in a process of their own."""
    script = ("import sys; sys.path.insert(0, 'docs/schema'); import json, make;"
              "print(json.dumps({n: make.as_text(n, s) for n, s in make.schemas().items()}))")
    done = subprocess.run([sys.executable, "-c", script],
                          cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    texts: dict[str, str] = json.loads(done.stdout)
    return texts


def test_the_schemas_are_those_of_the_code_today(made):
    there = {path.name.removesuffix(".schema.json"): path.read_text("utf-8")
             for path in SCHEMAS.glob("*.schema.json")}
    assert there.keys() == made.keys()
    changed = [name for name, text in made.items() if there[name] != text]
    assert not changed, "make them anew: python docs/schema/make.py"
    assert set(OF_FILE.values()) <= made.keys()


def test_the_page_names_every_schema(made):
    page = (SCHEMAS / "README.md").read_text("utf-8")
    assert set(re.findall(r"\(([\w-]+)\.schema\.json\)", page)) == made.keys()


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_a_job_file_is_of_its_schema(path):
    read = yaml.safe_load(path.read_text("utf-8"))
    assert not faults("sweep" if SWEEP_KEYS & read.keys() else "job", read)


def test_a_wrong_job_file_is_not_of_the_schema():
    job = {"model": "opt-13b", "cluster": "a40-4", "workload": {"requests": {"count": 1}}}
    assert not faults("job", job)
    assert faults("job", {**job, "clutser": "a40-4"})
    assert faults("job", {**job, "run": {"ranks": 0}})
    assert faults("job", {key: job[key] for key in ("model", "cluster")})


def test_the_page_of_job_files_has_every_key_of_the_schema():
    page = (ROOT / "docs" / "job-file.md").read_text("utf-8")
    schema = json.loads((SCHEMAS / "job.schema.json").read_text("utf-8"))
    for section, value in schema["properties"].items():
        assert f"`{section}" in page
        mappings = [form for form in value.get("anyOf", [value]) if "properties" in form]
        for key in (key for mapping in mappings for key in mapping["properties"]):
            assert re.search(rf"`{section}\.{key}`|`{key}`|[{{, ]{key}[,}}]", page), (
                f"{section}.{key}")


def test_what_commands_print_as_json_is_of_its_schema(tmp_path):
    out = tmp_path / "schedule.json"
    planned = xgpt("schedule", ROOT / "jobs" / "opt-13b-summarise.yaml", "--json", "--out", out)
    assert not faults("schedule", {key: value for key, value in json.loads(
        planned.stdout).items() if key not in ("job", "times", "horizon")})
    assert not faults("schedule", json.loads(out.read_text("utf-8")))
    swept = xgpt("sweep", ROOT / "jobs" / "opt-13b-summarise.yaml", "--bounds", "2,inf", "--cores",
                 1, "--set", "schedule.policy=ft", "--out", tmp_path / "sweep")
    assert swept.returncode == 0, swept.stderr
    rows = (tmp_path / "sweep" / "sweep.jsonl").read_text("utf-8").splitlines()
    assert len(rows) == 2 and not [f for row in rows for f in faults("sweep-line", json.loads(row))]
    (tmp_path / "job.yaml").write_text("model: opt-13b\n")
    for command in (("schedule", tmp_path / "job.yaml"), ("status", tmp_path / "nowhere")):
        failed = xgpt(*command, "--json")
        assert failed.returncode > 0 and not faults("failure-json", json.loads(failed.stdout))
