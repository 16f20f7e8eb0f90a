"""`xgpt schedule`: what is shown beside the schedule, its options, and one object for all of it."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_run import write_fake_run

from jobs import job_file
from xgpt.app import library, plan_analysis
from xgpt.app.opened_job import open_file
from xgpt.app.profile import timing_of
from xgpt.cli import schedule as command
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.schedule import Schedule
from xgpt.core.schedule_file import load_schedule
from xscheduler import drift
from xscheduler.planner import Planner
from xscheduler.price import Offer, price
from xscheduler.space import LEAST_GAIN

# Cards without peer access: bounds and gains below are those of slow links. As likely as not, so
# that computed times have no margin.
OPT_13B = {"cluster": "{device: A40, num_nodes: 1, devices_per_node: 4, intra_link: pcie4-x16}",
           "workload": "{requests: {count: 1500}, task: S}", "schedule": "{encode_chunk: 0}",
           "constraint": "{latency_s: 8, confidence: 0.5}"}


@pytest.fixture
def job(tmp_path):
    return job_file(tmp_path, **OPT_13B)


def run(job: Path, *arguments: str, horizon: str = "steady", **changes: object) -> Result:
    """`horizon`: the steady state is planned in a third of the time of a job's own."""
    sets = [f"--set={key.replace('__', '.')}={value}" for key, value in changes.items()]
    return CliRunner().invoke(command.schedule, [
        str(job), *sets, "--horizon", horizon, *arguments], catch_exceptions=False)


def shown_width(text: str) -> int:
    """Columns of a screen; the commands to go on with name a path, which may be longer."""
    return max(len(line) for line in text.splitlines() if not line.startswith(("run it:", "why:")))


def planned(job: Path, **changes: object) -> Schedule:
    session = open_file(job, [f"{key.replace('__', '.')}={value}"
                                 for key, value in changes.items()])
    return Planner(session.problem, timing_of(session)).steady()


def test_the_schedule_is_explained_and_set_beside_its_alternatives(job):
    done = run(job, "--verbose")
    assert done.exit_code == 0 and shown_width(done.stdout) <= 80
    found = json.loads(run(job, "--json").stdout)
    labels = [line[:13].strip() for line in done.stdout.splitlines()]
    others = {"rra", "waa-c", "waa-m"} - {found["policy"]}
    assert all(f"\n{name.upper()} " in done.stdout for name in others)
    assert {"why", "margin", "search", "pruned"} <= set(labels)
    assert len(found["explanation"]) == 3 and found["explanation"][0].split()[0].lower() == (
        found["policy"])
    text = " ".join(done.stdout.split())
    assert all(" ".join(sentence.split()) in text for sentence in found["explanation"])
    margin = found["margin"]
    assert 1 <= margin["factor"] < 1.02 and "times are computed" in margin["note"]
    assert not {"price", "drift", "reschedule", "infeasible"} & set(found)


def test_an_explained_run_begins_with_the_prediction_of_its_whole_job(tmp_path):
    folder = write_fake_run(tmp_path / "run")
    shown = CliRunner().invoke(command.explain, [str(folder)], catch_exceptions=False).stdout
    labels = [line[:13].strip() for line in shown.splitlines()]
    assert labels[:3] == ["time", "throughput", "chosen"]
    assert "35.1 s" in shown and "2.05 requests/s, 119 output tokens/s, start and end" in shown
    (folder / "metrics.json").unlink()
    shown = CliRunner().invoke(command.explain, [str(folder)], catch_exceptions=False).stdout
    assert shown.startswith("chosen ")


