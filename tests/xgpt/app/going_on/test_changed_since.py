"""What changed since a run was stopped: refused where it decides the answers, with nothing touched,
and otherwise no hindrance."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs need the extra `run`")

from begun_runs import POLICIES, RUN, Run, opened, roofline  # noqa: E402

from xgpt.app.running.prepare import make_room, plan_for_ranks  # noqa: E402
from xgpt.app.schedule import plan_job  # noqa: E402
from xgpt.cli.terminal import Terminal  # noqa: E402
from xgpt.core.errors import InputError, StoppedEarly  # noqa: E402
from xrunner.io.results import HELD_FILE  # noqa: E402


def test_a_stopped_run_is_not_gone_on_with_by_another_model(folder: Path, run: Run) -> None:
    """Answers of two models in one file would look like those of one."""
    with pytest.raises(StoppedEarly):
        run(6)
    out = folder / "out"
    done, asked = (out / "results.jsonl").read_bytes(), (out / "run.json").read_bytes()
    (out / "model" / "generation_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"generation_config.json.*begin anew with `--again`"):
        run(ranks_work=False)
    assert (out / "results.jsonl").read_bytes() == done and (out / HELD_FILE).exists()
    assert (out / "run.json").read_bytes() == asked, "nothing is touched"
    (out / "model" / "generation_config.json").unlink()
    assert run()["queries_before"] >= 6


def test_a_stopped_run_whose_requests_changed_is_refused_untouched(folder: Path,
                                                                   run: Run) -> None:
    with pytest.raises(StoppedEarly):
        run(6)
    out, requests = folder / "out", folder / "requests.jsonl"
    done, asked = (out / "results.jsonl").read_bytes(), (out / "run.json").read_bytes()
    text = requests.read_text()
    requests.write_text(text.replace("[7, 8, 9]", "[7, 8, 1]"))
    with pytest.raises(InputError, match=r"the requests: changed .*`xgpt submit --again`"):
        run(ranks_work=False)
    requests.write_text(text)
    assert (out / "results.jsonl").read_bytes() == done and not list(out.glob("results-*"))
    assert (out / "run.json").read_bytes() == asked, "nothing is touched"
    assert run()["queries_before"] >= 6


def test_a_stopped_run_whose_products_changed_is_refused_untouched(
        folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoppedEarly):
        run(6)
    out = folder / "out"
    done, asked = (out / "results.jsonl").read_bytes(), (out / "run.json").read_bytes()
    monkeypatch.setitem(RUN, "dtype", "dtype: float32, deterministic: true")
    with pytest.raises(InputError, match=r"run.deterministic: changed .*`xgpt submit --again`"):
        run(ranks_work=False)
    assert (out / "results.jsonl").read_bytes() == done
    assert (out / "run.json").read_bytes() == asked, "nothing is touched"
    monkeypatch.setitem(RUN, "dtype", "dtype: float32")
    assert run()["queries_before"] >= 6


@pytest.mark.parametrize(("changes", "said"), [
    ({"engine_args": {"max_num_seqs": 8}}, "run.engine_args"),
    ({"engine_version": "0.9.2"}, "the engine's version"), ({"engine": "vllm"}, "run.engine"),
    ({"seed": 3, "top_k": 5}, "run.seed, run.top_k"), ({"max_tokens": 7}, "workload.max_tokens")])
def test_what_else_decides_the_answers_is_refused_by_its_key(
        folder: Path, run: Run, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(StoppedEarly):
        run(6)
    out, session = folder / "out", opened(folder)
    plan = plan_for_ranks(session, plan_job(session, roofline(session)).schedule, session.requests)
    asked = (out / "run.json").read_bytes()
    with pytest.raises(InputError, match=f"{re.escape(said)}: changed since the run"):
        make_room(out, replace(plan, **changes), Terminal())
    assert (out / "run.json").read_bytes() == asked and (out / HELD_FILE).exists()


def test_a_byte_between_the_samples_is_seen_by_who_reads_them_all(
        folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    weights = folder / "out" / "model" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(bytes(4 * 2**20))
    verified = "dtype: float32, verify: true"
    monkeypatch.setitem(RUN, "dtype", verified)
    with pytest.raises(StoppedEarly):
        run(6)
    monkeypatch.setitem(RUN, "dtype", "dtype: float32")
    with pytest.raises(StoppedEarly):  # what was read stays known
        run(3)
    with weights.open("r+b") as file:
        file.seek(2**20 + 2**15)  # behind the beginning and before the first block
        file.write(b"x")
    monkeypatch.setitem(RUN, "dtype", verified)
    with pytest.raises(InputError, match=r"model.safetensors: .*begin anew with `--again`"):
        run(ranks_work=False)
    capsys.readouterr()
    monkeypatch.setitem(RUN, "dtype", "dtype: float32")
    run()
    assert "begun without `--verify`" not in capsys.readouterr().err


def test_what_was_begun_without_reading_all_says_so(
        folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "out" / "model").mkdir(parents=True)
    (folder / "out" / "model" / "model.safetensors").write_bytes(bytes(2**20))
    with pytest.raises(StoppedEarly):
        run(6)
    monkeypatch.setitem(RUN, "dtype", "dtype: float32, verify: true")
    run()
    assert "begun without `--verify`" in " ".join(capsys.readouterr().err.split())


def test_a_folder_that_was_moved_goes_on(folder: Path) -> None:
    moved = folder.with_name(f"{folder.name} moved")
    shutil.copytree(folder, moved)
    prints = []
    for place in (folder, moved):
        session = opened(place)
        prints.append(plan_for_ranks(
            session, plan_job(session, roofline(session)).schedule, session.requests).fingerprint)
    assert prints[0] == prints[1]


def test_lines_that_no_schedule_answers_do_not_keep_another_from_going_on(folder: Path) -> None:
    with (folder / "requests.jsonl").open("a") as file:
        for line in ({"tokens": [7] * 201}, {"tokens": [7], "forced_tokens": 500},
                     {"tokens": [7] * 80, "forced_tokens": 49}, {"tokens": [1, 97] * 40}):
            file.write(json.dumps(line) + "\n")
    prints = {}
    for policy in POLICIES:
        session = opened(folder, policy, ranks=2)
        schedule = plan_job(session, roofline(session)).schedule
        plan = plan_for_ranks(session, schedule, session.requests)
        prints[policy] = plan.fingerprint
        assert (plan.query_kv_tokens, plan.most_input_tokens) == (33, 0), policy
    assert len(set(prints.values())) == 1, prints
