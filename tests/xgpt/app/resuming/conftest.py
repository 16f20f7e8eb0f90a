"""The job of begun_runs.py in a folder, and its runs."""

import json
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs need the extra `run`")

from begun_runs import CONFIG, COUNT, opened, roofline  # noqa: E402

from xgpt.app.running import run as execution  # noqa: E402
from xgpt.app.schedule import Plan, plan_job  # noqa: E402
from xgpt.launch.launcher import RankProgram  # noqa: E402
from xrunner.comm.point_to_point import local_comms  # noqa: E402
from xrunner.rank import worker  # noqa: E402
from xrunner.rank.world import World  # noqa: E402


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    lines = [{"id": f"q{i}", "tokens": [7, 8, 9 + i], "forced_tokens": 30 if i % 5 == 2 else 3}
             for i in range(COUNT)]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


@pytest.fixture
def run(folder, monkeypatch):
    """Executes the job, until `stop_after` results are there. `ranks_work`: or none may start."""
    alone = World(local_comms(1)[0], barrier=lambda: None, gather=lambda report: [report],
                  abort=lambda code: pytest.fail(f"aborted: {code}"),
                  split=lambda *_: pytest.fail("in no group"), duplicate=lambda: local_comms(1)[0])
    monkeypatch.setattr(worker, "connect", lambda kind: alone)

    def once(stop_after: int = COUNT + 2, ranks_work: bool = True,
             plan: Plan | None = None) -> dict[str, Any]:
        class InProcess:
            is_here = True

            def run(self, ranks: RankProgram, **_: Any) -> None:
                assert ranks_work and (ranks.module, ranks.count) == ("xrunner.rank.worker", 1)
                assert worker.main([str(ranks.argument)]) == 0

        monkeypatch.setattr(execution, "launcher_of", lambda job, problem: InProcess())
        monkeypatch.setattr("xrunner.files.sink.RunSink.should_stop",
                            lambda sink: len(sink.tally) >= stop_after)
        session = opened(folder)
        plan = plan or plan_job(session, roofline(session))
        return execution.execute(plan)

    return once
