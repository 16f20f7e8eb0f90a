"""Heartbeat files of ranks: `ranks/RANK.json`, replaced about once a second by a thread of each. A
rank that is stopped or lost writes no more. One that is stuck writes the step it is at
(xgpt.app.running.follow)."""

import json
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from xgpt.core.system.whole_file import write_atomically
from xrunner.comm.messages import StepMessage
from xrunner.rules.steps import StepKind
from xrunner.step_record import StepRecord

HEARTBEATS = "ranks"  # folder within the output folder
_INTERVAL_S = 1.0  # chosen
MOST_STEPS = 24  # chosen: latest steps of each kind in a state
_PACE_WRITES = 6  # chosen: intervals that the tokens a second are measured over


class ReportedStep(NamedTuple):
    """A step as a state reports it: see xrunner.step_record.StepRecord."""

    kind: str
    queries: int
    tokens: int
    decoded: int
    context_tokens: float
    longest_context: int
    input_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """A rank's state, `elapsed_s` seconds after the run's common start.

    `busy_s`: seconds of these spent on steps. `recent_share`: busy share of the last second or so.
    `queries`: requests in its stage's caches. `at_s`: when it was written, in seconds since 1970
    (None: never). `told`: the step it received last; `step_since_s`: since when it is at it (None:
    done). `steps`: the latest of each kind since the state before, at most MOST_STEPS.
    `node`, `devices`: where it runs, in words. `waiting`, `tokens_per_s`: requests in the queue of
    a pool's first rank, and output tokens of its last seconds. `restarts`: of its engine. `note`:
    what it does instead of steps, in words."""

    rank: int
    stage: int
    pool: str
    elapsed_s: float
    busy_s: float
    recent_share: float
    queries: int
    replica: int = 0
    at_s: float | None = None
    steps: tuple[ReportedStep, ...] = ()
    num_steps: int = 0  # steps done
    longest_step_s: float = 0.0
    told: str = ""
    step_since_s: float | None = None
    node: str = ""
    devices: str = ""
    waiting: int = 0
    tokens_per_s: float = 0.0
    restarts: int = 0
    note: str = ""

    @property
    def name(self) -> str:
        """The rank's name for messages, with its stage, pool and replica."""
        place = f"stage {self.stage}" + ("" if self.pool == "all" else f", {self.pool} pool")
        return f"rank {self.rank} ({place}{f', replica {self.replica}' if self.replica else ''})"

    @property
    def doing(self) -> str:
        """Words for its last activity, which follow its last sign of life."""
        return f"while {self.note}" if self.note else f"after the order {self.told}"


