"""A job as a JobSet and as a SkyPilot task: files that their schemas allow, the same each time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from job_folder import xgpt

from xgpt.launch.manifests import Exported, render_jobset, render_skypilot

HERE = Path(__file__).parent
SCHEMAS = HERE.parents[1] / "schemas"
JOB = """
model: opt-125m
cluster: {cluster}
workload: {{requests: {{count: 40}}, task: S}}
schedule: {{policy: rra, encode_batch: 4, decode_iterations: 4, encode_chunk: 0, tp_degree: 1}}
run: {{weights: random}}
output: out
"""
AWKWARD = Exported(
    name="awkward", job_file=Path("/data/it's a \"folder\" of 50% $(HOME)/job: 1.yaml"),
    words=("--set", "run.seed=5", "--set", "name=yes"), nodes=2, devices=4, gpu="A100-80",
    image="registry/xgpt:1.0", claim="xgpt", remarks=("A remark.", "Another: 'quoted'."))


def schema(name: str) -> Any:
    return json.loads((SCHEMAS / name).read_text())


def check_jobset(text: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text)
    jsonschema.validate(found, schema("jobset-v1alpha2.json"))
    return found


def check_skypilot(text: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text)
    known = schema("skypilot-0.14.json")
    jsonschema.validate(found, known["task"])
    jsonschema.validate(found["resources"], known["resources"])
    return found


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write(tmp_path, "a40-4")


def write(folder: Path, cluster: str) -> Path:
    path = folder / "My job.yaml"
    path.write_text(JOB.format(cluster=cluster))
    return path


def text_of(job: Path, to: str, *words: str) -> str:
    done = xgpt("export", job, "--to", to, "--image", "xgpt:1", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("name", "text"), [
    ("golden_jobset.yaml", render_jobset(AWKWARD))])
def test_awkward_names_are_quoted_as_the_golden_file_has_them(name: str, text: str) -> None:
    assert text == (HERE / name).read_text()


def test_a_jobset_of_two_nodes_names_the_hosts_of_its_pods() -> None:
    found = check_jobset(render_jobset(AWKWARD))
    lead, others = found["spec"]["replicatedJobs"]
    (container,) = lead["template"]["spec"]["template"]["spec"]["containers"]
    assert container["command"][-1] == "run.hosts=[awkward-lead-0-0.awkward, " \
                                       "awkward-others-0-0.awkward]"
    assert str(AWKWARD.job_file).replace("$(HOME)", "$$(HOME)") in container["command"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "4"}}
    assert others["template"]["spec"]["completions"] == 1
    assert found["spec"]["successPolicy"]["targetReplicatedJobs"] == ["lead"]


def test_what_a_schedule_takes_is_what_the_files_ask_for(job: Path) -> None:
    four = ("--set", "schedule.tp_degree=4")  # one copy on all devices
    found = check_jobset(text_of(job, "jobset", *four))
    (only,) = found["spec"]["replicatedJobs"]
    pod = only["template"]["spec"]["template"]["spec"]
    assert found["metadata"]["name"] == "my-job"
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    command = pod["containers"][0]["command"]
    assert command[:6] == ["python3", "-P", "-m", "xgpt.cli.main", "submit", str(job)]
    assert command[6:] == [*four, "--set", "cluster=local", "--set", "run.ranks=4",
                           "--set", "slurm=null"]
    task = check_skypilot(text_of(job, "skypilot", *four, "--set", "run.seed=7"))
    assert task["resources"]["accelerators"] == {"A40": 4}
    assert task["workdir"] == str(job.parent) and '"My job.yaml"' in task["run"]
    assert "--set run.seed=7 --set cluster=local --set run.ranks=4" in task["run"]


def test_the_same_file_is_made_each_time_and_written_where_it_is_asked_for(
        job: Path, tmp_path: Path) -> None:
    text, path = text_of(job, "jobset"), tmp_path / "new" / "jobset.yaml"
    assert text_of(job, "jobset", "--out", str(path)) == "" and path.read_text() == text
    assert max(map(len, (line for line in text.splitlines() if line.startswith("#")))) <= 80
    found = json.loads(text_of(job, "jobset", "--json"))
    assert (found["to"], found["text"], found["file"]) == ("jobset", text, None)


def test_words_of_a_task_s_line_survive_the_shell() -> None:
    one = Exported(**{**{name: getattr(AWKWARD, name) for name in AWKWARD.__slots__}, "nodes": 1})
    task = check_skypilot(render_skypilot(one))
    assert task["run"] == ('python3 -P -m xgpt.cli.main submit "job: 1.yaml" --set run.seed=5 '
                           '--set name=yes\n')
    assert task["resources"]["accelerators"] == {"A100-80GB": 4}


@pytest.mark.parametrize(("cluster", "to", "more", "said"), [
    ("a40-16", "skypilot", ("--set", "model=opt-13b"), "share no file system"),
    ("a40-4", "jobset", ("--set", "output=/elsewhere/out"), "that folder alone is taken along")])
def test_what_such_a_file_cannot_run_is_refused_in_words(
        tmp_path: Path, cluster: str, to: str, more: tuple[str, ...], said: str) -> None:
    done = xgpt("export", write(tmp_path, cluster), "--to", to, "--image", "i", *more)
    assert done.returncode == 2 and said in " ".join(done.stderr.split()), done.stderr


def test_a_field_that_the_schemas_do_not_know_is_found_out() -> None:
    found = check_jobset(render_jobset(AWKWARD))
    found["spec"]["replicatedJobs"][0]["template"]["spec"]["paralelism"] = 1
    with pytest.raises(jsonschema.ValidationError, match="paralelism"):
        jsonschema.validate(found, schema("jobset-v1alpha2.json"))
