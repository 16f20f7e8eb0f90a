"""Settings of one vLLM engine, as a rank sends them to the process that holds it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xrunner.backends.vllm.protocol import Load
from xrunner.backends.vllm.row import LORA, block_tokens, engine_arguments

# chosen: most tokens of one pass; a larger step takes several. vLLM runs its largest pass at the
# start, and reserves memory for it.
MOST_TOKENS = 4096
_GIB = 2**30
_TOKENIZER = "tokenizer_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of one engine.

    `tp_degree`: processes that divide each layer. `stages`: number of layers of each stage of a
    pipeline; one has all if none are given. `cores`: those of each process on CPUs.
    `max_tokens`: positions of the longest request. `kv_tokens`: KV tokens of all requests together,
    of `kv_token_bytes` each on a process with all layers. `most_tokens`: tokens of one pass.
    `is_random`: random weights. `arguments`: run.engine_args, which override ours. `has_prefixes`:
    requests share blocks."""

    model_dir: Path
    dtype: str
    max_queries: int
    max_tokens: int
    kv_tokens: int
    kv_token_bytes: int
    cores: Sequence[Sequence[int]] = ()
    tp_degree: int = 1
    stages: Sequence[int] = (1,)
    device_kind: str = "cpu"
    is_random: bool = False
    most_tokens: int = MOST_TOKENS
    has_prefixes: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks: each request fills its last block in part, and vLLM takes one
        itself."""
        return self.kv_tokens // block_tokens(self.arguments, self.device_kind) + (
            self.max_queries + 1)

    @property
    def load(self) -> Load:
        """The request to load the model with these settings."""
        block, is_cpu = block_tokens(self.arguments, self.device_kind), self.device_kind == "cpu"
        arguments = {
            "max_model_len": self.max_tokens, "max_num_seqs": self.max_queries,
            "max_num_batched_tokens": max(self.most_tokens, self.max_queries),
            "enable_prefix_caching": self.has_prefixes, "prefix_caching_hash_algo": "sha256",
            "num_gpu_blocks_override": self.num_blocks, "seed": 0,
            "load_format": "dummy" if self.is_random else "auto",
            "enforce_eager": is_cpu, "disable_log_stats": True,
            "tensor_parallel_size": self.tp_degree, "block_size": block,
            "pipeline_parallel_size": len(self.stages),
            # windowed layers keep all tokens, as planned: separate groups of layers would take a
            # block of each per request, and there are not that many
            "disable_hybrid_kv_cache_manager": True,
            **base_arguments(self.model_dir, self.dtype, self.arguments)}
        # counts logits that are not finite
        environment = {"VLLM_COMPUTE_NANS_IN_LOGITS": "1"}
        if self.tp_degree * len(self.stages) > 1:  # a process with threads must not fork
            environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        if len(self.stages) > 1:
            environment["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, self.stages))
        if is_cpu:
            bytes_each = self.num_blocks * block * -(
                -self.kv_token_bytes * max(self.stages) // sum(self.stages))
            # its default binding reserves a core, and takes the others' hyperthreads
            environment |= {
                "VLLM_CPU_OMP_THREADS_BIND": "|".join(
                    ",".join(map(str, own)) for own in self.cores),
                "VLLM_CPU_KVCACHE_SPACE": str(-(-bytes_each // _GIB))}
        adapter = self.arguments.get(LORA)
        return Load(arguments, environment, None if adapter is None else str(adapter))


def base_arguments(model_dir: Path, dtype: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's arguments for the model itself, and the job's own (`given`: run.engine_args)."""
    return {"model": str(model_dir), "dtype": dtype, "trust_remote_code": False,
            "skip_tokenizer_init": not (model_dir / _TOKENIZER).is_file(),
            **engine_arguments(given)}


def cores_of_each(cores: Sequence[int], processes: int, threads: int) -> list[list[int]]:
    """Cores of each process, `threads` each; shared if there are too few."""
    return [sorted({cores[(process * threads + thread) % len(cores)]
                    for thread in range(threads)}) for process in range(processes)]
