"""What a command makes of its surroundings before anything else, for itself and what it starts:
paths are UTF-8, as job files are, whatever the locale; there is a home, or what serves as one."""

import os
import pwd
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from xgpt.core.errors import XgptError


def settle() -> str | None:
    """What there is to say of it; None where all is as usual. Raises XgptError where nothing can be
    kept anywhere. Begins the process anew where Python reads the names of files by another code."""
    if sys.getfilesystemencoding() != "utf-8":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    os.environ.pop("PYTHONIOENCODING", None)  # what is started speaks to us
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:  # of whom libraries ask the name
        os.environ.setdefault("USER", f"uid{os.getuid()}")
    return _find_home()


def _find_home() -> str | None:
    home, cache = os.path.expanduser("~"), os.environ.get("XDG_CACHE_HOME")
    if cache:
        os.environ["XDG_CACHE_HOME"] = os.path.abspath(cache)
    has_home = os.path.isabs(home)
    if has_home and (cache or _takes_files(Path(home, ".cache"))):
        return None
    folder = _folder_of_user()
    if not has_home:
        os.environ["HOME"] = str(folder)
    if not cache:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/.cache"
    why = f"{home} cannot be written to" if has_home else "this user has no home"
    return (f"note: {why}: what would be kept there is in {folder} (XDG_CACHE_HOME names another "
            "folder)")


def _takes_files(folder: Path) -> bool:
    """Whether it can be written to, or made."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _folder_of_user() -> Path:
    """A folder in the temporary one that nobody else can read or write. Raises XgptError where
    there can be none: others may have taken its name."""
    try:
        folder = Path(tempfile.gettempdir(), f"xgpt-{os.geteuid()}")
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError as cause:
        raise XgptError(f"there is no home and no temporary folder that can be written to "
                        f"({cause.strerror}): set XDG_CACHE_HOME and TMPDIR") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise XgptError(f"there is no home that can be written to, and {folder}, which would "
                        "serve, is not this user's alone: set HOME or XDG_CACHE_HOME")
    return folder
