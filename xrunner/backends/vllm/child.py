"""The process that holds a rank's vLLM engine, as the rank sees it: started, asked, restarted."""

import math
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from xgpt.core.errors import XgptError
from xgpt.core.system.lifeline import without_other_launchers
from xgpt.core.units import format_seconds
from xrunner.backends.vllm import protocol
from xrunner.backends.vllm.devices import await_freed, free_memory
from xrunner.backends.vllm.protocol import (
    Failed,
    Finish,
    Load,
    Loaded,
    PeakMemory,
    Step,
    Token,
    Tokens,
)
from xrunner.backends.vllm.row import QUIET, command_of
from xrunner.engine.pipeline import ExecutorDied

LOAD_LIMIT_S = 1800.0  # chosen: to import vLLM, load a model and compile it
FIRST_STEP_S, LEAST_S, STEPS = 600.0, 60.0, 10  # chosen: limits of a step, as the launcher's
_END_S = 10.0  # chosen: until a closed process has ended
_LOOK_S = 0.05
# keeps vLLM's scheduler in the process, and its sockets on the loopback
_ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_HOST_IP": "127.0.0.1",
          "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
# by which all replicas of a node would try the same ports
_PORTS = {"VLLM_PORT", "VLLM_DP_MASTER_IP", "VLLM_DP_MASTER_PORT"}
_MODULE = "xrunner.backends.vllm.engine_process"


