"""The peaks of this machine, for what nothing was measured of: a rank alone, `python -m
xprofiler.measure.calibrate REQUEST.json`, for half a second. They are kept beside the profiles,
with how much of the machine others had meanwhile."""

if __name__ == "__main__":  # before what takes seconds to import
    from xgpt.core.lifeline import begin_rank

    begin_rank()

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from xgpt.core.lifeline import all_imported
from xprofiler.kept_peaks import KeptPeaks, keep_peaks
from xprofiler.measure.clock import measure_peaks
from xprofiler.measure.disturbance import Disturbance
from xprofiler.measure.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRequest:
    """What the launcher asks for; its fields are those of REQUEST.json. `name`: under which the
    peaks are kept in `folder`."""

    dtype: str
    threads: int
    folder: str
    name: str


def main(arguments: list[str]) -> int:
    all_imported()
    request = CalibrationRequest(**json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    torch.set_num_threads(request.threads)
    disturbance = Disturbance(Ranks(None), patience_s=0.0)
    with torch.inference_mode():
        peaks = measure_peaks(getattr(torch, request.dtype), torch.device("cpu"), is_brief=True)
    keep_peaks(Path(request.folder), request.name, KeptPeaks(peaks, disturbance.missing()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
