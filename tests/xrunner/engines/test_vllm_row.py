"""Refusals of the engine vllm before anything is started, and what it plans: equal replicas, each
of equal tensor-parallel groups within a node."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from problems import problem_of, roofline_of

from xgpt.app.needed_profile import needed_profile
from xgpt.app.opened_job import OpenedJob, open_file
from xgpt.app.schedule import executable, plan_from, plan_job
from xgpt.core.errors import InputError, XgptError
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xgpt.job.job_file import load_job
from xgpt.job.resolve import resolve
from xrunner.backends.engine import engine_of
from xrunner.backends.vllm.row import engine_arguments, version_in
from xscheduler.fallback import _able, initial_schedule
from xscheduler.replicas import equal_parts, replica_problems


def job_of(folder: Path, run: str, schedule: str = "auto") -> Path:
    (folder / "requests.jsonl").write_text('{"id": "1", "prompt": "a"}\n')
    job = folder / "job.yaml"
    job.write_text(f"""
model: opt-13b
cluster: local
workload:
  requests: requests.jsonl
  output_tokens: {{mean: 15, std: 8, max: 40}}
schedule: {schedule}
run: {{engine: vllm, {run}}}
output: out
""")
    return job


@pytest.mark.parametrize(("run", "schedule", "keys"), [
    ("ranks: 1", "{policy: [waa-c, rra]}", ["schedule.policy"]),
    ("ranks: 2, hosts: [a, b], weights: random, cuda_graphs: off", "auto", ["run.cuda_graphs"]),
    ("engine_args: {tensor_parallel_size: 2, data_parallel_rank: 1, nnodes: 2}", "auto",
     ["run.engine_args.tensor_parallel_size", "run.engine_args.data_parallel_rank",
      "run.engine_args.nnodes"]),
    ("engine_args: {max_num_seqs: 9, dtype: float16, block_size: 16}", "auto",
     ["run.engine_args.max_num_seqs", "run.engine_args.dtype"]),
    ("engine_args: {enable_prefix_caching: true, block_size: many}", "auto",
     ["run.engine_args.enable_prefix_caching", "run.engine_args.block_size"])])
def test_what_it_does_not_do_is_refused_by_key(tmp_path, run, schedule, keys):
    job = load_job(job_of(tmp_path, run, schedule))
    assert [mistake.key for mistake in engine_of(job).refusals(job)] == keys


def planned(path: Path, *overrides: str) -> Problem:
    job = load_job(path, ["workload.requests={count: 90}", "workload.input_tokens={mean: 20, "
                          "std: 9, max: 50}", *overrides])
    return engine_of(job).restricted(job, resolve(job), None)


def keys_of(refused: pytest.ExceptionInfo[InputError]) -> list[str]:
    return [mistake.key for mistake in refused.value.mistakes]


@pytest.mark.parametrize(("overrides", "key", "words"), [
    (["schedule.tp_degree=16"], "schedule.tp_degree", "--headless"),
    (["schedule.tp_degree=3"], "schedule.tp_degree", "40 attention heads"),
    (["schedule={tp_degree: 8, replicas: 3}"], "schedule.replicas", "at most 2: 2 x 8 devices"),
    (["schedule.policy=waa-c"], "schedule.policy",
     "one of rra, ft, dsi, orca, vllm, sarathi, mixed, lightllm"),
    (["model=t5-11b"], "model", "decoder-only"),
    (["model=gpt3-39b", "run.weights=random"], "run.weights", "none is written for gpt3-39b")])
def test_values_that_no_replica_can_have_are_refused_by_key(tmp_path, overrides, key, words):
    path = job_of(tmp_path, "engine_args: {}")
    with pytest.raises(InputError, match=words) as refused:
        planned(path, "cluster=a100-16", *overrides)
    assert keys_of(refused) == [key]


def sizes_of(problem: Problem) -> list[tuple[int, int]]:
    """(replicas, devices of each) that are searched."""
    assert equal_parts(problem) == replica_problems(problem)
    return [(part.copies, part.cluster.num_devices) for part in equal_parts(problem)]


@pytest.mark.parametrize(("overrides", "sizes"), [
    ([], [(16, 1), (8, 2), (4, 3), (4, 4), (2, 5), (2, 6), (2, 7), (2, 8)]),
    (["schedule.tp_degree=4"], [(4, 4)]), (["schedule.replicas=8"], [(8, 1), (8, 2)]),
    (["schedule={tp_degree: 4, replicas: 3}"], [(3, 4)]),
    (["schedule={tp_degree: 2, replicas: 2}"], [(2, 2), (2, 4), (2, 6), (2, 8)]),
    (["workload.requests={count: 3}"], [(3, 1), (3, 2), (3, 3), (3, 4), (2, 5), (2, 6), (2, 7),
                                        (2, 8)])])
def test_replicas_are_equal_and_within_a_node(tmp_path, overrides, sizes):
    path = job_of(tmp_path, "engine_args: {}")
    assert sizes_of(planned(path, "cluster=a100-16", *overrides)) == sizes


@pytest.mark.parametrize(("run", "hosts", "devices"), [
    ("", 1, 1), ("ranks: 2", 1, 2), ("hosts: [a, b]", 2, 2), ("hosts: [a, b], ranks: 4", 2, 4)])
def test_the_cores_of_a_machine_are_one_device_unless_the_job_names_more(
        tmp_path, monkeypatch, run, hosts, devices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = job_of(tmp_path, "engine_args: {}")
    path.write_text(path.read_text().replace("engine_args: {}", run or "seed: 0"))
    cluster = planned(path).cluster
    assert (cluster.num_nodes, cluster.num_devices) == (hosts, devices)


@pytest.mark.parametrize(("overrides", "starts"), [
    (["cluster=a40-4"], [((1,), 1, 1), ((2,), 1, 1), ((4,), 1, 1)]),  # one replica suffices
    (["cluster=a40-4", "model=opt-30b"], [((2,), 1, 1), ((4,), 1, 1)]),  # opt-30b needs two
    (["run.ranks=4", "model=opt-125m"], [((1,), 4, 4), ((2,), 2, 2), ((4,), 1, 1)]),
    (["run.ranks=4", "model=opt-125m", "schedule.tp_degree=2"], [((2,), 2, 2)]),
    (["run={ranks: 4, hosts: [a, b], engine: vllm}", "model=opt-125m"],
     [((1,), 4, 2), ((2,), 2, 1)])])
def test_steps_are_timed_by_degree_of_all_replicas_at_once_on_cpus(
        tmp_path, monkeypatch, overrides, starts):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("xgpt.app.needed_profile.profile_metadata", lambda job, problem: None)
    path = job_of(tmp_path, "engine_args: {}")
    problem = planned(path, *overrides)
    assert needed_profile(load_job(path, overrides), problem).starts == starts


def on_gpus(folder: Path, *overrides: str) -> OpenedJob:
    path = job_of(folder, "engine_args: {}")
    return open_file(path, ["workload={requests: {count: 4000}, input_tokens: {mean: 100, std: 40, "
                            "max: 200}, output_tokens: {mean: 50, std: 20, max: 90}}", *overrides])


@pytest.mark.parametrize(("overrides", "replicas", "degree", "stages"), [
    (["cluster=a100-16", "model=llama-3.1-8b"], 16, 1, 1),
    (["cluster=a100-16", "model=llama-3.1-70b"], 4, 4, 1),
    (["cluster=a40-4", "schedule.replicas=1"], 1, 4, 1),
    (["cluster=a40-4", "schedule={replicas: 1, tp_degree: 1}"], 1, 1, 4),
    (["cluster=a40-4", "schedule={tp_degree: 2, tp_gpus: 4}"], 1, 2, 2)])
def test_a_plan_is_replicas_of_equal_groups(tmp_path, overrides, replicas, degree, stages):
    found = plan_job(on_gpus(tmp_path, *overrides))
    deployment = found.schedule.deployment
    assert (deployment.replicas, deployment.tp_degree) == (replicas, degree)
    assert [stage.tp_degree for stage in deployment.stages] == [degree] * stages
    assert not found.schedule.estimate.others
    devices = f"{degree * stages} device{'s' * (degree * stages > 1)}"
    assert (f"{replicas} replica{'s' * (replicas > 1)} x {devices} (TP {degree}, PP {stages})"
            in str(found))
    assert "vLLM 0.32 on A" in str(found), "vLLM's constants"


def test_a_job_begins_on_as_many_replicas_as_there_is_room_for():
    """Nine heads cannot be divided; lengths are known only as caps, at which the limit breaks."""
    problem = replace(problem_of("smollm2-135m", "a40-4"), most_stages=1, observes=True,
                      is_revised=True, num_queries=100)
    timing = roofline_of(problem)
    free_s = min(one.least_s for one in _able(problem, timing))
    problem = replace(problem, constraint=problem.constraint.with_latency(limit_s=0.8 * free_s))
    found = initial_schedule(problem, timing)
    assert found is not None and found.deployment.replicas == 4


def given_schedule(opened: OpenedJob) -> Schedule:
    """A schedule of xgpt's own engine for the job."""
    job = replace(opened.job, run=replace(opened.job.run, engine="xgpt"))
    return plan_job(replace(opened, job=job)).schedule


