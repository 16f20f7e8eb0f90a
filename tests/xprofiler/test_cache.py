"""The fingerprint of the timed code is of files that are there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from xprofiler import profile as cache


@pytest.mark.parametrize("name", cache._TIMED_CODE)
def test_timed_code_is_there(name: str) -> None:
    assert any((Path(cache.__file__).parents[1] / name).iterdir())


def test_the_fingerprint_is_short_and_the_same_in_every_process() -> None:
    words = "from xprofiler.profile import kernels_fingerprint; print(kernels_fingerprint())"
    found = subprocess.run([sys.executable, "-c", words], text=True, capture_output=True,
                           timeout=60, check=True)
    assert found.stdout.strip() == cache.kernels_fingerprint()
    assert len(cache.kernels_fingerprint()) == 16


@pytest.mark.parametrize(("suffix", "one", "same", "other"), [
    (".py", 'def f(x):\n    """Adds."""\n    return x + "# 1"\n',
     '"""Sums."""\n\n# why\ndef f(x):\n    return (x\n            + "# 1")  # more\n',
     'def f(x):\n    return x + "# 2"\n'),
    (".cu", "int f() { return 1; }", "/* one\n// */ int f() {\n  return 1;  // it\n}\n",
     "int f() { return 2; }")])
def test_comments_and_docstrings_change_no_fingerprint(suffix: str, one: str, same: str,
                                                       other: str) -> None:
    assert cache.timed_text(one, suffix) == cache.timed_text(same, suffix)
    assert cache.timed_text(one, suffix) != cache.timed_text(other, suffix)


# as another user where the tests run as root, whom no mode keeps from a file
AS_ANOTHER = """
import os, sys
from pathlib import Path
from xprofiler.profile import changing
os.getuid() or os.setuid(65534)
with changing(Path(sys.argv[1])):
    print("entered")
"""


@pytest.mark.parametrize("mode", [0o444, 0o000])
def test_a_lock_of_another_user_keeps_nobody_from_a_shared_folder(mode: int) -> None:
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        lock = Path(folder) / ".changing.lock"
        lock.touch()
        lock.chmod(mode)
        found = subprocess.run([sys.executable, "-c", AS_ANOTHER, folder], text=True,
                               capture_output=True, timeout=60, check=False)
        assert found.stdout == "entered\n", found.stderr
