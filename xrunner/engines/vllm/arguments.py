"""`PYTHON -m xrunner.engines.vllm.arguments`: what the vLLM of this interpreter can be told, as one
line of JSON."""

import json
from dataclasses import MISSING, fields

import torch
from vllm.engine.arg_utils import EngineArgs

from xrunner.engines.vllm.tool_calls import known_parsers


def arguments() -> dict[str, str]:
    """name -> its type in words, of every argument of an engine."""
    return {one.name: str(one.type) for one in fields(EngineArgs)
            if one.default is not MISSING or one.default_factory is not MISSING}


if __name__ == "__main__":
    print(json.dumps({"torch": torch.__version__, "arguments": arguments(),
                      "tool_parsers": known_parsers()}))
