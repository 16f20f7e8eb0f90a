"""A job whose requests share prefixes, from its file to its results: run, stopped, gone on with."""

import json

import pytest

pytest.importorskip("torch", reason="runs need the extra `run`")

from begun_runs import COUNT, POLICIES, RUN, lines, opened, roofline  # noqa: E402

from xgpt.app.running.prepare import plan_for_ranks, uses_kv_blocks  # noqa: E402
from xgpt.app.schedule import plan_job  # noqa: E402
from xgpt.core.errors import StoppedEarly  # noqa: E402

HEADS = ([*range(3, 63)], [*range(30, 94)])


@pytest.fixture
def shared(folder):
    """The job, of two prefixes of 60 and 64 tokens."""
    (folder / "requests.jsonl").write_text("".join(json.dumps(
        {"id": f"q{i}", "tokens": [*HEADS[i % 3 == 1], 9 + i, i],
         "forced_tokens": 30 if i % 5 == 2 else 3}) + "\n" for i in range(COUNT)))
    return folder


def answers(folder):
    found = lines(folder / "out" / "results.jsonl").values()
    return [json.loads(line)["output_ids"] for line in found]


@pytest.mark.parametrize("policy", ["rra", "orca", "vllm"])
def test_a_run_encodes_each_prefix_once_and_answers_as_without(shared, run, monkeypatch, policy):
    def planned():
        session = opened(shared, policy)
        return plan_job(session, roofline(session))

    run(plan=planned())
    measured = json.loads((shared / "out" / "measured.json").read_text())["prefixes"]
    assert measured["input_tokens"] == sum(62 + 4 * (i % 3 == 1) for i in range(COUNT))
    assert measured["encoded_tokens"] - measured["encoded_again_tokens"] == 60 + 64 + 2 * COUNT
    assert measured["encoded_again_tokens"] <= 64, "in one group's room"
    with_prefixes = answers(shared)
    monkeypatch.setitem(POLICIES, policy, f"{POLICIES[policy]}, prefixes: off")
    alone = planned()
    assert alone.opened.problem.queries.prefixes is None
    (shared / "out" / "results.jsonl").unlink()
    run(plan=alone)
    assert "prefixes" not in json.loads((shared / "out" / "measured.json").read_text())
    assert not (shared / "out" / "spool" / "prefixes.npy").exists()
    assert answers(shared) == with_prefixes


def test_a_stopped_run_goes_on_with_its_prefixes(shared, run):
    for stop_after in (6, 5):
        with pytest.raises(StoppedEarly):
            run(stop_after)
    run()
    assert list(lines(shared / "out" / "results.jsonl")) == list(range(COUNT))
    measured = json.loads((shared / "out" / "measured.json").read_text())
    assert 0 < measured["prefixes"]["encoded_tokens"] < measured["prefixes"]["input_tokens"] / 2


@pytest.mark.parametrize(("policy", "layout", "shares", "in_blocks"), [
    ("rra", "auto", True, True), ("rra", "blocks", True, True), ("rra", "rows", False, False),
    ("orca", "auto", True, False), ("ft", "auto", False, False)])
def test_what_shares_lies_in_blocks(shared, monkeypatch, policy, layout, shares, in_blocks):
    monkeypatch.setitem(RUN, "dtype", f"dtype: float32, kv_layout: {layout}")
    session = opened(shared, policy)
    schedule = plan_job(session, roofline(session)).schedule
    plan = plan_for_ranks(session, schedule, session.requests)
    assert (plan.shares_prefixes, plan.kv_in_blocks) == (shares, in_blocks)
    assert uses_kv_blocks(session, schedule.estimate) == in_blocks


def test_little_is_not_shared(folder):
    """Two tokens of each request: copying their block would take longer."""
    assert opened(folder).requests.prefixes is None
