"""One configuration of a static batch, and what the steps of many hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray, Lengths
from xsimulator.occupancy import expected_maximum_z


def _parts_of(values: Mapping[str, int | None]) -> int | None:
    """The encode steps of each decode group, where steps are a variable (DSI)."""
    steps, groups = values.get("encode_micro_batches"), values.get("decode_micro_batches")
    return max(steps // groups, 1) if steps and groups else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticConfig:
    """One point of the space; each decode group has `encode_parts` encode steps. None stands for
    one, and says that it is no variable (FT)."""

    encode_batch: int
    decode_micro_batches: int
    encode_parts: int | None = field(default=None, metadata={"derived": _parts_of})
    tp_degree: int = 1
    tp_gpus: int = 0


class StaticSteps(NamedTuple):
    """The steps of batches [configs] have these sizes."""

    batch: FloatArray
    groups: FloatArray  # decode groups that are not empty
    encodes: FloatArray  # encode steps that are not empty
    parts: FloatArray  # of the first group
    encode_queries: FloatArray  # of an encode step, in the mean
    tokens: FloatArray  # of an encode step, in the mean
    most_tokens: FloatArray  # of the largest
    rows: FloatArray  # of a decode step, in the mean
    most_rows: FloatArray  # of the largest


def static_steps(configs: Sequence[StaticConfig], inputs: Lengths) -> StaticSteps:
    """The batches' queries have inputs of these lengths."""
    batch = np.array([c.encode_batch for c in configs], float)
    groups = np.minimum([c.decode_micro_batches for c in configs], batch)
    parts = np.minimum([c.encode_parts or 1 for c in configs], np.ceil(batch / groups))
    encodes = np.minimum(groups * parts, batch)
    queries = batch / encodes
    odd = queries - np.floor(queries)  # that share of the steps encodes one query more
    tokens = queries * inputs.mean
    spread = np.sqrt(queries * inputs.std**2 + odd * (1 - odd) * inputs.mean**2)
    most = np.minimum(tokens + expected_maximum_z(encodes) * spread, np.ceil(queries) * inputs.max)
    rows = batch / groups
    return StaticSteps(batch, groups, encodes, parts, queries, tokens, most, rows, np.ceil(rows))
