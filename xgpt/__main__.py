"""What `xgpt` and `python -m xgpt` start. Until the command is imported nothing is begun, and
Ctrl-C just ends the process, as it does a program that has not come to its own handler."""

import signal
from importlib import import_module


def main() -> None:
    """See xgpt.cli.main, which raises SystemExit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    answer = import_module("xgpt.cli.main").main
    signal.signal(signal.SIGINT, signal.default_int_handler)
    answer()


if __name__ == "__main__":
    main()
