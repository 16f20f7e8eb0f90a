"""Questions and long messages to an engine's process that dies or is stopped, by stand-ins."""

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from xrunner.backends.vllm import child as child_module
from xrunner.backends.vllm.child import EngineChild
from xrunner.backends.vllm.executor import VllmExecutor
from xrunner.backends.vllm.protocol import Added, Load, Step
from xrunner.engine.pipeline import ExecutorDied
from xrunner.query import Sampling

SERVE = """
    import os, signal, sys
    from multiprocessing.connection import Connection
    from xrunner.backends.vllm.protocol import *
    line = Connection(int(sys.argv[1]))
    line.send(VERSION)
    asked = line.recv()
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., EngineChild]:
    def start(*scripts: str, **options: Any) -> EngineChild:
        """A child whose processes execute these scripts, one after the other."""
        left = list(scripts)
        monkeypatch.setattr(child_module, "command_of", lambda python, module: [
            sys.executable, "-c", textwrap.dedent(SERVE) + textwrap.dedent(left.pop(0))])
        return EngineChild(sys.executable, tmp_path / "log", **options)

    return start


LOAD = Load({}, {})
LOADS = "line.send(Loaded(100, 100)); line.recv()\n"


def test_a_question_that_kills_the_process_is_told_once_by_who_steps(started):
    child = started(LOADS + "sys.exit(3)", "line.send(Answer(None)); line.recv()")
    child.load(LOAD)
    assert child.await_ready()
    plan = SimpleNamespace(model_dir=Path(), dtype="float32", engine_args={})
    executor = VllmExecutor(child, plan, lambda message: None)  # type: ignore[arg-type]
    query = SimpleNamespace(sampling=SimpleNamespace(passed="{}"), input_ids=[1], max_new_tokens=1)
    assert executor.refusal(query) is None  # type: ignore[arg-type]
    with pytest.raises(ExecutorDied, match="exit code 3"):
        executor.is_ready  # noqa: B018
    assert not executor.is_ready
    child.close()


def test_a_process_that_does_not_load_again_has_died_again(started):
    fails = "line.send(Failed('no memory', is_final=True))"
    child = started(LOADS + "sys.exit(3)", fails)
    child.load(LOAD)
    assert child.await_ready()
    with pytest.raises(ExecutorDied):
        child.step(Step([]))
    child.load(LOAD)
    with pytest.raises(ExecutorDied, match="no memory"):
        child.await_ready()
    assert not child.await_ready()


def test_a_stopped_process_takes_no_long_message(started):
    child = started("line.send(Loaded(100, 100)); os.kill(os.getpid(), signal.SIGSTOP)",
                    step_limit_s=0.5)
    child.load(LOAD)
    assert child.await_ready()
    with pytest.raises(ExecutorDied, match="takes no message"):
        child.step(Step([], [Added("one", list(range(2**20)), Sampling())]))


def test_the_limit_of_loading_begins_when_it_does(started, monkeypatch):
    child = started(LOADS)
    child.start()
    child._loads_since -= 2 * child_module.LOAD_LIMIT_S  # such as while files are copied
    child.load(LOAD)
    assert child.await_ready()
    child.close()
