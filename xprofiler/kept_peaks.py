"""The peaks of this machine's ranks by name, in one file beside the profiles, and how much of the
machine others had while they were measured."""

import json
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from xgpt.core.whole_file import write_atomically
from xprofiler.noise import MOST_TRIES
from xprofiler.profile import DISTURBED_LIMIT, Peaks, ProfileMetadata

PEAKS_FILE = "peaks.json"
_LEAST, _MOST = 1e6, 1e18  # a second, operations or bytes: no machine does less, or more


def name_of(metadata: ProfileMetadata) -> str:
    """Of what must be equal for the peaks of one rank to be another's."""
    return (f"{metadata.device} {metadata.ranks}x{metadata.threads_per_rank} {metadata.dtype} "
            f"{metadata.libraries}")


class KeptPeaks(NamedTuple):
    """`missing`: share of the machine that others had; `tries`: how often they were measured."""

    peaks: Peaks
    missing: float
    tries: int = 1

    @property
    def is_disturbed(self) -> bool:
        """Whether so much was missing that they may be far too low."""
        return self.missing > DISTURBED_LIMIT

    @property
    def is_worth_again(self) -> bool:
        """Whether to measure them again, as points of a profile are (xprofiler.noise)."""
        return self.is_disturbed and self.tries < MOST_TRIES

    def and_then(self, later: "KeptPeaks") -> "KeptPeaks":
        """The better of each, since others only take away from what a machine does."""
        first, second = self.peaks, later.peaks
        return KeptPeaks(
            Peaks(flops_per_s=max(first.flops_per_s, second.flops_per_s), source=second.source,
                  bandwidth_bytes_per_s=max(first.bandwidth_bytes_per_s,
                                            second.bandwidth_bytes_per_s)),
            min(self.missing, later.missing), self.tries + later.tries)


def kept_peaks(folder: Path, name: str) -> KeptPeaks | None:
    """Those that were measured under the name; None where none were, or what is there is no
    machine's: a cache is no input of the user's."""
    raw = _read(folder).get(name, {})
    try:
        found = Peaks(flops_per_s=float(raw["flops_per_s"]), source=str(raw["source"]),
                      bandwidth_bytes_per_s=float(raw["bandwidth_bytes_per_s"]))
        kept = KeptPeaks(found, float(raw["missing"]), int(raw["tries"]))
    except (KeyError, OverflowError, TypeError, ValueError):
        return None
    rates = (found.flops_per_s, found.bandwidth_bytes_per_s)
    is_right = all(_LEAST <= rate <= _MOST for rate in rates) and 0 <= kept.missing <= 1
    return kept if is_right else None


def keep_peaks(folder: Path, name: str, measured: KeptPeaks) -> None:
    """Adds them to the file, with the date; to disturbed ones that are there what is better."""
    before = kept_peaks(folder, name)
    kept = before.and_then(measured) if before is not None and before.is_disturbed else measured
    write_atomically(folder / PEAKS_FILE, json.dumps(
        {**_read(folder), name: {
            **asdict(kept.peaks), "missing": round(kept.missing, 3), "tries": kept.tries,
            "date": date.today().isoformat()}}, indent=1) + "\n")


def _read(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        raw = json.loads((folder / PEAKS_FILE).read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}
