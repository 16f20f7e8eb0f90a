"""A profile of one node is not taken for several: messages between nodes were not timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from profiles import amdahl, profile_of

from xgpt.app import local_profile
from xgpt.app.local_profile import wanted_profile
from xgpt.app.opened import OpenedJob, open_file
from xgpt.app.profile_identity import profile_metadata
from xgpt.app.telling import LogTeller
from xgpt.launch.launcher import RankProgram
from xprofiler.cache import cached_profile_path
from xprofiler.profile import TRANSFER, Profile, Sample, TableKey
from xprofiler.profile_file import load_profile, save_profile


def opened_on(folder: Path, hosts: str) -> OpenedJob:
    path = folder / "job.yaml"
    path.write_text(f"""
model: opt-125m
cluster: local
workload: {{requests: {{count: 20}}, task: S}}
run: {{ranks: 2, threads_per_rank: 1, dtype: float32, hosts: [{hosts}]}}
""")
    return open_file(path)


@dataclass
class Measurer:
    """Stands for ranks that measure: adds what it is told to the profile it is asked for."""

    add: Callable[[Profile], Profile]
    is_here: bool = True
    found: list[Profile] = field(default_factory=list)

    def run(self, ranks: RankProgram, **_: Any) -> None:
        target = Path(json.loads(ranks.argument.read_text())["target"])
        self.found.append(load_profile(target))
        save_profile(self.add(self.found[-1]), target)


def test_one_node_and_two_of_as_many_ranks_are_told_apart(tmp_path: Path) -> None:
    one, two = (profile_metadata(opened.job, opened.problem) for hosts in ("", "a, b")
                for opened in [opened_on(tmp_path, hosts)])
    assert (one.ranks, two.ranks) == (2, 2) and (one.nodes, two.nodes) == (1, 2)
    assert cached_profile_path(tmp_path, one) != cached_profile_path(tmp_path, two)


def test_messages_between_nodes_that_a_profile_lacks_are_measured_and_added_once(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_profile, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(local_profile, "missing", lambda *_: [])
    opened = opened_on(tmp_path, "a, b")
    over_network = TableKey(TRANSFER, 1, "network")
    points = (Sample(x=1024, samples_s=(1e-4,) * 3),)
    ranks = Measurer(lambda known: replace(known, tables={**known.tables, over_network: points}))
    wanted = replace(wanted_profile(opened.job, opened.problem), launcher=ranks)
    near = replace(profile_of(wanted.model, 2, 1, amdahl(0.0)), metadata=wanted.metadata)
    path = cached_profile_path(tmp_path / "profiles", wanted.metadata)
    path.parent.mkdir()
    save_profile(near, path)
    whole = local_profile.local_profile(wanted, LogTeller())
    assert over_network not in ranks.found[0].tables
    assert set(whole.tables) == {*near.tables, over_network}
    assert set(local_profile.local_profile(wanted, LogTeller()).tables) == set(whole.tables)
    assert len(ranks.found) == 1, "what is whole is not measured again"
