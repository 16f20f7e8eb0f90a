"""Which of a job's `run.engine_args` vLLM's engine takes, and which stand for something that its
engine is told otherwise: what finds calls of tools, and the adapter of all answers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOOL_PARSER = "tool_call_parser"  # of vLLM's server, not of its engine
LORA = "lora_path"  # the folder of an adapter, which every answer is given with
OWN = (TOOL_PARSER, LORA)
ADAPTER_CONFIG = "adapter_config.json"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM sets memory aside for


def engine_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a job's arguments that vLLM's engine takes, with what the adapter needs."""
    given = {name: value for name, value in arguments.items() if name not in OWN}
    if LORA not in arguments:
        return given
    rank = rank_of(Path(arguments[LORA]))
    room = next((size for size in _RANKS if size >= rank), rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room, **given}


def rank_of(folder: Path) -> int:
    """The rank of an adapter. Raises ValueError, saying what is wrong with the folder."""
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
