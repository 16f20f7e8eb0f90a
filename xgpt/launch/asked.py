"""A stop that was asked for by a signal while no ranks ran, and must not be lost. What a signal's
handler raises comes wherever Python happens to be: a library whose import tries this and that
catches it with everything else (seen with torch's, twice in 60 signals), and the run would go
on."""

from xgpt.core.errors import StoppedEarly

_asked: list[StoppedEarly] = []


def remember(stop: StoppedEarly) -> None:
    """It is raised now, and again before ranks start."""
    _asked[:] = [stop]


def forget() -> None:
    """Nobody asks any longer."""
    _asked.clear()


def is_asked() -> bool:
    """Whether a StoppedEarly is remembered."""
    return bool(_asked)


def raise_if_asked() -> None:
    """Raises the StoppedEarly that was remembered."""
    if _asked:
        raise _asked[0]
