"""A job for others to run: as files for other schedulers (a Kubernetes JobSet, a SkyPilot task),
and as the command that starts vLLM as near to a schedule as its flags can say. Pure functions of
the job and its schedule; nothing is started. What is put into the templates is JSON, and so YAML
whatever it holds.

What no flag of vLLM says (when to encode, batches kept even, the order of queries) is told beside
the command, since the figures expected are the schedule's own. A schedule that it has no flags for
at all is refused. The flags are read back by the parser of vLLM 0.32 in tests/vllm."""

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from xgpt.core.deployment import Deployment, Pool
from xgpt.core.engines import VLLM
from xgpt.core.errors import XgptError
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCommand:
    """A command, and what is to be known of it, a sentence each."""

    engine: str
    words: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        """For a shell, what is to be known as comments before it."""
        return "\n".join([*(f"# {note}" for note in self.notes), shlex.join(self.words)])


def vllm_command(schedule: Schedule, problem: Problem, *, model: str,
                 times_of: str) -> EngineCommand:
    """vLLM's command for a schedule of `problem`. model: as vLLM is to be told of it. times_of: by
    whose times the schedule was planned: an engine, or a profile. Raises XgptError for a schedule
    that vLLM has no flags for."""
    estimate, deployment = schedule.estimate, schedule.deployment
    pool, controls = _only_pool(schedule), estimate.controls
    limit_s = schedule.bound.limit_s
    limit = "" if math.isinf(limit_s) else f", of {limit_s:.3g} s allowed"
    notes = [f"Expected: {schedule.figures.throughput_qps:.3g} requests/s, latency "
             f"{schedule.figures.latency_s:.3g} s{limit}.",
             f"These are by the times of {VLLM}." if times_of == VLLM else
             f"These are by the times of {times_of}, not of {VLLM}: without a profile `--set "
             f"plan.engine={VLLM}` plans for those."]
    words = ["vllm", "serve", model, "--tensor-parallel-size", str(_degree(deployment)),
             "--pipeline-parallel-size", str(len(pool.stages))]
    if model == problem.model.name and "/" not in model:
        notes.append(f"{model} is a shape of the catalog: put its checkpoint there.")
    if deployment.replicas > 1:
        words += ["--data-parallel-size", str(deployment.replicas)]
    if estimate.others:
        notes.append("This command is of the first copies alone: those of another shape have a "
                     "schedule of their own (`others` in `--json`).")
    words += ["--max-num-seqs", str(getattr(controls, "max_active", 0)
                                    or math.ceil(estimate.most_in_system))]
    budget, chunk = getattr(controls, "token_budget", None), getattr(controls, "encode_chunk", 0)
    if chunk:
        budget = chunk + math.ceil(estimate.figures.decode_batch)
    if chunk or estimate.policy == "sarathi":
        words += ["--max-num-batched-tokens", str(budget), "--enable-chunked-prefill"]
    else:
        words.append("--no-enable-chunked-prefill")
        notes.append("Inputs are planned to be encoded whole"
                     + (f", {budget} tokens a step at most." if budget else "."))
    words += ["--max-model-len", str(_longest(problem))]
    if problem.dtype in ("float32", "bfloat16", "float16"):
        words.append(f"--dtype={problem.dtype}")
    return EngineCommand(engine=VLLM, words=tuple(words), notes=(*notes, *_unsaid(schedule, pool)))


def _only_pool(schedule: Schedule) -> Pool:
    deployment, policy = schedule.deployment, schedule.estimate.policy
    if len(deployment.pools) > 1:
        raise _no_flags(f"{policy}'s queries are handed from a pool that encodes to one that "
                        "decodes", "policy=[rra, sarathi]")
    if policy in ("ft", "dsi"):
        raise _no_flags(f"{policy} holds a batch until its longest query is done", "policy=auto")
    return deployment.pools[0]


def _degree(deployment: Deployment) -> int:
    degrees = {stage.tp_degree for stage in deployment.stages}
    if len(degrees) > 1:
        raise _no_flags("stages of different tensor-parallel degrees ("
                        f"{', '.join(map(str, sorted(degrees)))})", f"tp_degree={max(degrees)}")
    return degrees.pop()


def _no_flags(what: str, change: str) -> XgptError:
    return XgptError(f"{VLLM} has no flags for this schedule: {what}. `--set "
                     f"'schedule.{change}'` plans one that it can be told of.")


def _longest(problem: Problem) -> int:
    """Positions of the longest query."""
    queries = problem.queries
    if queries is not None:
        return int((queries.inputs + queries.most_outputs).max())
    longest = problem.lengths.inputs.max + max(problem.lengths.outputs.max,
                                               problem.default_max_tokens)
    most = problem.model.max_positions
    return longest if most is None else min(longest, most)


def _unsaid(schedule: Schedule, pool: Pool) -> list[str]:
    """What the schedule decides and no flag says."""
    notes = []
    if schedule.estimate.policy == "rra":
        controls = schedule.estimate.variables
        notes.append(f"No flag says that {controls['encode_batch']} queries are encoded every "
                     f"{controls['decode_iterations']} iterations: the engine encodes as soon as "
                     "there is room, so latencies are others.")
    layers = [stage.num_layers for stage in pool.stages]
    if len(set(layers)) > 1:
        notes.append(f"Planned with {', '.join(map(str, layers))} layers a stage; the engine "
                     "divides them itself.")
    return notes
