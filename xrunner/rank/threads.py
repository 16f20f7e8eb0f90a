"""Number of threads a rank computes with while other programs take some of its cores.

The threads of a product have equal parts of it and wait for one another, spinning. One that loses
its core holds up all of them, at each of the hundreds of products of a step. Measured
(benchmarks/results/taken-core.md): such a step takes up to 40 times as long, and sleeping instead
of spinning slows undisturbed steps by a fifth and more. So a rank whose threads wait for cores
drops one thread: a taken core then costs its share. After a while it tries one more again.

Linux counts how long each thread waited for a core (/proc/PID/task/*/schedstat, second number, ns).
It is read only if threads were interrupted at all."""

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch

LOOK_S = 0.25  # chosen, as the following
WAITED_SHARE = 0.15  # of the time, over all threads: more means that one lost its core
LEAST_INTERRUPTED = 20.0  # a second; below this none has lost its core
CALM_LOOKS = 4  # without waiting, after which an added thread is kept
HOLD_S, MOST_HOLD_S = 2.0, 32.0  # before an added thread; doubled by each failure


class Threads:
    """The number of threads of one rank, up to `most`. Call `look` after every step."""

    def __init__(self, most: int, *, waited_s: Callable[[], float] | None = None,
                 apply: Callable[[int], None] = torch.set_num_threads,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """`waited_s`: seconds that this process's threads have waited for a core so far. By default
        the system's count. `apply`: sets the number of threads."""
        self.most = self.count = most
        self.changes = 0
        self._waited_s, self._apply, self._clock = waited_s or WaitedForCores(), apply, clock
        self._looked_s, self._waited_before_s = clock(), self._waited_s()
        self._hold_s, self._changed_s, self._calm = HOLD_S, 0.0, 0
        self._was_waiting = False

    def look(self) -> None:
        """Drops a thread after two looks in which threads waited; adds one again after a while."""
        if self.most == 1:
            return
        now_s = self._clock()
        elapsed_s = now_s - self._looked_s
        if elapsed_s < LOOK_S:
            return
        waited_s = self._waited_s()
        is_waiting = (waited_s - self._waited_before_s) / elapsed_s > WAITED_SHARE
        was_waiting, self._was_waiting = self._was_waiting, is_waiting
        self._looked_s, self._waited_before_s = now_s, waited_s
        self._calm = 0 if is_waiting else self._calm + 1
        if is_waiting and was_waiting and self.count > 1:
            self._set(self.count - 1, now_s)
        elif self.count < self.most and now_s - self._changed_s >= self._hold_s and not is_waiting:
            self._hold_s = min(2 * self._hold_s, MOST_HOLD_S)
            self._set(self.count + 1, now_s)
        elif self.count == self.most and self._calm >= CALM_LOOKS:
            self._hold_s = HOLD_S

    def _set(self, count: int, now_s: float) -> None:
        self.count, self._changed_s, self._was_waiting = count, now_s, False
        self._calm = 0
        self.changes += 1
        self._apply(count)


def threads_of(device_kind: str, dtype: str, most: int, *,
               is_deterministic: bool = False) -> Threads | None:
    """The object that adjusts a rank's number of threads; None if the number must not change. It
    must not in float32 and with `run.deterministic`: another number adds products in another order,
    and answers must not depend on other programs."""
    is_free = device_kind == "cpu" and dtype != "float32" and not is_deterministic
    return Threads(most) if is_free else None


class WaitedForCores:
    """Seconds that this process's threads have waited for a core since it was made. 0 if the system
    does not count them."""

    def __init__(self, tasks: Path = Path("/proc/self/task"), *, is_always: bool = False) -> None:
        """`is_always`: read threads' counts whether any was interrupted or not."""
        self._tasks, self._waited_s = tasks, 0.0
        self._least = 0.0 if is_always else LEAST_INTERRUPTED
        self._known = _delays(tasks)
        self._interrupted, self._asked_s = _interrupted(), time.monotonic()

    def __call__(self) -> float:
        now_s, interrupted = time.monotonic(), _interrupted()
        rate = (interrupted - self._interrupted) / max(now_s - self._asked_s, 1e-9)
        self._interrupted, self._asked_s = interrupted, now_s
        if rate >= self._least:
            delays = _delays(self._tasks)
            # a new thread's count may be old: it is not added
            self._waited_s += sum(delay - self._known.get(task, delay)
                                  for task, delay in delays.items()) / 1e9
            self._known = delays
        return self._waited_s


def _interrupted() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _delays(tasks: Path) -> dict[str, int]:
    """Nanoseconds that each thread has waited for a core, by thread id."""
    found = {}
    try:
        for task in os.listdir(tasks):
            fields = (tasks / task / "schedstat").read_text(encoding="ascii").split()
            found[task] = int(fields[1])
    except (OSError, ValueError, IndexError):
        pass  # the thread has ended, or the system does not count
    return found
