"""What other launchers and resource managers leave in the environment of whatever they start. By it
MPI and mpiexec would take ranks on this machine for parts of an allocation, or of another run."""

import re
from collections.abc import Mapping

# resource managers' names; those of hydra (but for a user's own words to it), PMI, Open MPI,
# MVAPICH and torchrun; whole names
_THEIRS = re.compile(
    r"(SLURM|SRUN_|PBS_|LSB_|LSF_|EGO_|JSM_|SGE_|COBALT_|LOADL|MP_|FLUX_|ALPS_|PALS_|OAR_|PJM_|"
    r"_CONDOR_|MOAB_|HYDRA_(?!(IFACE|BINDING|MAPPING|MEMBIND|TOPOLIB|DEBUG)$)|HYDI_|MPIEXEC_|PMI2?_|"
    r"I_MPI_(HYDRA_|JOB_|PMI|PERHOST|PROCESS_MANAGER)|PMIX_|MPI_LOCAL|OMPI_|OPAL_|ORTE_|PRR?TE_|"
    r"MV2_|MVP_|MPIRUN_|MPISPAWN_|TORCHELASTIC_|ACCELERATE_|GROUP_|ROLE_|CROSS_|"
    r"(PE_HOSTFILE|JOB_ID|NSLOTS|NHOSTS|NQUEUES|LS_(EXEC_T|JOBPID|SUBCWD)|((LOCAL_|NODE_)?RANK)|"
    r"(LOCAL_)?WORLD_SIZE|LOCAL_SIZE|MASTER_(ADDR|PORT))$)")


def without_other_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for ranks that this machine alone starts."""
    return {name: value for name, value in environment.items() if not _THEIRS.match(name)}
