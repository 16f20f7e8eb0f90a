"""Resolves what the user wrote (`Job`) into what is planned (`Problem`). It reads files that the
job names, and detects this machine for `cluster: local`. It neither downloads nor reads requests: a
caller that has done so passes `model` and `requests`."""

from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np

from xgpt.core import catalog
from xgpt.core.cluster import KV_BLOCK_TOKENS, Cluster, Device
from xgpt.core.constraint import Constraint, deadline_bound
from xgpt.core.controls import Adjustment
from xgpt.core.engines import IN_CHILDREN, OWN_ENGINE, SHARING_ENGINES, VLLM
from xgpt.core.errors import Mistake, refuse, wrong
from xgpt.core.hf.config import read_shape
from xgpt.core.lengths import FloatArray, JointLengths, synthetic_lengths
from xgpt.core.model import ModelSpec, Split
from xgpt.core.policies import able_policies
from xgpt.core.prefixes import Prefixes, dealt_prefixes, in_blocks
from xgpt.core.problem import Problem, QueryLengths, has_room, output_room
from xgpt.core.system import machine as local
from xgpt.core.system.machine import MAX_DEFAULT_WORKERS, Layout, gpus_here, layouts, usable_cores
from xgpt.core.units import DTYPE_BYTES, FP8, INT8
from xgpt.job.arrivals_section import resolve_arrivals
from xgpt.job.job import LOCAL_CLUSTER, Job
from xgpt.job.job_lengths import earlier_lengths, resolve_lengths, without_requests
from xgpt.job.placement_section import may_offload, with_tiers, wrong_placement
from xgpt.job.plan_sections import without_limit
from xgpt.job.request_columns import wrong_columns
from xgpt.job.schedule_section import OFF, SPLIT_KEYS, wrong_split
from xgpt.requests.deadlines import in_seconds
from xgpt.requests.request import Requests

_SAMPLED = 4096  # chosen: requests of a job that has no number of them


def resolve(job: Job, *, model: ModelSpec | None = None, requests: Requests | None = None,
            start: datetime | None = None) -> Problem:
    """The Problem of `job`. Raises InputError.

    `model`: its shape, if fetched from a hub; default: the catalog's or the local config.json's.
    `requests`: the job's requests, read from its file; required if it names one. `start`: when
    the job started, in local time; default: now."""
    assert requests or job.workload.requests is None, f"{job.workload.requests} is to be read first"
    shape = model or known_model(job)
    cluster = _without_reserve(resolve_cluster(job), job)
    fixed = job.schedule
    if (split := _split(job, shape, cluster.device)).is_asked:
        shape = replace(shape, split=split)  # which is executed by engines' own commands alone
        fixed = replace(fixed, policies=fixed.policies or tuple(
            row.name for row in able_policies(fixed) if row.admits and len(row.pools) == 1))
    if shape.planned_only and job.run.engine != VLLM and (
            job.cluster == LOCAL_CLUSTER or job.slurm is not None):
        raise wrong(job.source, "model", job.model, f"one that is executed: {shape.planned_only} "
                    "is planned for, on clusters of GPUs that are not here, and not executed by "
                    f"the engine {job.run.engine}; `run: {{engine: {VLLM}}}` hands it to vLLM")
    if (job.schedule.replicas or 1) > cluster.num_devices:
        raise wrong(job.source, "schedule.replicas", job.schedule.replicas,
                    f"at most {cluster.num_devices}, the devices of cluster {cluster.name}: each "
                    "replica needs one")
    if requests is not None and job.run.stop:  # outputs may end before their forced length
        requests = replace(requests, may_stop=np.ones(len(requests), bool))
    refuse([*wrong_columns(job, shape, requests), *wrong_placement(job, shape)])
    arrivals, device = resolve_arrivals(job, requests), cluster.device
    if arrivals and job.constraint.objective == "cost" and device.price_per_hour is None:
        raise wrong(job.source, "price_per_hour", None, "required for objective cost: the catalog "
                    f"has no price of {device.name}")
    lengths = resolve_lengths(job, shape, requests)
    constraint, deadlines_s = with_deadlines(job, requests, start or datetime.now())
    # for a request without a cap of its own: the job's, else the longest planned for
    most_outputs = job.workload.max_tokens or lengths.outputs.max
    dtype = resolve_dtype(job.run.dtype, cluster.device)
    queries = query_lengths(requests, most_outputs, shape, deadlines_s) if (
        requests is not None) else dealt_queries(job, lengths)
    if queries is not None and queries.prefixes is not None:
        queries = replace(queries, prefixes=_planned(queries, job, shape, cluster.device))
    return Problem(
        model=shape, cluster=cluster, lengths=lengths, constraint=constraint,
        fixed=fixed, dtype=dtype,
        weight_dtype=resolve_weight_dtype(job, dtype, shape, cluster),
        kv_dtype=_resolve_kv_dtype(job, dtype, cluster),
        num_queries=job.workload.count if requests is None else len(requests),
        default_max_tokens=most_outputs, adjustment=_admitting(job),
        queries=queries, seed=job.run.seed,
        is_synthetic=queries is None and requests is None and job.workload.count is not None,
        observes=job.workload.output_tokens.kind == "observe",
        is_revised=job.run.reschedule is not None and arrivals is None, arrivals=arrivals,
        learned=earlier_lengths(job.output) if (
            job.adjustment.admission.forecast.is_learned) else None,
        head_rows=lengths.inputs.mean if job.workload.embed == "mean" else max(
            requests.mean_targets, 1.0) if requests is not None else 1.0,
        has_head=job.workload.embed is None,
        offload="auto" if may_offload(job, shape) else "off",
        input_error=requests.input_error if requests is not None and (
            job.workload.input_tokens.kind == "from_requests") else 0.0)


