"""Systems of static batches that others published: how each forms its batches. Their placements on
devices are no part of it. All are as in He et al., UELLM (2024)."""

import math
from typing import NamedTuple

from xgpt.core.controls import Batches

STATIC = "ft"  # the policy that works their batches


class System(NamedTuple):
    """The settings that form a system's batches."""

    settings: Batches


SYSTEMS = {
    "fifo": System(Batches(length=0.0, threshold=math.inf)),  # input order, cut every ten
    "s3": System(Batches(most=20, threshold=math.inf, pack=1024)),
    "uellm-length": System(Batches()),  # ODBS
    "uellm-deadline": System(Batches(deadline=1.0, length=0.0)),  # SLO-DBS
    "uellm": System(Batches(deadline=1.0, length=0.5))}  # SLO-ODBS, weights of the release's UA
