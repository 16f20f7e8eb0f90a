"""Model files on a node's own disk (`run.stage_model`): copied by one rank there under a lock, for
all its ranks, a restart, a requeue, and other runs with the same files. Ranks hold the lock shared
while they read, so the last of them removes the files once the job is done."""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from xgpt.core.system.direct_file import MEMORY_SYSTEMS, file_system
from xgpt.core.system.whole_file import read_object, write_atomically
from xgpt.core.units import format_bytes, format_seconds
from xrunner.checkpoint.identity import model_files
from xrunner.files.heartbeat import HEARTBEATS
from xrunner.plan import RunPlan

# for the launcher: the copying under way; why a node has no copy
STAGING_FILE, NOTE_FILE = f"{HEARTBEATS}/staging", f"{HEARTBEATS}/staging.note"
_NETWORK = re.compile(r"nfs4?|lustre|gpfs|beegfs.*|ceph|cifs|smb3|afs|9p|panfs|wekafs|fuse\..*")
_NO_DISK = re.compile(f"{_NETWORK.pattern}|{MEMORY_SYSTEMS.pattern}")
_CHUNK_BYTES = 2**28  # chosen: progress is said after each
_TRIES, _TRY_S = 50, 0.1  # chosen: to become the one that copies
_held: dict[Path, int] = {}  # copies that this process uses, with the descriptors of their locks


def staged(plan: RunPlan) -> RunPlan:
    """The plan with the model's folder on this node's disk; unchanged where none is to be there, or
    it has no room. Waits for a rank that copies. Call it when the heartbeat is written."""
    try:
        if (base := _base(plan)) is None:
            return plan
        (plan.output / HEARTBEATS).mkdir(exist_ok=True)
        return replace(plan, model_dir=_copy(plan, base))
    except OSError as error:
        with suppress(OSError), (plan.output / NOTE_FILE).open("x", encoding="utf-8") as file:
            file.write("the model's files are read from where they are, without a copy on "
                       f"{socket.gethostname()}: {error.filename or 'its lock'}: {error.strerror}")
        return plan


def release(plan: RunPlan) -> None:
    """Gives up this process's copies; removes those that no other uses if the job is done. Call it
    when rank 0 has written measured.json."""
    is_done = read_object(plan.output / "measured.json").get("state") == "done"
    while _held:
        copy, lock = _held.popitem()
        with suppress(BlockingIOError):
            if is_done:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(copy, ignore_errors=True)
        os.close(lock)


def _base(plan: RunPlan) -> Path | None:
    """Folder for copies of models; None where the files are read from where they are."""
    if plan.stage_model != "auto":
        return None if plan.stage_model == "off" else Path(plan.stage_model)
    named = (os.environ.get("SLURM_TMPDIR"), os.environ.get("TMPDIR"), "/var/tmp")
    if not any(_is_on(_NETWORK, plan.model_dir / name) for name in plan.model_files):
        return None
    return next((Path(name) for name in named if name and os.path.isdir(name)
                 and not _is_on(_NO_DISK, Path(name))), None)


def _is_on(types: re.Pattern[str], path: Path) -> bool:
    """Whether the path lies on a file system of these types."""
    return types.fullmatch(file_system(path)) is not None


def _copy(plan: RunPlan, base: Path) -> Path:
    """Folder of the whole copy, whose lock this process now holds. Raises OSError."""
    own = base / f"xgpt-models-{os.getuid()}"
    own.mkdir(0o700, parents=True, exist_ok=True)
    if own.lstat().st_uid != os.getuid() or (_is_on(_NO_DISK, own) and not _is_on(_NETWORK, own)):
        raise OSError(errno.EPERM, "another user's, or in memory", str(own))
    content = json.dumps(plan.model_files, sort_keys=True)
    copy = own / hashlib.sha256(content.encode()).hexdigest()[:16]
    lock = os.open(copy.with_suffix(".lock"), os.O_CREAT | os.O_RDONLY, 0o600)
    try:
        for _ in range(_TRIES):
            fcntl.flock(lock, fcntl.LOCK_SH)  # waits for one that copies
            # programs that tidy up may have removed some files
            if copy.is_dir() and model_files(copy) == plan.model_files:
                _held[copy] = os.dup(lock)  # of the same lock
                return copy
            try:  # never waits: who has a copy keeps the lock while it runs
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_TRY_S)
                continue
            _make(plan, copy)
            if model_files(copy) != plan.model_files:
                shutil.rmtree(copy, ignore_errors=True)
                raise OSError(errno.ESTALE, "changed while it was copied", str(plan.model_dir))
        raise OSError(errno.EBUSY, "without some files, and in use by another run", str(copy))
    finally:
        os.close(lock)


def _make(plan: RunPlan, copy: Path) -> None:
    """Copies the files, and renames their folder once all are there."""
    partial, begin_s, done = copy.with_suffix(".partial"), time.monotonic(), 0
    for left in (copy, partial):  # of one that was killed
        shutil.rmtree(left, ignore_errors=True)
    pairs = [(plan.model_dir / name, partial / name) for name in plan.model_files]
    total, room = sum(one.stat().st_size for one, _ in pairs), shutil.disk_usage(copy.parent).free
    if room < total:
        raise OSError(errno.ENOSPC, f"{format_bytes(room)} free, {format_bytes(total)} needed",
                      str(copy.parent))
    try:
        for source, target in pairs:
            target.parent.mkdir(parents=True, exist_ok=True)
            with source.open("rb") as read, target.open("wb") as write:
                while sent := os.sendfile(write.fileno(), read.fileno(), None, _CHUNK_BYTES):
                    done += sent
                    write_atomically(plan.output / STAGING_FILE, (
                        f"copying the model's files to {copy.parent} on {socket.gethostname()}: "
                        f"{format_bytes(done)} of {format_bytes(total)}, "
                        f"{format_seconds(round(time.monotonic() - begin_s))} so far"),
                        is_durable=False)
        os.rename(partial, copy)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        (plan.output / STAGING_FILE).unlink(missing_ok=True)
