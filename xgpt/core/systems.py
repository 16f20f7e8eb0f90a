"""Systems of static batches that others published, a row each: how each forms its batches.

The rows compare ways to form batches. A system's placement on devices is not part of them."""

import math
from dataclasses import dataclass

from xgpt.core.controls import Batches
from xgpt.core.errors import UnknownNameError

STATIC = "ft"  # the policy that works their batches


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A system: its name, how it forms batches in words, where that is published, and the settings
    that form such batches here."""

    name: str
    words: str
    source: str
    settings: Batches


_UELLM = "He et al., UELLM (2024)"
SYSTEMS = (
    System(name="fifo", words="input order, cut every ten", source=f"{_UELLM}, baseline",
           settings=Batches(length=0.0, threshold=math.inf)),
    System(name="s3", words="by length, up to 20 with 1,024 output tokens together",
           source="Jin et al., S3 (2023), as UELLM's release has it",
           settings=Batches(most=20, threshold=math.inf, pack=1024)),
    System(name="uellm-length", words="by length (ODBS)", source=_UELLM, settings=Batches()),
    System(name="uellm-deadline", words="by deadline (SLO-DBS)", source=_UELLM,
           settings=Batches(deadline=1.0, length=0.0)),
    # weights as in the release's UA
    System(name="uellm", words="by deadline and length (SLO-ODBS)", source=_UELLM,
           settings=Batches(deadline=1.0, length=0.5)),
)


def system_names() -> tuple[str, ...]:
    return tuple(row.name for row in SYSTEMS)


def system(name: str) -> System:
    """The row of that name. Raises UnknownNameError, which lists the known names."""
    for row in SYSTEMS:
        if row.name == name:
            return row
    raise UnknownNameError("system", name, system_names())
