"""Sections of a job file: what their keys become. What is wrong in them has test_wrong_jobs.py."""

import json
import math
from pathlib import Path

import pytest

from jobs import job
from xgpt.core import catalog
from xgpt.job.job_file import load_job
from xgpt.job.resolve import resolve_cluster
from xgpt.job.sections import SlurmSpec, seconds_of, time_of
from xgpt.requests.reader import read_requests
from xgpt.requests.request import Request
from xgpt.requests.request_files import STDIN, RequestFiles

JOB = "model: opt-125m\ncluster: local\nworkload: {requests: {count: 4}, task: S}\n"
FULL = """
slurm:
  partition: gpu
  account: 007
  qos: high
  constraint: "a40&nvme"
  reservation: maintenance
  dependency: afterok:12:13_2,singleton
  nodes: 2
  ntasks_per_node: 4
  gpus_per_node: a40:4
  cpus_per_task: 8
  mem: 200G
  time: 1-02:30:00
  exclusive: true
  mail_type: [end, "FAIL,TIME_LIMIT_80"]
  mail_user: me@example.org
  at_once: 3
  extra: ["--comment=two words", --nice, "-L matlab:1"]
  modules: cuda/12.4
  venv: envs/xgpt
  env: {UCX_NET_DEVICES: "mlx5_0:1", OMP_PLACES: cores, N: 3}
  prologue: [ulimit -l unlimited, "cd /tmp"]
  container: [apptainer, exec, --nv, image.sif]
  launch: srun
  mpi: pmix
  requeue: 5
  warning: 5 min
"""

def load(folder: Path, text: str, *overrides: str) -> SlurmSpec | None:
    path = folder / "job.yaml"
    path.write_text(JOB + text, encoding="utf-8")
    return load_job(path, overrides).slurm


def test_every_option_arrives_in_slurms_own_words_and_one_key_makes_a_section(tmp_path):
    spec = load(tmp_path, FULL)
    assert spec == SlurmSpec(
        partition="gpu", account="007", qos="high", constraint="a40&nvme",
        reservation="maintenance", dependency="afterok:12:13_2,singleton", nodes=2,
        ntasks_per_node=4, gpus_per_node="a40:4", cpus_per_task=8, mem="200G", time="1-02:30:00",
        exclusive=True, mail_type=("END", "FAIL", "TIME_LIMIT_80"), mail_user="me@example.org",
        at_once=3, extra=("--comment=two words", "--nice", "-L matlab:1"), modules=("cuda/12.4",),
        venv=str(tmp_path / "envs/xgpt"),
        env=(("UCX_NET_DEVICES", "mlx5_0:1"), ("OMP_PLACES", "cores"), ("N", "3")),
        prologue=("ulimit -l unlimited", "cd /tmp"),
        container=("apptainer", "exec", "--nv", "image.sif"), mpi="pmix", requeue=5, warning_s=300)
    assert spec.gpus_each == 4 and spec.time_s == 26.5 * 3600
    assert load(tmp_path, "") is None and load(tmp_path, "slurm:\n") is None
    assert load(tmp_path, "", "slurm.launch=srun") == load(tmp_path, "slurm: {}") == SlurmSpec()


@pytest.mark.parametrize(("text", "seconds", "written"), [
    ("90", 5400, "01:30:00"), ("2:30", 150, "00:03:00"), ("02:00:00", 7200, "02:00:00"),
    ("1-0", 86400, "1-00:00:00"), ("1-02:30", 95400, "1-02:30:00"), ("0:01", 1, "00:01:00"),
    ("2-01:00:01", 176401, "2-01:01:00"), ("infinite", math.inf, ""), ("UNLIMITED", math.inf, "")])
def test_a_time_is_read_as_slurm_reads_it_and_written_in_whole_minutes_that_hold_it(
        text, seconds, written):
    assert seconds_of(text) == seconds
    assert not written or time_of(seconds) == written


def test_bounds_hold_jointly(tmp_path):
    constraint = job(tmp_path, objective="devices", constraint=(
        "{latency_s: 30, quantile: 0.95, ttft_s: 2, tpot_s: {limit_s: 60 ms, quantile: 0.9}, "
        "makespan_s: 6h}")).constraint
    assert constraint.latency_s == 30 and constraint.limit_s("makespan") == 6 * 3600
    ttft, tpot = constraint.bound_on("ttft"), constraint.bound_on("tpot")
    assert (ttft.limit_s, ttft.quantile, ttft.kind) == (2, 0.95, "queries")
    assert (tpot.limit_s, tpot.quantile) == (pytest.approx(0.06), 0.9)
    assert constraint.objective == "devices"
    assert math.isinf(job(tmp_path, constraint="{latency_s: 30}").constraint.limit_s("ttft"))


def test_prices(tmp_path):
    def device(**sections):
        return resolve_cluster(job(tmp_path, **sections)).device

    assert device().price_per_hour is None
    own = device(price_per_hour="0.4")
    assert (own.price_per_hour, own.price_source) == (0.4, "the job file")
    assert device(workload="{task: S}", cluster=(
        "{devices_per_node: 2, intra_link: nvlink4, device: {memory_bytes: 8e10, price_per_hour: "
        "1.5, bandwidth_bytes_per_s: 1e12, flops_per_s: {float32: 1e13}}}")).price_per_hour == 1.5
    known = [catalog.device(name) for name in catalog.names("device")]
    assert all(bool(one.price_source) == (one.price_per_hour is not None) for one in known)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b[1]").mkdir()  # a folder's own brackets are no pattern
    root = tmp_path / "b[1]"
    for name in ("c.jsonl", "a.jsonl", "b.csv", "x[0].jsonl", "data.parquet"):
        (root / name).touch()
    (root / "deep" / "er").mkdir(parents=True)
    (root / "deep" / "er" / "a.jsonl").touch()
    return root


