"""Keys of jobs whose requests arrive over time: what they become, and what is refused."""

import json
import math

import pytest

from xgpt.app.opened_job import open_job
from xgpt.app.teller import LogTeller
from xgpt.core.errors import InputError
from xgpt.job.job_file import load_job
from xgpt.job.resolve import resolve

LENGTHS = "input_tokens: {mean: 9, std: 1, max: 20}, output_tokens: 5"
SERVICE = f"workload: {{arrivals: {{rate: 4}}, {LENGTHS}}}"
BATCH = f"workload: {{requests: {{count: 9}}, {LENGTHS}}}"


def job_of(folder, *lines):
    path = folder / "job.yaml"
    path.write_text("\n".join(("model: opt-125m", "cluster: a40-4", *lines)))
    return load_job(path)


def problem_of(folder, *lines):
    return resolve(job_of(folder, *lines))


def arrivals_of(folder, arrivals):
    return problem_of(folder, f"workload: {{arrivals: {arrivals}, {LENGTHS}}}").arrivals


def refused(folder, *lines):
    with pytest.raises(InputError) as cause:
        problem_of(folder, *lines)
    return {one.key: (one.line, one.value, one.allowed) for one in cause.value.mistakes}


def test_arrivals_are_a_process_a_closed_loop_or_a_trace(tmp_path):
    found = arrivals_of(tmp_path, "{rate: 4, process: gamma, cv: 2}")
    assert (found.rate, found.process, found.cv, found.own_rate) == (4, "gamma", 2, 4)
    assert arrivals_of(tmp_path, "{process: even}").own_rate is None
    assert arrivals_of(tmp_path, "{concurrency: 32}").concurrency == 32
    (tmp_path / "t.csv").write_text("TIMESTAMP\n2023-11-16 18:17:03.9799600\n"
                                    "2023-11-16 18:17:05.9799600\n2023-11-17 00:00:03.97996\n")
    assert arrivals_of(tmp_path, "{file: t.csv, speed: 2}").times_s == pytest.approx(
        [0, 1, 10290], abs=1e-5)
    scaled = arrivals_of(tmp_path, "{file: t.csv, rate: 4}")
    assert scaled.own_rate == pytest.approx(4) and scaled.times_s[1] < scaled.times_s[2]
    assert problem_of(tmp_path, BATCH).arrivals is None


def test_limits_hold_for_requests_times_the_scale_and_jointly(tmp_path):
    limits = "ttft_s: {limit_s: 0.4, quantile: 0.9}, tpot_s: 0.1, queueing_s: 2, deadline_s: 8"
    own = problem_of(tmp_path, SERVICE, f"constraint: {{{limits}, scale: 0.5}}").constraint
    assert [(one.metric, one.limit_s, one.kind, one.quantile) for one in own.bounds] == [
        ("latency", math.inf, "queries", 0.99), ("ttft", 0.2, "queries", 0.9),
        ("tpot", 0.05, "queries", 0.99), ("queueing", 1, "queries", 0.99),
        ("deadline", 4, "queries", 0.95)]
    assert own.attainment is None
    joint = problem_of(tmp_path, SERVICE,
                       "constraint: {ttft_s: 0.4, attainment: 0.8}").constraint
    assert joint.attainment == 0.8 and {one.quantile for one in joint.bounds} == {0.8}
    batch = problem_of(tmp_path, BATCH, "constraint: {deadline_s: 9, attainment: 0.8}").constraint
    assert batch.attainment is None and batch.bound_on("deadline").quantile == 0.8


def test_arriving_requests_go_to_the_replica_with_the_fewest_in_order(tmp_path):
    own = problem_of(tmp_path, SERVICE).adjustment
    assert (own.routing, own.order, own.prefixes) == ("least-queries", "input", "off")
    given = problem_of(tmp_path, SERVICE, "schedule: {routing: deferred, order: auto}").adjustment
    assert (given.routing, given.order) == ("deferred", "input")
    assert problem_of(tmp_path, BATCH).adjustment.routing == "least-tokens"
    assert job_of(tmp_path, SERVICE, "search: {queries: 16000}").search_queries == 16000


