"""`python -m xrunner.rank.agreement OUT/run.json`: compares 8-bit products with the model's own
type. Both get the job's own inputs (teacher forcing) and choose the most likely token after each
position. OUT/agreement.json counts the positions where they agree."""

import json
import sys
from itertools import accumulate
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from xgpt.core.deployment import StageAssignment
from xgpt.core.errors import XgptError
from xgpt.core.model import ModelSpec
from xgpt.core.system.lifeline import end_with_launcher
from xgpt.core.system.whole_file import write_atomically
from xgpt.requests.spool import Spool
from xrunner.checkpoint.reader import open_weights
from xrunner.checkpoint.source import read_spec
from xrunner.engine.kv import KvCache, kv_shape
from xrunner.models.stage_model import StageModel
from xrunner.ops.contexts import encode_context, whole_inputs
from xrunner.plan import AGREEMENT_FILE, RunPlan, load_plan

MOST_TOKENS = 2048  # chosen


class Agreement(TypedDict):
    """Result of a comparison: `agreeing` of `positions`. `fingerprint`: the run's."""

    fingerprint: str
    inputs: int
    positions: int
    agreeing: int


def main(arguments: list[str]) -> int:
    """Writes OUT/agreement.json; returns the exit code."""
    plan = load_plan(Path(arguments[0]))
    torch.set_num_threads(plan.threads_per_rank)
    try:
        agreement = agreement_of(plan)
    except XgptError as error:
        print(f"xgpt: {error}", file=sys.stderr)
        return error.exit_code
    write_atomically(plan.output / AGREEMENT_FILE, json.dumps(agreement, indent=1) + "\n")
    return 0


def agreement_of(plan: RunPlan) -> Agreement:
    """Compares `plan.weight_dtype` with `plan.dtype` on the first inputs of the run's spool. As
    many as hold MOST_TOKENS together, at least one."""
    spool = Spool(plan.output)
    lengths = list(accumulate(len(spool.tokens(index)) for index in range(min(len(spool), 64))))
    count = max(sum(total <= MOST_TOKENS for total in lengths), min(len(lengths), 1))
    inputs = [list(spool.tokens(index)) for index in range(count)]
    spec = read_spec(plan.model_dir, plan.model_name)
    chosen = [_chosen(plan, spec, inputs, dtype) for dtype in (plan.dtype, plan.weight_dtype)]
    return Agreement(fingerprint=plan.fingerprint, inputs=count, positions=len(chosen[0]),
                     agreeing=int((chosen[0] == chosen[1]).sum()))


@torch.inference_mode()
def _chosen(plan: RunPlan, spec: ModelSpec, inputs: list[list[int]], weight_dtype: str) -> Tensor:
    """The most likely token after every token of every input, one input after the other, [T]."""
    whole = StageAssignment(index=0, ranks=(0,), num_layers=spec.num_layers, first_layer=0)
    dtype = getattr(torch, plan.dtype)
    reader = open_weights(plan.model_dir, dtype)
    model = StageModel(spec, reader, whole, dtype, weight_dtype=getattr(torch, weight_dtype))
    reader.close()
    chosen = []
    for tokens in inputs:
        cache = KvCache(kv_shape(spec, dtype, slots=1, capacity=len(tokens)))
        first = cache.allocate([len(tokens)])
        step = encode_context(whole_inputs([len(tokens)], first))
        hidden = model.encode(torch.tensor(tokens), cache.layers, step)
        chosen.append(model.scores(hidden).best(range(len(tokens))).tokens)
    return torch.cat(chosen) if chosen else torch.zeros(0, dtype=torch.long)


if __name__ == "__main__":
    end_with_launcher()
    sys.exit(main(sys.argv[1:]))
