"""vLLM's engine core, in this process: started with what a schedule needs, fed and stepped. Runs in
the interpreter that has vLLM, and imports it when a core is started."""

import json
import os
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from xgpt.core.errors import XgptError
from xrunner.backends.vllm.row import LORA, QUIET, block_tokens, engine_arguments
from xrunner.query import Sampling, TokenLikelihood
from xrunner.rules.steps import Start

_LOOK_S = 0.001  # chosen: seconds between polls for a compiled grammar


def parameters_of(sampling: Sampling, num_tokens: int, config: Any, max_tokens: int) -> Any:
    """vLLM's SamplingParams of a request with `num_tokens` tokens, its output included. `config`:
    an engine's. Raises ValueError if vLLM does not sample that way."""
    from vllm.sampling_params import SamplingParams

    given: dict[str, Any] = {"temperature": 0.0}
    if sampling.is_drawn:
        given = {"temperature": sampling.temperature, "top_k": sampling.top_k or 0,
                 "top_p": sampling.top_p, "seed": sampling.seed % 2**63}
    if sampling.is_penalised:
        given["repetition_penalty"] = sampling.repetition_penalty
    if sampling.passed:
        given |= _passed(json.loads(sampling.passed))
    parameters = SamplingParams(
        **given, max_tokens=max_tokens, ignore_eos=True, detokenize=False,
        logprobs=sampling.top_logprobs,
        min_tokens=min(max(sampling.barred_until - num_tokens, 0), max_tokens))
    # tokens barred before min_tokens, and those that may end a grammar; unlike `stop_token_ids`
    # vLLM does not stop at them
    parameters._all_stop_token_ids = {*sampling.barred}
    if sampling.passed:
        parameters.verify(config.model_config, config.speculative_config,
                          config.structured_outputs_config, tokenizer_of(config))
    return parameters


def tokenizer_of(config: Any) -> Any:
    """vLLM's tokenizer, which compiles grammars; None if no request needs it."""
    from vllm.tokenizers import cached_tokenizer_from_config

    model = config.model_config
    return None if model.skip_tokenizer_init else cached_tokenizer_from_config(model)


def await_grammar(request: Any) -> None:
    """Waits until the grammar of a request's output, if any, is compiled. The batching rule needs
    it in the next step. Raises the compiler's error."""
    form = request.structured_output_request
    if form is None:
        return
    while not form.is_grammar_ready:
        time.sleep(_LOOK_S)
    if isinstance(form.grammar, Exception):
        raise form.grammar


def _passed(passed: Mapping[str, Any]) -> dict[str, Any]:
    """A request's own parameters as vLLM's types."""
    from vllm.sampling_params import StructuredOutputsParams

    given = dict(passed)
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    return given


class RewindingGenerator(torch.Generator):
    """A CPU generator that returns to its seed whatever offset is set. vLLM draws after each chunk
    of an input, drops all but the last draw and resets the generator, which CPU generators cannot
    do. No draw counts until the input is encoded."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        """Resets the generator to its seed."""
        return self.manual_seed(self.initial_seed())


def rewind_draws(worker: Any) -> None:
    """Lets this worker's requests draw by generators that can be reset."""
    batch = worker.model_runner.input_batch
    add = batch.add_request

    def add_request(request: Any) -> Any:
        if request.generator is not None and not isinstance(request.generator, RewindingGenerator):
            seed = request.generator.initial_seed()
            request.generator = RewindingGenerator()
            request.generator.manual_seed(seed)
        return add(request)

    batch.add_request = add_request


