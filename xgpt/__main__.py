"""Entry point of `xgpt` and `python -m xgpt`. While the command is imported Ctrl-C just ends the
process, as nothing has begun yet."""

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
