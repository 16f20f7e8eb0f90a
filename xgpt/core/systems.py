"""Systems of static batches that others published, a row each: how each forms its batches. Its
placement on devices is no part of it."""

import math
from dataclasses import dataclass

from xgpt.core.controls import Batches

STATIC = "ft"  # the policy that works their batches


@dataclass(frozen=True, slots=True)
class System:
    """A system: how it forms batches in words, where that is published, and the settings that form
    such batches here."""

    words: str
    source: str
    settings: Batches


_UELLM = "He et al., UELLM (2024)"
SYSTEMS = {
    "fifo": System("input order, cut every ten", f"{_UELLM}, baseline",
                   Batches(length=0.0, threshold=math.inf)),
    "s3": System("by length, up to 20 with 1,024 output tokens", f"S3 as in {_UELLM}",
                 Batches(most=20, threshold=math.inf, pack=1024)),
    "uellm-length": System("by length (ODBS)", _UELLM, Batches()),
    "uellm-deadline": System("by deadline (SLO-DBS)", _UELLM, Batches(deadline=1.0, length=0.0)),
    # weights of the release's UA
    "uellm": System("by both (SLO-ODBS)", _UELLM, Batches(deadline=1.0, length=0.5))}
