"""How a query's tokens are chosen, in vLLM's words.

Imports vLLM where it is used, in whose interpreter this runs."""

import json
import time
from collections.abc import Mapping
from typing import Any

from xrunner.query import Sampling

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
