"""The rules of all replicas, which the launcher changes while they run."""

from collections.abc import Sequence
from dataclasses import replace

from xgpt.core.controls import EvenBatches
from xgpt.core.schedule import Estimate
from xrunner.comm.messages import PortionMessage
from xrunner.comm.point_to_point import Comm
from xrunner.engine.head import Head
from xrunner.engine.replicas import ToReplicas
from xrunner.rank.world import Replica
from xrunner.rules.changes import Changes, ChangesByShape, changes_of_shape
from xrunner.rules.routing import Window, rra_window
from xrunner.rules.rra import PhaseControls


class RunningRules:
    """Rank 0's way to change the rules of all replicas. A change applies to each rule from its own
    next phase on."""

    def __init__(self, comm: Comm, supply: ToReplicas, replicas: Sequence[Replica]) -> None:
        """`replicas`: all, in their order."""
        self._comm, self._supply, self._replicas = comm, supply, replicas

    @property
    def next_phase(self) -> int:
        """Next phase of rank 0's own rule."""
        phase: int = self._own.rule.next_phase  # type: ignore[attr-defined]
        return phase

    def change(self, controls: Changes | ChangesByShape, *, phase: int) -> None:
        """Sends new settings to all replicas, and supplies them accordingly."""
        supply, router = self._supply, self._supply.router
        launcher, sources = supply.sink.launcher, supply.sources
        assert launcher is not None, "who changes"
        for replica in self._replicas:
            number, own = replica.number, changes_of_shape(controls, replica.shape)
            if (window := _window(own, replica.estimate)) is not None:
                before = router.windows[number]
                router.windows[number] = replace(window, at_work=before.at_work)
            if own is not None and number == 0:
                self._own.changes = own
                self._own.rule.change(own, phase=phase)  # type: ignore[attr-defined]
            elif own is not None and replica.head in sources:
                supply.changes[number, launcher.revision] = own
                self._comm.send(replica.head, PortionMessage(
                    change=own, revision=launcher.revision))

    @property
    def _own(self) -> Head:
        assert self._supply.own is not None, "the first replica has not started"
        return self._supply.own


def _window(controls: Changes | None, estimate: Estimate) -> Window | None:
    """Window of a replica under new settings; None: unchanged."""
    if not isinstance(controls, PhaseControls):
        return None  # lower limits need no smaller window: surplus requests wait
    even = getattr(estimate.controls, "even", EvenBatches())
    return rra_window(controls.encode_batch, estimate.deployment.num_groups, even)
