"""`-m surroundings FILE`: what a rank finds around it, one JSON line a rank appended. And what
other launchers and resource managers leave in the environment of whatever they start."""

import json
import os
import sys
from pathlib import Path

_FEW = {  # beginning of names -> the rest of some, of which no value is of any use here
    "SLURM_": "JOB_ID JOBID JOB_NODELIST NODELIST NNODES JOB_NUM_NODES NTASKS PROCID NODEID "
              "MPI_TYPE EXTERNAL_LAUNCHER STEP_ID", "SLURMD_": "NODENAME", "SRUN_": "DEBUG",
    "PBS_": "NODEFILE JOBID ENVIRONMENT", "LSB_": "HOSTS MCPU_HOSTS JOBID DJOB_HOSTFILE",
    "LSF_": "BINDIR", "SGE_": "ROOT TASK_ID", "COBALT_": "NODEFILE", "MP_": "CHILD",
    "LOADL": "_HOSTFILE BATCH _PROCESSOR_LIST", "FLUX_": "URI JOB_ID", "ALPS_": "APP_PE",
    "PALS_": "RANKID", "OAR_": "NODEFILE", "": "PE_HOSTFILE JOB_ID NSLOTS NHOSTS RANK WORLD_SIZE "
    "LOCAL_RANK LOCAL_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GROUP_RANK",
    "HYDRA_": "LAUNCHER LAUNCHER_EXEC BOOTSTRAP BOOTSTRAP_EXEC RMK HOST_FILE ENV CONFIG_FILE",
    "MPIEXEC_": "TIMEOUT PORT_RANGE", "PMI_": "RANK SIZE FD ID PORT JOBID SPAWNED",
    "PMIX_": "RANK NAMESPACE SERVER_URI2 SERVER_URI4 SECURITY_MODE VERSION GDS_MODULE",
    "OMPI_": "COMM_WORLD_RANK COMM_WORLD_SIZE MCA_orte_hnp_uri", "OPAL_": "PREFIX",
    "PRTE_": "LAUNCHED", "MPI_LOCAL": "NRANKS RANKID", "MV2_": "COMM_WORLD_RANK",
    "I_MPI_HYDRA_": "BOOTSTRAP", "TORCHELASTIC_": "RUN_ID"}
LEFT = {f"{prefix}{name}": "77" for prefix, names in _FEW.items() for name in names.split()} | {
    "SLURM_TASKS_PER_NODE": "1(x2)", "HYDRA_LAUNCHER": "slurm", "HYDRA_RMK": "pbs"}
# a user's own words, which count
OWN = {"UCX_LOG_LEVEL": "fatal", "FI_LOG_LEVEL": "warn", "MPIR_CVAR_ENABLE_GPU": "0",
       "HYDRA_TOPOLIB": "hwloc", "LS_COLORS": "di=1"}


def main() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    line = json.dumps({"rank": world.Get_rank(), "size": world.Get_size(),
                       "environment": dict(os.environ)})
    with Path(sys.argv[1]).open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    world.Barrier()


if __name__ == "__main__":
    main()
