"""A Hugging Face model divided over the launcher's ranks by DeepSpeed's AutoTP."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from xrunner.plan import RunPlan


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


def load_model(plan: RunPlan, ranks: int) -> Any:
    """This rank's slices. Each rank reads the whole model first: AutoTP divides what is loaded."""
    os.environ.update(join_ranks())
    import deepspeed
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, plan.dtype)
    whole = AutoModelForCausalLM.from_pretrained(plan.model_dir, dtype=dtype,
                                                 local_files_only=True)
    engine = deepspeed.init_inference(whole, tensor_parallel={"tp_size": ranks}, dtype=dtype)
    return engine.module.eval()


def forget_shared_memory() -> None:
    """Once every rank has loaded: removes the names of DeepSpeed's buffers in shared memory, which
    it leaves behind otherwise. The ranks hold the memory itself as long as they live."""
    names = "deepspeed_allreduce_buffer_*_{MASTER_ADDR}_{MASTER_PORT}_*".format(**os.environ)
    for path in Path("/dev/shm").glob(names):
        path.unlink(missing_ok=True)


def weight_bytes(directory: Path) -> int:
    """Of the files that a rank reads."""
    files = list(directory.glob("*.safetensors")) or list(directory.glob("*.bin"))
    return sum(path.stat().st_size for path in files)


def _free_address() -> tuple[str, int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1", int(probe.getsockname()[1])
