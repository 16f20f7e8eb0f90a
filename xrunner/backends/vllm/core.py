"""vLLM's engine core, in this process: loaded, fed and stepped as a rank asks (protocol.py). It
runs in the interpreter that has vLLM, and imports it when a core is made."""

import json
import os
import resource
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xgpt.core.errors import XgptError
from xrunner.backends.vllm.protocol import Added, Check, Load, Step, Token, passes
from xrunner.query import Sampling, TokenLikelihood

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


def prepare(worker: Any) -> None:
    """Lets this worker's requests draw by generators that can be reset. Makes the buffer of what a
    stage takes from the one before, which vLLM makes in a trial run that CPUs skip."""
    from vllm.distributed import get_pp_group

    runner = worker.model_runner
    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype,
            device=runner.device)
    batch = runner.input_batch
    add = batch.add_request

    def add_request(request: Any) -> Any:
        if request.generator is not None and not isinstance(request.generator, RewindingGenerator):
            seed = request.generator.initial_seed()
            request.generator = RewindingGenerator()
            request.generator.manual_seed(seed)
        return add(request)

    batch.add_request = add_request


SCHEDULER = "xrunner.backends.vllm.scheduler.StepScheduler"


def config_of(arguments: Mapping[str, Any]) -> Any:
    """vLLM's configuration. Raises XgptError with vLLM's reason if it takes no such arguments."""
    from vllm.engine.arg_utils import EngineArgs

    try:
        return EngineArgs(**arguments).create_engine_config()
    except (ValueError, RuntimeError, NotImplementedError, AssertionError, OSError) as cause:
        raise XgptError(f"vLLM does not start: {cause}") from cause