@pytest.mark.parametrize(("schedule", "keys"), [
    ("{policy: waa-c, replicas: 1}", ["schedule.policy"]),
    ("{policy: orca, replicas: 1, tp_degree: 2, tp_gpus: 2}",
     ["schedule.stages"]),  # a group of two, and two single devices
    ("{policy: orca, replicas: 1, tp_degree: 1}", []),
    ("{policy: orca, replicas: 4}", [])])
def test_a_given_schedule_that_it_cannot_execute_is_refused(tmp_path, schedule, keys):
    opened = on_gpus(tmp_path, "cluster=a40-4", f"schedule={schedule}")
    given = given_schedule(opened)
    free = on_gpus(tmp_path, "cluster=a40-4")
    if not keys:
        assert plan_from(free, given, tmp_path / "s.json").schedule == given
        return
    with pytest.raises(InputError) as refused:
        plan_from(free, given, tmp_path / "s.json")
    assert [key for key in keys_of(refused) if key != "schedule.tp_gpus"] == keys


def test_replicas_of_several_shapes_are_refused(tmp_path):
    opened = on_gpus(tmp_path, "cluster=a40-4", "schedule={policy: orca, replicas: 2}")
    one = given_schedule(opened)
    two = one.changed(others=(one.estimate.one_copy,))
    with pytest.raises(InputError, match="all of one shape") as refused:
        executable(opened, two)
    assert "schedule.others" in keys_of(refused)


