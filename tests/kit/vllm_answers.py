# owner tb
"""One process with vLLM that answers all that tests ask, as a rank's would: vLLM takes longer to
import than toys take to run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from xrunner.backends.vllm import vllm_worker
from xrunner.backends.vllm.child import LOAD_LIMIT_S, EngineChild
from xrunner.backends.vllm.protocol import Added, SharedStart, Step
from xrunner.backends.vllm.settings import EngineSettings
from xrunner.checkpoint.source import read_spec
from xrunner.query import Sampling


class KeptChild(EngineChild):
    """A child that executors have one after the other."""

    def close(self) -> None:
        """Leaves it to the next."""


class Asked:
    """Answers by the process; after one that failed by another."""

    def __init__(self, python: str, folder: Path) -> None:
        self.python, self._log = python, folder / "engine.log"
        self._child: KeptChild | None = None
        self._born_s = 0.0

    def run(self, plan: Path) -> int:
        """Runs our worker on this plan, in this process; returns its exit code."""
        with self._kept() as child, pytest.MonkeyPatch.context() as patched:
            patched.setattr(vllm_worker, "EngineChild", lambda *_, **__: child)
            return vllm_worker.main([str(plan)])

    def tokens(self, model: Path, dtype: str, inputs: Sequence[Sequence[int]],
               count: int) -> tuple[list[list[int]], list[list[float]]]:
        """`count` tokens that each of the inputs is answered with greedily, all at once, and their
        log-likelihoods."""
        longest, sampling = max(map(len, inputs)) + count + 1, Sampling(top_logprobs=0)
        names, given = [str(place) for place in range(len(inputs))], []
        step = Step([(name, len(inputs[int(name)])) for name in names],
                    [Added(name, list(inputs[int(name)]), sampling) for name in names])
        with self._kept() as child:
            load(child, model, dtype, max_queries=len(inputs), max_tokens=longest,
                 kv_tokens=len(inputs) * longest)
            for _ in range(count):
                given.append(child.step(step))
                step = Step([(name, 1) for name in names])
        return ([[step[name].value for step in given] for name in names],
                [[step[name].likelihood.logprob for step in given] for name in names])

    def shared(self, model: Path, steps: Sequence[Step]) -> list[dict[str, int]]:
        """The tokens of these steps, whose requests share prefixes."""
        with self._kept() as child:
            load(child, model, "float32", max_queries=2, max_tokens=128, kv_tokens=256,
                 has_prefixes=True, arguments={"block_size": 32})
            return [{name: token.value for name, token in child.step(step).items()}
                    for step in steps]

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()

    @contextmanager
    def _kept(self) -> Iterator[KeptChild]:
        """The child, for the next to go on with unless it fails."""
        if self._child is None or time.monotonic() - self._born_s > LOAD_LIMIT_S / 2:
            self.close()
            self._child, self._born_s = KeptChild(self.python, self._log), time.monotonic()
            self._child.start()
        try:
            yield self._child
        except BaseException:
            self.close()
            self._child = None
            raise


def load(child: EngineChild, model: Path, dtype: str, **sizes: Any) -> None:
    spec = read_spec(model, str(model))
    child.load(EngineSettings(
        model_dir=model, dtype=dtype, cores=[sorted(os.sched_getaffinity(0))[:1]],
        kv_token_bytes=4 * spec.kv_elements_per_token_layer * spec.num_layers, **sizes).load)
    child.await_ready()


def added(name: str, tokens: Sequence[int], start: SharedStart | None = None) -> Added:
    return Added(name, list(tokens), Sampling(), start=start)
