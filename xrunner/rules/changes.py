"""What of a schedule may change while it runs, by policy, and the rules that take it up.

Caches are sized once, for the schedule that a run begins with. RRA's have room to grow
(`RraRule.make_room`); the others' limits may fall, and rise again to what they were. Of copies of
several shapes each shape's rules change by themselves (`OfShapes`)."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from xgpt.core.policies import policy
from xgpt.core.schedule import Estimate
from xrunner.rules.iteration import StepLimits
from xrunner.rules.rra import PhaseControls, phase_controls
from xrunner.rules.waa import SystemLimits

Changes = PhaseControls | SystemLimits | StepLimits


@dataclass(frozen=True, slots=True)
class OfShapes:
    """What holds for the rules of each shape's copies, in the order of their ranks; None: what
    held when the run began."""

    own: tuple[Changes | None, ...]


def of_shape(changes: Changes | OfShapes, shape: int) -> Changes | None:
    """What holds for the copies of one shape; for all alike where they are of one."""
    return changes.own[shape] if isinstance(changes, OfShapes) else changes


@runtime_checkable
class Changeable(Protocol):
    """A rule that takes up other control variables between two phases, or those of all replicas.
    What it is told is of its policy's kind of Changes."""

    @property
    def next_phase(self) -> int:
        """The first phase that a change can still be made for."""

    def change(self, controls: Any, *, phase: int) -> None: ...


def changes_of(estimate: Estimate, *, slots: int, kv_tokens: int | None = None) -> Changes:
    """What turns the rule that runs into that of `estimate`, on the same stages and groups.
    `slots`: of a group's caches (RRA); `kv_tokens`: for which it has blocks (None: it has rows)."""
    row = policy(estimate.policy)
    if row.is_changeable:
        return phase_controls(estimate, slots=slots, kv_tokens=kv_tokens)
    limits: Changes = row.load("limits")(estimate)
    return limits