@pytest.mark.parametrize(("config", "why"), [
    (None, "there is no adapter_config.json"), ("{}", "KeyError"), ('{"r": 0}', "rank `r`"),
    ('{"r": 9}', None)])
def test_an_adapter_is_a_folder_that_says_its_rank(tmp_path, config, why):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    if config is not None:
        (adapter / "adapter_config.json").write_text(config)
    job = load_job(job_of(tmp_path, f"engine_args: {{lora_path: {adapter}, block_size: 32}}"))
    found = list(engine_of(job).refusals(job))
    if why is None:
        assert found == [] and engine_arguments(job.run.engine_args) == {
            "enable_lora": True, "max_loras": 1, "max_lora_rank": 16, "block_size": 32}
    else:
        assert [mistake.key for mistake in found] == ["run.engine_args.lora_path"]
        assert why in found[0].allowed
    relative = load_job(job_of(tmp_path, "engine_args: {lora_path: adapter, enable_lora: true}"))
    assert sorted(mistake.key for mistake in engine_of(relative).refusals(relative)) == [
        "run.engine_args.enable_lora", "run.engine_args.lora_path"]


@pytest.mark.parametrize("key", ["engine_python: /opt/python", "engine_args: {a: 1}"])
def test_its_keys_are_its_own(tmp_path, key):
    path = job_of(tmp_path, key)
    assert load_job(path).run.engine == "vllm"
    path.write_text(path.read_text().replace("engine: vllm", "engine: xgpt"))
    with pytest.raises(InputError, match="only with run.engine: vllm"):
        load_job(path)


def test_without_vllm_the_error_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(XgptError, match="is no program: run.engine_python"):
        version_in(str(tmp_path / "python"))
    try:
        version_in(sys.executable)
    except XgptError as error:
        assert "there is no vLLM in the environment of" in str(error)