def test_what_is_uncertain_takes_a_margin_and_the_alternatives_take_it_too(job):
    two = {"constraint__latency_s": 3, "schedule__policy": "[rra, waa-c]"}
    sure, found = planned(job, **two), planned(job, **two, constraint__drift="15%")
    assert found.margin.factor > 1 and found.margin.cost > 0.01, "else this test shows nothing"
    assert found.estimate.figures.latency_s * found.margin.factor <= found.bound.limit_s
    bare = found.rejected[-1]
    assert bare.kind == "without a margin"
    assert found.margin.cost == pytest.approx(
        1 - found.estimate.figures.throughput_qps / bare.throughput_qps)
    assert found.proof.bound_qps >= sure.estimate.figures.throughput_qps
    assert found.proof.status == "within gap"
    assert bare.throughput_qps >= 0.98 * sure.estimate.figures.throughput_qps
    others = [row for row in found.rejected if row.kind == "policy"]
    assert others and all(row.throughput_qps is None or row.throughput_qps <= (
        found.estimate.figures.throughput_qps) for row in others)
    assert "its margin" in found.explanation[2]
    shown = run(job, **two, constraint__drift="15%")
    assert "on the latency, to be 50% sure; it costs" in " ".join(shown.stdout.split())


def test_more_latency_gpus_and_memory_have_their_price(job, monkeypatch):
    one = {"schedule__policy": "rra", "schedule__tp_degree": 1}
    known: list[Sequence[Offer]] = []

    def found_once(*arguments: Any, **more: Any) -> Sequence[Offer]:
        """The table shows the offers of the object before it: each takes a search of seconds."""
        if not known:
            known.append(price(*arguments, **more))
        return known[0]

    monkeypatch.setattr(plan_analysis, "price", found_once)
    found = json.loads(run(job, "--price", "--json", **one).stdout)
    offers = found["price"]
    assert [offer["what"].split(" (")[0] for offer in offers] == [
        "10% more latency", "one more GPU", "10% more memory"]
    later = planned(job, constraint__latency_s=8.8, **one).estimate.figures.throughput_qps
    assert offers[0]["throughput_qps"] == pytest.approx(later, rel=0.02)
    assert offers[0]["gain"] > 0.02, "else this test shows nothing"
    assert offers[0]["gain"] == pytest.approx(
        offers[0]["throughput_qps"] / found["figures"]["throughput_qps"] - 1)
    shown = run(job, "--price", **one).stdout
    assert "What more would bring" in shown and shown_width(shown) <= 80


def test_a_bound_that_cannot_be_met_is_refused_and_offers_say_what_would_do(job):
    tightest_s = 1.2
    done = CliRunner().invoke(command.schedule, [
        str(job), "--json", "--price", f"--set=constraint.latency_s={tightest_s}",
        "--set=schedule={policy: rra, encode_chunk: 0}", "--horizon=steady"])
    assert isinstance(done.exception, InfeasibleError) and "tightest" in str(done.exception)
    found = done.exception.details  # what the command line prints
    assert "tightest" in found["infeasible"] and "figures" not in found
    assert [offer["what"].split(" (")[0] for offer in found["price"]] == [
        "10% more latency", "one more GPU", "10% more memory"]
    assert found["price"][0]["throughput_qps"] > 0, "1.32 s can be met"


def test_a_deployed_schedule_is_kept_adjusted_or_replaced(job, tmp_path):
    file = str(tmp_path / "s.json")
    fixed = {"schedule__policy": "rra", "schedule__tp_degree": 1,
             "schedule__encode_chunk": 0, "constraint__latency_s": 9}
    assert run(job, "--out", file, **fixed).exit_code == 0
    same = json.loads(run(job, "--from", file, "--json", **fixed).stdout)
    assert same["reschedule"]["choice"] == "keep"
    # the paper's policies: others would bring more on the layers where they are
    papers = {"schedule__policy": "[rra, waa-c, waa-m]", "schedule__encode_chunk": 0,
              "constraint__latency_s": 60}
    shorter = json.loads(run(job, "--from", file, "--json", workload__task="C1",
                             **papers).stdout)["reschedule"]
    qps = {way: shorter[way]["estimate"] and shorter[way]["estimate"]["figures"]["throughput_qps"]
           for way in ("keep", "adjust", "redeploy")}
    assert qps["redeploy"] > qps["adjust"] and shorter["loading"]["rank_bytes"]
    shown = run(job, "--from", file, workload__task="C1", **papers).stdout
    assert shown_width(shown) <= 80
    for label in ("keep ", "adjust ", "redeploy ", "advice "):
        assert f"\n{label}" in shown


