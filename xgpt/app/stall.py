"""A run that makes no progress is ended, by the name of who holds it up: a rank that is stopped,
swapped out, or waits for a disk or a device that does not answer holds up all, for ever."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from xgpt.core.errors import XgptError
from xgpt.core.units import format_seconds
from xrunner.files.beat import RankState, read_beats

LEAST_S, _STEPS = 60.0, 10  # without progress; times the longest step known
# until a rank tells that it lives (it imports, perhaps over a slow network), and for its first step
_START_S = 600.0
_LOOK_S = 1.0
SILENT_S = 10.0  # a rank tells of itself every second: who waits for it has no time left to tell
_AWAY_S = 5.0  # a launcher that has not looked for so long was stopped itself


class RanksHang(XgptError):
    """No rank died, and the run does not go on."""


@dataclass(slots=True)
class _Seen:
    """The last state of a rank, and when it was another (for its steps: when it did one)."""

    state: RankState
    changed_s: float
    worked_s: float


class StallWatch:
    """Looks at what the ranks tell. `limit_s` None: several times the longest step known, of which
    `step_s` is planned."""

    def __init__(self, output: Path, *, ranks: int, limit_s: float | None, step_s: float = 0.0,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._output, self._ranks, self._limit_s, self._step_s = output, ranks, limit_s, step_s
        self._clock, self._start_s, self._looked_s = clock, clock(), clock()
        self._seen: dict[int, _Seen] = {}

    def look(self) -> None:
        """Called often. Raises RanksHang."""
        now, before = self._clock(), self._looked_s
        if now - before < _LOOK_S:
            return
        self._looked_s = now
        if now - before > _AWAY_S:  # the ranks may have been stopped with it
            for seen in self._seen.values():
                seen.changed_s = seen.worked_s = now
        for state in read_beats(self._output):
            self._take(state, now)
        if (why := self._why(now)) is not None:
            raise RanksHang(f"the run hangs: {why}. It was ended; what is done is kept")

    def _take(self, state: RankState, now: float) -> None:
        seen = self._seen.get(state.rank)
        if seen is None:
            self._seen[state.rank] = _Seen(state, now, now)
            return
        if state.at_s != seen.state.at_s:
            seen.changed_s = now
        if state.num_steps != seen.state.num_steps or state.step_since_s != seen.state.step_since_s:
            seen.worked_s = now
        seen.state = state

    @property
    def silent(self) -> str | None:
        """In a few words, who has told nothing for longest, where that is long."""
        first = min(self._seen.values(), key=lambda one: one.changed_s, default=None)
        if first is None or (passed_s := self._clock() - first.changed_s) <= SILENT_S:
            return None
        return f"rank {first.state.rank} silent for {format_seconds(round(passed_s))}"

    def limit_s(self) -> float:
        return (max(LEAST_S, _STEPS * self.longest_step_s) if self._limit_s is None
                else self._limit_s)

    @property
    def longest_step_s(self) -> float:
        """Planned, or measured so far."""
        return max([self._step_s, *(seen.state.longest_step_s for seen in self._seen.values())])

    def _why(self, now: float) -> str | None:
        """Who holds up the run, in words; None where nobody does."""
        limit_s, seen = self.limit_s(), list(self._seen.values())
        silent = [one for one in seen if now - one.changed_s > limit_s]
        if silent:
            first = min(silent, key=lambda one: one.changed_s)
            return (f"{first.state.name} has given no sign of life for "
                    f"{format_seconds(round(now - first.changed_s))}; it was last told "
                    f"{first.state.told}")
        # the first step compiles what is not compiled yet
        stuck = [one for one in seen if one.state.step_since_s is not None and (
            now - one.worked_s > (limit_s if one.state.num_steps else max(limit_s, _START_S)))]
        if stuck:
            first = min(stuck, key=lambda one: one.worked_s)
            return (f"{first.state.name} lives, but has been at one step for "
                    f"{format_seconds(round(now - first.worked_s))}: it was told "
                    f"{first.state.told}")
        begun = [one for one in seen if one.state.num_steps]
        if begun and len(begun) == len(seen) and all(now - one.worked_s > limit_s for one in seen):
            first = max(begun, key=lambda one: one.worked_s)
            return (f"no rank has begun a step for "
                    f"{format_seconds(round(now - first.worked_s))}, though all live; the last "
                    f"was {first.state.name}, told {first.state.told}")
        missing = sorted(set(range(self._ranks)) - self._seen.keys())
        if missing and now - self._start_s > max(limit_s, _START_S):
            return (f"{'ranks' if missing[1:] else 'rank'} {', '.join(map(str, missing))} of "
                    f"{self._ranks} gave no sign of life within "
                    f"{format_seconds(round(now - self._start_s))} of the start")
        return None


def age_s(state: RankState, now: float | None = None) -> float | None:
    """Seconds since the rank's last sign of life, by this machine's clock and the rank's; None of
    one that is known by the account of a run that has ended."""
    return None if state.at_s is None else max(
        (time.time() if now is None else now) - state.at_s, 0.0)


def oldest_s(states: Sequence[RankState], now: float | None = None) -> float | None:
    """The longest of these; None of none."""
    return max((age for state in states if (age := age_s(state, now)) is not None), default=None)


def are_silent(states: Sequence[RankState]) -> bool:
    """Whether one of the ranks has told nothing for long."""
    return (oldest_s(states) or 0.0) > SILENT_S


def signs_of_life(states: Sequence[RankState], now: float | None = None) -> str | None:
    """How long ago the ranks told that they live, in a sentence; None of none."""
    heard = [(age, state) for state in states if (age := age_s(state, now)) is not None]
    if not heard:
        return None
    (age, oldest), *others = sorted(heard, key=lambda one: -one[0])
    said = (f"last sign of life: {oldest.name} {format_seconds(round(age))} ago, "
            f"told {oldest.told}")
    return said + (f"; the others {format_seconds(round(others[0][0]))} ago or less" if others
                   else "")
