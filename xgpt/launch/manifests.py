"""A job as files for other schedulers, which run its ranks elsewhere: a Kubernetes JobSet, and a
SkyPilot task. Pure functions of the job and its schedule; nothing is submitted. Every text is
quoted, numbers are plain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from xgpt.launch.slurm_jobs import quoted

_LEAD, _OTHERS = "lead", "others"
# for a run that is told to end: it saves what it has, and goes on when it is started again
_GRACE_S, _RESTARTS = 120, 3
# our names of devices -> SkyPilot's, where they differ
_SKYPILOT_NAMES = {"A100-40": "A100", "A100-80": "A100-80GB", "V100-32": "V100-32GB",
                   "RTX-3090": "RTX3090", "RTX-4090": "RTX4090"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What a file is made of. `devices`: of each node; GPUs, or CPU workers where `gpu` is None.
    `words`: what follows `xgpt submit JOB`. `remarks`: sentences at the file's head."""

    name: str  # lower-case letters, digits and dashes
    job_file: Path
    words: tuple[str, ...]
    nodes: int
    devices: int
    gpu: str | None
    image: str
    claim: str
    remarks: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return self.job_file.parent


def render_jobset(job: Exported) -> str:
    """A JobSet (jobset.x-k8s.io/v1alpha2): one pod that runs the job and, of several nodes, a pod
    for each other one, whose ssh server it starts its ranks through. All see the folder of the job
    file, which is a claim on a shared volume. It is done when the first pod is."""
    hosts = [f"{job.name}-{_LEAD}-0-0.{job.name}", *(
        f"{job.name}-{_OTHERS}-0-{i}.{job.name}" for i in range(job.nodes - 1))]
    several = ("--set", f"run.hosts=[{', '.join(hosts)}]") if job.nodes > 1 else ()
    command = ["python3", "-P", "-m", "xgpt.cli.main", "submit", str(job.job_file), *job.words,
               *several]
    pods = [_replicated(job, _LEAD, 1, command)]
    if job.nodes > 1:
        pods.append(_replicated(job, _OTHERS, job.nodes - 1, ["/usr/sbin/sshd", "-D", "-e"]))
    return _written(job.remarks, {
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.name},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [_LEAD]},
            "failurePolicy": {"maxRestarts": _RESTARTS},
            "replicatedJobs": pods}})


def _replicated(job: Exported, name: str, pods: int, command: Sequence[str]) -> dict[str, Any]:
    amount = str(job.devices)
    limits = {"nvidia.com/gpu": amount} if job.gpu is not None else {"cpu": amount}
    folder = str(job.folder)
    return {"name": name, "replicas": 1, "template": {"spec": {
        "parallelism": pods, "completions": pods, "completionMode": "Indexed", "backoffLimit": 0,
        "template": {"spec": {
            "restartPolicy": "Never", "terminationGracePeriodSeconds": _GRACE_S,
            "containers": [{
                "name": "xgpt", "image": job.image, "workingDir": folder,
                # $(NAME) would be a variable of the pod's
                "command": [word.replace("$(", "$$(") for word in command],
                "env": [{"name": "XDG_CACHE_HOME", "value": f"{folder}/.cache"},
                        {"name": "HF_HOME", "value": f"{folder}/.cache/huggingface"}],
                "resources": {"limits": limits},
                "volumeMounts": [{"name": "work", "mountPath": folder},
                                 {"name": "shm", "mountPath": "/dev/shm"}]}],
            "volumes": [
                {"name": "work", "persistentVolumeClaim": {"claimName": job.claim}},
                # MPI's messages between the ranks of a pod; the usual 64 MiB are too few
                {"name": "shm", "emptyDir": {"medium": "Memory"}}]}}}}}


def render_skypilot(job: Exported) -> str:
    """A SkyPilot task on one node, whose working folder is that of the job file."""
    assert job.nodes == 1, f"{job.nodes = }: its nodes share no file system"
    words = ["python3", "-P", "-m", "xgpt.cli.main", "submit", job.job_file.name, *job.words]
    resources: dict[str, Any] = {"image_id": f"docker:{job.image}"}
    if job.gpu is not None:
        resources["accelerators"] = {_SKYPILOT_NAMES.get(job.gpu, job.gpu): job.devices}
    else:
        resources["cpus"] = f"{job.devices}+"
    return _written(job.remarks, {
        "name": job.name, "workdir": str(job.folder), "num_nodes": 1, "resources": resources,
        "run": " ".join(map(quoted, words)) + "\n"})


class _Text(str):
    """A text that is a value."""


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that are values, and uses no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(_Text, lambda dumper, text: dumper.represent_scalar(
    "tag:yaml.org,2002:str", str(text), style='"'))


def _written(remarks: Sequence[str], content: Mapping[str, Any]) -> str:
    head = "".join(f"# {line}\n" for line in remarks)
    return head + yaml.dump(_values(content), Dumper=_Dumper, sort_keys=False, width=10**6,
                            allow_unicode=False)


def _values(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _values(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_values(inner) for inner in value]
    return _Text(value) if isinstance(value, str) else value
