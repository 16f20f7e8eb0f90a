"""Finds tool calls in a model's output by one of vLLM's parsers, which the job names
(`run.engine_args: {tool_call_parser: hermes}`).

`PYTHON -m xrunner.backends.vllm.tool_calls` prints vLLM's arguments and parsers as a line of JSON.
Imports vLLM where it is used, in the interpreter that has it."""

import json
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any


def known_parsers() -> list[str]:
    """Names of vLLM's tool-call parsers."""
    from vllm.tool_parsers import ToolParserManager

    return sorted(ToolParserManager.list_registered())


class ToolCallFinder:
    """Finds the calls in answers to chats with tools."""

    def __init__(self, parser: str, model_dir: Path) -> None:
        from vllm.tokenizers import get_tokenizer
        from vllm.tool_parsers import ToolParserManager

        self._parser = ToolParserManager.get_tool_parser(parser)
        self._tokenizer: Any = get_tokenizer(str(model_dir), trust_remote_code=False)
        self._ends = {self._tokenizer.eos_token_id}

    def __call__(self, tools: str,
                 output_ids: Sequence[int]) -> tuple[str, list[tuple[str, str]]] | None:
        """(the rest of the text, (name, arguments) of each call) of an output; None without any.
        `tools`: of the chat, as JSON."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest(model="", messages=[], tools=json.loads(tools))
        parser, ids = self._parser(self._tokenizer, request.tools), list(output_ids)
        if ids and ids[-1] in self._ends:
            ids.pop()
        # some models mark calls by special tokens, which plain text leaves out
        found = parser.extract_tool_calls(
            self._tokenizer.decode(ids, skip_special_tokens=False), request)
        if not found.tools_called:
            return None
        return found.content or "", [(call.function.name, call.function.arguments)
                                     for call in found.tool_calls]


def arguments() -> dict[str, str]:
    """Types in words, by name, of all arguments of vLLM's engine."""
    from vllm.engine.arg_utils import EngineArgs

    return {one.name: str(one.type) for one in fields(EngineArgs)
            if one.default is not MISSING or one.default_factory is not MISSING}


if __name__ == "__main__":
    import torch

    print(json.dumps({"torch": torch.__version__, "arguments": arguments(),
                      "tool_parsers": known_parsers()}))
