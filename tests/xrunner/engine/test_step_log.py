"""What steps take besides what the model computes, told apart while they run."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import toy_runs
import toys

from xrunner.engine import last_stage, stage
from xrunner.engine.step_log import StepLog


class Spent:
    """A clock that stands still but for what is spent."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def spending(self, seconds: float, call: Any) -> Any:
        def spend(*given: Any, **named: Any) -> Any:
            self.now_s += seconds
            return call(*given, **named)

        return spend


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_the_model_s_part_of_steps_is_not_the_host_s(tmp_path, family, monkeypatch):
    clock = Spent()
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(stage.StageExecutor.__init__, "__kwdefaults__", {
        **stage.StageExecutor.__init__.__kwdefaults__, "clock": clock})
    toys.make_model(family, tmp_path)
    made = toy_runs.executor_of

    def slow(*given: Any, **named: Any) -> Any:
        executor = made(*given, **named)
        for part in ("encode", "decode"):
            setattr(executor.model, part, clock.spending(2.0, getattr(executor.model, part)))
        return executor

    monkeypatch.setattr(toy_runs, "executor_of", slow)
    for module, name, seconds in ((last_stage, "next_tokens", 0.5),
                                  (stage, "decode_context", 0.25)):
        monkeypatch.setattr(module, name, clock.spending(seconds, getattr(module, name)))
    _, (executor,) = toy_runs.run_in_process(tmp_path, toys.random_queries(5), degrees=(1,))
    kinds = [record.kind for record in executor.log]
    contexts = kinds.count("decode") * (2 if family == "t5" else 1)
    assert executor.records.host_s == 0.25 * contexts > 0
    heads = len(kinds) if family == "llama" else kinds.count("decode")
    assert executor.records.busy_s == 2.0 * len(kinds) + 0.5 * heads + 0.25 * contexts


def test_of_a_gpu_nobody_knows():
    log = StepLog(torch.device("meta"), time.perf_counter)
    assert log.computed(max, 3, 5) == 5 and log.host_s is None
