"""Starting ranks: locally with mpiexec, or through Slurm."""
