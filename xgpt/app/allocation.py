"""What a job with a section `slurm` asks for, and the job as it runs on what it was given."""

from dataclasses import dataclass, replace

from xgpt.app.telling import Teller
from xgpt.core import local
from xgpt.core.errors import InputError, wrong
from xgpt.core.job import Job
from xgpt.core.problem import resolve_cluster
from xgpt.core.run_section import LOCAL_CLUSTER
from xgpt.core.slurm import SlurmSpec
from xgpt.launch.launcher import Allocation, node_names
from xrunner.engines.engine import mistake


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLayout:
    """How many nodes, and how many ranks on each: one a GPU, unless the job says otherwise."""

    nodes: int
    ranks_each: int
    gpus_per_node: str | None  # as sbatch takes it


def layout_of(job: Job) -> NodeLayout:
    """The nodes and ranks of the job, from its section `slurm` and from its cluster where that is
    not `local`: what the nodes have is not known elsewhere. Raises InputError."""
    assert job.slurm is not None, "only a job for Slurm has a layout"
    if job.cluster != LOCAL_CLUSTER:
        return _of_cluster(job, job.slurm)
    spec, mistakes = job.slurm, []
    nodes, ranks = spec.nodes or 1, job.run.ranks
    each = spec.ntasks_per_node or spec.gpus_each or (ranks or 0) // nodes
    if not each:
        mistakes.append(mistake(job, "slurm.ntasks_per_node", None, (
            "required with `cluster: local`, or slurm.gpus_per_node (one rank a GPU), or "
            "run.ranks: what the nodes have is not known here")))
    elif ranks is not None and ranks != nodes * each:
        mistakes.append(mistake(job, "run.ranks", ranks, (
            f"{nodes * each} ({each} on each of slurm.nodes = {nodes}), or left out")))
    if mistakes:
        raise InputError(mistakes)
    return NodeLayout(nodes=nodes, ranks_each=each, gpus_per_node=spec.gpus_per_node)


def _of_cluster(job: Job, spec: SlurmSpec) -> NodeLayout:
    cluster = resolve_cluster(job)
    nodes, each = cluster.num_nodes, cluster.devices_per_node
    name = f"what the job takes of cluster {cluster.name}"
    mistakes = [mistake(job, f"slurm.{key}", given, f"{wanted}, {name}, or left out")
                for key, given, wanted in (
                    ("nodes", spec.nodes, nodes), ("ntasks_per_node", spec.ntasks_per_node, each))
                if given not in (None, wanted)]
    if cluster.islands:
        mistakes.append(mistake(job, "cluster.links", None, (
            "left out with `slurm`: what some devices of a node are joined by is planned, and not "
            "executed, for the ranks measure one link in a node and one between nodes (`xgpt "
            "schedule` without the section plans it; name the slowest as intra_link to run)")))
    is_gpu = cluster.device.kind == "gpu"
    if is_gpu and spec.gpus_each is not None and spec.gpus_each < each:
        mistakes.append(mistake(job, "slurm.gpus_per_node", spec.gpus_per_node,
                                 f"at least {each}, {name}, or left out"))
    if mistakes:
        raise InputError(mistakes)
    # a site's own way of asking for GPUs
    is_asked = any(option.startswith(("--gres", "--gpus", "-G")) for option in spec.extra)
    return NodeLayout(nodes=nodes, ranks_each=each, gpus_per_node=spec.gpus_per_node or (
        str(each) if is_gpu and not is_asked else None))


def in_allocation(job: Job, allocation: Allocation, tell: Teller) -> Job:
    """The job as it runs on these nodes: `cluster: local`, whose hosts they are. Raises InputError
    for one that they cannot run."""
    layout = layout_of(job)
    if layout.nodes > allocation.nodes:
        raise wrong(job.source, "slurm.nodes", layout.nodes,
                    f"at most {allocation.nodes}, the nodes of Slurm's job {allocation.job_id}")
    ranks = layout.nodes * layout.ranks_each
    device = local.detect(ranks, layout.nodes).device
    wanted = None if job.cluster == LOCAL_CLUSTER else resolve_cluster(job).device
    if device.kind == "cpu" and (wanted is not None and wanted.kind == "gpu"):
        raise wrong(job.source, "cluster", str(job.cluster),
                    f"its GPUs ({wanted.name}): the nodes of Slurm's job {allocation.job_id} show "
                    "none (another slurm.partition?)")
    if wanted is not None and wanted.name != device.name:
        tell.say(f"note: {job.cluster} has {wanted.name}, and these nodes {device.name}: the job "
                 "is planned for what is here")
    elif device.kind == "cpu" and layout.gpus_per_node is not None:
        tell.say("note: these nodes show no GPUs, though the job asks for some: the ranks run on "
                 "their cores")
    names = node_names(allocation)[:layout.nodes]
    return replace(job, cluster=LOCAL_CLUSTER, run=replace(job.run, ranks=ranks, hosts=names))
