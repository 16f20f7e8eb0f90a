"""xgpt as a library: load a job, plan it, simulate it, run it (docs/python.md). Each name is
imported at its first use: `import xgpt` alone loads nothing."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"  # of the distribution, too (setup.cfg)
_LIBRARY = "xgpt.app.library"
__all__ = ["load", "plan", "results", "run", "simulate", "sweep", "write_report"]  # noqa: F822


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_LIBRARY), name)
    raise AttributeError(f"module 'xgpt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
