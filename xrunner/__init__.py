"""XRunner: MPI ranks that execute a Schedule on the real model (paper section 3).

`head` decides (through a torch-free batching rule), `stage` executes, `kv` accounts."""
