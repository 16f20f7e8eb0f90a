"""Job files: what is read, what is refused, and that every mistake is reported at once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from examples import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from xgpt.core import catalog
from xgpt.core.cluster import Cluster
from xgpt.core.constraint import latency_constraint
from xgpt.core.controls import Adjustment, FixedSchedule
from xgpt.core.errors import EXIT_BAD_INPUT, InputError
from xgpt.core.policies import policy_names
from xgpt.job.job import Job, LengthSpec, RunSpec
from xgpt.job.job_file import load_job
from xgpt.job.slurm_section import SlurmSpec

MINIMAL = "model: opt-13b\ncluster: a40-4\nworkload: {task: S}\n"
FULL = """\
name: news-summaries
model: opt-13b                     # catalog name, local HF directory, or hub id
cluster: a40-4
workload:
  requests: prompts.jsonl
  input_tokens:  {mean: 256, std: 252, max: 512}
  output_tokens: {mean: 32, std: 13, max: 80}
  max_tokens: 80
  chat: false
constraint: {latency_s: 11.5, kind: queries, quantile: 0.95}
schedule: {policy: rra, encode_batch: 49, decode_iterations: 7, tp_degree: 4, tp_gpus: 4}
run:   {ranks: 4, dtype: bfloat16, seed: 3, temperature: 0.7, top_k: 5, top_p: 0.9}
slurm: {partition: gpu, nodes: 1, time: 02:00:00, modules: [cuda/12, mpi], account: 007}
output: results/
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hi"}\n', encoding="utf-8")
    (tmp_path / "lengths.csv").write_text("input,output\n3,4\n", encoding="utf-8")
    local = tmp_path / "my-model"
    local.mkdir()
    (local / "config.json").write_text("{}", encoding="utf-8")
    return tmp_path


def _load(folder: Path, text: str, *overrides: str) -> Job:
    (path := folder / "job.yaml").write_text(text, encoding="utf-8")
    return load_job(path, overrides)


def _mistakes(folder: Path, text: str, *overrides: str) -> list[str]:
    """Mistakes as "line key: allowed"."""
    with pytest.raises(InputError) as caught:
        _load(folder, text, *overrides)
    assert caught.value.exit_code == EXIT_BAD_INPUT
    return [f"{m.line} {m.key}: {m.allowed}" for m in caught.value.mistakes]


def test_every_key_of_a_full_job_arrives(folder: Path) -> None:
    job = _load(folder, FULL)
    assert (job.name, job.model, job.cluster) == ("news-summaries", "opt-13b", "a40-4")
    files = job.workload.requests
    assert files is not None and files.paths == (folder / "prompts.jsonl",)
    assert job.workload.count is None and job.results is None
    assert job.workload.input_tokens == LengthSpec(kind="normal", mean=256, std=252, maximum=512)
    assert (job.workload.max_tokens, job.workload.chat) == (80, False)
    assert job.constraint == latency_constraint(latency_s=11.5, kind="queries", quantile=0.95)
    assert job.schedule == FixedSchedule(policies=("rra",), encode_batch=49, decode_iterations=7,
                                         tp_degree=4, tp_gpus=4)
    assert job.run == RunSpec(ranks=4, dtype="bfloat16", seed=3, temperature=0.7, top_k=5,
                              top_p=0.9)
    assert (job.output, job.source) == (folder / "results", folder / "job.yaml")


def test_times_are_those_of_the_engine_that_runs_unless_the_job_plans_for_another(
        folder: Path) -> None:
    assert _load(folder, MINIMAL).plan_engine == "xgpt"
    assert _load(folder, MINIMAL + "run: {engine: deepspeed}\n").plan_engine == "deepspeed"
    assert _load(folder, MINIMAL + "plan: {engine: vllm}\n").plan_engine == "vllm"
    assert any("plan.engine" in told and "tensorrt-llm" in told for told in _mistakes(
        folder, MINIMAL + "plan: {engine: trt}\n"))
    assert any("plan.engin" in told for told in _mistakes(
        folder, MINIMAL + "plan: {engin: vllm}\n"))


def test_stop_strings_of_the_job_are_texts_of_any_characters(folder: Path) -> None:
    assert _load(folder, FULL).run.stop == ()
    assert _load(folder, FULL, 'run.stop="###"').run.stop == ("###",)
    assert _load(folder, FULL, 'run.stop=["\\n", " "]').run.stop == ("\n", " ")
    assert len(_mistakes(folder, MINIMAL, "run.stop=a", "workload.requests={count: 3}")) == 1