SCHEDULER = "xrunner.backends.vllm.scheduler.StepScheduler"
# chosen: most tokens of one pass; a larger step takes several. vLLM runs its largest pass at the
# start, and reserves memory for it.
MOST_TOKENS = 4096
PREFIX = "filled-"  # of requests whose inputs count as encoded (filled.py)
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """Settings of one engine core.

    `tp_degree`: processes that divide each layer, of `threads` each. `max_tokens`: positions of the
    longest request. `kv_tokens`: KV tokens of all requests together, of `kv_token_bytes` each over
    all processes. `most_tokens`: tokens of one pass. `is_random`: random weights. `arguments`:
    run.engine_args, which override ours. `needs_tokenizer`: some outputs follow a grammar.
    `has_prefixes`: requests share blocks."""

    model_dir: Path
    dtype: str
    threads: int
    max_queries: int
    max_tokens: int
    kv_tokens: int
    kv_token_bytes: int
    tp_degree: int = 1
    device_kind: str = "cpu"
    is_random: bool = False
    most_tokens: int = MOST_TOKENS
    needs_tokenizer: bool = False
    has_prefixes: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def block_tokens(self) -> int:
        """Number of tokens in a KV block."""
        return block_tokens(self.arguments, self.device_kind)

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks: each request fills its last block in part, and vLLM takes one
        itself."""
        return self.kv_tokens // self.block_tokens + self.max_queries + 1

    @property
    def kv_bytes(self) -> int:
        """Bytes of one process's KV cache."""
        return self.num_blocks * self.block_tokens * -(-self.kv_token_bytes // self.tp_degree)


class Token(NamedTuple):
    """One request's next token. `is_finite`: its logits were finite. `is_end`: the request is full
    and gone. `likelihood`: where asked for."""

    value: int
    is_finite: bool = True
    is_end: bool = False
    likelihood: TokenLikelihood | None = None


def environment(settings: CoreSettings) -> dict[str, str]:
    """Environment variables that vLLM reads when it starts. They keep its scheduler in this process
    and the network unused, give each process cores of its own, and count logits that are not
    finite."""
    values = {**QUIET, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_COMPUTE_NANS_IN_LOGITS": "1"}
    if settings.tp_degree > 1:  # this process has threads, so a fork is unsafe
        values["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if settings.device_kind == "cpu":
        # its default binding reserves a core, and takes the others' hyperthreads
        values |= {"VLLM_CPU_OMP_THREADS_BIND": "|".join(_cores_of_each(settings)),
                   "VLLM_CPU_KVCACHE_SPACE": str(-(-settings.kv_bytes // _GIB))}
    return values


def _cores_of_each(settings: CoreSettings) -> list[str]:
    """Cores of each process in vLLM's notation; shared if there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    each = [[cores[(rank * settings.threads + thread) % len(cores)]
             for thread in range(min(settings.threads, len(cores)))]
            for rank in range(settings.tp_degree)]
    return [",".join(map(str, sorted(own))) for own in each]


class EngineCore:
    """One vLLM engine core: requests by name, and passes over the tokens wanted of each."""

    def __init__(self, settings: CoreSettings) -> None:
        """Loads the model. Raises XgptError with vLLM's reason if it cannot."""
        os.environ.update(environment(settings))
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.core import EngineCore as Core
        from vllm.v1.executor import Executor

        self._request, self._adapter = EngineCoreRequest, _adapter_of(settings)
        self._num_processes = settings.tp_degree
        self._tops: dict[str, int] = {}  # number of likeliest tokens that each request asks for
        self.max_pass = MOST_TOKENS
        try:
            config = EngineArgs(**self._arguments(settings)).create_engine_config()
            self.max_pass = config.scheduler_config.max_num_batched_tokens
            self._core = Core(config, Executor.get_class(config), log_stats=False)
            if settings.device_kind == "cpu":
                self._core.model_executor.collective_rpc(rewind_draws)
        except (ValueError, RuntimeError, NotImplementedError, AssertionError, OSError) as cause:
            raise XgptError(f"vLLM does not start: {cause}") from cause
        self.max_tokens = config.model_config.max_model_len

    def add(self, name: str, tokens: Sequence[int], sampling: Sampling, generated: int = 0,
            start: Start | None = None) -> None:
        """Adds a waiting request, which ends only by `end`. `generated`: how many of the last
        tokens are its own output, from before an eviction. `start`: the prefix that it begins
        with, and those that it writes."""
        request, _ = self._core.preprocess_add_request(self._request(
            request_id=name, prompt_token_ids=list(tokens), mm_features=None,
            sampling_params=parameters_of(sampling, len(tokens), self._core.vllm_config,
                                          self.max_tokens),
            pooling_params=None, arrival_time=time.time(), lora_request=self._adapter,
            cache_salt=None, data_parallel_rank=None))
        await_grammar(request)
        self._tops[name] = sampling.top_logprobs or 0
        form = request.structured_output_request
        if generated and form is not None:
            form.grammar.accept_tokens(name, list(tokens)[-generated:])
        self._core.add_request(request)
        if start is not None:
            self._core.scheduler.share(name, start)

    def end(self, names: Sequence[str]) -> None:
        """Removes requests that are done or evicted, and frees their blocks."""
        for name in names:
            self._tops.pop(name, None)  # a request that ended by itself is gone already
        if names:
            self._core.abort_requests(list(names))

    def release(self, nodes: Sequence[int]) -> None:
        """Gives up shared prefixes. Their blocks are free once no request has them."""
        if nodes:
            self._core.scheduler.release(nodes)

    def step(self, tokens: Mapping[str, int]) -> dict[str, Token]:
        """Executes one pass over so many tokens of each request. Returns the next token of each
        request whose input it ended. Raises XgptError if vLLM schedules anything else."""
        self._core.scheduler.want(tokens)
        outputs, _ = self._core.step()
        given = {one.request_id: Token(
            one.new_token_ids[0], not one.num_nans_in_logits, one.finish_reason is not None,
            _likelihood(one.new_logprobs, self._tops[one.request_id]))
            for client in outputs.values() for one in client.outputs if one.new_token_ids}
        for name, token in given.items():
            if token.is_end:
                del self._tops[name]
        return given

    def peak_memory_bytes(self) -> int:
        """Peak memory of all processes together, in bytes."""
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return own + (sum(self._core.model_executor.collective_rpc(_peak_bytes))
                      if self._num_processes > 1 else 0)

    def close(self) -> None:
        """Ends vLLM's processes and waits for them."""
        if self._num_processes > 1:
            self._core.shutdown()

    def _arguments(self, settings: CoreSettings) -> dict[str, Any]:
        """Arguments of vLLM's engine: ours, overridden by the user's."""
        return {"model": str(settings.model_dir), "dtype": settings.dtype, "seed": 0,
                "skip_tokenizer_init": not settings.needs_tokenizer, "trust_remote_code": False,
                "max_model_len": settings.max_tokens, "max_num_seqs": settings.max_queries,
                "max_num_batched_tokens": max(settings.most_tokens, settings.max_queries),
                "enable_prefix_caching": settings.has_prefixes,
                "prefix_caching_hash_algo": "sha256",
                "num_gpu_blocks_override": settings.num_blocks,
                "load_format": "dummy" if settings.is_random else "auto",
                "enforce_eager": settings.device_kind == "cpu", "disable_log_stats": True,
                "tensor_parallel_size": settings.tp_degree,
                "block_size": settings.block_tokens,
                # windowed layers keep all tokens, as planned: separate groups of layers would take
                # a block of each per request, and there are not that many
                "disable_hybrid_kv_cache_manager": True,
                **engine_arguments(settings.arguments),
                # the batching rule relies on these
                "scheduler_cls": SCHEDULER, "async_scheduling": False}


def _peak_bytes(worker: Any) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _adapter_of(settings: CoreSettings) -> Any:
    """The job's adapter, which every request names; None if there is none."""
    if LORA not in settings.arguments:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, str(settings.arguments[LORA]))


def _likelihood(logprobs: Any, top: int) -> TokenLikelihood | None:
    """Log-likelihoods of one token from vLLM's lists [1, 1 + likeliest], the chosen token first.
    The lists have as many likeliest tokens as any request of the pass asks for."""
    if logprobs is None:
        return None
    tokens, values = (part[0].tolist() for part in (logprobs.logprob_token_ids, logprobs.logprobs))
    return TokenLikelihood(values[0], (*zip(tokens[1:1 + top], values[1:1 + top], strict=True),))
