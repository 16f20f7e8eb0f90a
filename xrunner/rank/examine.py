"""`python -m xrunner.rank.examine torch|native|mpi`: prints what a rank would find here, as JSON. A
process of its own, so that a package that crashes or hangs on import can be reported."""

import json
import sys

import torch

from xrunner.ops.cpu import native


def torch_in_words() -> str:
    """PyTorch's version, CUDA support and number of threads, in a line."""
    cuda = torch.version.cuda
    if cuda is None:
        built = "built without CUDA"
    elif torch.cuda.is_available():
        built = f"CUDA {cuda}, GPUs it can use: {torch.cuda.device_count()}"
    else:
        built = f"CUDA {cuda}, but no GPU that it can use"
    return f"{torch.__version__}, {built}; {torch.get_num_threads()} threads"


def native_in_words() -> str:
    """The native operators for CPUs, in a line; compiles them where possible."""
    return native.describe().removeprefix("native operators: ")


def mpi_in_words() -> str:
    """The MPI library that ranks would use, in a line. Importing mpi4py.MPI starts it."""
    import mpi4py
    from mpi4py import MPI

    library = MPI.Get_library_version().split("\n")[0].strip(" \0")
    return f"mpi4py {mpi4py.__version__}, {' '.join(library.split())}"


PARTS = {"torch": torch_in_words, "native": native_in_words, "mpi": mpi_in_words}

if __name__ == "__main__":
    print(json.dumps(PARTS[sys.argv[1]]()))