class Judge:
    """Finds requests that vLLM cannot answer before they run, so that others do not suffer. It
    tries their sampling parameters and compiles their grammars, without the model."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        from vllm.v1.structured_output import StructuredOutputManager

        self._config = config_of(arguments)
        self._manager = StructuredOutputManager(self._config)

    def reason(self, asked: Check) -> str | None:
        """Why vLLM cannot answer the request; None if it can."""
        from vllm.v1.request import Request

        try:
            parameters = parameters_of(asked.sampling, len(asked.tokens), self._config,
                                       asked.max_tokens)
            request = Request(request_id="asked", prompt_token_ids=list(asked.tokens),
                              sampling_params=parameters, pooling_params=None)
            self._manager.grammar_init(request)
            await_grammar(request)
        except Exception as cause:  # a grammar compiler raises any error
            return f"vLLM: {str(cause).strip() or type(cause).__name__}"
        return None


class EngineCore:
    """One vLLM engine core: requests by name, and passes over the tokens wanted of each."""

    def __init__(self, load: Load) -> None:
        """Loads the model. Raises XgptError with vLLM's reason if it cannot."""
        os.environ.update(load.environment)
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.core import EngineCore as Core
        from vllm.v1.executor import Executor

        self._request, self._adapter = EngineCoreRequest, _adapter_of(load.adapter)
        self._tops: dict[str, int] = {}  # number of likeliest tokens that each request asks for
        self._steps = deque[dict[str, Token]]()  # tokens so far of each step that has begun
        # passes under way: (tokens of the step, vLLM's schedule, its futures)
        self._passes = deque[tuple[dict[str, Token], Any, Any, Any]]()
        # the batching rule relies on these
        config = config_of({**load.arguments, "scheduler_cls": SCHEDULER,
                            "async_scheduling": False})
        self._num_processes = config.parallel_config.world_size
        try:
            self._core = Core(config, Executor.get_class(config), log_stats=False)
            if config.device_config.device_type == "cpu":
                self._core.model_executor.collective_rpc(prepare)
        except (ValueError, RuntimeError, NotImplementedError, AssertionError, OSError) as cause:
            raise XgptError(f"vLLM does not start: {cause}") from cause
        self.max_pass: int = config.scheduler_config.max_num_batched_tokens
        self.max_tokens: int = config.model_config.max_model_len

    def _add(self, new: Added) -> None:
        """Adds a waiting request, which ends only by `_end`."""
        name, tokens, sampling = new.name, list(new.tokens), new.sampling
        request, _ = self._core.preprocess_add_request(self._request(
            request_id=name, prompt_token_ids=tokens, mm_features=None,
            sampling_params=parameters_of(sampling, len(tokens), self._core.vllm_config,
                                          self.max_tokens),
            pooling_params=None, arrival_time=time.time(), lora_request=self._adapter,
            cache_salt=None, data_parallel_rank=None))
        await_grammar(request)
        self._tops[name] = sampling.top_logprobs or 0
        form = request.structured_output_request
        if new.generated and form is not None:
            form.grammar.accept_tokens(name, tokens[-new.generated:])
        self._core.add_request(request)
        if new.start is not None:
            self._core.scheduler.share(name, new.start)

    def _end(self, names: Sequence[str]) -> None:
        """Removes requests that are done or evicted, and frees their blocks."""
        for name in names:
            self._tops.pop(name, None)  # a request that ended by itself is gone already
        if names:
            self._core.abort_requests(list(names))

    def begin(self, step: Step) -> None:
        """Begins a step, in as few passes as vLLM allows, while others are under way in other
        stages. Raises XgptError if vLLM schedules anything else."""
        self._end(step.ended)
        if step.released:
            self._core.scheduler.release(step.released)
        for new in step.added:
            self._add(new)
        given = dict[str, Token]()
        self._steps.append(given)
        scheduler, executor = self._core.scheduler, self._core.model_executor
        for wanted in passes(step.wanted, self.max_pass):
            if len(self._passes) == self._core.batch_queue_size:  # one a stage
                self._end_pass()
            scheduler.want(wanted)
            output = scheduler.schedule()
            executed = executor.execute_model(output, non_block=True)
            self._passes.append((given, output, executed, executor.sample_tokens(
                scheduler.get_grammar_bitmask(output), non_block=True)))

    def finish(self) -> dict[str, Token]:
        """Ends the oldest step. Returns the next token of each request whose input it ended."""
        given = self._steps.popleft()
        while any(one[0] is given for one in self._passes):
            self._end_pass()
        return given

    def _end_pass(self) -> None:
        given, scheduled, executed, sampled = self._passes.popleft()
        executed.result()  # raises what went wrong
        outputs = self._core.scheduler.update_from_output(scheduled, sampled.result())
        given |= {one.request_id: Token(
            one.new_token_ids[0], not one.num_nans_in_logits, one.finish_reason is not None,
            _likelihood(one.new_logprobs, self._tops[one.request_id]))
            for client in outputs.values() for one in client.outputs if one.new_token_ids}
        for name, token in given.items():
            if token.is_end:
                self._tops.pop(name, None)

    def peak_memory_bytes(self) -> int:
        """Peak memory of all processes together, in bytes."""
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return own + (sum(self._core.model_executor.collective_rpc(_peak_bytes))
                      if self._num_processes > 1 else 0)

    def close(self) -> None:
        """Ends vLLM's processes and waits for them."""
        if self._num_processes > 1:
            self._core.shutdown()


def _peak_bytes(worker: Any) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _adapter_of(folder: str | None) -> Any:
    """The adapter that every request names; None if there is none."""
    if folder is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, folder)


def _likelihood(logprobs: Any, top: int) -> TokenLikelihood | None:
    """Log-likelihoods of one token from vLLM's lists [1, 1 + likeliest], the chosen token first.
    The lists have as many likeliest tokens as any request of the pass asks for."""
    if logprobs is None:
        return None
    tokens, values = (part[0].tolist() for part in (logprobs.logprob_token_ids, logprobs.logprobs))
    return TokenLikelihood(values[0], (*zip(tokens[1:1 + top], values[1:1 + top], strict=True),))