def test_a_trace_gives_the_lengths_that_the_job_leaves_out(tmp_path):
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,9,2\n1,7,4\n")
    found = problem_of(tmp_path, "workload: {arrivals: {file: t.csv}}")
    assert found.lengths.pairs.tolist() == [[9, 2], [7, 4]] and found.num_queries is None
    (tmp_path / "v.csv").write_text("num_prefill_tokens,num_decode_tokens\n5,6\n")
    both = "{file: v.csv}"
    own = problem_of(tmp_path, f"workload: {{arrivals: {{file: t.csv}}, input_tokens: {both}, "
                     f"output_tokens: {both}}}")
    assert own.lengths.pairs.tolist() == [[5, 6]]


def test_all_mistakes_of_arrivals_are_told_at_once(tmp_path):
    found = refused(
        tmp_path, "workload:", "  arrivals: {rate: 0, cv: 2, concurrency: 3}", "  task: S",
        "constraint: {kind: sequence, makespan_s: 9, attainment: 1, quantile: 0.9, ",
        "  disk: 1 TB}",
        "schedule: {order: random, window: 9}",
        "tiers: {disk: {memory: 1 TB, up: 3 GB, down: 1 GB}}",
        "run: {engine: deepspeed, offload: /tmp/x}", "objective: cost")
    assert found["workload.arrivals.rate"] == (4, 0, "requests/s > 0")
    assert {"workload.arrivals.cv", "constraint.kind", "constraint.makespan_s",
            "constraint.attainment", "constraint.quantile",
            "constraint.disk", "schedule.order", "schedule.window", "tiers",
            "run.engine", "run.offload"} <= {*found}
    assert "deepspeed" in found["run.engine"][2]


@pytest.mark.parametrize(("arrivals", "key", "words"), [
    ("{}", "", "{rate, process, cv}"), ("{speed: 2}", "", "{file, speed}"),
    ("{rate: 2, cv: 2}", ".cv", "gamma"), ("{process: gamma}", ".cv", "needs it"),
    ("{file: t.csv, speed: 2, rate: 1}", "", "{file, rate}"),
    ("{concurrency: 3, process: even}", "", "{concurrency}"),
    ("from_requests", "", "file"), ("sometimes", "", "from_requests")])
def test_keys_of_arrivals_that_do_not_fit_are_refused(tmp_path, arrivals, key, words):
    (tmp_path / "t.csv").write_text("TIMESTAMP\n0\n1\n")
    found = refused(tmp_path, f"workload: {{arrivals: {arrivals}, {LENGTHS}}}")
    assert words in found[f"workload.arrivals{key}"][2]


@pytest.mark.parametrize(("lines", "key", "words"), [
    ((BATCH, "constraint: {queueing_s: 3}"), "constraint.queueing_s", "batch job"),
    ((BATCH, "constraint: {scale: 2}"), "constraint.scale", "batch job"),
    ((BATCH, "search: {queries: 9}"), "search.queries", "batch job"),
    ((BATCH, "schedule: {routing: deferred}"), "schedule.routing", "needs workload.arrivals"),
    ((SERVICE, "constraint: {attainment: 0.9}"), "constraint.attainment", "needs a limit"),
    ((SERVICE.replace("{arr", "{requests: {count: 9}, arr"), "constraint: {makespan_s: 9}"),
     "constraint.makespan_s", "left out"),
    ((SERVICE, "constraint: {attainment: 0.9, ttft_s: {limit_s: 1, quantile: 0.5}}"),
     "constraint.ttft_s.quantile", "left out beside"),
    ((SERVICE, "schedule: {batches: {deadline: 1}, policy: ft}"), "schedule.batches", "weight 0"),
    ((SERVICE, "schedule: {placement: {device_batch: 1}}"), "schedule.placement", "left out"),
    ((SERVICE.replace("rate: 4", "rate: 4}, shared: {groups: 2, tokens: 3"),), "workload.shared",
     "left out")])
