"""Exports of a job: files for other schedulers (a Kubernetes JobSet, a SkyPilot task), and vLLM's
command, offline or as a server, as near to a schedule as its flags allow. Offline replicas are a
shell script: a `vllm run-batch` each, over a part of the file. Pure functions of the job and its
schedule; nothing is started. Values are put into the templates as JSON, which is always
YAML.

The command's notes say what no flag of vLLM does: when to prefill, even batches, the order of
requests. A schedule that vLLM has no flags for is refused. The flags are read back by the parser of
vLLM 0.32 in tests/vllm."""

import json
import math
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from xgpt.core.deployment import Deployment, Pool
from xgpt.core.engines import VLLM
from xgpt.core.errors import XgptError
from xgpt.core.model import ModelSpec, Split
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xgpt.core.units import DTYPE_BYTES, FP8, INT8
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
            # a run that is stopped saves what it has, and goes on when it is started again
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
            - name: shm  # MPI's messages between a pod's ranks: the default 64 MiB are too few
              emptyDir: {medium: Memory}
""")
_SKYPILOT = Template("""\
${remarks}name: $name
workdir: $folder
num_nodes: 1
resources: $resources
run: $run
""")
_COMMENT = 78  # columns of a comment
# our names of devices -> SkyPilot's, where they differ
_SKYPILOT_NAMES = {"A100-40": "A100", "A100-80": "A100-80GB", "V100-32": "V100-32GB",
                   "RTX-3090": "RTX3090", "RTX-4090": "RTX4090", "RTX-5090": "RTX5090"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A job as the templates need it. `devices`: of each node; GPUs, or CPU workers where `gpu` is
    None. `words`: what follows `xgpt submit JOB`. `remarks`: sentences at the file's head."""

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
    """The text of a JobSet (jobset.x-k8s.io/v1alpha2). One pod runs the job; each further node has
    a pod with an ssh server, through which ranks are started. All mount the job file's folder, a
    claim on a shared volume. The JobSet is done when the first pod is."""
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
    """The text of a SkyPilot task on one node, with the job file's folder as its workdir."""
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
    """A command of another engine, notes about it (a sentence each), and the shell script that runs
    it, on one node or more."""

    engine: str
    words: tuple[str, ...]
    notes: tuple[str, ...]
    script: str

    def __str__(self) -> str:
        """The whole script, with the notes as comments."""
        return "\n".join(["#!/bin/bash", *(
            f"# {line}" for note in self.notes for line in textwrap.wrap(
                note, _COMMENT, break_long_words=False, break_on_hyphens=False)), self.script])


def vllm_command(schedule: Schedule, problem: Problem, *, model: str, times_of: str,
                 files: tuple[Path, Path] | None) -> EngineCommand:
    """vLLM's command for a schedule of `problem`. Raises XgptError for a schedule that vLLM has no
    flags for.

    `model`: the job's model. `times_of`: source of the times that the schedule was planned with, an
    engine or a profile. `files`: requests and answers of an offline run (`vllm run-batch`); None: a
    server."""
    estimate, deployment = schedule.estimate, schedule.deployment
    pool, controls = _only_pool(schedule), estimate.controls
    name = model if "/" in model else problem.model.hub_id or model
    words = ["vllm", "serve", name] if files is None else ["vllm", "run-batch", "--model", name]
    words += _group_words(problem.model.split, _degree(deployment))
    words += ["--pipeline-parallel-size", str(len(pool.stages))]
    budget, chunk = getattr(controls, "token_budget", 0), getattr(controls, "encode_chunk", 0)
    if chunk:
        budget = chunk + math.ceil(estimate.figures.decode_batch)
    has_chunks = bool(chunk) or estimate.policy == "sarathi"
    active = getattr(controls, "max_active", 0) or math.ceil(estimate.most_in_system)
    # limits of one part of a group, each an engine of its own to vLLM
    parts = problem.model.split.attention_dp
    active, budget = math.ceil(active / parts), math.ceil((budget or 0) / parts)
    # vLLM refuses more sequences than tokens of a step
    words += ["--max-num-seqs", str(min(active, budget) if has_chunks else active)]
    words += ["--max-num-batched-tokens", str(budget), "--enable-chunked-prefill"] if (
        has_chunks) else ["--no-enable-chunked-prefill"]
    words += ["--max-model-len", str(_longest(problem))]
    if problem.dtype in DTYPE_BYTES:
        words.append(f"--dtype={problem.dtype}")
    words += ["--quantization", FP8] if problem.weight_dtype == FP8 else []
    words += ["--kv-cache-dtype", FP8] if problem.kv_dtype == FP8 else []
    each = problem.cluster.devices_per_node
    if files is None or deployment.replicas == 1 or deployment.devices_per_replica > each:
        spread, before, notes = _over_nodes(problem.model, deployment, each)
        words += [*spread, *([] if files is None else ["-i", str(files[0]), "-o", str(files[1])])]
        script = "\n".join((*before, shlex.join(words)))
    else:
        script, notes = _in_parts(words, files, deployment, each), [_PARTS]
    return EngineCommand(engine=VLLM, words=tuple(words), script=script, notes=(
        *_expected(schedule, times_of), *notes,
        *(() if files is None else (_LINES,) if problem.model.split.is_asked else _OFFLINE),
        *([f"{name} is a shape of the catalog: put its checkpoint there."] if name == (
            problem.model.name) and "/" not in name else []),
        *(["Planned with weights of int8, which vLLM takes from a checkpoint alone: name one."]
          if problem.weight_dtype == INT8 else []),
        *([] if has_chunks else ["Inputs are planned to be prefilled whole" + (
            f", {budget} tokens a step at most." if budget else ".")]),
        *_unsaid(schedule, pool)))