def _admitting(job: Job) -> Adjustment:
    """The job's adjustment, with the planned engine's admission rule if the job asks for none."""
    asked = job.adjustment
    if asked.admission.rule is not None or not catalog.engine(job.plan_engine).reserves:
        return asked
    return replace(asked, admission=replace(asked.admission, rule="reserve"))


def dealt_queries(job: Job, lengths: JointLengths) -> QueryLengths | None:
    """Requests of a job without a file that share prefixes, dealt to them at random; None if they
    share none. A job without a count has a sample."""
    shared, seed = job.workload.shared, job.run.seed
    if shared is None:
        return None
    inputs, outputs = synthetic_lengths(lengths, job.workload.count or _SAMPLED, seed)
    ends = without_requests(shared.tokens).sample(shared.groups, np.random.default_rng((seed, 4)))
    return QueryLengths(inputs=inputs, most_outputs=outputs, outputs=outputs,
                        prefixes=dealt_prefixes(ends, inputs, seed))


def _planned(queries: QueryLengths, job: Job, model: ModelSpec, device: Device) -> Prefixes | None:
    """The prefixes of the requests as the planned engine shares them; None if it shares none."""
    prefixes = queries.prefixes
    if (prefixes is None or job.adjustment.prefixes == OFF or job.run.engine not in SHARING_ENGINES
            or job.run.kv_layout == "rows" or model.is_encoder_decoder):
        return None
    size = job.run.engine_args.get("block_size")  # vLLM's, which refuses what is no number
    block_tokens = size if isinstance(size, int) and size > 0 else KV_BLOCK_TOKENS[device.kind]
    return in_blocks(prefixes, block_tokens, is_whole=job.plan_engine != OWN_ENGINE)


def _without_reserve(cluster: Cluster, job: Job) -> Cluster:
    """`cluster` with the memory reserved that the planned engine keeps for itself on GPUs, and the
    share of the rest that its cache takes."""
    row = catalog.engine(job.plan_engine)
    if cluster.device.kind != "gpu" or not (row.reserve_gb or row.of_free):
        return cluster
    return replace(cluster, device=replace(
        cluster.device, reserved_bytes=int(row.reserve_gb * 1e9),
        cache_share=row.memory_share if row.of_free else None))


