"""Who holds up a run is named, and nobody else."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runs import RUNNING

from xgpt.app.running.follow import RanksHang, StallWatch
from xgpt.app.telling import tell_run
from xgpt.run_folder.state import signs_of_life
from xrunner.files.beat import BEATS, RankState
from xrunner.files.sink import write_progress

STATE = RankState(rank=0, stage=0, pool="all", elapsed_s=1.0, busy_s=1.0, recent_share=1.0,
                  queries=3, at_s=1000.0, num_steps=1, longest_step_s=0.5, told="to decode")


class Run:
    """Two ranks, as their files tell of them while a clock goes on."""

    def __init__(self, output: Path, limit_s: float | None = None) -> None:
        self.output, self.now = output, 0.0
        (output / BEATS).mkdir()
        self.states = {0: STATE, 1: replace(STATE, rank=1, stage=1)}
        self.watch = StallWatch(output, ranks=2, limit_s=limit_s, clock=lambda: self.now)

    def pass_by(self, seconds: int, *, lives: tuple[int, ...] = (0, 1),
                works: tuple[int, ...] = (0, 1)) -> None:
        for _ in range(seconds):
            self.now += 1.0
            for rank, state in self.states.items():
                if rank in lives:
                    state = replace(state, at_s=state.at_s + 1)
                if rank in works:
                    state = replace(state, num_steps=state.num_steps + 1)
                self.states[rank] = state
                (self.output / BEATS / f"{rank}.json").write_text(json.dumps(asdict(state)))
            self.watch.look()


@pytest.mark.parametrize(("limit_s", "first", "then", "said"), [
    (None, (20, {}), (62, {"lives": (0,), "works": (0,)}),
     r"rank 1 \(stage 1\) has given no sign of life for .*told"),
    (30, (5, {}), (32, {"works": ()}), "no rank has begun a step for"),
    (None, (0, {}), (602, {"lives": (0,), "works": (0,), "told": (0,)}),
     "rank 1 of 2 gave no sign of life within")])
def test_who_holds_up_a_run_is_named_and_no_sooner(tmp_path, limit_s, first, then, said):
    run = Run(tmp_path, limit_s=limit_s)
    run.pass_by(first[0], **first[1])
    (seconds, keys) = then
    for rank in {*run.states} - {*keys.pop("told", (0, 1))}:
        del run.states[rank]
    run.pass_by(seconds - 2, **keys)
    with pytest.raises(RanksHang, match=said):
        run.pass_by(4, **keys)


def test_a_rank_that_is_silent_is_told_of_before_that(tmp_path):
    """And no time that is left, which hangs on it."""
    run = Run(tmp_path)
    run.pass_by(20)
    assert run.watch.silent is None
    run.pass_by(11, lives=(0,), works=(0,))
    assert run.watch.silent == "rank 1 silent for 11.0 s"
    write_progress(tmp_path / "progress.json", RUNNING)
    said: list[str] = []
    tell: Any = SimpleNamespace(progress=lambda line, is_last: said.append(line))
    for silent in (None, run.watch.silent):
        tell_run(tell, tmp_path / "progress.json", 2.0, silent)
    assert "left" in said[0] and "left" not in said[1] and "rank 1 silent for 11.0 s" in said[1]
    assert max(map(len, said)) < 80


def test_a_rank_that_is_at_one_step_is_named_and_not_who_waits_for_it(tmp_path):
    run = Run(tmp_path, limit_s=30)
    run.pass_by(5)
    run.states[1] = replace(run.states[1], step_since_s=7.0)
    with pytest.raises(RanksHang, match=r"rank 1 .* lives, but has been at one step for"):
        run.pass_by(33, works=())


def test_a_first_step_may_compile(tmp_path):
    run = Run(tmp_path, limit_s=30)
    run.states = {rank: replace(state, num_steps=0) for rank, state in run.states.items()}
    run.states[0] = replace(run.states[0], step_since_s=7.0)
    run.pass_by(300, works=())
    with pytest.raises(RanksHang, match=r"rank 0 .* has been at one step for"):
        run.pass_by(310, works=())


def test_the_limit_follows_the_longest_step(tmp_path):
    run = Run(tmp_path)
    assert run.watch.limit_s() == 60
    run.states[0] = replace(STATE, longest_step_s=50.0)
    run.pass_by(1)
    assert run.watch.limit_s() == 500


def test_loading_is_no_hanging_but_silence_is(tmp_path):
    run = Run(tmp_path, limit_s=30)
    run.states = {rank: replace(state, num_steps=0) for rank, state in run.states.items()}
    run.pass_by(100, works=())
    with pytest.raises(RanksHang, match="no sign of life"):
        run.pass_by(32, lives=(1,), works=())


def test_a_command_that_was_stopped_itself_begins_to_count_anew(tmp_path):
    run = Run(tmp_path, limit_s=30)
    run.pass_by(5)
    run.now += 1000
    run.pass_by(29, lives=(), works=())


def test_the_age_of_the_oldest_sign_is_told():
    said = signs_of_life([STATE, replace(STATE, rank=1, stage=1, at_s=925.0)], now=1000.0)
    assert said == ("last sign of life: rank 1 (stage 1) 75.0 s ago, told to decode; the others "
                    "0 us ago or less")
    assert signs_of_life([]) is None
