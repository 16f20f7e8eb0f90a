"""Every job file that is handed to users loads, and its prompts are usable requests."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from xgpt.cli.main import cli
from xgpt.core import catalog
from xgpt.core.policies import searched_policies
from xgpt.job.job_file import load_job
from xgpt.job.job_lengths import read_lengths
from xgpt.job.sweep_file import load_sweep
from xgpt.requests.reader import read_requests
from xgpt.requests.request import Request
from xgpt.requests.request_files import RequestFiles

JOBS = Path(__file__).resolve().parents[2] / "jobs"
SWEEPS = [JOBS / "paper-scenarios.yaml", JOBS / "vidur-grid.yaml"]
JOB_FILES = sorted({*JOBS.glob("*.yaml")} - {*SWEEPS})
PROMPTS = JOBS / "prompts" / "quickstart.jsonl"
KINDS = ("summarise", "translate", "code", "question", "classify")


def test_there_are_job_files():
    assert len(JOB_FILES) >= 6


@pytest.mark.parametrize("path", JOB_FILES, ids=lambda path: path.stem)
def test_every_job_file_loads(path):
    job = load_job(path)
    assert job.name == path.stem
    assert job.output == JOBS.parent / "out" / path.stem
    assert 0 < min(bound.limit_s for bound in job.constraint.bounds) < math.inf
    assert job.workload.requests is None or all(
        path.is_file() for path in job.workload.requests.paths)


@pytest.mark.parametrize("path", JOB_FILES, ids=lambda path: path.stem)
def test_every_name_is_in_the_catalog_and_the_ranks_fill_the_cluster(path):
    job = load_job(path)
    assert catalog.model(job.model).num_layers > 0
    if job.cluster != "local":
        assert isinstance(job.cluster, str)
        assert job.run.ranks in (None, catalog.cluster(job.cluster).num_devices)


def test_the_jobs_for_slurm_are_these():
    with_slurm = [path.stem for path in JOB_FILES if load_job(path).slurm is not None]
    assert with_slurm == ["llama-8b-8gpu", "slurm-opt-13b", "slurm-quickstart"]


@pytest.mark.parametrize(("cluster", "nodes"), [("8xH100", 1), ("16xH100", 2)])
def test_eight_replicas_a_node_get_a_gpu_each_without_model_gpu_or_slurm(cluster, nodes):
    done = CliRunner().invoke(cli, [
        "submit", str(JOBS / "llama-8b-8gpu.yaml"), "--dry-run", "--json", "--set",
        f"cluster={cluster}", "--set", "schedule={policy: sarathi, tp_degree: 1}"])
    assert done.exit_code == 0, done.output
    script = json.loads(done.stdout)["script"]
    assert f"{8 * nodes} replicas x 1 device" in " ".join(done.stderr.split())
    assert {f"#SBATCH --nodes={nodes}", "#SBATCH --gpus-per-node=8",
            "#SBATCH --ntasks-per-node=8"} <= {*script.splitlines()}
    (planned,) = [line for line in script.splitlines() if line.startswith("# starts as planned")]
    assert planned.endswith(f"--nodes={nodes} --ntasks={8 * nodes} --ntasks-per-node=8 "
                            "--cpus-per-task=8 --gpus-per-task=1")


def test_a_model_of_four_times_the_memory_is_planned_without_a_gpu():
    done = CliRunner().invoke(cli, ["schedule", str(JOBS / "opt-30b-t4.yaml"), "--json"])
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    placed, (pool,) = plan["placed"], plan["deployment"]["pools"]
    assert placed["needed_bytes"] > 57 * 2**30 > 4 * plan["figures"]["memory_capacity_bytes"]
    assert {row["name"] for row in placed["tiers"]} == {"device", "host", "disk"}
    assert [row["kind"] for row in placed["steps"]] == ["encode", "decode"]
    assert pool["placement"]["weights"][0] < 0.25 and plan["policy"] in ("ft", "rra")


def test_the_readme_lists_every_job_file():
    text = (JOBS / "README.md").read_text(encoding="utf-8")
    assert all(f"| `{path.name}` |" in text for path in (*JOB_FILES, *SWEEPS))


def test_the_paper_s_sweep_is_twenty_scenarios_under_four_bounds_by_every_policy():
    spec = load_sweep(SWEEPS[0])
    assert spec.output == JOBS.parent / "out" / "paper-scenarios" and not spec.has_margin
    assert len(spec.points) == 20 * 4 * len(searched_policies())
    assert len({tuple(point.values.items()) for point in spec.points}) == len(spec.points)
    assert len({tuple(point.values.values())[:3] for point in spec.points}) == 20
    assert all(point.job.run.dtype == "float16" for point in spec.points)
    assert {point.values["bound"] for point in spec.points} == {"ft10", "ft30", "ft70", "inf"}


def test_vidur_s_grid_is_its_450_deployments_for_each_of_two_workloads():
    points = load_sweep(SWEEPS[1]).points
    counts = Counter(point.values["lengths"] for point in points)
    assert counts == {"arxiv-4k.csv": 450, "books-4k.csv": 450}
    assert len({tuple(sorted(point.values.items())) for point in points}) == 900
    stages = Counter((point.values["tp"], 16 // (point.values["tp"] * point.values["copies"]))
                     for point in points)
    assert stages == {(tp, pp): 100 for tp in (1, 2, 4) for pp in (1, 2, 4)}
    policies = Counter((point.values["policy"], point.values["budget"]) for point in points)
    assert policies == dict.fromkeys([("vllm", 4096), ("mixed", 4096), *(
        ("sarathi", budget) for budget in (512, 1024, 2048))], 180)
    for name, means in (("arxiv-4k.csv", (2588.1, 291.4)), ("books-4k.csv", (1067.2, 1612.8))):
        lengths = read_lengths(JOBS / name, "input", "output")
        assert lengths.mean(axis=0) == pytest.approx(means, rel=0.005)


def test_the_quickstart_reads_its_prompts():
    files = load_job(JOBS / "quickstart.yaml").workload.requests
    assert files is not None and files.paths == (PROMPTS,)


def test_the_prompts_are_usable_requests_of_five_kinds():
    rows = list(read_requests(RequestFiles(paths=(PROMPTS,))))
    requests = [row for row in rows if isinstance(row, Request)]
    assert len(requests) == len(rows) >= 64
    counts = Counter(request.id.rsplit("-", 1)[0] for request in requests)
    assert set(counts) == set(KINDS) and max(counts.values()) - min(counts.values()) <= 2
    prompts = [request.prompt for request in requests]
    assert len(set(prompts)) == len(prompts) and all(prompts)


def test_a_line_of_the_prompts_has_no_unknown_key():
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, lines):
        assert {"id", "prompt"} <= set(row) <= {"id", "prompt", "max_tokens"}
        assert 1 <= row.get("max_tokens", 1) <= 160


def test_the_reviews_are_rows_of_which_every_one_can_be_asked():
    job = load_job(JOBS / "reviews.yaml")
    assert job.workload.requests is not None and job.results == job.output / "results.csv"
    requests = list(read_requests(job.workload.requests))
    assert [row.id for row in requests] == [f"r{number:02}" for number in range(1, 13)]
    assert all(isinstance(row, Request) for row in requests)