def test_the_engine_is_xgpts_own_unless_the_job_names_another(folder: Path) -> None:
    assert _load(folder, MINIMAL).run.engine == "xgpt"
    assert _load(folder, MINIMAL, "run.engine=deepspeed").run.engine == "deepspeed"
    (mistake,) = _mistakes(folder, MINIMAL, "run.engine=vlm")
    assert "xgpt, deepspeed" in mistake


def test_slurms_words_stay_as_written(folder: Path) -> None:
    # YAML 1.1 would read the time as 7200 (minutes, to Slurm) and the account as 7
    assert _load(folder, FULL).slurm == SlurmSpec(
        partition="gpu", nodes=1, time="02:00:00", modules=("cuda/12", "mpi"), account="007")


def test_a_minimal_job_has_defaults(folder: Path) -> None:
    job = _load(folder, MINIMAL)
    assert job.name == "job" and job.output == folder / "out" and job.slurm is None
    assert job.constraint == latency_constraint(latency_s=math.inf) and job.run == RunSpec()
    assert job.schedule == FixedSchedule() and job.workload.requests is None
    assert job.workload.input_tokens == LengthSpec(kind="task", task="S")


def test_keys_without_a_value_count_as_not_given(folder: Path) -> None:
    assert _load(folder, MINIMAL + "name:\nrun:\nconstraint: {latency_s: }\nslurm:\n") == _load(
        folder, MINIMAL)


def test_lengths_of_a_file_of_requests_default_to_theirs(folder: Path) -> None:
    job = _load(folder, "model: gpt2\ncluster: local\nworkload: {requests: prompts.jsonl}")
    assert job.workload.input_tokens.kind == "from_requests"
    assert job.workload.output_tokens.kind == "observe"


@pytest.mark.parametrize(("text", "seconds"), [
    ("90 s", 90), ("2 min", 120), ("11.5", 11.5), ("inf", math.inf), (".inf", math.inf),
    ("1e1", 10)])
def test_latency_takes_units_and_infinity(folder: Path, text: str, seconds: float) -> None:
    job = _load(folder, MINIMAL + f"constraint: {{latency_s: {text}}}")
    assert job.constraint.latency_s == seconds


def test_a_model_is_a_row_a_folder_or_a_hub_id(folder: Path) -> None:
    for written, stored in [("opt-13b", "opt-13b"), ("./my-model", str(folder / "my-model")),
                            ("my-model", str(folder / "my-model")),
                            (str(folder / "my-model"), str(folder / "my-model")),
                            ("facebook/opt-125m", "facebook/opt-125m")]:
        assert _load(folder, MINIMAL, f"model={written}").model == stored


@pytest.mark.parametrize(("model", "reason"), [
    ("opt13b", "did you mean 'opt-13b'"), ("./none", "no config.json in"), ("/tmp", "no config"),
    ("a/b/c", "hub id owner/name"), ("a /b", "hub id owner/name"), ("7", "catalog name"),
    ("[x]", "not a list"), ("{a: 1}", "not a mapping"), ("''", "catalog name")])
def test_what_is_no_model_is_refused(folder: Path, model: str, reason: str) -> None:
    (mistake,) = _mistakes(folder, MINIMAL, f"model={model}")
    assert reason in mistake


def test_an_inline_cluster_takes_rows_and_mappings(folder: Path) -> None:
    job = _load(folder, MINIMAL, "cluster={device: A40, devices_per_node: 4, intra_link: nvlink3}")
    assert isinstance(job.cluster, Cluster) and job.cluster.device == catalog.device("A40")
    assert job.cluster.intra_link == job.cluster.inter_link == catalog.link("nvlink3")
    own = _load(folder, MINIMAL, "cluster={num_nodes: 2, devices_per_node: 1, intra_link: "
                "{bandwidth_bytes_per_s: 25 GB, latency_s: 10 us}, inter_link: ib-100g, device: "
                "{memory_bytes: 8 GiB, bandwidth_bytes_per_s: 1e11, flops_per_s: {float32: 1e13}}}"
                ).cluster
    assert isinstance(own, Cluster) and own.device.memory_bytes == 8 * 2**30
    assert own.intra_link.latency_s == pytest.approx(1e-5)


