"""What the engine vllm refuses before anything is started, and what it plans."""

import sys
from pathlib import Path

import pytest

from xgpt.core.errors import InputError, XgptError
from xgpt.core.problem import Problem
from xgpt.job.job_file import load_job
from xgpt.job.resolve import resolve
from xrunner.backends.engine import engine_of
from xrunner.backends.vllm.row import engine_arguments, version_in


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
    ("ranks: 2, hosts: [a, b]", "auto", ["run.hosts"]),
    ("weights: random, cuda_graphs: off", "auto", ["run.weights", "run.cuda_graphs"]),
    ("engine_args: {max_num_seqs: 9, dtype: float16, block_size: 16}", "auto",
     ["run.engine_args.max_num_seqs", "run.engine_args.dtype"])])
def test_what_it_does_not_do_is_refused_by_key(tmp_path, run, schedule, keys):
    job = load_job(job_of(tmp_path, run, schedule))
    assert [mistake.key for mistake in engine_of(job).refusals(job)] == keys


def planned(path: Path, *overrides: str) -> Problem:
    job = load_job(path, ["workload.requests={count: 90}", "workload.input_tokens={mean: 20, "
                          "std: 9, max: 50}", *overrides])
    return engine_of(job).restricted(job, resolve(job), None)


def test_all_ranks_divide_each_layer(tmp_path):
    path = job_of(tmp_path, "ranks: 4, threads_per_rank: 1")
    fixed = planned(path).fixed
    assert (fixed.replicas, fixed.tp_degree, fixed.tp_gpus) == (1, 4, 4)
    one = planned(path, "run.ranks=1").fixed
    assert (one.replicas, one.tp_degree, one.tp_gpus) == (1, 1, 0)
    for override, key in (("run.ranks=3", "run.ranks"), ("schedule.tp_degree=2",
                                                         "schedule.tp_degree")):
        with pytest.raises(InputError) as refused:
            planned(path, override)
        assert [mistake.key for mistake in refused.value.mistakes] == [key]
    many = job_of(tmp_path, "ranks: 16").read_text().replace("cluster: local", "cluster: a100-16")
    path.write_text(many)
    with pytest.raises(InputError, match="of one node"):
        planned(path)


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