# a line that begins with spaces is a command, which is not broken
_LINES = "-i takes OpenAI's batch lines alone."
_OFFLINE = (f"{_LINES} For other prompts, or choices:",
            f"  xgpt submit JOB.yaml --set run.engine={VLLM}")
_PARTS = ("Each replica answers its part of the file, whatever the others have left to do, and "
          "writes its answers at its end.")
_SCRIPT = Template("""\
${head}set -eu
mkdir -p $folder
export parts=$$(mktemp -d $folder/vllm.XXXXXX)  # requests, answers and log of each replica
split --number=l/$replicas --numeric-suffixes --suffix-length=4 $requests "$$parts/requests."

replica() {  # NUMBER
    $command \\
        -i "$$parts/requests.$$1" -o "$$parts/answers.$$1" > "$$parts/log.$$1" 2>&1
}
$run
cat "$$parts"/answers.{0000..$last} > $answers""")
_BY_SLURM = """export -f replica
srun bash -c 'replica "$(printf %04d "$SLURM_PROCID")"'"""


def _in_parts(words: Sequence[str], files: tuple[Path, Path], deployment: Deployment,
              each: int) -> str:
    """A script of replicas, each on devices of its own; one for sbatch where nodes of `each`
    devices are several."""
    replicas, size = deployment.replicas, deployment.devices_per_replica
    head, run = "", "\n".join([*(
        f"CUDA_VISIBLE_DEVICES={','.join(str(n * size + i) for i in range(size))} replica {n:04} &"
        for n in range(replicas)), "wait"])
    if replicas > (on_node := each // size):
        run, head = _BY_SLURM, (f"#SBATCH --ntasks={replicas} --ntasks-per-node={on_node} "
                                f"--gpus-per-task={size}\n")
    return _SCRIPT.substitute(
        head=head, folder=quoted(str(files[1].parent)), replicas=replicas, run=run,
        requests=quoted(str(files[0])), answers=quoted(str(files[1])), last=f"{replicas - 1:04}",
        command=shlex.join(words))


_JOIN = ("On each other node, once Ray runs on the first:",
         "  ray start --address=FIRST_NODE:6379")


def _expected(schedule: Schedule, times_of: str) -> list[str]:
    """Notes with the schedule's figures, and the source of its times."""
    limit_s, figures = schedule.bound.limit_s, schedule.figures
    limit = "" if math.isinf(limit_s) else f", of {limit_s:.3g} s allowed"
    whose = f"Planned by the times of {times_of}." if times_of.startswith(VLLM) else (
        f"Planned by the times of {times_of}; `--set plan.engine={VLLM}` takes those of {VLLM}.")
    others = ["This command is of the first replicas alone. Those of another shape have a schedule "
              "of their own (`others` in `--json`)."] if schedule.estimate.others else []
    return [f"Expected in steady state: {figures.throughput_qps:.3g} requests/s, latency "
            f"{figures.latency_s:.3g} s{limit}.", whose, *others]


def _group_words(split: Split, degree: int) -> list[str]:
    """Flags of a group of `degree` devices. vLLM's tensor-parallel size is that of attention; its
    experts lie on the groups of all data-parallel ranks."""
    if split.ep_degree not in (1, degree):
        raise _no_flags(f"experts on {split.ep_degree} parts of {degree} devices (it divides them "
                        "over all or none)", f"ep_degree={degree}")
    words = ["--tensor-parallel-size", str(split.attention_degree(degree))]
    words += ["--data-parallel-size", str(split.attention_dp)] if split.attention_dp > 1 else []
    return words + ["--enable-expert-parallel"] * (split.ep_degree > 1)


def _over_nodes(model: ModelSpec, deployment: Deployment,
                each: int) -> tuple[list[str], tuple[str, ...], list[str]]:
    """(flags of replicas and nodes, commands before, notes), on nodes of `each` devices."""
    replicas, size = deployment.replicas, deployment.devices_per_replica
    nodes, of_one = -(-deployment.num_devices // each), -(-size // each)
    if of_one == 1 and replicas > 1 and model.decoder.experts is not None:
        return [], (), [f"One replica of {replicas}: run each on {size} devices of its own. "
                        "--data-parallel-size would divide one set of experts over all of them."]
    if of_one > 1 and model.split.attention_dp > 1:
        raise _no_flags("parts that attend to requests of their own, on several nodes",
                        "attention_dp=1")
    if nodes == 1:
        return (["--data-parallel-size", str(replicas)] if replicas > 1 else []), (), []
    head = ("ray start --head --port=6379",)
    if of_one == 1:
        return ["--data-parallel-size", str(replicas), "--data-parallel-size-local",
                str(each // size), "--data-parallel-backend", "ray"], head, [*_JOIN]
    several = [f"One replica of {replicas}, on {of_one} nodes: run each on nodes of its own, with "
               "its part of the requests."] if replicas > 1 else []
    return ["--distributed-executor-backend", "ray"], head, [*several, *_JOIN]


def _only_pool(schedule: Schedule) -> Pool:
    deployment, policy = schedule.deployment, schedule.estimate.policy
    if len(deployment.pools) > 1:
        raise _no_flags(f"{policy}'s requests are handed from a pool that prefills to one "
                        "that decodes", "policy=[rra, sarathi]")
    if deployment.pools[0].placement is not None:
        raise XgptError(f"{VLLM} has no flags for this schedule: its weights and KV cache lie "
                        "partly on host or disk. More devices, with `run.offload: off`, have one.")
    if policy in ("ft", "dsi"):
        raise _no_flags(f"{policy} holds a batch until its longest request is done",
                        "policy=[rra, sarathi]")
    return deployment.pools[0]


def _degree(deployment: Deployment) -> int:
    degrees = {stage.tp_degree for stage in deployment.stages}
    if len(degrees) > 1:
        raise _no_flags("stages of different tensor-parallel degrees ("
                        f"{', '.join(map(str, sorted(degrees)))})", f"tp_degree={max(degrees)}")
    return degrees.pop()


def _no_flags(what: str, change: str) -> XgptError:
    return XgptError(f"{VLLM} has no flags for this schedule: {what}. `--set "
                     f"'schedule.{change}'` plans one that they can describe.")


def _longest(problem: Problem) -> int:
    """Tokens of the longest request, input and output."""
    queries = problem.queries
    if queries is not None:
        return int((queries.inputs + queries.most_outputs).max())
    longest = problem.lengths.inputs.max + max(problem.lengths.outputs.max,
                                               problem.default_max_tokens)
    most = problem.model.max_positions
    return longest if most is None else min(longest, most)


def _unsaid(schedule: Schedule, pool: Pool) -> list[str]:
    """Notes on decisions of the schedule that no flag says."""
    notes = []
    if schedule.estimate.policy == "rra":
        controls = schedule.estimate.variables
        notes.append(f"No flag says that {controls['encode_batch']} requests are prefilled every "
                     f"{controls['decode_iterations']} iterations. The engine prefills as soon as "
                     "there is room, so latencies differ.")
    layers = [stage.num_layers for stage in pool.stages]
    if len(set(layers)) > 1:
        notes.append(f"Planned with {', '.join(map(str, layers))} layers a stage; the engine "
                     "divides them itself.")
    return notes