@pytest.mark.parametrize(("cluster", "keys"), [
    ("{}", ["cluster.device", "cluster.devices_per_node", "cluster.intra_link"]),
    ("{device: A41, devices_per_node: 4, intra_link: pcie}",
     ["cluster.device", "cluster.intra_link"]),
    ("{device: A40, num_nodes: 2, devices_per_node: 4, intra_link: nvlink3}",
     ["cluster.inter_link"]),
    ("{device: {memory_bytes: lots, flops_per_s: {int4: 1}}, devices_per_node: 1, nods: 1, "
     "intra_link: {latency_s: -1, bandwidth_bytes_per_s: 0}}",
     ["cluster.device.bandwidth_bytes_per_s", "cluster.device.flops_per_s.float32",
      "cluster.device.flops_per_s.int4", "cluster.device.memory_bytes",
      "cluster.intra_link.bandwidth_bytes_per_s", "cluster.intra_link.latency_s",
      "cluster.nods"]),
    ("a40-5", ["cluster"]), ("[a40-4]", ["cluster"])])
def test_what_is_no_cluster_is_refused(folder: Path, cluster: str, keys: list[str]) -> None:
    found = [m.split(" ")[1].rstrip(":") for m in _mistakes(folder, MINIMAL, f"cluster={cluster}")]
    assert sorted(found) == keys


def test_five_different_mistakes_are_exactly_five(folder: Path) -> None:
    text = """\
model: opt-13b
cluster: a40-4
workload:
  requests: none.jsonl
  output_tokens: {mean: 90, std: 13, max: 80}
constraint: {latency_s: -2}
run: {ranks: true}
shedule: auto
"""
    found = _mistakes(folder, text)
    assert [m.split(":")[0] for m in found] == [
        "4 workload.requests", "5 workload.output_tokens.mean",
        "6 constraint.latency_s", "7 run.ranks", "8 shedule"]


def test_the_three_required_keys_are_all_missed(folder: Path) -> None:
    assert [m.split(":")[0] for m in _mistakes(folder, "name: x\n")] == [
        "1 model", "1 cluster", "1 workload"]


@pytest.mark.parametrize(("override", "key"), [
    ("constraint.quantile=1", "constraint.quantile"),
    ("constraint.quantile=0", "constraint.quantile"),
    ("constraint.kind=mean", "constraint.kind"), ("constraint.latency_s=0", "constraint.latency_s"),
    ("constraint.latency_s=.nan", "constraint.latency_s"),
    ("constraint.latency_s=true", "constraint.latency_s"), ("constraint=5", "constraint"),
    ("run.engine=sglang", "run.engine"), ("run.engine=true", "run.engine"),
    ("run.dtype=half", "run.dtype"), ("run.ranks=0", "run.ranks"), ("run.ranks=2.0", "run.ranks"),
    ("run.seed=-1", "run.seed"), ("run.temperature=-0.1", "run.temperature"),
    ("run.temperature=.inf", "run.temperature"), ("run.top_p=0", "run.top_p"),
    ("run.top_p=1.1", "run.top_p"), ("run.ignore_eos=yes", "run.ignore_eos"),
    ("run.stop=''", "run.stop"), ("run.stop=[a, 3]", "run.stop"),
    ("schedule=manual", "schedule"), ("schedule.policy=fifo", "schedule.policy"),
    ("schedule.encode_batch=0", "schedule.encode_batch"), ("schedule=[1]", "schedule"),
    ("schedule.adjustment=1", "schedule.adjustment"), ("schedule.steer=2", "schedule.steer"),
    ("schedule.routing=random", "schedule.routing"),
    ("schedule.shuffle=1", "schedule.shuffle"), ("schedule.shuffle=all", "schedule.shuffle"),
    ("slurm.nodes=0", "slurm.nodes"), ("slurm.time=2 h", "slurm.time"),
    ("slurm.mem=lots", "slurm.mem"), ("slurm.modules=[1]", "slurm.modules"),
    ("slurm.gpu=1", "slurm.gpu"), ("output=3", "output"), ("workload=5", "workload"),
    ("workload.task=X", "workload.task"), ("workload.max_tokens=0", "workload.max_tokens"),
    ("workload.requests={count: 0}", "workload.requests.count"),
    ("workload.requests={}", "workload.requests.count"),
    ("workload.requests=7", "workload.requests"),
    ("name={a: 1}", "name"), ("a.b.c=1", "a"), ('name="a\\nb"', "name")])
def test_one_wrong_value_is_one_mistake(folder: Path, override: str, key: str) -> None:
    (mistake,) = _mistakes(folder, MINIMAL, override)
    assert mistake.startswith(f"None {key}:")


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_is_known_by_name(folder: Path, policy: str) -> None:
    assert _load(folder, MINIMAL, f"schedule.policy={policy}").schedule.policy == policy


