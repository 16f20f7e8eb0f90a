"""Entry point of `xgpt` and `python -m xgpt`. Ctrl-C ends the process at once while the command is
imported."""

import signal
from importlib import import_module


def main() -> None:
    """Runs xgpt.cli.main, which raises SystemExit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    answer = import_module("xgpt.cli.main").main
    signal.signal(signal.SIGINT, signal.default_int_handler)
    answer()


if __name__ == "__main__":
    main()