def test_with_from_the_schedule_recommended_is_written(job, tmp_path):
    file, out = str(tmp_path / "s.json"), tmp_path / "next.json"
    assert run(job, "--out", file, schedule__policy="rra", schedule__encode_batch=8,
               schedule__tp_degree=1, schedule__replicas=1).exit_code == 0
    found = json.loads(run(job, "--from", file, "--out", str(out), "--json",
                           schedule__policy="[rra, waa-c, waa-m]", schedule__encode_chunk=0,
                           workload__requests__count=100, schedule__replicas=1,
                           horizon="job").stdout)
    ways, written = found["reschedule"], load_schedule(out)
    assert ways["choice"] == "adjust", "100 queries do not make up for loading"
    chosen = ways["adjust"]["estimate"]["figures"]
    assert (written.estimate.figures.encode_batch, written.estimate.figures.throughput_qps) == (
        chosen["encode_batch"], chosen["throughput_qps"])
    assert written.proof.gap == pytest.approx(
        found["proof"]["bound_qps"] / chosen["throughput_qps"] - 1)
    with pytest.raises(InputError):
        run(job, "--from", file, model="gpt2-xl", schedule__encode_batch=8)


def test_what_is_adjusted_keeps_the_margin(job, tmp_path):
    file, fixed = str(tmp_path / "s.json"), {"schedule__policy": "rra", "schedule__tp_degree": 1}
    assert run(job, "--out", file, **fixed).exit_code == 0
    found = json.loads(run(job, "--from", file, "--json", constraint__drift="15%",
                           **fixed).stdout)
    ways, limit_s = found["reschedule"], 8 / found["margin"]["factor"]
    assert limit_s < 7.9, "else this test shows nothing"
    assert ways["keep"]["reason"] is not None, "planned without a margin"
    assert ways["adjust"]["estimate"]["figures"]["latency_s"] <= limit_s


def test_drifting_lengths_are_a_table(job, monkeypatch):
    monkeypatch.setattr(drift, "FACTORS", (0.7, 1.0, 1.3))
    monkeypatch.setattr(drift, "SKEWNESS_CHANGES", (0.0, 0.4))
    monkeypatch.setattr(plan_analysis, "drift_rows",
                        functools.partial(drift.drift_rows, least_queries=300))
    fixed: dict[str, Any] = {"schedule__policy": "rra", "schedule__encode_batch": 2,
                             "schedule__tp_degree": 1, "schedule__decode_iterations": 16}
    done = run(job, "--drift", **fixed)
    table = done.stdout.partition("When output lengths change\n")[2]
    assert max(map(len, table.splitlines())) <= 80
    rows = [line.split() for line in table.splitlines()[2:10]]
    assert [(row[0], row[1]) for row in rows] == [
        ("mean", "-30%"), ("mean", "-"), ("mean", "+30%"), ("std", "-30%"), ("std", "-"),
        ("std", "+30%"), ("skewness", "-"), ("skewness", "+0.4")]
    assert float(rows[0][2]) > float(rows[2][2]), "shorter outputs, more queries"
    assert "replaying" in done.stderr


def test_few_replays_end_with_a_schedule_and_with_a_gap_the_search_ends_once_that_is_proved(job):
    first, second, full, wide = (
        json.loads(run(job, "--json", *limit, schedule__policy="rra").stdout) for limit in (
            ("--max-nodes", "1"), ("--max-nodes", "1"), (), ("--gap", "60%")))
    for found in (first, second):
        found["proof"]["seconds"] = 0
    assert first == second, "repeatable"
    first_qps, full_qps = (found["figures"]["throughput_qps"] for found in (first, full))
    assert first["proof"]["bound_qps"] >= first_qps
    assert full["proof"]["bound_qps"] >= full_qps >= (1 - LEAST_GAIN) * first_qps
    assert wide["proof"]["gap"] <= 0.6 and wide["proof"]["nodes"] <= full["proof"]["nodes"]
    own = open_file(job, ["schedule.policy=rra"])
    assert library.plan(own, horizon="steady", gap=0.6).schedule.proof.gap == wide["proof"]["gap"]
