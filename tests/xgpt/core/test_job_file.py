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
from xgpt.core.errors import EXIT_BAD_INPUT, InputError
from xgpt.core.job import Adjustment, FixedSchedule, Job, LengthSpec
from xgpt.core.job_file import load_job
from xgpt.core.policies import policy_names
from xgpt.core.run_section import RunSpec
from xgpt.core.slurm import SlurmSpec

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
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
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


def test_stop_strings_of_the_job_are_texts_of_any_characters(folder: Path) -> None:
    assert _load(folder, FULL).run.stop == ()
    assert _load(folder, FULL, 'run.stop="###"').run.stop == ("###",)
    assert _load(folder, FULL, 'run.stop=["\\n", " "]').run.stop == ("\n", " ")
    assert len(_mistakes(folder, MINIMAL, "run.stop=a", "workload.requests={count: 3}")) == 1


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


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_is_known_by_name(folder: Path, policy: str) -> None:
    assert _load(folder, MINIMAL, f"schedule.policy={policy}").schedule.policy == policy


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


def test_lengths_may_come_from_a_file(folder: Path) -> None:
    job = _load(folder, MINIMAL, "workload={input_tokens: {file: lengths.csv}, "
                                 "output_tokens: {mean: 5, std: 0, max: 8}}")
    assert job.workload.input_tokens == LengthSpec(kind="file", path=folder / "lengths.csv")


def test_overrides_win_over_the_file_and_are_checked_alike(folder: Path) -> None:
    assert _load(folder, FULL, "run.ranks=2", "constraint.latency_s=inf").run.ranks == 2
    with pytest.raises(InputError) as caught:
        _load(folder, FULL, "run.rank=2")
    assert str(caught.value).startswith("--set: run.rank: unknown key; did you mean 'ranks'?")


def test_mistakes_come_in_the_order_of_the_lines_and_the_command_line_last(folder: Path) -> None:
    found = _mistakes(folder, "zzz: 1\n" + MINIMAL + "run: {ranks: x}\nrun: 1\n", "output=7")
    assert [m.split(" ")[0] for m in found] == ["1", "5", "6", "None"]


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


def test_what_is_left_out_is_as_given_without_a_value_and_times_are_those_of_the_engine(folder):
    assert _load(folder, MINIMAL + "name:\nrun:\nconstraint: {latency_s: }\nslurm:\n") == _load(
        folder, MINIMAL)
    for text, engine in (("", "xgpt"), ("run: {engine: deepspeed}\n", "deepspeed"),
                         ("plan: {engine: vllm}\n", "vllm")):
        assert _load(folder, MINIMAL + text).plan_engine == engine
