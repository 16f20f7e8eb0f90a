"""Settings of a schedule that may change while it runs, by policy.

Caches are sized once, for the schedule a run starts with. RRA's caches have room to grow
(`RraRule.make_room`); the limits of other policies may only fall and rise again. Replicas of
several shapes have settings for each shape (`ChangesByShape`)."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from xgpt.core.policies import policy
from xgpt.core.schedule import Estimate
from xrunner.rules.iteration import StepLimits
from xrunner.rules.rra import PhaseControls, phase_controls
from xrunner.rules.waa import SystemLimits

Changes = PhaseControls | SystemLimits | StepLimits


@dataclass(frozen=True, slots=True)
class ChangesByShape:
    """New settings for each shape of replica, in the order of their ranks; None: as at the
    start."""

    own: tuple[Changes | None, ...]


def changes_of_shape(changes: Changes | ChangesByShape, shape: int) -> Changes | None:
    """New settings of replicas of one shape; None: as at the start of the run."""
    return changes.own[shape] if isinstance(changes, ChangesByShape) else changes


@runtime_checkable
class Changeable(Protocol):
    """A rule that can change its settings between two phases. Its settings are its policy's
    Changes."""

    @property
    def next_phase(self) -> int:
        """The first phase that a change can still apply to."""

    def change(self, controls: Any, *, phase: int) -> None:
        """Applies `controls` from the start of `phase` on."""


def changes_of(estimate: Estimate, *, slots: int, kv_tokens: int | None = None) -> Changes:
    """Settings that turn a running rule on the same stages and groups into that of `estimate`.
    `slots`: rows of a group's cache (RRA). `kv_tokens`: tokens in its blocks (None: it has
    rows)."""
    row = policy(estimate.policy)
    if row.is_changeable:
        return phase_controls(estimate, slots=slots, kv_tokens=kv_tokens)
    limits: Changes = row.load("limits")(estimate)
    return limits
