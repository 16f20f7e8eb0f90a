"""Sweep files and the flags of `xgpt sweep`: which points they make, and what is wrong in them."""

import math
from pathlib import Path

import pytest

from xgpt.core.errors import InputError
from xgpt.core.policies import policy_names
from xgpt.job.sweep_file import load_sweep

JOB = """
name: base
model: opt-13b
cluster: a40-4
workload: {requests: {count: 2000}, input_tokens: {mean: 50, std: 9, max: 90},
           output_tokens: {mean: 30, std: 9, max: 90}}
constraint: {latency_s: 11.5}
run: {ranks: 4}
"""

@pytest.fixture
def job(tmp_path):
    path = tmp_path / "base.yaml"
    path.write_text(JOB)
    return path


def write(folder: Path, text: str) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(text)
    return path


def mistakes(path: Path, **flags: object) -> list[str]:
    with pytest.raises(InputError) as refusal:
        load_sweep(path, **flags)
    return [str(one).removeprefix(f"{path.parent}/") for one in refusal.value.mistakes]


def test_a_grid_is_every_combination_of_every_case_bounds_fastest(job):
    spec = load_sweep(write(job.parent, """
base: base.yaml
cases:
  - {model: opt-13b}
  - {model: gpt3-39b, cluster: a40-16, task: [S, T]}
grid:
  bound: [5, 50%, inf]
  policy: [rra, auto]
"""))
    assert (spec.name, spec.horizon, spec.has_margin) == ("sweep", "steady", True)
    assert spec.output == job.parent / "out" / "sweep"
    assert len(spec.points) == 1 * 6 + 2 * 6
    assert [dict(point.values) for point in spec.points[4:8]] == [
        {"model": "opt-13b", "policy": "auto", "bound": "50%"},
        {"model": "opt-13b", "policy": "auto", "bound": "inf"},
        {"model": "gpt3-39b", "cluster": "a40-16", "task": "S", "policy": "rra", "bound": "5 s"},
        {"model": "gpt3-39b", "cluster": "a40-16", "task": "S", "policy": "rra", "bound": "50%"}]
    assert [(axis.name, values) for axis, values in spec.axes] == [
        ("model", ("opt-13b", "gpt3-39b")), ("task", ("S", "T")), ("policy", ("rra", "auto")),
        ("bound", ("5 s", "50%", "inf"))]
    first, shared = spec.points[0], spec.points[1]
    assert (first.job.constraint.latency_s, first.share) == (5, None)
    assert (shared.job.constraint.latency_s, shared.share) == (math.inf, 0.5)
    assert spec.points[3].job.schedule.policy is None


def test_a_task_takes_the_place_of_lengths_and_a_cluster_is_meant_as_a_whole(job):
    own, task, cluster, gpus = (
        load_sweep(job, over=over).points[0].job
        for over in (("policy=ft",), ("task=T",), ("cluster=a40-8",), ("cluster=a40-8", "gpus=2")))
    assert own.workload.output_tokens.mean == 30 and own.run.ranks == 4
    assert task.workload.output_tokens.task == "T" and task.workload.count == 2000
    assert cluster.cluster == "a40-8" and cluster.run.ranks is None
    assert gpus.run.ranks == 2


def test_flags_take_the_place_of_a_file_s_axes_and_set_changes_its_base(job):
    path = write(job.parent, "base: base.yaml\ncases: [{task: [S, T]}]\ngrid: {bound: [5, 6]}\n")
    spec = load_sweep(
        path, overrides=("run.dtype=float32",), over=("workload.task=C1", "policy=all"),
        bounds="2 min", out=job.parent / "there", horizon="job")
    assert len(spec.points) == len(policy_names()) and spec.horizon == "job"
    assert {point.job.workload.output_tokens.task for point in spec.points} == {"C1"}
    assert {point.job.constraint.latency_s for point in spec.points} == {120}
    assert {point.job.run.dtype for point in spec.points} == {"float32"}
    assert spec.output == job.parent / "there"


def test_a_job_file_alone_and_an_inline_base_are_swept(job, tmp_path):
    spec = load_sweep(job)
    assert [point.share for point in spec.points] == [0.1, 0.2, 0.3, 0.5, 0.7, 1.0, None]
    assert spec.output == job.parent / "out" / "sweep" and spec.name == "base"
    spec = load_sweep(write(tmp_path, """
base: {model: opt-13b, cluster: a40-4, workload: {task: S}}
grid:
  workload.output_tokens:
    - {mean: 20, std: 5, max: 60}
    - {mean: 40, std: 5, max: 60}
  workload.input_tokens: {mean: 20, std: 5, max: 60}
"""))
    assert [point.job.workload.output_tokens.mean for point in spec.points] == [20, 40]
    assert spec.points[0].values["workload.output_tokens"] == '{"max": 60, "mean": 20, "std": 5}'


def test_every_mistake_is_told_once_with_its_line_or_flag(job):
    told = mistakes(write(job.parent, """base: base.yaml
cases:
  - {model: opt-13c}
  - 4
  - {task: T, polizy: rra}
grid:
  bound: [5, 0%, -3, soon]
  modle: [a]
  task: [S, Q]
  policy: []
  workload.tsk: 3
horizont: job
"""))
    places = [one.partition(": ")[0] for one in told]
    assert places == [f"sweep.yaml:{line}" for line in (3, 4, 5, 5, 7, 7, 7, 8, 9, 10, 11, 12)]
    text = "\n".join(told)
    for part in ("model = 'opt-13c': unknown model; did you mean 'opt-13b'?",
                 "cases[1]: a mapping of axes", "cases[2].polizy = 'rra': unknown axis; did you",
                 "task: also an axis of the grid", "grid.bound = '0%': seconds, inf, or a share",
                 "constraint.latency_s = 'soon': seconds > 0", "grid.modle: unknown axis",
                 "workload.task = 'Q': allowed: S, T", "grid.policy: at least one value",
                 "workload.tsk: unknown key; did you mean 'task'?", "horizont: unknown key"):
        assert part in text, part
    told = mistakes(job, over=("cluster=a40-9", "policy", "colour=red", "model=opt-13b",
                               "model=opt-30b"), bounds="1,x")
    assert [one.partition(": ")[0] for one in told].count("--over") == 4
    assert "--over: model: given twice: all its values go behind one =" in told
    assert any(one.startswith("--bounds: constraint.latency_s = 'x'") for one in told)
    assert any("did you mean 'a40-8'" in one for one in told)


@pytest.mark.parametrize(("text", "said"), [
    ("grid: {bound: 5}", "base: required"), ("base: none.yaml", "no such file"),
    ("base: base.yaml\ncases: 3", "a list of mappings"), ("[1]", "not a mapping"),
    ("base: base.yaml\ngrid: {bound: [1, [2]]}", "not a list within the list")])
def test_a_sweep_that_is_none(job, text, said):
    assert said in "\n".join(mistakes(write(job.parent, text)))
