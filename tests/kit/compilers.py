"""Whether there is a C++ compiler, for tests of what it makes."""

from __future__ import annotations

from xrunner.ops.build import BuildError, find_compiler


def has_compiler() -> bool:
    try:
        return bool(find_compiler().command)
    except BuildError:
        return False
