"""What a command makes of its surroundings before anything else, for itself and what it starts:
paths are UTF-8, as job files are, whatever the locale; there is a home, or what serves as one."""

import os
import sys
import tempfile
from io import TextIOWrapper
from pathlib import Path

from xgpt.core.errors import XgptError


def settle() -> str | None:
    """What there is to say of it, if anything. Raises XgptError where nothing can be kept. Begins
    the process anew where Python reads the names of files by another code."""
    if sys.getfilesystemencoding() != "utf-8":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    os.environ.pop("PYTHONIOENCODING", None)  # what is started speaks to us
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    home, cache = os.path.expanduser("~"), os.environ.get("XDG_CACHE_HOME")
    if cache:
        os.environ["XDG_CACHE_HOME"] = os.path.abspath(cache)
    has_home = os.path.isabs(home)
    if has_home and (cache or _takes_files(Path(home, ".cache"))):
        return None
    folder = _folder_of_user()
    if not has_home:  # nor a name, for which libraries ask
        os.environ.update(HOME=folder, USER=os.environ.get("USER") or f"uid{os.getuid()}")
    os.environ.setdefault("XDG_CACHE_HOME", f"{folder}/.cache")
    why = f"{home} cannot be written to" if has_home else "this user has no home"
    return f"note: {why}; {folder} serves instead (XDG_CACHE_HOME names another cache)"


def _takes_files(folder: Path) -> bool:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _folder_of_user() -> str:
    """In the temporary folder, where others may have taken its name: the user's alone, or refused
    by an XgptError."""
    folder = Path(tempfile.gettempdir(), f"xgpt-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o077 or folder.is_symlink():
        raise XgptError(f"there is no home that can be written to, and {folder} is not this user's "
                        "alone: set HOME or XDG_CACHE_HOME to another folder")
    return str(folder)
