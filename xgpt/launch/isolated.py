"""`python isolated.py COMMAND...`: runs a command with no network but loopback.

MPI does not authenticate who connects, so ranks on one machine must not be reachable from outside.
They use the loopback interface, and the command runs in a network namespace that has no other:
MPICH's mpiexec listens on every interface, whatever its options. If the system permits no such
namespace, the command runs without one (docs/security.md). mpiexec ends with the process that
started it: ranks that are connecting notice nothing else (mpi4py holds the interpreter's lock).

Run as a file, with the standard library alone, as it runs before every start of ranks."""

import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys

# Variables for the interface of MPICH, its transports UCX and libfabric, and gloo; a user's own
# values take precedence.
TRANSPORTS = ("UCX_NET_DEVICES", "FI_TCP_IFACE", "GLOO_SOCKET_IFNAME")
LOOPBACK = dict.fromkeys(("HYDRA_IFACE", *TRANSPORTS), "lo")
_NEW_USER, _NEW_NET = 0x10000000, 0x40000000  # of sched.h
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
_REQUEST = "16sh14x"  # struct ifreq
_PR_SET_PDEATHSIG = 1  # of prctl.h


def main(command: list[str]) -> None:
    if sys.platform == "linux":
        for name, value in LOOPBACK.items():
            os.environ.setdefault(name, value)
        uses_loopback = all(os.environ[name] == value for name, value in LOOPBACK.items())
        if uses_loopback and _is_permitted():
            _isolate()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # reset by the calls above
    os.execvp(command[0], command)


def _is_permitted() -> bool:
    """Whether isolating works, tried in a child process: it cannot be undone halfway."""
    try:
        child = os.fork()
    except OSError:  # there are too many processes
        return False
    if child == 0:
        code = 1
        try:
            _isolate()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def _isolate() -> None:
    """Moves this process into a network namespace of its own. Raises OSError if not permitted."""
    user, group = os.getuid(), os.getgid()
    # in a user namespace root would lose its rights over the files of others; it needs none
    kinds = _NEW_NET if user == 0 else _NEW_NET | _NEW_USER
    if ctypes.CDLL(None, use_errno=True).unshare(kinds):
        raise OSError(ctypes.get_errno(), "unshare")
    if user != 0:  # the same user and group inside
        for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"),
                           ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(line)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack(_REQUEST, b"lo", 0)
        flags = struct.unpack(_REQUEST, fcntl.ioctl(probe, _GET_FLAGS, request))[1]
        fcntl.ioctl(probe, _SET_FLAGS, struct.pack(_REQUEST, b"lo", flags | _UP))


if __name__ == "__main__":
    main(sys.argv[1:])
