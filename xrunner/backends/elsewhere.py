"""Runs a module of ours in another interpreter, which has none of our packages:
`OTHER_PYTHON .../xrunner/backends/elsewhere.py MODULE [ARGUMENT ...]`.

Only our own five packages come from here. Everything else is that interpreter's: versions of torch
or transformers of two environments must not meet in one process.

A process that `multiprocessing` spawns from there (a rank of vLLM's) runs this file as its main
module, by another name, and so finds our packages, too."""

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
    """Finds our packages where this file lies."""

    def find_spec(self, name: str, path: Sequence[str] | None = None,
                  target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _OURS:
            return None  # what lies within a package is found by its own path
        return importlib.machinery.PathFinder.find_spec(name, [str(_ROOT)])


def main() -> None:
    # this script's own folder: a module of ours there must not stand for a package of that name
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve()
                   != Path(__file__).resolve().parent]
    sys.meta_path.insert(0, _Ours())
    del sys.argv[0]
    # this file stays sys.modules["__main__"], for what is spawned
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=False)


if __name__ == "__mp_main__":
    sys.meta_path.insert(0, _Ours())
if __name__ == "__main__":
    main()
