"""How many threads a rank computes with, while others take some of its cores.

The threads of a product have equal parts of it and wait for one another, spinning: one that another
process keeps from its core holds up all of them, at each of the hundreds of products of a step (a
step took up to 40 times as long), and sleeping instead of spinning would slow every step by a fifth
and more where nobody disturbs (benchmarks/results/taken-core.md). So a rank whose threads wait for
cores computes with one thread less, on the cores that are left: a taken core costs its share. After
a while it tries with one more again.

How long threads waited for a core is what Linux counts for each (/proc/PID/task/*/schedstat, the
second number, nanoseconds); they are asked only where threads were interrupted at all."""

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch

LOOK_S = 0.25
WAITED_SHARE = 0.15  # of the time, by all threads together: more, and one is in the way
LEAST_INTERRUPTED = 20.0  # times a second, below which nobody is
CALM_LOOKS = 4  # without waiting, after which a try counts as gone well
HOLD_S, MOST_HOLD_S = 2.0, 32.0  # between a thread less and the next try; doubled by each in vain


class Threads:
    """The threads of one rank, `most` where nobody disturbs. `look` is called after every step."""

    def __init__(self, most: int, *, waited_s: Callable[[], float] | None = None,
                 apply: Callable[[int], None] = torch.set_num_threads,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """`waited_s`: seconds so far that threads of this process waited for a core, all together;
        by default the system's count. `apply`: sets their number."""
        self.most = self.count = most
        self.changes = 0
        self._waited_s, self._apply, self._clock = waited_s or WaitedForCores(), apply, clock
        self._looked_s, self._waited_before_s = clock(), self._waited_s()
        self._hold_s, self._changed_s, self._calm = HOLD_S, 0.0, 0
        self._was_waiting = False

    def look(self) -> None:
        """A thread less where they were waiting in two looks one after the other; one more again
        after a while."""
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
    """What looks after a rank's threads; None where their number stays. It does in float32, and
    where answers are to be the same bit for bit (run.deterministic): another
    number adds products up in another order, and its answers are not to depend on what else the
    machine does."""
    is_free = device_kind == "cpu" and dtype != "float32" and not is_deterministic
    return Threads(most) if is_free else None


class WaitedForCores:
    """Seconds that the threads of this process waited for a core, since it was made: 0 where the
    system does not count them."""

    def __init__(self, tasks: Path = Path("/proc/self/task"), *, is_always: bool = False) -> None:
        """is_always: threads are asked whether any was interrupted or not."""
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
            # a thread that is new has waited since it began, which may be long ago: not counted
            self._waited_s += sum(delay - self._known.get(task, delay)
                                  for task, delay in delays.items()) / 1e9
            self._known = delays
        return self._waited_s


def _interrupted() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _delays(tasks: Path) -> dict[str, int]:
    """Nanoseconds by thread."""
    found = {}
    try:
        for task in os.listdir(tasks):
            fields = (tasks / task / "schedstat").read_text(encoding="ascii").split()
            found[task] = int(fields[1])
    except (OSError, ValueError, IndexError):
        pass  # it has ended meanwhile, or the system does not count
    return found
