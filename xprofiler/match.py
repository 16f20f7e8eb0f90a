"""Whether a profile speaks of the device, dtype and kernels it is to be used for."""

from __future__ import annotations

from typing import NamedTuple

from xprofiler.profile import ProfileMetadata

# A profile of another of these is of something else, and refused.
_MUST = {"model_shape": "model", "device": "device", "dtype": "dtype"}
# Of another of these it may still be near: it is used, and marked. Ranks and threads matter where
# ranks share a host's memory, libraries where the run is on this machine.
_SHOULD = ("kernels", "sampling", "origin")
_SHOULD_ON_CPU = ("ranks", "threads_per_rank")
_SHOULD_HERE = ("libraries",)


class Match(NamedTuple):
    """`refusals`: why a profile cannot be used. `marks`: how it differs from what will run."""

    refusals: tuple[str, ...]
    marks: tuple[str, ...]


def match(measured: ProfileMetadata, wanted: ProfileMetadata, *, is_cpu: bool,
          is_here: bool) -> Match:
    """Compares what was measured with what is to run, on CPU workers or not, here or elsewhere."""
    compared = (*_SHOULD, *(_SHOULD_ON_CPU * is_cpu), *(_SHOULD_HERE * is_here))
    refusals = tuple(
        f"it is of {word} {_shown(measured, key)!r}, the job's is {_shown(wanted, key)!r}"
        for key, word in _MUST.items() if getattr(measured, key) != getattr(wanted, key))
    marks = tuple(
        f"{key} {getattr(measured, key)!r} instead of {getattr(wanted, key)!r}"
        for key in compared if getattr(measured, key) != getattr(wanted, key))
    return Match(refusals, marks)


def _shown(metadata: ProfileMetadata, key: str) -> object:
    """A model's name says more than its fingerprint; the same name may have two shapes."""
    if key != "model_shape":
        return getattr(metadata, key)
    return f"{metadata.model} (shape {metadata.model_shape})"
