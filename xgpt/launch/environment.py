"""The environment that ranks are started in. Part of it decides how long their steps take, so it is
part of what a profile is of (xprofiler.profile)."""

import os

# A layer's large temporaries come and go thousands of times: keep their memory instead of returning
# it to the system, which hands it back page by page (seen: 5 % of an encode). glibc's names.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
# CUDA counts the fastest GPU first; nvidia-smi, by which a plan is made, goes by their places.
_GPU_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def environment_of_ranks() -> dict[str, str]:
    """This process's environment with ours beneath it; what ranks print is not held back."""
    return {**_ALLOCATOR, **_GPU_ORDER, **os.environ, "PYTHONUNBUFFERED": "1"}