def with_deadlines(job: Job, requests: Requests | None,
                   start: datetime) -> tuple[Constraint, FloatArray | None]:
    """(the job's constraint with a limit on deadlines if a request has one, deadlines of its
    requests in seconds from `start`, [requests]). Raises InputError for keys without a limit."""
    constraint, limit_s = job.constraint, job.constraint.limit_s("deadline")
    if requests is None or requests.deadlines_s is None:
        refuse(Mistake(file=str(job.source), line=None, key=key, value=None, allowed=allowed)
               for key, allowed in without_limit(constraint))
    elif constraint.bound_on("deadline") is None:
        constraint = replace(constraint, bounds=(*constraint.bounds, deadline_bound()))
    return constraint, None if requests is None else in_seconds(
        requests.deadlines_s, np.arange(len(requests)), limit_s, start.timestamp())


def query_lengths(requests: Requests | None, most_outputs: int, model: ModelSpec,
                  deadlines_s: FloatArray | None = None) -> QueryLengths | None:
    """Lengths of the job's requests, cut to the model's positions; None if not tokenised.
    `deadlines_s`: their deadlines, [requests].

    A request that no schedule can run (its input or forced output is too long, or it has no tokens)
    gets one token of input and no output; it becomes an error record."""
    if requests is None or requests.input_tokens is None or not requests.are_tokenised:
        return None
    inputs = requests.input_tokens
    runs = has_room(model, inputs, requests.forced)
    runs[list(requests.unusable)] = False
    caps = np.minimum(requests.output_caps(most_outputs), output_room(model, inputs))
    caps, prefixes = np.where(runs, caps, 0), requests.prefixes
    return QueryLengths(inputs=np.where(runs, inputs, 1), most_outputs=caps,
                        prefixes=None if prefixes is None else replace(
                            prefixes, nodes=np.where(runs, prefixes.nodes, -1)),
                        outputs=caps if requests.are_forced else None, deadlines_s=deadlines_s,
                        forecasts=None if requests.forecasts is None else np.clip(
                            requests.forecasts, 1, caps[:, None]))


def resolve_cluster(job: Job) -> Cluster:
    """The job's cluster, cut to `run.ranks` and the constraint, at the job's price."""
    ranks, hosts = job.run.ranks, len(job.run.hosts) or 1
    if job.cluster == LOCAL_CLUSTER:
        if ranks is None and job.run.engine in IN_CHILDREN and not gpus_here():
            ranks = hosts
        cluster = local.detect(ranks, hosts)
    else:
        cluster = job.cluster if isinstance(job.cluster, Cluster) else catalog.cluster(job.cluster)
        cluster = cluster if ranks is None else _part_of(cluster, ranks, job.source)
    cluster = limited(with_tiers(cluster, job), job.constraint)
    if (price := job.price_per_hour) is None:
        return cluster
    return replace(cluster, device=replace(
        cluster.device, price_per_hour=price, price_source="the job file"))


