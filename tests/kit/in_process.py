"""An xgpt command in this process, as its entry point runs it: no interpreter is started."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

from xgpt.cli.main import main


def xgpt(*arguments: object) -> subprocess.CompletedProcess[str]:
    """What the command prints, and its exit code."""
    words, code = ["xgpt", *map(str, arguments)], 0
    printed, told = io.StringIO(), io.StringIO()
    with patch.object(sys, "argv", words), redirect_stdout(printed), redirect_stderr(told):
        try:
            main()
        except SystemExit as left:
            assert isinstance(left.code, int)
            code = left.code
    return subprocess.CompletedProcess(words, code, printed.getvalue(), told.getvalue())