class Heartbeat:
    """Writes one rank's heartbeat file. Call it after every step; `start` a thread to write
    meanwhile. Others set `waiting`, `output_tokens` (so far), `restarts` and `note` (RankState)."""

    def __init__(self, output: Path, *, rank: int, stage: int, pool: str,
                 replica: int = 0, devices: str = "") -> None:
        self._path = output / HEARTBEATS / f"{rank}.json"
        self._place = {"rank": rank, "stage": stage, "pool": pool, "replica": replica,
                       "devices": devices, "node": socket.gethostname().partition(".")[0]}
        self.waiting = self.output_tokens = self.restarts = 0
        self.note = ""
        self._paces = deque([(time.monotonic(), 0)], maxlen=_PACE_WRITES)  # (seconds, tokens)
        self._written_s, self._busy_s = -math.inf, 0.0
        self._elapsed_s, self._share, self._queries = 0.0, 0.0, 0
        self._num_steps, self._longest_s = 0, 0.0
        self._steps: dict[str, deque[StepRecord]] = {}  # by kind, since the last state
        self._told: tuple[ReportedStep, ...] = ()
        self._message: StepMessage | None = None
        self._since_s: float | None = None
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread that shows that this process lives."""
        self._thread = threading.Thread(target=self._live, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops writing: the rank's part is done."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def begin(self, message: StepMessage) -> None:
        """Records that the rank has received this step."""
        self._message, self._since_s = message, time.time()

    def give_up(self) -> None:
        """Records that the step under way, if any, will not be done."""
        self._since_s = None

    def __call__(self, now_s: float, busy_s: float, queries: int,
                 step: StepRecord | None = None) -> None:
        """Records a `step` that is done. `now_s`: since the run's start. `queries`: in its
        caches."""
        if step is not None:
            self._steps.setdefault(step.kind, deque(maxlen=MOST_STEPS)).append(step)
        if self._since_s is not None:
            self._longest_s = max(self._longest_s, time.time() - self._since_s)
        self._since_s, self._num_steps, self._queries = None, self._num_steps + 1, queries
        passed_s = now_s - self._written_s
        if 0 <= passed_s < _INTERVAL_S:
            return
        is_first = not 0 <= passed_s < math.inf  # or the clock was restarted
        share = (busy_s / now_s if now_s > 0 else 0.0) if is_first else (
            (busy_s - self._busy_s) / passed_s)
        self._written_s, self._elapsed_s, self._busy_s = now_s, now_s, busy_s
        self._share = min(max(share, 0.0), 1.0)
        self._told = () if is_first else tuple(map(_told, (
            step for own in self._steps.values() for step in own)))
        self._steps.clear()
        self._write()

    def _live(self) -> None:
        self._write()
        while not self._is_over.wait(_INTERVAL_S):
            self._write()

    def _tokens_per_s(self) -> float:
        now_s = time.monotonic()
        if now_s - self._paces[-1][0] >= _INTERVAL_S:
            self._paces.append((now_s, self.output_tokens))
        (first_s, first), (last_s, last) = self._paces[0], self._paces[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0

    def _write(self) -> None:
        state = RankState(
            **self._place, elapsed_s=self._elapsed_s, busy_s=self._busy_s,  # type: ignore[arg-type]
            recent_share=self._share, queries=self._queries, at_s=time.time(), steps=self._told,
            num_steps=self._num_steps,
            longest_step_s=self._longest_s, step_since_s=self._since_s,
            told=_in_words(self._message), waiting=self.waiting, restarts=self.restarts,
            note=self.note, tokens_per_s=round(self._tokens_per_s(), 1))
        with self._lock, suppress(OSError):  # a full disk is reported where results are written
            self._path.parent.mkdir(exist_ok=True)
            write_atomically(self._path, json.dumps(asdict(state)) + "\n", is_durable=False)


def _told(step: StepRecord) -> ReportedStep:
    return ReportedStep(step.kind, step.queries, step.tokens, step.decoded,
                    round(step.context_tokens, 1), step.longest_context,
                    round(step.input_tokens, 1), round(step.seconds, 7))


def _in_words(message: StepMessage | None) -> str:
    if message is None:
        return "to load its weights"
    of = f"phase {message.phase}, iteration {message.iteration}, group {message.group}"
    joined = f", {len(message.joined)} new requests" if message.joined else ""
    kind = "encode and decode" if message.kind is StepKind.MIXED else message.kind.value
    return f"to {kind} ({of}{joined})"


def read_heartbeats(output: Path) -> list[RankState]:
    """The last state of each rank, in their order; empty if there is none."""
    states = []
    for path in (output / HEARTBEATS).glob("*.json"):
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            states.append(RankState(**{**raw, "steps": tuple(
                ReportedStep(*step) for step in raw.get("steps", ()))}))
        except (OSError, ValueError, TypeError, AttributeError):
            continue
    return sorted(states, key=lambda state: state.rank)


def of_replicas(states: Iterable[RankState]) -> list[RankState]:
    """One state for the ranks of each replica together, in the order of the replicas. `queries`: in
    the caches of the first stage of each pool."""
    by_number: dict[int, list[RankState]] = {}
    for state in sorted(states, key=lambda one: (one.replica, one.rank)):
        by_number.setdefault(state.replica, []).append(state)
    return [_together(ranks) for ranks in by_number.values()]


def _together(ranks: Sequence[RankState]) -> RankState:
    first = {rank.pool: rank for rank in sorted(ranks, key=lambda one: (-one.stage, -one.rank))}
    node, devices = (", ".join(dict.fromkeys(filter(None, (getattr(rank, name) for rank in ranks))))
                     for name in ("node", "devices"))
    return replace(ranks[0], node=node, devices=devices,
                   recent_share=max(rank.recent_share for rank in ranks),
                   busy_s=max(rank.busy_s for rank in ranks),
                   queries=sum(rank.queries for rank in first.values()),
                   waiting=sum(rank.waiting for rank in ranks),
                   tokens_per_s=sum(rank.tokens_per_s for rank in ranks),
                   restarts=sum(rank.restarts for rank in ranks),
                   note=next((rank.note for rank in ranks if rank.note), ""))
