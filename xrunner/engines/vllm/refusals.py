"""Which queries ask vLLM for what it does not do: said before a run, for one of them must not cost
the others.

Imports vLLM where it is used, in whose interpreter this runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from xgpt.requests.chat import has_form
from xrunner.engines.vllm.given import engine_arguments
from xrunner.engines.vllm.sampling import await_form, parameters_of
from xrunner.io.tokenizer import TextTokenizer
from xrunner.plan import RunPlan
from xrunner.query import PreparedQuery


class Refusals:
    """Which queries vLLM cannot answer. Most jobs ask for nothing that it might not: none of vLLM
    is loaded for them."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan, self._judge = plan, cast("Judge | None", None)
        self.are_forms = False  # whether some outputs are held to a form

    def of(self, query: PreparedQuery) -> str | None:
        """Why vLLM does not answer it; None where it does."""
        if not query.sampling.passed:
            return None
        is_form = has_form(query.sampling.passed)
        if is_form and not TextTokenizer(self._plan.model_dir).is_there:
            return "the model's folder has no tokenizer, by which vLLM holds an output to a form"
        if self._judge is None:
            self._judge = Judge(self._plan.model_dir, self._plan.dtype,
                                self._plan.engine_args)
        why = self._judge.refusal(query)
        self.are_forms |= is_form and why is None
        return why


class Judge:
    """Tries queries' sampling parameters, and compiles the forms of their outputs, by a
    configuration of vLLM's own and without its model."""

    def __init__(self, model_dir: Path, dtype: str, arguments: Mapping[str, Any]) -> None:
        """`arguments`: the job's own, of vLLM's engine. vLLM's environment is set up."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.structured_output import StructuredOutputManager

        self._config = EngineArgs(**{
            "model": str(model_dir), "dtype": dtype, "trust_remote_code": False,
            "skip_tokenizer_init": not (model_dir / "tokenizer_config.json").is_file(),
            **engine_arguments(arguments)}).create_engine_config()
        self._manager = StructuredOutputManager(self._config)

    def refusal(self, query: PreparedQuery) -> str | None:
        """Why vLLM does not answer it; None where it does."""
        from vllm.v1.request import Request

        sampling, inputs = query.sampling, list(query.input_ids)
        try:
            parameters = parameters_of(sampling, len(inputs), self._config, query.max_new_tokens)
            if has_form(sampling.passed):
                request = Request(request_id=query.id, prompt_token_ids=inputs,
                                  sampling_params=parameters, pooling_params=None)
                self._manager.grammar_init(request)
                await_form(request)
        except Exception as cause:  # of what compiles a form, which raises as it likes
            return f"vLLM: {str(cause).strip() or type(cause).__name__}"
        return None