def of(folder, requests, more="", **sections):
    return job(folder, **sections, workload=(
        f"{{requests: {requests}, output_tokens: {{mean: 5, std: 1, max: 9}}{more}}}"))


def files(folder: Path, requests: str) -> RequestFiles:
    return of(folder, requests).workload.requests


def names(folder: Path, requests: str) -> list[str]:
    return [str(path.relative_to(folder)) for path in files(folder, requests).paths]


def test_files_lists_and_patterns_are_found(folder):
    assert names(folder, "c.jsonl") == ["c.jsonl"]
    assert names(folder, "[c.jsonl, b.csv]") == ["c.jsonl", "b.csv"]
    assert names(folder, "'*.jsonl'") == ["a.jsonl", "c.jsonl", "x[0].jsonl"]
    assert names(folder, "'x[0].jsonl'") == ["x[0].jsonl"]
    assert names(folder, "'**/a.jsonl'") == ["a.jsonl", "deep/er/a.jsonl"]
    # what two of them name is read once, where it was named first
    assert names(folder, "[c.jsonl, '?.jsonl']") == ["c.jsonl", "a.jsonl"]
    assert names(folder, "{file: '[ab].*'}") == ["a.jsonl", "b.csv"]
    assert files(folder, "'-'").paths == (STDIN,) and files(folder, "'-'").is_stdin
    assert job(folder, "workload.requests=-").workload.requests.is_stdin


def test_columns_and_format_are_told_beside_the_file_and_tell_requests_apart(folder):
    found = files(folder, "{file: b.csv, format: tsv, prompt: question, id: nr, delimiter: ';', "
                  "options: false, carry: [topic, b]}")
    assert found == RequestFiles(
        paths=(folder / "b.csv",), format="tsv", prompt="question", id="nr", delimiter=";",
        has_options=False, carry=("topic", "b"))
    assert files(folder, "{file: b.csv, messages: chat}").messages == "chat"
    assert files(folder, "{file: b.csv, carry: []}").carry == ()
    assert files(folder, "a.jsonl").rules == files(folder, "{file: b.csv, format: jsonl}").rules
    plain = files(folder, "b.csv").rules
    assert files(folder, "{file: b.csv, carry: [x]}").rules == plain != ""
    others = [files(folder, text).rules for text in (
        "{file: b.csv, prompt: x}", "{file: b.csv, delimiter: ';'}", "{file: b.csv, format: text}",
        "{file: b.csv, options: false}", "[b.csv, a.jsonl]", "[a.jsonl, b.csv]", "a.jsonl")]
    assert len({plain, *others}) == 8


@pytest.mark.parametrize(("requests", "said", "name"), [
    ("a.jsonl", "", None), ("b.csv", "", "out/results.csv"), ("'-'", "", None),
    ("data.parquet", "", "out/results.parquet"), ("{file: a.jsonl, format: tsv}", "",
                                                   "out/results.tsv"),
    ("b.csv", "results: off", None), ("b.csv", "results: false", None),
    ("b.csv", "results: answers.parquet", "answers.parquet"),
    ("a.jsonl", "results: deep/x.csv.gz", "deep/x.csv.gz"), ("{count: 3}", "", None),
    ("b.csv", "quote_formulas: true", "out/results.csv")])
def test_the_results_of_a_table_are_a_table_unless_told_otherwise(folder, requests, said, name):
    more = ", input_tokens: {mean: 5, std: 1, max: 9}" if "count" in requests else ""
    key, _, value = said.partition(": ")
    found = of(folder, requests, more, **{key: value} if said else {})
    assert found.results == (None if name is None else folder / name)
    assert found.quote_formulas == ("quote" in said)


def of_requests(folder, workload, *overrides):
    (folder / "r.jsonl").touch()
    return job(folder, *overrides, workload=f"{{requests: r.jsonl, {workload}}}")


def test_a_job_that_scores_or_embeds_encodes_whole_inputs_by_our_own_engine(tmp_path):
    scores, embeds = (of_requests(tmp_path, keys) for keys in ("score: true", "embed: mean"))
    assert embeds.workload.embed == "mean" and embeds.workload.only_encodes
    assert scores.workload.output_tokens.maximum == 1
    for one in (scores, embeds):
        assert one.schedule.policies == ("rra",) and one.schedule.encode_chunk == 0
        assert not one.workload.chat


@pytest.mark.parametrize(("body", "content"), [
    ({"input": "a text"}, "a text"), ({"input": ["a text"]}, "a text"), ({"input": [4, 5]}, (4, 5)),
    ({"input": [[4, 5]], "encoding_format": "float", "model": "m", "user": "u"}, (4, 5)),
    ({"input": []}, "input"), ({}, "input"), ({"input": ["a", 3]}, "input"),
    ({"input": "a", "dimensions": 8}, "dimensions"),
    ({"input": "a", "encoding_format": "base64"}, "encoding_format"),
    ({"messages": [{"role": "user", "content": "a"}]}, "messages")])
def test_openais_lines_of_embeddings(tmp_path, body, content):
    files = of_requests(tmp_path, "embed: last").workload.requests
    line = {"custom_id": "x", "method": "POST", "url": "/v1/embeddings",
            "body": {"model": "m", **body}}
    files.paths[0].write_text(json.dumps(line) + "\n")
    found, = read_requests(files)
    if isinstance(found, Request):
        assert (found.prompt or found.tokens) == content and found.pooled == "last"
    else:
        assert content in found.error and found.is_openai
    chat = {**line, "url": "/v1/chat/completions"}
    files.paths[0].write_text(json.dumps(chat) + "\n")
    found, = read_requests(files)
    assert found.code == "invalid_url" and "workload.embed" in found.error
