"""Where compiled modules are kept for those who want none beside the sources
(PYTHONDONTWRITEBYTECODE): the processes that tests start would else compile all of theirs anew."""

import contextlib
import os
import sys
import sysconfig
from pathlib import Path

from xrunner.ops.build import BuildError, find_compiler


def keep_compiled(folder: Path) -> None:
    """Processes started from now on keep theirs below `folder`, and find there what the
    interpreter and its packages were installed with."""
    for of in {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}:
        if not (folder / of.lstrip("/")).exists():
            _link_all(Path(of), folder)
    os.environ.update(PYTHONDONTWRITEBYTECODE="", PYTHONPYCACHEPREFIX=str(folder))


def _link_all(of: Path, folder: Path) -> None:
    """What is compiled anew takes the place of its link."""
    for path, folders, files in os.walk(of):
        folders[:] = [name for name in folders if name not in ("site-packages", "test", "tests")
                      or path != str(of)]
        if path.endswith("__pycache__"):
            target = folder / Path(path).parent.relative_to("/")
            target.mkdir(parents=True, exist_ok=True)
            for name in files:
                if f".{sys.implementation.cache_tag}." in name:
                    with contextlib.suppress(FileExistsError):  # another session's
                        (target / name).symlink_to(Path(path, name))


def has_compiler() -> bool:
    try:
        return bool(find_compiler().command)
    except BuildError:
        return False
