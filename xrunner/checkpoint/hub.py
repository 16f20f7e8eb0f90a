"""The hub that models are fetched from, and whether it can be reached at all."""

import errno
import os
import socket
import urllib.error
import urllib.request

_HUB = "https://huggingface.co"
_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)


def hub_address() -> str:
    return os.environ.get("HF_ENDPOINT", _HUB).rstrip("/")


def is_offline() -> bool:
    """Whether the user wants models of this machine alone."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def why_silent(limit_s: float) -> Exception | None:
    """What keeps the hub from answering within so many seconds; None where it does, whatever it
    says."""
    try:
        request = urllib.request.Request(hub_address(), method="HEAD")
        with urllib.request.urlopen(request, timeout=limit_s):
            return None
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as cause:
        reason = getattr(cause, "reason", cause)
        return reason if isinstance(reason, Exception) else OSError(str(reason))


def why_in_vain(limit_s: float) -> str | None:
    """Why the hub's client need not be called, in words; None where it may find a way. Without a
    network it tries six times, 24 seconds in all, and tells each of them."""
    cause = None if is_offline() else why_silent(limit_s)
    # what else fails may be of this question alone: the client brings certificates of its own
    is_certain = isinstance(cause, (socket.gaierror, ConnectionError, TimeoutError)) or (
        isinstance(cause, OSError) and cause.errno in _NO_WAY)
    if not is_certain:
        return None
    why = getattr(cause, "strerror", None) or cause
    return f"{hub_address()} cannot be reached: {why}"
