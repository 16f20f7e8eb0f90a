"""Weights that a rank reads while its run is planned are those that the run takes from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs need the extra `run`")
import torch  # noqa: E402
import toys  # noqa: E402
from begun_runs import roofline  # noqa: E402

from xgpt.app import run  # noqa: E402
from xgpt.app.plan import plan_job  # noqa: E402
from xgpt.app.run_folder import plan_for_ranks  # noqa: E402
from xgpt.app.telling import LogTeller  # noqa: E402
from xgpt.core.job_file import load_job  # noqa: E402
from xrunner import ahead, loading  # noqa: E402
from xrunner.loading import Shelf  # noqa: E402
from xrunner.ops import linear  # noqa: E402
from xrunner.plan import weights_key  # noqa: E402


class Waiting:
    """A rank that keeps what it is told."""

    processes = ()

    def __init__(self) -> None:
        self.words: list[str] = []

    def read_ahead(self, word: str) -> None:
        self.words.append(word)


def opened(folder: Path, family: str, **settings: object) -> tuple[Any, list[str]]:
    toys.make_model(family, folder / "model")
    (folder / "requests.jsonl").write_text("".join(
        json.dumps({"tokens": [7, 8, 9], "max_tokens": 5}) + "\n" for _ in range(6)))
    words = {"ranks": 1, "dtype": "float32", "threads_per_rank": 1, **settings}
    (folder / "job.yaml").write_text(f"""
model: {folder / "model"}
cluster: local
workload: {{requests: requests.jsonl, output_tokens: {{mean: 4, std: 1, max: 5}}}}
run: {json.dumps(words)}
output: out
""")
    waiting = Waiting()
    return run.open_to_run(load_job(folder / "job.yaml", ()), LogTeller(),
                           waiting), waiting.words  # type: ignore[arg-type]


@pytest.mark.parametrize(("family", "settings"), [
    ("llama", {}), ("t5", {}), ("llama", {"deterministic": True, "dtype": "bfloat16"})])
def test_the_run_takes_what_was_read_ahead(tmp_path: Path, family: str,
                                           settings: dict[str, object]) -> None:
    job, words = opened(tmp_path, family, **settings)
    assert len(words) == 1
    shelf = Shelf()
    ahead.read(words[0], shelf)
    schedule = plan_job(job, roofline(job)).schedule
    plan = plan_for_ranks(job, schedule, job.requests)
    key = weights_key(plan, schedule)
    assert shelf.holds(key)
    weights = shelf.weights(key, lambda: pytest.fail("read twice"))
    assert weights.bytes_read > 0 and weights.seconds > 0, "as it was read for this run"
    assert shelf.weights(key, lambda: pytest.fail("read twice")).bytes_read == 0
    assert not shelf.holds(weights_key(replace(plan, threads_per_rank=2), schedule))


def test_what_is_wrong_with_them_is_left_to_the_run(tmp_path: Path) -> None:
    _, (word,) = opened(tmp_path, "llama")
    for path in (tmp_path / "model").glob("*.safetensors"):
        path.write_bytes(b"")
    shelf = Shelf()
    ahead.read(word, shelf)
    assert shelf._content is None


@pytest.mark.parametrize("settings", [{"weights": "random"}, {"weight_dtype": "int8"}])
def test_weights_that_are_made_or_need_a_look_are_not_read_ahead(
        tmp_path: Path, settings: dict[str, object]) -> None:
    assert opened(tmp_path, "llama", **settings)[1] == []


def test_nor_are_large_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_MOST_AHEAD_BYTES", 1000)
    assert opened(tmp_path, "llama")[1] == []


@pytest.mark.parametrize(("from_disk", "asked"), [(0, 0), (10**9, 1), (None, 1)])
def test_the_disk_is_asked_for_its_rate_where_it_gave_the_bytes(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_disk: int | None,
        asked: int) -> None:
    _, (word,) = opened(tmp_path, "llama")
    calls: list[Path] = []
    monkeypatch.setattr(loading.DiskMeter, "num_bytes", from_disk)
    monkeypatch.setattr(loading, "disk_bytes_per_s", calls.append)
    ahead.read(word, Shelf())
    assert len(calls) == asked


@pytest.mark.parametrize(("is_ours", "settings", "threads"), [
    (True, {}, 1), (False, {}, 2), (True, {"deterministic": True}, 2),
    (True, {"dtype": "float32"}, 2)])
def test_one_thread_reads_where_nothing_is_laid_out_for_their_number(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ours: bool,
        settings: dict[str, object], threads: int) -> None:
    _, (word,) = opened(tmp_path, "llama", **{"dtype": "bfloat16", "threads_per_rank": 2,
                                              **settings})
    asked: list[int] = []
    monkeypatch.setattr(linear, "is_pairs_served", lambda: is_ours)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(ahead, "read_stage", lambda *_, **__: asked.append(0))
    ahead.read(word, Shelf())
    assert asked == [threads, 0], "before the weights are read"
