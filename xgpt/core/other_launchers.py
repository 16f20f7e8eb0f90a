"""What other launchers and resource managers leave in the environment of whatever they start. It
tells MPI and its mpiexec that they are part of an allocation, or of another run: ranks on this
machine would be started by `srun` on other nodes, or look for a server that is not theirs."""

from collections.abc import Mapping

# Beginnings of names. Resource managers: Slurm, PBS and Torque, LSF and jsrun, Grid Engine, Cobalt,
# LoadLeveler and POE, Flux, ALPS and PALS, OAR, Fujitsu's, HTCondor, Moab. Launchers: hydra (MPICH,
# Intel MPI), PMI and PMIx, Open MPI and PRRTE, MVAPICH, torchrun, accelerate.
_PREFIXES = (
    "SLURM", "SRUN_", "PBS_", "LSB_", "LSF_", "EGO_", "JSM_", "SGE_", "COBALT_", "LOADL", "MP_",
    "FLUX_", "ALPS_", "PALS_", "OAR_", "PJM_", "_CONDOR_", "MOAB_",
    "HYDRA_", "HYDI_", "MPIEXEC_", "I_MPI_HYDRA_", "I_MPI_JOB_", "I_MPI_PMI", "PMI_", "PMI2_",
    "PMIX_", "MPI_LOCAL", "OMPI_", "OPAL_", "ORTE_", "PRTE_", "PRRTE_", "MV2_", "MVP_", "MPIRUN_",
    "MPISPAWN_", "TORCHELASTIC_", "ACCELERATE_")
_NAMES = frozenset((
    "PE_HOSTFILE", "JOB_ID", "NSLOTS", "NHOSTS", "NQUEUES", "LS_EXEC_T", "LS_JOBPID", "LS_SUBCWD",
    "I_MPI_PERHOST", "I_MPI_PROCESS_MANAGER", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT"))
# a user's own words to mpiexec, of which no launcher sets any
_OF_THE_USER = frozenset(("HYDRA_IFACE", "HYDRA_BINDING", "HYDRA_MAPPING", "HYDRA_MEMBIND",
                          "HYDRA_TOPOLIB", "HYDRA_DEBUG"))


def without_other_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for ranks that this machine alone starts."""
    return {name: value for name, value in environment.items() if name in _OF_THE_USER
            or not (name in _NAMES or name.startswith(_PREFIXES))}
