"""The system's account of its cores' time, where it keeps one."""

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
