"""Runs a module of ours in another interpreter, which does not have our packages:
`OTHER_PYTHON .../xrunner/backends/other_python.py MODULE [ARGUMENT ...]`.

Only our five packages come from here. Everything else is that interpreter's, since versions of
torch or transformers of two environments must not meet in one process. Processes that
`multiprocessing` spawns from there (vLLM's ranks) run this file as their main module, under another
name, and so find our packages too."""

import importlib.abc
import importlib.machinery
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).resolve().parents[2]
_OURS = ("xgpt", "xprofiler", "xsimulator", "xscheduler", "xrunner")


class _Ours(importlib.abc.MetaPathFinder):
    """Finds our packages beside this file's package."""

    def find_spec(self, name: str, path: Sequence[str] | None = None,
                  target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _OURS:
            return None  # modules within a package are found by its own path
        return importlib.machinery.PathFinder.find_spec(name, [str(_ROOT)])


def main() -> None:
    """Runs the module that the first argument names, with the others as its arguments."""
    # drop this script's folder, in which our modules could hide packages of the same name
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve()
                   != Path(__file__).resolve().parent]
    sys.meta_path.insert(0, _Ours())
    del sys.argv[0]
    # this file stays sys.modules["__main__"], for spawned processes
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=False)


if __name__ == "__mp_main__":
    sys.meta_path.insert(0, _Ours())
if __name__ == "__main__":
    main()
