"""A job as files for other schedulers, which run its ranks elsewhere: a Kubernetes JobSet, and a
SkyPilot task. Pure functions of the job and its schedule; nothing is submitted. What is put into
the templates is JSON, and so YAML whatever it holds."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from xgpt.launch.slurm_jobs import quoted

_JOBSET = Template("""\
${remarks}apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: $name}
spec:
  network: {enableDNSHostnames: true, subdomain: $name}
  successPolicy: {operator: All, targetReplicatedJobs: [lead]}
  failurePolicy: {maxRestarts: 3}
  replicatedJobs:
""")
_PODS = Template("""\
  - name: $kind
    replicas: 1
    template:
      spec:
        parallelism: $count
        completions: $count
        completionMode: Indexed
        backoffLimit: 0
        template:
          spec:
            restartPolicy: Never
            # a run that is told to end saves what it has, and goes on when it is started again
            terminationGracePeriodSeconds: 120
            containers:
            - name: xgpt
              image: $image
              workingDir: $folder
              command: $command
              env:
              - {name: XDG_CACHE_HOME, value: $cache}
              - {name: HF_HOME, value: $hub}
              resources: {limits: $limits}
              volumeMounts:
              - {name: work, mountPath: $folder}
              - {name: shm, mountPath: /dev/shm}
            volumes:
            - name: work
              persistentVolumeClaim: {claimName: $claim}
            - name: shm  # MPI's messages between the ranks of a pod: the usual 64 MiB are too few
              emptyDir: {medium: Memory}
""")
_SKYPILOT = Template("""\
${remarks}name: $name
workdir: $folder
num_nodes: 1
resources: $resources
run: $run
""")
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

    def submit(self, job_file: str) -> list[str]:
        return ["python3", "-P", "-m", "xgpt.cli.main", "submit", job_file, *self.words]


def render_jobset(job: Exported) -> str:
    """A JobSet (jobset.x-k8s.io/v1alpha2): one pod that runs the job and, of several nodes, a pod
    for each other one, whose ssh server it starts its ranks through. All see the folder of the job
    file, which is a claim on a shared volume. It is done when the first pod is."""
    hosts = [f"{job.name}-lead-0-0.{job.name}", *(
        f"{job.name}-others-0-{i}.{job.name}" for i in range(job.nodes - 1))]
    several = ["--set", f"run.hosts=[{', '.join(hosts)}]"] if job.nodes > 1 else []
    pods = [_pods(job, "lead", 1, [*job.submit(str(job.job_file)), *several])]
    if job.nodes > 1:
        pods.append(_pods(job, "others", job.nodes - 1, ["/usr/sbin/sshd", "-D", "-e"]))
    return "".join([_filled(_JOBSET, job, name=job.name), *pods])


def _pods(job: Exported, kind: str, count: int, command: Sequence[str]) -> str:
    folder, unit = str(job.job_file.parent), "cpu" if job.gpu is None else "nvidia.com/gpu"
    return _filled(
        _PODS, job, kind=kind, count=count, image=job.image, folder=folder, claim=job.claim,
        # $(NAME) would be a variable of the pod's
        command=[word.replace("$(", "$$(") for word in command], cache=f"{folder}/.cache",
        hub=f"{folder}/.cache/huggingface", limits={unit: str(job.devices)})


def render_skypilot(job: Exported) -> str:
    """A SkyPilot task on one node, whose working folder is that of the job file."""
    assert job.nodes == 1, f"{job.nodes = }: its nodes share no file system"
    devices = {"cpus": f"{job.devices}+"} if job.gpu is None else {
        "accelerators": {_SKYPILOT_NAMES.get(job.gpu, job.gpu): job.devices}}
    return _filled(
        _SKYPILOT, job, name=job.name, folder=str(job.job_file.parent),
        resources={"image_id": f"docker:{job.image}", **devices},
        run=" ".join(map(quoted, job.submit(job.job_file.name))) + "\n")


def _filled(template: Template, job: Exported, **values: object) -> str:
    return template.substitute({name: json.dumps(value) for name, value in values.items()},
                               remarks="".join(f"# {line}\n" for line in job.remarks))