@pytest.mark.parametrize(("schedule", "key", "words"), [
    ("{policy: ft, encode_micro_batches: 4}", "schedule.encode_micro_batches", "a variable of dsi"),
    ("{policy: waa-c, decode_iterations: 4}", "schedule.decode_iterations", "waa-c has"),
    ("{policy: orca, encode_batch: 4}", "schedule.encode_batch", "orca has max_active"),
    ("{policy: dsi, decode_micro_batches: 4, encode_micro_batches: 6}",
     "schedule.encode_micro_batches", "multiple of decode_micro_batches = 4")])
def test_a_variable_of_another_policy_is_a_mistake(folder: Path, schedule: str, key: str,
                                                   words: str) -> None:
    (mistake,) = _mistakes(folder, MINIMAL, f"schedule={schedule}")
    assert key in mistake and words in mistake


@pytest.mark.parametrize(("schedule", "expected"), [
    ("auto", Adjustment()), ("{policy: waa-c, steer: true}", Adjustment(steers=True)),
    ("{adjustment: 15%, steer: false, shuffle: true}",
     Adjustment(share=0.15, steers=False, shuffle=True)),
    ("{adjustment: 0, shuffle: 500}", Adjustment(share=0.0, shuffle=500)),
    ("{replicas: 2, routing: round-robin}", Adjustment(routing="round-robin")),
    ("{policy: ft, shuffle: false}", Adjustment())])
def test_the_workload_adjustment_fixes_nothing_of_the_schedule(
        folder: Path, schedule: str, expected: Adjustment) -> None:
    path = folder / "job.yaml"
    path.write_text(MINIMAL)
    job = load_job(path, [f"schedule={schedule}"])
    assert job.adjustment == expected
    assert job.schedule == FixedSchedule(policies=job.schedule.policies,
                                         replicas=job.schedule.replicas)


@pytest.mark.parametrize(("schedule", "key", "words"), [
    ("{policy: ft, adjustment: 5%}", "schedule.adjustment", "rra, waa-c, waa-m"),
    ("{policy: vllm, steer: true}", "schedule.steer", "rra, waa-c, waa-m"),
    ("{adjustment: 0, steer: true}", "schedule.steer", "above 0")])
def test_an_adjustment_that_cannot_be_is_a_mistake(folder: Path, schedule: str, key: str,
                                                   words: str) -> None:
    (mistake,) = _mistakes(folder, MINIMAL, f"schedule={schedule}")
    assert key in mistake and words in mistake


def test_tp_gpus_must_be_whole_groups(folder: Path) -> None:
    (mistake,) = _mistakes(folder, MINIMAL, "schedule={tp_degree: 2, tp_gpus: 3}")
    assert "multiple of tp_degree = 2" in mistake


@pytest.mark.parametrize(("workload", "keys"), [
    ("{}", ["workload.input_tokens", "workload.output_tokens"]),
    ("{task: S, input_tokens: {mean: 5, std: 1, max: 9}}", ["workload.input_tokens"]),
    ("{requests: {count: 5}}", ["workload.input_tokens", "workload.output_tokens"]),
    ("{requests: {count: 5}, input_tokens: from_requests, output_tokens: observe}",
     ["workload.input_tokens", "workload.output_tokens"]),
    ("{requests: prompts.jsonl, input_tokens: observe}", ["workload.input_tokens"]),
    ("{requests: prompts.jsonl, output_tokens: 32}", ["workload.output_tokens"]),
    ("{requests: prompts.jsonl, output_tokens: {mean: 5}}",
     ["workload.output_tokens.std", "workload.output_tokens.max"]),
    ("{requests: prompts.jsonl, output_tokens: {mean: 5, std: 9, max: 8}}",
     ["workload.output_tokens.std"]),
    ("{requests: prompts.jsonl, output_tokens: {file: none.csv}}", ["workload.output_tokens.file"]),
    ("{requests: prompts.jsonl, output_tokens: {file: lengths.csv, mean: 5}}",
     ["workload.output_tokens.mean"]),
    ("{requests: prompts.jsonl, output_tokens: {mean: .nan, std: 1, max: 8}}",
     ["workload.output_tokens.mean"])])
def test_lengths_that_contradict_are_refused(folder: Path, workload: str, keys: list[str]) -> None:
    found = _mistakes(folder, MINIMAL, f"workload={workload}")
    assert [m.split(" ")[1].rstrip(":") for m in found] == keys


