"""Job files: what is read, where, and that every mistake is reported at once. Wrong values have
test_wrong_jobs.py."""

import math
from pathlib import Path

import pytest
import yaml
from examples import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from xgpt.core import catalog
from xgpt.core.constraint import latency_constraint
from xgpt.core.controls import Adjustment, FixedSchedule
from xgpt.core.errors import InputError
from xgpt.core.policies import policy_names, searched_policies
from xgpt.job.job import LengthSpec, RunSpec
from xgpt.job.job_file import load_job
from xgpt.job.sections import SlurmSpec
from xgpt.job.sweep_file import load_sweep

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
slurm: {partition: gpu, time: 02:00:00, account: 007}
output: results/
"""

@pytest.fixture
def folder(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hi"}\n', encoding="utf-8")
    (tmp_path / "lengths.csv").write_text("input,output\n3,4\n", encoding="utf-8")
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text("{}", encoding="utf-8")
    return tmp_path


def load(folder, text, *overrides):
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return load_job(path, overrides)


def places(folder, text, *overrides):
    """Mistakes as "line key"."""
    with pytest.raises(InputError) as caught:
        load(folder, text, *overrides)
    return [f"{mistake.line} {mistake.key}" for mistake in caught.value.mistakes]


def test_every_key_of_a_full_job_arrives(folder):
    job = load(folder, FULL)
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
    # YAML 1.1 would read the time as 7200 (minutes, to Slurm) and the account as 7
    assert job.slurm == SlurmSpec(partition="gpu", time="02:00:00", account="007")


def fixed(job):
    """How batches are adjusted. That fixes nothing of the schedule."""
    assert job.schedule == FixedSchedule(policies=job.schedule.policies,
                                         replicas=job.schedule.replicas)
    return job.adjustment


@pytest.mark.parametrize(("override", "get", "value"), [
    ("name=", lambda job: (job.name, job.output.name, job.slurm), ("job", "out", None)),
    ("name=", lambda job: (job.constraint, job.run, job.schedule, job.workload.requests),
     (latency_constraint(latency_s=math.inf), RunSpec(), FixedSchedule(), None)),
    ("name=", lambda job: job.workload.input_tokens, LengthSpec(kind="task", task="S")),
    ("name=", lambda job: (job.run.stop, job.run.engine, job.plan_engine), ((), "xgpt", "xgpt")),
    ("constraint.latency_s=90 s", lambda job: job.constraint.latency_s, 90),
    ("constraint.latency_s=2 min", lambda job: job.constraint.latency_s, 120),
    ("constraint.latency_s=1e1", lambda job: job.constraint.latency_s, 10),
    ("constraint.latency_s=inf", lambda job: job.constraint.latency_s, math.inf),
    ("constraint.latency_s=.inf", lambda job: job.constraint.latency_s, math.inf),
    *((f"run.reschedule={text}", lambda job: job.run.reschedule, share) for text, share in (
        ("", 0.1), ("auto", 0.1), ("on", 0.1), ("off", None), ("false", None), ("0.25", 0.25),
        ("5%", 0.05), ("1", 1.0))),
    ("run.stage_model=/scratch", lambda job: job.run.stage_model, "/scratch"),
    ("run.stage_model=off", lambda job: job.run.stage_model, "off"),
    ('run.stop="###"', lambda job: job.run.stop, ("###",)),
    ('run.stop=["\\n", " "]', lambda job: job.run.stop, ("\n", " ")),
    ("run.engine=deepspeed", lambda job: (job.run.engine, job.plan_engine), ("deepspeed",) * 2),
    ("plan.engine=vllm", lambda job: (job.run.engine, job.plan_engine), ("xgpt", "vllm")),
    ("plan.engine=vllm-0.12.0", lambda job: job.plan_engine, "vllm-0.12"),
    ("run.engine=vllm", lambda job: (job.run.engine, job.plan_engine), ("vllm", "vllm-0.32")),
    *((f"workload={{requests: {{count: {text}}}, task: S}}", lambda job: job.workload.count, count)
      for text, count in (("3e6", 3_000_000), ("3M", 3_000_000), ("1.2k", 1200), ("'256'", 256))),
    ("run.top_p='0.9'", lambda job: job.run.top_p, 0.9),
    ("run.ranks=2.0", lambda job: job.run.ranks, 2),
    ("schedule.replicas='2'", lambda job: job.schedule.replicas, 2),
    *((f"run.dtype={text}", lambda job: job.run.dtype, dtype) for text, dtype in (
        ("fp16", "float16"), ("half", "float16"), ("bf16", "bfloat16"), ("fp32", "float32"))),
    ("model=OPT-13B", lambda job: job.model, "opt-13b"),
    ("cluster={device: rtx4090, devices_per_node: 2, intra_link: pcie4-x16}",
     lambda job: job.cluster.device.name, "RTX-4090"),
    ("cluster=16xA100", lambda job: job.cluster, "16xA100-80"),
    ("model=./my-model", lambda job: job.model.startswith("/"), True),
    ("model=my-model", lambda job: job.model.endswith("/my-model"), True),
    ("model=facebook/opt-125m", lambda job: job.model, "facebook/opt-125m"),
    ("cluster={device: A40, devices_per_node: 4, intra_link: nvlink3}",
     lambda job: (job.cluster.device, job.cluster.intra_link, job.cluster.inter_link),
     (catalog.device("A40"), catalog.link("nvlink3"), catalog.link("nvlink3"))),
    ("cluster={num_nodes: 2, devices_per_node: 1, intra_link: {bandwidth_bytes_per_s: 25 GB, "
     "latency_s: 10 us}, inter_link: ib-100g, device: {memory_bytes: 8 GiB, flops_per_s: "
     "{float32: 1e13}, bandwidth_bytes_per_s: 1e11}}",
     lambda job: (job.cluster.device.memory_bytes, job.cluster.intra_link.latency_s),
     (8 * 2**30, pytest.approx(1e-5))),
    ("workload={requests: prompts.jsonl}",
     lambda job: (job.workload.input_tokens.kind, job.workload.output_tokens.kind),
     ("from_requests", "observe")),
    ("workload={input_tokens: {file: lengths.csv}, output_tokens: {mean: 5, std: 0, max: 8}}",
     lambda job: (job.workload.input_tokens.kind, job.workload.input_tokens.path.name),
     ("file", "lengths.csv")),
    *((f"schedule.policy={name}", lambda job: job.schedule.policy, name)
      for name in policy_names()),
    ("schedule.policy=auto", lambda job: (job.schedule.policies, job.schedule.policy), ((), None)),
    ("schedule.policy=[rra, waa-c, rra]", lambda job: (job.schedule.policies, job.schedule.policy),
     (("rra", "waa-c"), None)),
    ("schedule=auto", fixed, Adjustment()),
    ("schedule={policy: waa-c, steer: true}", fixed, Adjustment(steers=True)),
    ("schedule={adjustment: 15%, steer: false, shuffle: true}", fixed,
     Adjustment(share=0.15, steers=False, order="random")),
    ("schedule={adjustment: 0, shuffle: 500}", fixed,
     Adjustment(share=0.0, order="random", window=500)),
    ("schedule={order: longest-output, window: job}", fixed,
     Adjustment(order="longest-output", window=0)),
    ("schedule={order: auto, window: 2k}", fixed, Adjustment(window=2000)),
    ("schedule={replicas: 2, routing: round-robin}", fixed, Adjustment(routing="round-robin")),
    ("schedule={policy: ft, shuffle: false}", fixed, Adjustment(order="input"))])
def test_what_a_key_becomes(folder, override, get, value):
    assert get(load(folder, MINIMAL, override)) == value


def test_keys_without_a_value_count_as_not_given_and_overrides_win(folder):
    assert load(folder, MINIMAL + "name:\nrun:\nconstraint: {latency_s: }\nslurm:\n") == load(
        folder, MINIMAL)
    assert load(folder, FULL, "run.ranks=2", "constraint.latency_s=inf").run.ranks == 2
    with pytest.raises(InputError) as caught:
        load(folder, FULL, "run.rank=2")
    assert str(caught.value).startswith("--set: run.rank: unknown key; did you mean 'ranks'?")


def test_all_mistakes_are_told_in_the_order_of_the_lines_and_the_command_line_last(folder):
    assert places(folder, """\
