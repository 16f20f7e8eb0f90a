"""vLLM's engine core, in this process: started with what a schedule needs, fed and stepped.

Imports vLLM when it starts one, in whose interpreter this runs."""

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
from xrunner.backends.vllm.row import LORA, QUIET, engine_arguments
from xrunner.query import Sampling, TokenLikelihood

_LOOK_S = 0.001  # between looks whether a form is compiled


def parameters_of(sampling: Sampling, num_tokens: int, config: Any, max_tokens: int) -> Any:
    """vLLM's SamplingParams of a query that has so many tokens, its own output included, by an
    engine's `config`. Raises ValueError where vLLM does not sample so."""
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
    # what is barred before so many tokens, and may end a form; vLLM does not stop by these, as it
    # would by `stop_token_ids`
    parameters._all_stop_token_ids = {*sampling.barred}
    if sampling.passed:
        parameters.verify(config.model_config, config.speculative_config,
                          config.structured_outputs_config, tokenizer_of(config))
    return parameters


def tokenizer_of(config: Any) -> Any:
    """vLLM's own, which compiles forms; None where no query needs it."""
    from vllm.tokenizers import cached_tokenizer_from_config

    model = config.model_config
    return None if model.skip_tokenizer_init else cached_tokenizer_from_config(model)


def await_form(request: Any) -> None:
    """Returns when the form of a vLLM request's output, if it has one, is compiled: the batching
    rule counts on it in the very next step. Raises whatever its compiler did."""
    form = request.structured_output_request
    if form is None:
        return
    while not form.is_grammar_ready:
        time.sleep(_LOOK_S)
    if isinstance(form.grammar, Exception):
        raise form.grammar


def _passed(passed: Mapping[str, Any]) -> dict[str, Any]:
    """A request's own parameters, as vLLM's types have them."""
    from vllm.sampling_params import StructuredOutputsParams

    given = dict(passed)
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    return given


class FromTheStart(torch.Generator):
    """A CPU generator that goes back, by whatever offset it is told, to its seed. vLLM draws after
    each chunk of an input, gives all but the last draw up and sets the generator back, which CPU
    generators cannot do; nothing that was drawn counts until the input is encoded."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        """Draws again what it drew first."""
        return self.manual_seed(self.initial_seed())


def rewind_draws(worker: Any) -> None:
    """Has this worker's requests draw by generators that can be set back."""
    batch = worker.model_runner.input_batch
    add = batch.add_request

    def add_request(request: Any) -> Any:
        if request.generator is not None and not isinstance(request.generator, FromTheStart):
            seed = request.generator.initial_seed()
            request.generator = FromTheStart()
            request.generator.manual_seed(seed)
        return add(request)

    batch.add_request = add_request