def test_keys_are_refused_in_the_other_kind_of_job(tmp_path, lines, key, words):
    assert words in refused(tmp_path, *lines)[key][2]


def test_a_cost_needs_a_price(tmp_path):
    device = ("{device: {flops_per_s: {float32: 1e13}, memory_bytes: 1e10, "
              "bandwidth_bytes_per_s: 1e12}, devices_per_node: 1, intra_link: pcie4-x16}")
    path = tmp_path / "job.yaml"
    path.write_text(f"model: opt-125m\ncluster: {device}\nobjective: cost\n{SERVICE}\n")
    with pytest.raises(InputError, match="price_per_hour.*required for objective cost"):
        resolve(load_job(path))
    assert resolve(load_job(path, ["price_per_hour=2"])).cluster.device.price_per_hour == 2


def test_a_trace_with_wrong_times_is_refused_by_its_rows(tmp_path):
    (tmp_path / "t.csv").write_text("TIMESTAMP,x\n5,1\n4,1\nsoon,1\n6,1\n")
    with pytest.raises(InputError) as cause:
        arrivals_of(tmp_path, "{file: t.csv}")
    assert [(one.line, one.key, one.value) for one in cause.value.mistakes] == [
        (3, "TIMESTAMP", "4"), (4, "TIMESTAMP", "soon")]
    (tmp_path / "t.csv").write_text("input,output\n5,1\n")
    with pytest.raises(InputError, match="no column TIMESTAMP"):
        arrivals_of(tmp_path, "{file: t.csv}")


def opened(folder, lines, arrivals="from_requests", suffix="jsonl"):
    (folder / f"q.{suffix}").write_text(lines)
    (folder / "job.yaml").write_text(
        f"model: opt-125m\ncluster: a40-4\nworkload: {{requests: q.{suffix}, "
        f"output_tokens: 5, arrivals: {arrivals}}}")
    return open_job(load_job(folder / "job.yaml"), LogTeller(), "lengths")


def test_requests_bring_their_times_as_a_column(tmp_path):
    lines = [{"tokens": [1], "arrival_s": 10}, {"tokens": [2], "arrival_s": "10.5"},
             {"tokens": [3], "arrival_s": "1970-01-01 00:00:12"}]
    text = "".join(json.dumps(one) + "\n" for one in lines)
    assert opened(tmp_path, text).problem.arrivals.times_s.tolist() == [0, 0.5, 2]
    table = opened(tmp_path, 'tokens,arrival_s\n"[1]",0\n"[2]",3.5\n', suffix="csv").problem
    assert table.arrivals.times_s.tolist() == [0, 3.5]


def test_requests_without_times_or_with_falling_ones_are_refused_by_their_lines(tmp_path):
    lines = ('{"tokens": [1], "arrival_s": 5}\n{"tokens": [2], "arrival_s": 4}\n'
             '{"tokens": [3]}\n{"tokens": [4], "arrival_s": "later"}\n')
    with pytest.raises(InputError) as cause:
        opened(tmp_path, lines)
    first, second = cause.value.mistakes
    assert first.key == second.key == "workload.arrivals"
    assert "1 of 3 do not" in first.allowed and first.allowed.endswith("line 3")
    assert "not before" in second.allowed and second.allowed.endswith("line 2")
    assert opened(tmp_path, lines, "{rate: 2}").requests.bad_lines[0].line == 4
    with pytest.raises(InputError, match="constraint.deadline_s is the limit"):
        opened(tmp_path, '{"tokens": [1], "arrival_s": 5, "deadline_s": 7}\n')
