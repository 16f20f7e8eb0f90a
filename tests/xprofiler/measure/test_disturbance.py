"""What is noticed of others while something is measured, and what becomes of it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from xgpt.core.model import ModelSpec
from xprofiler.measure.network import Sums, seconds_of_sums, summing_bench

pytest.importorskip("torch", reason="measuring needs the extra `run`")

from xgpt.core.system.machine import children_s
from xprofiler.measure import ranks
from xprofiler.measure import ranks as disturbance
from xprofiler.measure.probe import StepParts
from xprofiler.measure.ranks import Disturbance, _Seen, missing_share
from xprofiler.profile import DISTURBED_LIMIT

BURN = """
import subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "while True: pass"])
while float(sum(map(int, open(f"/proc/{grandchild.pid}/stat").read().split()[13:15]))) < 30:
    time.sleep(0.01)
grandchild.send_signal(19)
print("burnt", flush=True)
time.sleep(0.5)
grandchild.kill()
"""


def seen(busy_s: float | None = 2.0, own_s: float = 1.0, waited_s: float = 0.0,
         elapsed_s: float = 1.0, host: str = "a") -> _Seen:
    return _Seen(host, busy_s, own_s, waited_s, elapsed_s)


def test_alone_nothing_is_missing():
    assert missing_share([seen(), seen()], cores=2) == 0.0
    assert missing_share([seen(busy_s=2.02), seen(busy_s=2.02)], cores=2) == 0.0, "rounding"
    assert missing_share([seen(busy_s=None)], cores=2) == 0.0, "the system does not say"


def test_others_time_waiting_and_the_worst_host():
    assert missing_share([seen(busy_s=2.0, own_s=1.0)], cores=2) == pytest.approx(0.5)
    assert missing_share([seen(waited_s=0.3), seen()], cores=2) == pytest.approx(0.3)
    hosts = [seen(), seen(), seen(host="b", busy_s=1.4)]
    assert missing_share(hosts, cores=2) == pytest.approx(0.2)


def test_a_living_child_counts_with_its_own_children():
    before_s = children_s(os.getpid())  # of what other tests of this process have started
    with subprocess.Popen([sys.executable, "-c", BURN], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        assert children_s(os.getpid()) >= before_s + 0.2
    assert children_s(os.getpid()) < before_s + 0.2, "who is gone is of RUSAGE_CHILDREN"


class Watch:
    """Others have this share at each attempt."""

    def __init__(self, shares: list[float], patience: int) -> None:
        self._shares, self.patience, self.waits = iter(shares), patience, 0

    def begin(self) -> None:
        """It counts."""

    def missing(self) -> float:
        return next(self._shares)

    def has_patience(self) -> bool:
        self.waits += 1
        self.patience -= 1
        return self.patience >= 0


def steps_of(seconds: float) -> Iterator[StepParts]:
    while True:
        yield StepParts(seconds, seconds, 0.0, 0.0, 0.0)


def test_what_others_disturbed_is_measured_again_and_the_least_disturbed_counts():
    steps = steps_of(0.4)
    watch = Watch([0.5, 0.0], patience=5)
    got = ranks.Ranks(None).measure_step(lambda: next(steps), watch=watch)
    assert got.missing == 0.0 and watch.waits == 1
    watch = Watch([0.5, 0.3, 0.4], patience=5)
    assert ranks.Ranks(None).measure_step(lambda: next(steps), watch=watch).missing == 0.3
    watch = Watch([0.5, 0.0], patience=0)
    got = ranks.Ranks(None).measure_step(lambda: next(steps), watch=watch)
    assert got.missing == 0.5, "no patience is left: it is marked"
    assert got.missing > DISTURBED_LIMIT


def test_patience_is_spent_on_waiting_and_on_attempts(monkeypatch):
    shares = iter([0.9, 0.9, 0.0, *[0.9] * 50])
    slept: list[float] = []
    monkeypatch.setattr(disturbance, "missing_share", lambda *_: next(shares))
    monkeypatch.setattr(disturbance.time, "sleep", slept.append)
    own = Disturbance(ranks.Ranks(None), 2.0)
    assert own.missing() == 0.9 and own.has_patience(), "the second look found it quiet"
    assert len(slept) == 2
    assert not own.has_patience() and 0 < len(slept) - 2 <= 6, "within two seconds in all"
    assert not own.has_patience() and len(slept) <= 8


# --- ranks that are timed together ------------------------------------------------------------


pytest.importorskip("torch", reason="ranks need the extra `run`")
from xprofiler.measure.network import RankNodes  # noqa: E402


@pytest.mark.parametrize(("node_of", "size", "near", "far"), [
    ((0, 0, 0, 0), 2, [(0, 1), (2, 3)], []),
    ((0, 0, 1, 1), 2, [(0, 1), (2, 3)], [(0, 2)]),
    ((0, 0, 1, 1), 4, [], [(0, 1, 2, 3)]),
    ((0, 1, 2, 3), 2, [], [(0, 1)]),
    ((0, 1, 2, 3), 4, [], [(0, 1, 2, 3)]),
    ((0, 0, 0, 1), 2, [(0, 1)], [(0, 3)]),
    ((0, 0, 0, 1), 3, [(0, 1, 2)], []),
])
def test_groups_lie_within_a_node_or_evenly_over_several(node_of, size, near, far):
    where = RankNodes(node_of=node_of)
    assert where.near_groups(size) == near
    assert where.far_groups(size) == far


# --- sums of a group --------------------------------------------------------------------------


TOY = ModelSpec(name="toy", family="llama", num_layers=9, hidden_size=32, num_heads=2,
                num_kv_heads=2, vocab_size=64, intermediate_size=48, max_positions=200)


class Alone:
    """A communicator of this rank."""

    def __init__(self) -> None:
        self.barriers = 0

    def Barrier(self) -> None:  # noqa: N802
        self.barriers += 1

    def Get_rank(self) -> int:  # noqa: N802
        return 0

    def Bcast(self, mine: Any, root: int) -> None:  # noqa: N802
        assert root == 0


class Noting:
    """A group that leaves every tensor as it is."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.rows.append(len(tensor))
        return tensor


@pytest.mark.parametrize(("rows", "layers"), [(1, 6), (36, 6), (900, 4)])
def test_steps_with_sums_take_turns_with_steps_without(rows, layers):
    sums, comm, group = Sums(), Alone(), Noting()
    with torch.inference_mode():
        bench = summing_bench(TOY, torch.float32, 2, sums, device=torch.device("cpu"),
                              weight_dtype=torch.float32)
        added = seconds_of_sums(comm, group, bench, sums, rows)
    assert comm.barriers == 2 * (len(added) + 1), "all ranks begin each step together"
    # two a layer, all of the step's rows, in every other step
    assert sums.count == 2 * layers and group.rows == [rows] * (2 * layers * (len(added) + 1))
    assert len(added) >= 5 and all(s >= 0 for s in added)