SCHEDULER = "xrunner.backends.vllm.scheduler.StepScheduler"
# Tokens of one pass at most: a step of more goes through the model in several. vLLM tries its
# largest pass when it starts, and keeps memory for it.
MOST_TOKENS = 4096
PREFIX = "filled-"  # of requests whose inputs count as encoded already (filled.py)
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """What one engine core is started with. `tp_degree`: processes that divide each layer, of
    `threads` each; `max_tokens`: positions of the longest query; `kv_tokens`: that all queries
    together hold at most, of so many bytes each in all processes; `most_tokens`: of one pass.
    `is_random`: weights of the model's shape. `arguments`: vLLM's own (run.engine_args), which win.
    `needs_tokenizer`: some outputs are held to a form."""

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
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def block_tokens(self) -> int:
        """Tokens of a KV block: vLLM's own choice on CPUs and on GPUs."""
        return int(self.arguments.get("block_size") or (
            128 if self.device_kind == "cpu" else 16))

    @property
    def num_blocks(self) -> int:
        """Every query's last block is filled in part; one block is vLLM's own."""
        return self.kv_tokens // self.block_tokens + self.max_queries + 1

    @property
    def kv_bytes(self) -> int:
        """Of one process's cache."""
        return self.num_blocks * self.block_tokens * -(-self.kv_token_bytes // self.tp_degree)


class Token(NamedTuple):
    """What a pass gave one request: its next token. `is_finite`: its logits were numbers.
    `is_end`: the request has all the tokens it can hold, and is gone. `likelihood`: where it is
    asked for."""

    value: int
    is_finite: bool = True
    is_end: bool = False
    likelihood: TokenLikelihood | None = None


def environment(settings: CoreSettings) -> dict[str, str]:
    """What vLLM reads when it starts: its scheduler in this process, threads of their own on cores
    of this process for each that computes, no use of the network, and a count of logits that are
    no numbers."""
    values = {**QUIET, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_COMPUTE_NANS_IN_LOGITS": "1"}
    if settings.tp_degree > 1:  # this process has threads already, with which no fork goes well
        values["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if settings.device_kind == "cpu":
        # its default binding reserves a core, and takes the others' hyperthreads
        values |= {"VLLM_CPU_OMP_THREADS_BIND": "|".join(_cores_of_each(settings)),
                   "VLLM_CPU_KVCACHE_SPACE": str(-(-settings.kv_bytes // _GIB))}
    return values


def _cores_of_each(settings: CoreSettings) -> list[str]:
    """The cores of each process, as vLLM reads them. Where there are too few they share them."""
    cores = sorted(os.sched_getaffinity(0))
    each = [[cores[(rank * settings.threads + thread) % len(cores)]
             for thread in range(min(settings.threads, len(cores)))]
            for rank in range(settings.tp_degree)]
    return [",".join(map(str, sorted(own))) for own in each]


class EngineCore:
    """One vLLM engine core: requests by name, passes by the tokens wanted of each."""

    def __init__(self, settings: CoreSettings) -> None:
        """Loads the model. Raises XgptError with vLLM's reason where it does not."""
        os.environ.update(environment(settings))
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.core import EngineCore as Core
        from vllm.v1.executor import Executor

        self._request, self._adapter = EngineCoreRequest, _adapter_of(settings)
        self._num_processes = settings.tp_degree
        self._tops: dict[str, int] = {}  # likeliest tokens that each request asks for
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

    def add(self, name: str, tokens: Sequence[int], sampling: Sampling, generated: int = 0) -> None:
        """A request that waits from now on; it ends when it is told to, and not before. The last
        `generated` tokens are output of its own, from before it was evicted."""
        request, _ = self._core.preprocess_add_request(self._request(
            request_id=name, prompt_token_ids=list(tokens), mm_features=None,
            sampling_params=parameters_of(sampling, len(tokens), self._core.vllm_config,
                                          self.max_tokens),
            pooling_params=None, arrival_time=time.time(), lora_request=self._adapter,
            cache_salt=None, data_parallel_rank=None))
        await_form(request)
        self._tops[name] = sampling.top_logprobs or 0
        form = request.structured_output_request
        if generated and form is not None:
            form.grammar.accept_tokens(name, list(tokens)[-generated:])
        self._core.add_request(request)

    def end(self, names: Sequence[str]) -> None:
        """These requests are done, or evicted: their blocks are free."""
        for name in names:
            self._tops.pop(name, None)  # of one that ended by itself it is gone already
        if names:
            self._core.abort_requests(list(names))

    def step(self, tokens: Mapping[str, int]) -> dict[str, Token]:
        """One pass, of so many tokens of each request: the next token of each whose input it
        ended. Raises XgptError where vLLM does anything else."""
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
        """Of all processes together."""
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return own + (sum(self._core.model_executor.collective_rpc(_peak_bytes))
                      if self._num_processes > 1 else 0)

    def close(self) -> None:
        """Ends the processes that vLLM has started, and waits for them: what they used is ours."""
        if self._num_processes > 1:
            self._core.shutdown()

    def _arguments(self, settings: CoreSettings) -> dict[str, Any]:
        """vLLM's arguments: ours beneath the user's."""
        return {"model": str(settings.model_dir), "dtype": settings.dtype, "seed": 0,
                "skip_tokenizer_init": not settings.needs_tokenizer, "trust_remote_code": False,
                "max_model_len": settings.max_tokens, "max_num_seqs": settings.max_queries,
                "max_num_batched_tokens": max(settings.most_tokens, settings.max_queries),
                "enable_prefix_caching": False, "num_gpu_blocks_override": settings.num_blocks,
                "load_format": "dummy" if settings.is_random else "auto",
                "enforce_eager": settings.device_kind == "cpu", "disable_log_stats": True,
                "tensor_parallel_size": settings.tp_degree,
                "block_size": settings.block_tokens,
                # layers with a window keep all tokens, as is planned: with groups of layers of
                # their own a query would need a block of each, and there are not so many
                "disable_hybrid_kv_cache_manager": True,
                **engine_arguments(settings.arguments),
                # what the batching rule relies on
                "scheduler_cls": SCHEDULER, "async_scheduling": False}


def _peak_bytes(worker: Any) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _adapter_of(settings: CoreSettings) -> Any:
    """What every request names: the job's adapter, or none."""
    if LORA not in settings.arguments:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, str(settings.arguments[LORA]))


def _likelihood(logprobs: Any, top: int) -> TokenLikelihood | None:
    """Of vLLM's lists for one token, [1, 1 + likeliest], the chosen token first; there are as many
    likeliest as any request of the pass asks for."""
    if logprobs is None:
        return None
    tokens, values = (part[0].tolist() for part in (logprobs.logprob_token_ids, logprobs.logprobs))
    return TokenLikelihood(values[0], (*zip(tokens[1:1 + top], values[1:1 + top], strict=True),))
