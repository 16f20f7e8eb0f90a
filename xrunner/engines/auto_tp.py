"""A Hugging Face model divided over the launcher's ranks by DeepSpeed's AutoTP."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from xrunner.checkpoint.source import cache_dir
from xrunner.plan import RunPlan

_ALL_REDUCE = "deepspeed_shm_comm"  # what DeepSpeed compiles at first use


def join_ranks() -> dict[str, str]:
    """What DeepSpeed and torch.distributed ask of the environment, from the communicator. A
    collective call. mpiexec sets none of it, and without LOCAL_SIZE DeepSpeed's all-reduce through
    shared memory ends in a segmentation fault."""
    rank, size, local_rank, local_size = 0, 1, 0, 1
    address, port = _free_address()
    if "mpi4py" in sys.modules:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        local = world.Split_type(MPI.COMM_TYPE_SHARED)
        rank, size = world.Get_rank(), world.Get_size()
        local_rank, local_size = local.Get_rank(), local.Get_size()
        address, port = world.bcast((socket.gethostname() if local_size < size else address, port))
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local_rank),
            "LOCAL_SIZE": str(local_size), "MASTER_ADDR": address, "MASTER_PORT": str(port),
            "DS_ACCELERATOR": "cpu", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def load_model(plan: RunPlan, ranks: int, barrier: Callable[[], None]) -> Any:
    """This rank's slices; a collective call. Each rank reads the whole model first: AutoTP divides
    what is loaded."""
    os.environ.update(join_ranks())
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(cache_dir() / "torch_extensions"))
    import deepspeed
    from transformers import AutoModelForCausalLM

    if ranks > 1:
        _compile(Path(os.environ["TORCH_EXTENSIONS_DIR"]), barrier)
    dtype = getattr(torch, plan.dtype)
    whole = AutoModelForCausalLM.from_pretrained(plan.model_dir, dtype=dtype, local_files_only=True)
    engine = deepspeed.init_inference(whole, tensor_parallel={"tp_size": ranks}, dtype=dtype)
    barrier()
    if os.environ["RANK"] == "0":
        _forget_shared_memory()
    return engine.module.eval()


def _compile(folder: Path, barrier: Callable[[], None]) -> None:
    """DeepSpeed's all-reduce, on the first rank of each host, where it is not there yet. What a
    killed run leaves of torch's lock would be waited for without end: it is removed under a lock
    that goes with its process."""
    from deepspeed.accelerator import get_accelerator

    if os.environ["LOCAL_RANK"] == "0":
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".xgpt-lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for stale in folder.glob(f"{_ALL_REDUCE}/lock"):
                stale.unlink(missing_ok=True)
            get_accelerator().create_op_builder("ShareMemCommBuilder").load()
    barrier()


def _forget_shared_memory() -> None:
    """Once every rank has loaded: removes the names of DeepSpeed's buffers in shared memory, which
    it leaves behind otherwise. The ranks hold the memory itself as long as they live."""
    names = "deepspeed_allreduce_buffer_*_{MASTER_ADDR}_{MASTER_PORT}_*".format(**os.environ)
    for path in Path("/dev/shm").glob(names):
        path.unlink(missing_ok=True)


def weight_bytes(directory: Path) -> int:
    """The size of the files that a rank reads."""
    files = list(directory.glob("*.safetensors")) or list(directory.glob("*.bin"))
    return sum(path.stat().st_size for path in files)


def _free_address() -> tuple[str, int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1", int(probe.getsockname()[1])
