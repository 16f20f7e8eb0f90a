"""The devices and cores of a replica that vLLM executes, and how much memory of GPUs is free."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence

from xgpt.core.errors import XgptError
from xgpt.core.system.machine import parse_smi

_FREED_S, _LOOK_S = 60.0, 0.5  # chosen: wait for a dead process's memory
_FREED = 0.9  # chosen: share of what was free before it started


def own_devices(share: Callable[[str], list[str]], rank: int, kind: str, count: int) -> list[str]:
    """The `count` devices of this rank, of those that its node shows it: GPUs as they stand in
    CUDA_VISIBLE_DEVICES, or cores. Collective, over `share` (xrunner.rank.world).

    Ranks that see the same devices take them in turn, by their order on the node. A launcher that
    binds tasks shows each its own. Raises XgptError where a device would have two replicas, unless
    the list itself names it twice, or where there are too few GPUs."""
    seen = visible_gpus() if kind == "gpu" else [
        (str(core), str(core)) for core in sorted(os.sched_getaffinity(0))]
    everyone = [(host, [tuple(one) for one in devices]) for host, devices in map(
        json.loads, share(json.dumps((socket.gethostname(), seen))))]
    here = [other for other, (host, _) in enumerate(everyone) if host == everyone[rank][0]]
    names = [{uuid for _, uuid in everyone[other][1]} for other in here]
    is_bound = len(here) > 1 and sum(map(len, names)) == len(set().union(*names))
    first = 0 if is_bound else here.index(rank) * count
    own = seen[first:first + count]
    if kind == "cpu":  # replicas share cores if there are too few
        return [seen[(first + place) % len(seen)][0] for place in range(count)]
    if len(own) < count:
        raise XgptError(f"replica {rank} needs {count} GPUs of {everyone[rank][0]}, from number "
                        f"{first} on, and {len(seen)} are visible there: "
                        f"{', '.join(name for name, _ in seen) or 'none'}")
    is_same = all(everyone[other][1] == everyone[rank][1] for other in here)
    for other in here if not is_bound and not is_same else ():
        if other != rank and names[here.index(other)] & {uuid for _, uuid in own}:
            raise XgptError(f"replicas {rank} and {other} would share a GPU of {everyone[rank][0]}:"
                            f" {', '.join(name for name, _ in own)}")
    return [name for name, _ in own]


def visible_gpus() -> list[tuple[str, str]]:
    """(name as in CUDA_VISIBLE_DEVICES, UUID where nvidia-smi knows it) of each visible GPU."""
    known = {str(gpu.index): gpu.uuid for gpu in parse_smi(_smi("index,uuid,name,memory.total"))}
    selected = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = list(known) if selected is None else [
        name for word in selected.split(",") if (name := word.strip())]
    return [(name, known.get(name, name)) for name in names]


def free_memory(names: Sequence[str]) -> int:
    """MiB that are free on these GPUs together, by nvidia-smi; 0 where it does not say."""
    known = dict(visible_gpus())
    wanted = {known.get(name, name) for name in names}
    lines = [line.split(",") for line in _smi("uuid,memory.free").splitlines()]
    return sum(int(free) for uuid, free in lines if uuid in wanted and free.strip().isdigit())


def await_freed(names: Sequence[str], before: int) -> None:
    """Waits until about as much memory is free on these GPUs as `before` (MiB), for a minute."""
    until = time.monotonic() + _FREED_S
    while free_memory(names) < _FREED * before and time.monotonic() < until:
        time.sleep(_LOOK_S)


def _smi(fields: str) -> str:
    """nvidia-smi's lines of these fields; "" where there is none."""
    try:
        return subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
