"""A rank alone in its run, started ahead: `python -m xrunner.standby` imports what
`python -m xrunner.worker` does, and then waits to be told of its run. Word comes over the socket
that is its standard input: the worker's argument, and the descriptors that it is to keep open."""

import os
import socket
import sys

from xrunner import worker
from xrunner.rank import leave

_MOST_BYTES, _MOST_FILES = 2**16, 16


def main() -> int:
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as line:
        argument, *_ = socket.recv_fds(line, _MOST_BYTES, _MOST_FILES)
    return worker.main([argument.decode()]) if argument else 0  # nothing: it is not wanted


if __name__ == "__main__":
    leave(main())
