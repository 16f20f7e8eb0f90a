"""The process that holds a rank's vLLM engine: `PYTHON -m xrunner.backends.vllm.engine_process FD
PARENT`, in the interpreter that has vLLM. It answers what comes on the socket FD (protocol.py)
until that is closed, and ends with its parent."""

import os
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from xgpt.core.errors import XgptError
from xgpt.core.system.lifeline import end_with_launcher
from xrunner.backends.vllm import protocol
from xrunner.backends.vllm.core import EngineCore, Judge
from xrunner.backends.vllm.protocol import (
    Answer,
    Check,
    Failed,
    FindCalls,
    Finish,
    Load,
    Loaded,
    PeakMemory,
    Step,
    Tokens,
)
from xrunner.backends.vllm.tool_calls import ToolCallFinder


class Served:
    """Answers requests, by the engine and the helpers that it has made for them."""

    def __init__(self) -> None:
        self._core: EngineCore | None = None
        self._judge: Judge | None = None
        self._finder: ToolCallFinder | None = None

    def answer(self, asked: protocol.Request) -> Any:
        """The answer to a request; None: it has none. Raises XgptError where it would fail
        again."""
        if isinstance(asked, Step):
            return self.core.begin(asked)
        if isinstance(asked, Finish):
            return Tokens.of(self.core.finish())
        if isinstance(asked, Load):
            self._core = EngineCore(asked)
            return Loaded(self._core.max_pass, self._core.max_tokens)
        if isinstance(asked, Check):
            self._judge = self._judge or Judge(asked.arguments)
            return Answer(self._judge.reason(asked))
        if isinstance(asked, FindCalls):
            self._finder = self._finder or ToolCallFinder(asked.parser, Path(asked.model_dir))
            return Answer(self._finder(asked.tools, asked.output_ids))
        assert isinstance(asked, PeakMemory), f"{asked = }"
        return Answer(self.core.peak_memory_bytes())

    @property
    def core(self) -> EngineCore:
        assert self._core is not None, "a step before the model is loaded"
        return self._core

    def close(self) -> None:
        if self._core is not None:
            self._core.close()


def main(arguments: list[str]) -> int:
    """Answers requests until the socket is closed, or one fails; returns the exit code."""
    end_with_launcher()
    if os.getppid() != int(arguments[1]):
        print(f"xgpt: process {arguments[1]}, which started this one, is gone or not its parent")
        return 1
    served = Served()
    with Connection(int(arguments[0])) as rank:
        rank.send(protocol.VERSION)
        while True:
            try:
                asked = rank.recv()
            except (EOFError, ConnectionError):
                served.close()
                return 0
            try:
                if (answer := served.answer(asked)) is not None:
                    rank.send(answer)
            except XgptError as error:
                rank.send(Failed(str(error), is_final=True))
                return 1
            except Exception as error:  # vLLM raises any: the rank decides
                traceback.print_exc()
                rank.send(Failed(f"{type(error).__name__}: {error}"))
                return 1


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # vLLM's threads and processes may hang at an orderly end
