"""What a rank would find on this machine, in words, as a JSON text on stdout: `python -m
xrunner.rank.examine` with `torch`, `native` or `mpi`. A process of its own, so that one can tell of
a package that crashes or hangs when it is imported."""

import json
import sys

import torch

from xrunner.ops.cpu import native


def torch_in_words() -> str:
    """Its version, and what it can use."""
    cuda = torch.version.cuda
    if cuda is None:
        built = "built without CUDA"
    elif torch.cuda.is_available():
        built = f"CUDA {cuda}, GPUs it can use: {torch.cuda.device_count()}"
    else:
        built = f"CUDA {cuda}, but no GPU that it can use"
    return f"{torch.__version__}, {built}; {torch.get_num_threads()} threads"


def native_in_words() -> str:
    """Which native operators serve on CPUs; they are compiled where they can be."""
    return native.describe().removeprefix("native operators: ")


def mpi_in_words() -> str:
    """The MPI library that ranks would use. Importing mpi4py.MPI starts it."""
    import mpi4py
    from mpi4py import MPI

    library = MPI.Get_library_version().split("\n")[0].strip(" \0")
    return f"mpi4py {mpi4py.__version__}, {' '.join(library.split())}"


PARTS = {"torch": torch_in_words, "native": native_in_words, "mpi": mpi_in_words}

if __name__ == "__main__":
    print(json.dumps(PARTS[sys.argv[1]]()))