def test_lengths_may_come_from_a_file(folder: Path) -> None:
    job = _load(folder, MINIMAL, "workload={input_tokens: {file: lengths.csv}, "
                                 "output_tokens: {mean: 5, std: 0, max: 8}}")
    assert job.workload.input_tokens == LengthSpec(kind="file", path=folder / "lengths.csv")


def test_an_unknown_key_is_refused_with_the_nearest(folder: Path) -> None:
    (mistake,) = _mistakes(folder, MINIMAL, "run.temprature=0")
    assert "did you mean 'temperature'" in mistake


def test_overrides_win_over_the_file_and_are_checked_alike(folder: Path) -> None:
    assert _load(folder, FULL, "run.ranks=2", "constraint.latency_s=inf").run.ranks == 2
    with pytest.raises(InputError) as caught:
        _load(folder, FULL, "run.rank=2")
    assert str(caught.value).startswith("--set: run.rank: unknown key; did you mean 'ranks'?")


def test_mistakes_come_in_the_order_of_the_lines_and_the_command_line_last(folder: Path) -> None:
    found = _mistakes(folder, "zzz: 1\n" + MINIMAL + "run: {ranks: x}\nrun: 1\n", "output=7")
    assert [m.split(" ")[0] for m in found] == ["1", "5", "6", "None"]


@pytest.mark.parametrize("text", ["", "# only a comment\n", "[1, 2]", "just text", "null"])
def test_a_file_without_keys_is_refused(folder: Path, text: str) -> None:
    (mistake,) = _mistakes(folder, text)
    assert "required keys: model, cluster, workload" in mistake


def test_loading_makes_nothing(folder: Path) -> None:
    before = sorted(folder.iterdir())
    _load(folder, FULL)
    assert sorted(folder.iterdir()) == sorted([*before, folder / "job.yaml"])


_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["auto", "inf", "S", "observe", "from_requests", "local", "a40-4", "./x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([
        "mean", "std", "max", "file", "count", "device", "policy", "latency_s", "time", "modules",
        "requests", "input_tokens", "output_tokens", "task", "ranks", "flops_per_s", "x"]),
        inner, max_size=4), max_leaves=8)


@given(st.dictionaries(st.sampled_from([
    "name", "model", "cluster", "workload", "constraint", "schedule", "run", "slurm", "output",
    "other"]), _JUNK, max_size=9))
@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_junk_gives_a_job_or_an_input_error(folder: Path, junk: dict[str, Any]) -> None:
    try:
        _load(folder, yaml.safe_dump(junk))
    except InputError as error:
        assert str(error)


@pytest.mark.parametrize("key", [
    "schedule.encode_batch", "schedule.decode_iterations", "schedule.shuffle", "run.top_k",
    "run.ranks", "workload.max_tokens", "run.threads_per_rank"])
def test_every_whole_number_has_a_most(key: str, tmp_path: Path) -> None:
    """The largest that 64 bits hold ended in a traceback, or in an allocation of 29.8 GiB."""
    path = tmp_path / "job.yaml"
    path.write_text("model: opt-13b\ncluster: a40-4\nworkload: {task: S}\noutput: out\n")
    with pytest.raises(InputError, match=key.rpartition(".")[2]):
        load_job(path, (f"{key}={2**63 - 1}",))


def test_what_is_no_job_file_by_its_name_is_told_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "my questions.csv").write_text("prompt\nhello\n")
    with pytest.raises(InputError, match=r"looks like prompts.*init --prompts '.*questions.csv'"):
        load_job(tmp_path / "my questions.csv")
    with pytest.raises(InputError, match=r"is a folder; a job file in it is wanted"):
        load_job(tmp_path)


@pytest.mark.parametrize(("value", "policies"), [
    ("auto", ()), ("sarathi", ("sarathi",)), ("[rra, waa-c, rra]", ("rra", "waa-c"))])
def test_a_job_names_policies_to_choose_among(folder: Path, value: str,
                                              policies: tuple[str, ...]) -> None:
    path = folder / "job.yaml"
    path.write_text(MINIMAL)
    schedule = load_job(path, [f"schedule.policy={value}"]).schedule
    assert schedule.policies == policies
    assert schedule.policy == (policies[0] if len(policies) == 1 else None)


@pytest.mark.parametrize("value", ["[]", "[rra, fifo]", "[3]", "[auto, rra]"])
def test_a_list_of_policies_has_known_names(folder: Path, value: str) -> None:
    (mistake,) = _mistakes(folder, MINIMAL, f"schedule.policy={value}")
    assert "schedule.policy" in mistake and "in a list" in mistake
