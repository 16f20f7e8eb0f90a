"""Two hosts on one machine: network namespaces with addresses, names and process views of their
own, joined by one cable (a veth pair). Needs root; all of it goes when the block is left.

As a command, it runs another on the first host: `python namespaces.py COMMAND...`, with the hosts'
names in $XGPT_HOSTS and what starts commands on them in $XGPT_LAUNCHER.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HOSTS = ("xgpt-a", "xgpt-b")
# Addresses that no real network has (RFC 5737); they are seen inside the namespaces alone.
ADDRESSES = ("192.0.2.1", "192.0.2.2")
_CABLE = "eth0"
# MPICH's UCX goes through shared memory wherever it can; between hosts it cannot
ENVIRONMENT = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": _CABLE}


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoHosts:
    """`launcher` HOST COMMAND...: runs it there, as ssh does."""

    launcher: Path
    namespaces: tuple[str, ...]

    def sent_bytes(self) -> list[int]:
        """What each host has put on the cable so far."""
        return [int(_ip("netns", "exec", name, "cat",
                        f"/sys/class/net/{_CABLE}/statistics/tx_bytes")) for name in
                self.namespaces]


def refusal() -> str | None:
    """Why this machine cannot play two hosts; None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    missing = [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} on PATH"
    name = f"xgpt-try-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("link", "add", f"xt{os.getpid()}", "netns", name, "type", "veth", "peer", "xgpt-peer",
            "netns", name)
        subprocess.run(["nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "--mount",
                        "true"], check=True, capture_output=True)
    except subprocess.CalledProcessError as cause:
        return f"no network namespaces here: {cause.stderr or cause}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """The hosts, named HOSTS within; their namespaces are this process's own."""
    namespaces = tuple(f"{host}-{os.getpid()}" for host in HOSTS)
    folder = Path(tempfile.mkdtemp(prefix="xgpt-hosts-"))
    try:
        for name in namespaces:
            _ip("netns", "add", name)
        _ip("link", "add", _CABLE, "netns", namespaces[0], "type", "veth", "peer", _CABLE, "netns",
            namespaces[1])
        for name, address in zip(namespaces, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", _CABLE)
            for device in (_CABLE, "lo"):
                _ip("-n", name, "link", "set", device, "up")
        _await_carrier(namespaces)
        yield TwoHosts(launcher=_write_launcher(folder, namespaces), namespaces=namespaces)
    finally:
        for name in namespaces:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def _await_carrier(namespaces: Sequence[str]) -> None:
    """The kernel takes up to a second to notice a cable; UCX takes no device without one."""
    deadline = time.monotonic() + 10
    while not all("state UP" in _ip("-n", name, "link", "show", _CABLE) for name in namespaces):
        assert time.monotonic() < deadline, "no carrier"
        time.sleep(0.05)


def _write_launcher(folder: Path, namespaces: Sequence[str]) -> Path:
    table = folder / "hosts"
    table.write_text("127.0.0.1 localhost\n" + "".join(
        f"{address} {host}\n" for host, address in zip(HOSTS, ADDRESSES, strict=True)))
    cases = "\n".join(f"    {host}) namespace={name};;" for host, name in
                      zip(HOSTS, namespaces, strict=True))
    launcher = folder / "on_host"
    # like ssh, it joins the command's words and hands them to a shell; UCX looks for devices in
    # /sys, which shows those of the namespace in which it was mounted
    launcher.write_text(f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
case $host in
{cases}
    *) echo "unknown host $host" >&2; exit 255;;
esac
exec nsenter --net=/run/netns/$namespace unshare --uts --mount sh -c \
"hostname $host; mount --bind {table} /etc/hosts; mount -t sysfs sysfs /sys 2>/dev/null; $*"
""")
    launcher.chmod(0o755)
    return launcher


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def main(command: Sequence[str]) -> int:
    with two_hosts() as hosts:
        environment = {**os.environ, **ENVIRONMENT, "XGPT_HOSTS": ",".join(HOSTS),
                       "XGPT_LAUNCHER": str(hosts.launcher)}
        return subprocess.run([str(hosts.launcher), HOSTS[0], "exec", *command], env=environment,
                              check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