def limited(cluster: Cluster, constraint: Constraint) -> Cluster:
    """`cluster` cut to the constraint's memory per device and number of devices (the largest number
    within it that uses nodes whole or evenly)."""
    memory, device = constraint.memory_bytes, cluster.device
    if memory is not None and memory < device.memory_bytes:
        cluster = replace(cluster, device=replace(device, memory_bytes=memory))
    most = constraint.max_gpus
    if most is None or most >= cluster.num_devices:
        return cluster
    used = max(count for count in range(1, most + 1)
               if count % -(-count // cluster.devices_per_node) == 0)
    nodes = -(-used // cluster.devices_per_node)
    return replace(cluster, num_nodes=nodes, devices_per_node=used // nodes)


def resolve_dtype(dtype: str, device: Device) -> str:
    """`dtype`, or for auto: bfloat16 if the device has it, else float16 on a GPU, else float32."""
    if dtype != "auto":
        return dtype
    rates = dict(device.flops_per_s)
    if "bfloat16" in rates:
        return "bfloat16"
    return "float16" if device.kind == "gpu" and "float16" in rates else "float32"


def resolve_weight_dtype(job: Job, dtype: str, model: ModelSpec, cluster: Cluster) -> str:
    """`run.weight_dtype`, or for auto `dtype`. For bfloat16 on a CPU auto means float32, if that
    multiplies faster and the weights take at most half of the memory. Raises InputError for types
    that cannot be executed."""
    wish, device, engine = job.run.weight_dtype, cluster.device, job.run.engine
    allowed = _weight_dtypes(dtype, model, device, engine)
    allowed += [narrow for narrow in _planned_for(job, device, "weight_dtype")
                if narrow not in allowed]
    if wish != "auto" and wish not in allowed:
        raise wrong(job.source, "run.weight_dtype", wish, f"auto or {' or '.join(allowed)} here; "
                    f"float32 for bfloat16, and {INT8} (decoder-only models, VNNI), on CPUs by "
                    f"run.engine: {OWN_ENGINE}; "
                    f"{_planned_words('weight_dtype')}")
    if wish != "auto":
        return wish
    if dtype != "bfloat16" or "float32" not in allowed:
        return dtype
    rates = dict(device.flops_per_s)
    widened = model.num_params * DTYPE_BYTES["float32"]
    is_quicker = rates["float32"] > rates.get("bfloat16", np.inf)
    has_room = widened <= cluster.num_devices * device.memory_bytes / 2
    return "float32" if is_quicker and has_room else dtype


def _resolve_kv_dtype(job: Job, dtype: str, cluster: Cluster) -> str:
    """`run.kv_dtype`, or for auto `dtype`. Raises InputError for types that no engine has here."""
    wish = job.run.kv_dtype
    if wish == "auto":
        return dtype
    if wish not in (allowed := _planned_for(job, cluster.device, "kv_dtype")):
        raise wrong(job.source, "run.kv_dtype", wish,
                    f"{' or '.join(('auto', *allowed))} here; {_planned_words('kv_dtype')}")
    return wish


_EIGHT_BITS_BY_KEY = {"weight_dtype": {FP8: "has_fp8", INT8: "has_int8"},
                      "kv_dtype": {FP8: "has_fp8", INT8: "int8_cache"}}


def only_planned(job: Job) -> list[tuple[str, object]]:
    """(key, value) of what the job asks for that no runner under xgpt executes on GPUs."""
    asked = [(f"schedule.{key}", getattr(job.schedule, key) or 1) for key in SPLIT_KEYS]
    narrow = [(f"run.{key}", getattr(job.run, key)) for key in _EIGHT_BITS_BY_KEY]
    return [(key, value) for key, value in asked if value > 1] + [
        (key, value) for key, value in narrow if value == FP8]


def _is_only_planned(job: Job, device: Device) -> bool:
    """Whether the job is for GPUs that are not here, and has no profile, which was measured with
    another type or division."""
    return not (device.kind != "gpu" or job.cluster == LOCAL_CLUSTER or job.slurm is not None
                or job.profile is not None)


def _planned_for(job: Job, device: Device, key: str) -> list[str]:
    """The 8-bit types allowed for a key: those that the planned engine executes, if the job is only
    planned."""
    if not _is_only_planned(job, device):
        return []
    row = catalog.engine(job.plan_engine)
    return [dtype for dtype, own in _EIGHT_BITS_BY_KEY[key].items() if getattr(row, own)]


def _planned_words(key: str) -> str:
    engines = [name for name in catalog.names("engine") if any(
        getattr(catalog.engine(name), own) for own in _EIGHT_BITS_BY_KEY[key].values())]
    return (f"types of 8 bits are planned for on clusters of GPUs that are not here, as "
            f"{', '.join(engines)} execute them (plan.engine), and no runner under xgpt does there")


def _split(job: Job, model: ModelSpec, device: Device) -> Split:
    """How the job divides a layer of a mixture of experts within a group. Raises InputError for
    what the model has not, or no engine would execute."""
    asked = {key: value for key in SPLIT_KEYS if (value := getattr(job.schedule, key) or 1) > 1}
    wrongs = dict(wrong_split(job.schedule, model))
    if not _is_only_planned(job, device) or not catalog.engine(job.plan_engine).splits:
        able = [name for name in catalog.names("engine") if catalog.engine(name).splits]
        wrongs |= dict.fromkeys(asked, (
            "1 (or left out) here: other values are planned for on clusters of GPUs that are not "
            f"here, as {', '.join(able)} execute them (plan.engine). No runner under xgpt does, "
            "and its replicas of vLLM divide columns alone; `xgpt schedule --export "
            f"{VLLM}` prints vLLM's own command"))
    refuse(Mistake(file=str(job.source), line=None, key=f"schedule.{key}", value=asked[key],
                   allowed=allowed) for key, allowed in wrongs.items())
    return Split(**asked)


def open_weight_dtypes(problem: Problem, engine: str) -> list[str]:
    """The dtypes that `run.weight_dtype: auto` may choose, depending on memory."""
    allowed = _weight_dtypes(problem.dtype, problem.model, problem.cluster.device, engine)
    return [dtype for dtype in allowed if dtype in (problem.dtype, "float32")]


def _weight_dtypes(dtype: str, model: ModelSpec, device: Device, engine: str) -> list[str]:
    """The dtypes that weights can have in a run of `dtype`, that one first."""
    allowed = [dtype]
    if engine == OWN_ENGINE and device.kind == "cpu":
        if dtype == "bfloat16":
            allowed.append("float32")
        if INT8 in dict(device.flops_per_s) and not model.is_encoder_decoder:
            allowed.append(INT8)
    return allowed


def _part_of(cluster: Cluster, ranks: int, source: Path) -> Cluster:
    """`ranks` devices of the cluster, evenly on as few nodes as hold them. Raises InputError."""
    nodes = -(-ranks // cluster.devices_per_node)
    if ranks > cluster.num_devices:
        raise wrong(source, "run.ranks", ranks,
                    f"at most {cluster.num_devices}, the devices of cluster {cluster.name}")
    if ranks % nodes:
        raise wrong(source, "run.ranks", ranks,
                    f"needs {nodes} nodes of {cluster.name} and does not divide evenly over them")
    return replace(cluster, num_nodes=nodes, devices_per_node=ranks // nodes)


def known_model(job: Job) -> ModelSpec:
    """The shape of the job's model, without downloads. Raises InputError."""
    folder = Path(job.model)
    if folder.is_absolute():
        return read_shape(folder, folder.name)
    if (row := catalog.model_named(job.model)) is not None:
        return row
    raise wrong(job.source, "model", job.model,
                "the shape of this hub model is known only once its config.json is fetched; "
                "give a catalog name, or a folder with config.json")


def open_layouts(job: Job) -> tuple[Layout, ...]:
    """Layouts of this machine's cores that a job allows: those with the fewest and the most ranks,
    or the one with its threads. Empty if it names its ranks, runs elsewhere or on GPUs, or by
    an engine with layouts of its own."""
    run = job.run
    if job.cluster != LOCAL_CLUSTER or run.ranks is not None or run.hosts or (
            run.engine != OWN_ENGINE and run.engine not in IN_CHILDREN) or gpus_here():
        return ()
    cores = usable_cores()
    if run.engine in IN_CHILDREN:
        return (Layout(1, run.threads_per_rank or cores),)
    if run.threads_per_rank is not None:
        ranks = min(max(cores // run.threads_per_rank, 1), MAX_DEFAULT_WORKERS)
        return (Layout(ranks, run.threads_per_rank),)
    least, most = job.schedule.replicas or 1, job.constraint.max_gpus or cores
    allowed = [layout for layout in layouts(cores) if least <= layout.ranks <= most]
    return (*allowed[:1], *allowed[1:][-1:])


def with_layout(job: Job, layout: Layout) -> Job:
    """`job` with its ranks and threads set to `layout`."""
    return replace(job, run=replace(job.run, ranks=layout.ranks, threads_per_rank=layout.threads))
