"""The system's account of its cores' time, and of who used it, where it keeps one."""

import os
from pathlib import Path


def busy_s(stat: Path = Path("/proc/stat")) -> float | None:
    """Seconds all cores together were not idle since boot."""
    try:
        fields = stat.read_text(encoding="utf-8").splitlines()[0].split()[1:9]
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    except (OSError, ValueError, IndexError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def used_s(process: int) -> float:
    """Seconds of the cores that a process and its children have used; 0 where it has ended, or the
    system does not say."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    own = sum(map(int, text.rpartition(")")[2].split()[11:15]))  # of those waited for, too
    return own / os.sysconf("SC_CLK_TCK") + children_s(process)


def children_s(process: int) -> float:
    """The same of its living children alone."""
    try:
        tasks = list(Path(f"/proc/{process}/task").iterdir())  # any thread may have started one
        names = " ".join((task / "children").read_text(encoding="utf-8") for task in tasks)
    except OSError:
        return 0.0
    return sum(used_s(int(child)) for child in names.split())