class EngineChild:
    """One vLLM engine in a process of its own, in the interpreter `python`.

    Its output goes to the file `log`. The process and all below it end with this one, are in no MPI
    or Slurm job, and have no files open but their socket and `log`."""

    def __init__(self, python: str, log: Path, gpus: Sequence[str] = (), *,
                 cores: Sequence[int] = (), replica: int = 0,
                 step_limit_s: float | None = None) -> None:
        """`gpus`: those that it sees (none: CPUs). `cores`: those that it runs on (none: all).
        `step_limit_s`: seconds without an answer after
        which it counts as dead (None: several times the longest step)."""
        self._replica, self._cores = replica, cores
        self._python, self._log, self._gpus = python, log, gpus
        self._free: int | None = None  # MiB on its GPUs before its first start
        self._limit_s, self._longest_s, self._num_steps = step_limit_s, 0.0, 0
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Connection | None = None
        self.loaded: Loaded | None = None  # set once it is ready
        self._loads_since = self._load_until = 0.0
        self._is_loading = False
        self.start_s = 0.0  # seconds from the last start until it was ready

    def start(self) -> None:
        """Starts the process, which imports vLLM meanwhile; it does nothing if it runs."""
        if self._process is not None:
            return
        if self._free is None:
            self._free = free_memory(self._gpus) if self._gpus else 0
        elif self._gpus:
            await_freed(self._gpus, self._free)
        ours, theirs = socket.socketpair()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # of a process that is stopped
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack(
                "ll", math.ceil(self._limit_s or FIRST_STEP_S), 0))
        environment = {**without_other_launchers(os.environ), **QUIET,
                       **_ALONE, "CUDA_VISIBLE_DEVICES": ",".join(self._gpus)}
        if self._cores:  # vLLM binds the threads of several processes, but not of one
            environment["OMP_NUM_THREADS"] = str(len({*self._cores}))
        for name in _PORTS & environment.keys():
            del environment[name]
        if self._replica:  # vLLM writes some compiled files in place
            usual = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "vllm"
            root = Path(environment.get("VLLM_CACHE_ROOT", usual))
            environment["VLLM_CACHE_ROOT"] = str(root / f"replica-{self._replica}")
        with theirs, self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command_of(self._python, _MODULE), str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True, pass_fds=(theirs.fileno(),))
        if self._cores:
            os.sched_setaffinity(self._process.pid, self._cores)
        self._line, self.loaded = Connection(ours.detach()), None
        self._loads_since, self._is_loading, self._num_steps = time.monotonic(), False, 0

    def load(self, load: Load) -> None:
        """Starts to load the model (`await_ready`)."""
        self.start()
        with suppress(ExecutorDied):  # as `await_ready` will say
            self.send(load)
        self._is_loading = True
        self._load_until = time.monotonic() + LOAD_LIMIT_S

    def await_ready(self, wait_s: float = LOAD_LIMIT_S) -> bool:
        """Waits for so many seconds at most until the model is loaded; returns whether it is.
        Raises ExecutorDied where it cannot be."""
        while self._is_loading:
            left_s = self._load_until - time.monotonic()
            if left_s <= 0:
                raise self._died(f"did not load the model within {format_seconds(LOAD_LIMIT_S)}")
            if not self._has_come(min(wait_s, left_s)) and wait_s < left_s:
                break
            if isinstance(answer := self._next(0.0), Loaded):
                self.loaded, self._is_loading = answer, False
                self.start_s = time.monotonic() - self._loads_since
        return self.loaded is not None

    def ask(self, question: protocol.Request, limit_s: float = LOAD_LIMIT_S) -> Any:
        """The answer to a question other than Load and Step, the first of which may import much.
        Raises ExecutorDied."""
        self.start()
        if self._is_loading:
            self.await_ready()
        self.send(question)
        return self._receive(limit_s).value

    def step(self, step: Step) -> Mapping[str, Token]:
        """Executes a step (`send`, `finish`)."""
        self.send(step)
        return self.finish()

    def finish(self) -> Mapping[str, Token]:
        """Ends the oldest step; returns the next token of each request whose input it ends. Raises
        ExecutorDied, and XgptError where the step would fail again."""
        self.send(Finish())
        since = time.monotonic()
        usual_s = self._limit_s or max(LEAST_S, STEPS * self._longest_s)
        # the first one may compile
        tokens = self._receive(usual_s if self._num_steps else max(usual_s, FIRST_STEP_S))
        self._longest_s = max(self._longest_s, time.monotonic() - since)
        self._num_steps += 1
        assert isinstance(tokens, Tokens), f"{tokens = }"
        return tokens.by_name

    def peak_memory_bytes(self) -> int:
        """Peak memory of the engine's processes, in bytes; 0 where it does not run."""
        return int(self.ask(PeakMemory(), _END_S)) if self.await_ready(0.0) else 0

    def close(self) -> None:
        """Ends the process, and waits for it."""
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._process is not None and self.loaded is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        self.kill()

    def kill(self) -> None:
        """Ends the process and all below it at once, and waits until they are gone."""
        process, self._process, self.loaded = self._process, None, None
        if process is None:
            return
        until = time.monotonic() + _END_S
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            while time.monotonic() < until:  # those below it
                os.killpg(process.pid, signal.SIGKILL)
                time.sleep(_LOOK_S)

    def send(self, message: protocol.Request) -> None:
        """Sends a request; of a Step, `finish` brings the tokens. Raises ExecutorDied."""
        if self._line is None:
            raise self._died("has ended")
        try:
            self._line.send(message)
        except BlockingIOError:
            raise self._died("takes no message") from None
        except OSError:
            raise self._died() from None

    def _has_come(self, wait_s: float) -> bool:
        if self._line is None:
            raise self._died("has ended")
        try:
            return self._line.poll(max(wait_s, 0.0))
        except OSError:
            raise self._died() from None

    def _receive(self, limit_s: float) -> Any:
        """The next answer. Raises ExecutorDied if there is none within `limit_s` seconds."""
        until = time.monotonic() + limit_s
        while (answer := self._next(until - time.monotonic())) is None:
            if time.monotonic() > until:
                raise self._died(f"gave no answer for {format_seconds(limit_s)}")
        return answer

    def _next(self, wait_s: float) -> Any:
        """Receives what comes within `wait_s` seconds; None for nothing, and for its greeting."""
        if not self._has_come(wait_s):
            return None
        assert self._line is not None
        try:
            answer = self._line.recv()
        except BlockingIOError:
            raise self._died("stopped within an answer") from None
        except (EOFError, OSError):
            raise self._died() from None
        if isinstance(answer, Failed):
            if answer.is_final and not (self._is_loading and self.start_s):  # it did load once
                raise XgptError(answer.words)
            raise self._died(f"failed: {answer.words}")
        if not isinstance(answer, int):
            return answer
        if answer != protocol.VERSION:
            raise XgptError(f"vLLM's process speaks version {answer} of xgpt's messages, and this "
                            f"rank {protocol.VERSION}: are they of one source tree?")
        return None

    def _died(self, why: str = "") -> ExecutorDied:
        """Ends what is left of the process; the error that says how it ended."""
        process = self._process
        if not why and process is not None:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(_END_S)
                why = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self.kill()
        self._line, self._is_loading = None, False
        return ExecutorDied(f"vLLM's process {why or 'does not answer'} ({self._log})")
