"""The peaks of this machine's ranks by name, in one file beside the profiles."""

import json
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from xgpt.core.whole_file import write_atomically
from xprofiler.profile import Peaks, ProfileMetadata

PEAKS_FILE = "peaks.json"
_LEAST, _MOST = 1e6, 1e18  # a second, operations or bytes: no machine does less, or more


def name_of(metadata: ProfileMetadata) -> str:
    """Of what must be equal for the peaks of one rank to be another's."""
    return (f"{metadata.device} {metadata.ranks}x{metadata.threads_per_rank} {metadata.dtype} "
            f"{metadata.libraries}")


def kept_peaks(folder: Path, name: str) -> Peaks | None:
    """Those that were measured under the name; None where none were, or what is there is no
    machine's: a cache is no input of the user's."""
    raw = _read(folder).get(name, {})
    try:
        found = Peaks(flops_per_s=float(raw["flops_per_s"]), source=str(raw["source"]),
                      bandwidth_bytes_per_s=float(raw["bandwidth_bytes_per_s"]))
    except (KeyError, OverflowError, TypeError, ValueError):
        return None
    rates = (found.flops_per_s, found.bandwidth_bytes_per_s)
    return found if all(_LEAST <= rate <= _MOST for rate in rates) else None


def keep_peaks(folder: Path, name: str, peaks: Peaks) -> None:
    """Adds them to the file, with the date."""
    write_atomically(folder / PEAKS_FILE, json.dumps(
        {**_read(folder), name: {**asdict(peaks), "date": date.today().isoformat()}},
        indent=1) + "\n")


def _read(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        raw = json.loads((folder / PEAKS_FILE).read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}
