"""What vLLM answers, in the interpreter that has it: `VLLM_PYTHON vllm_answers.py < ASKED.json`.

ASKED has `model` (a folder), `dtype`, `inputs` (lists of tokens) and `count` (tokens of each
answer). One engine core of ours answers them greedily, all at once; a line of JSON says the tokens
of each and their log-likelihoods."""

from __future__ import annotations

import json
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    sys.path.insert(0, str(_ROOT / "xrunner" / "engines"))
    import elsewhere

    del sys.path[0]
    sys.meta_path.insert(0, elsewhere._Ours())
    from xrunner.checkpoint.source import read_spec
    from xrunner.engines.vllm.core import CoreSettings, EngineCore
    from xrunner.query import Sampling

    asked = json.load(sys.stdin)
    model, inputs, count = Path(asked["model"]), asked["inputs"], asked["count"]
    spec, longest = read_spec(model, str(model)), max(map(len, inputs)) + count + 1
    core = EngineCore(CoreSettings(
        model_dir=model, dtype=asked["dtype"], threads=1, max_queries=len(inputs),
        max_tokens=longest, kv_tokens=len(inputs) * longest,
        kv_token_bytes=4 * spec.kv_elements_per_token_layer * spec.num_layers))
    names = [str(place) for place in range(len(inputs))]
    for name, tokens in zip(names, inputs, strict=True):
        core.add(name, tokens, Sampling(top_logprobs=0))
    wanted, given = {name: len(inputs[int(name)]) for name in names}, []
    for _ in range(count):
        given.append(core.step(wanted))
        wanted = dict.fromkeys(names, 1)
    print(json.dumps({"tokens": [[step[name].value for step in given] for name in names],
                      "logprobs": [[step[name].told[0] for step in given] for name in names]}))


if __name__ == "__main__":
    main()