model: opt-13b
cluster: a40-4
workload:
  requests: none.jsonl
  output_tokens: {mean: 90, std: 13, max: 80}
constraint: {latency_s: -2}
run: {ranks: true}
shedule: auto
""") == ["4 workload.requests", "5 workload.output_tokens.mean", "6 constraint.latency_s",
         "7 run.ranks", "8 shedule"]
    assert places(folder, "name: x\n") == ["1 model", "1 cluster", "1 workload"]
    found = places(folder, f"zzz: 1\n{MINIMAL}run: {{ranks: x}}\nrun: 1\n", "output=7")
    assert [place.split(" ")[0] for place in found] == ["1", "5", "6", "None"]
    assert len(places(folder, MINIMAL, "run.stop=a", "workload.requests={count: 3}")) == 1


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
def test_any_junk_gives_a_job_or_an_input_error(folder, junk):
    try:
        load(folder, yaml.safe_dump(junk))
    except InputError as error:
        assert str(error)


def test_what_is_no_job_file_by_its_name_is_told_with_what_to_do(tmp_path):
    (tmp_path / "my questions.csv").write_text("prompt\nhello\n")
    with pytest.raises(InputError, match=r"looks like prompts.*init --prompts '.*questions.csv'"):
        load_job(tmp_path / "my questions.csv")
    with pytest.raises(InputError, match=r"is a folder; a job file in it is wanted"):
        load_job(tmp_path)


# Sweep files and the flags of `xgpt sweep`: which points they make, and what is wrong in them.


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
    assert (first.job.constraint.latency_s, first.relative_bound) == (5, None)
    assert (shared.job.constraint.latency_s, shared.relative_bound) == (math.inf, "50%")
    assert spec.points[3].job.schedule.policy is None


def test_a_task_takes_the_place_of_lengths_and_a_cluster_is_meant_as_a_whole(job):
    own, task, cluster, gpus = (
        load_sweep(job, over=over).points[0].job
        for over in (("policy=ft",), ("task=T",), ("cluster=a40-8",), ("cluster=a40-8", "gpus=2")))
    assert own.workload.output_tokens.mean == 30 and own.run.ranks == 4
    assert task.workload.output_tokens.task == "T" and task.workload.count == 2000
    assert cluster.cluster == "a40-8" and cluster.run.ranks is None
    assert gpus.run.ranks == 2
    rows = load_sweep(job, over=("plan.engine=vllm-0.12.0,sglang-0.5",), bounds="inf").points
    assert [point.job.plan_engine for point in rows] == ["vllm-0.12", "sglang"]


def test_flags_take_the_place_of_a_file_s_axes_and_set_changes_its_base(job):
    path = write(job.parent, "base: base.yaml\ncases: [{task: [S, T]}]\ngrid: {bound: [5, 6]}\n")
    spec = load_sweep(
        path, overrides=("run.dtype=float32",), over=("workload.task=C1", "policy=all"),
        bounds="2 min", out=job.parent / "there", horizon="job")
    assert len(spec.points) == len(searched_policies()) and spec.horizon == "job"
    assert {point.job.workload.output_tokens.task for point in spec.points} == {"C1"}
    assert {point.job.constraint.latency_s for point in spec.points} == {120}
    assert {point.job.run.dtype for point in spec.points} == {"float32"}
    assert spec.output == job.parent / "there"


def test_a_job_file_alone_and_an_inline_base_are_swept(job, tmp_path):
    spec = load_sweep(job)
    assert [point.relative_bound for point in spec.points] == [
        "10%", "20%", "30%", "50%", "70%", "100%", None]
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
  bound: [5, 0%, ft0, -3, soon]
  modle: [a]
  task: [S, Q]
  policy: []
  workload.tsk: 3
horizont: job
"""))
    places = [one.partition(": ")[0] for one in told]
    assert places == [f"sweep.yaml:{line}" for line in (3, 4, 5, 5, 7, 7, 7, 7, 8, 9, 10, 11, 12)]
    text = "\n".join(told)
    for part in ("model = 'opt-13c': unknown model; did you mean 'opt-13b'?",
                 "cases[1]: a mapping of axes", "cases[2].polizy = 'rra': unknown axis; did you",
                 "task: also an axis of the grid", "grid.bound = '0%': seconds, inf, a share",
                 "grid.bound = 'ft0': seconds, inf, a share", "FT's latencies, ft1 to ft99",
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
