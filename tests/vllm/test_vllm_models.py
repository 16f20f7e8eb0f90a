"""Which models and which stored weights vLLM executes through our engine core: toys of each family
of config in float32 against transformers, and weights of fewer bits against the same, widened."""

import copy
from typing import Any, NamedTuple

import pytest
import quantised_toys
import torch
import toys

from xgpt.core.errors import XgptError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
Answers = tuple[list[list[int]], list[list[float]]]  # tokens, and their log-likelihoods
INPUTS = [[(7 * i) % 90 + 6 for i in range(20)], [11, 12, 13, 14], [60] * 9]
COUNT, NEAR_TIE = 24, 1e-3
# of heads and columns that vLLM's CPU kernels take
SHAPE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32}
# LongRoPE has a factor for each pair of a head's elements that turn
OWN_SHAPES = {"phi4-mini": {"rope_parameters": {
    **toys.MODERN_FAMILIES["phi4-mini"][1]["rope_parameters"],
    "short_factor": [1.0 + 0.02 * i for i in range(12)],
    "long_factor": [1.5 + 0.1 * i for i in range(12)]}}}
REFUSED = "qwen2-windows"  # a window in some layers of Qwen2


class Compared(NamedTuple):
    """How far log-likelihoods of the chosen tokens lie apart at most, and at how many positions
    another token was chosen though the two best were further apart than a near-tie."""

    apart: float
    wrong: int


def compared(reference: Any, answers: Answers) -> Compared:
    """transformers is shown each answer, and says what it finds likeliest at each position."""
    apart, wrong = 0.0, 0
    for inputs, tokens, logprobs in zip(INPUTS, *answers, strict=True):
        assert len(tokens) == COUNT
        with torch.no_grad():
            logits = reference(torch.tensor([inputs + tokens])).logits[0, len(inputs) - 1:-1]
        own = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        apart = max(apart, float((own - torch.tensor(logprobs)).abs().max()))
        best = logits.topk(2)
        is_clear = best.values[:, 0] - best.values[:, 1] > NEAR_TIE
        wrong += int((is_clear & (best.indices[:, 0] != torch.tensor(tokens))).sum())
    return Compared(apart, wrong)


def off_by_rounding(reference: Any, answers: Answers) -> float:
    """How far apart the log-likelihoods of these tokens are in bfloat16 and in float32, by
    transformers alone."""
    rounded, apart = copy.deepcopy(reference).to(torch.bfloat16), 0.0
    for inputs, tokens in zip(INPUTS, answers[0], strict=True):
        ids = torch.tensor([inputs + tokens])
        with torch.no_grad():
            own = [model(ids).logits[0, len(inputs) - 1:-1].float().log_softmax(-1).gather(
                1, torch.tensor(tokens)[:, None]) for model in (reference, rounded)]
        apart = max(apart, float((own[0] - own[1]).abs().max()))
    return apart


@pytest.mark.parametrize("variant", ["w4a16", "awq", pytest.param(
    "gptq-4-symmetric", marks=pytest.mark.slow)])
def test_weights_of_four_bits_are_executed_as_stored(tmp_path, asked, variant, monkeypatch):
    """Through products that unpack the weights as they go, in bfloat16: as far from the widened
    weights in float32 as bfloat16 alone is. A wrong scale or order of values is far off."""
    for name, columns in (("HIDDEN", 128), ("INNER", 256)):  # kernels take multiples of 32
        monkeypatch.setattr(quantised_toys, name, columns)
    monkeypatch.setitem(quantised_toys.VARIANTS, "gptq-4-symmetric", quantised_toys.Variant(
        {**quantised_toys.GPTQ, "bits": 4, "group_size": 32, "sym": True},
        quantised_toys.gptq(4, 32, is_symmetric=True)))
    model = quantised_toys.make_quantised(variant, tmp_path)
    answers = asked.tokens(tmp_path, "bfloat16", INPUTS, COUNT)
    apart = compared(model, answers).apart
    assert apart <= 2.5 * off_by_rounding(model, answers)


@pytest.mark.parametrize("family", [
    pytest.param(name, marks=() if name == "gemma3" else pytest.mark.slow)
    for name in (*toys.MODERN_FAMILIES, "opt", "gpt2") if name != REFUSED])
def test_a_family_is_executed_exactly(tmp_path, asked, family):
    model = (toys.make_model(family, tmp_path, heads=4, head_dim=32) if family in ("opt", "gpt2")
             else toys.make_modern(family, tmp_path, **SHAPE, **OWN_SHAPES.get(family, {})))
    found = compared(model, asked.tokens(tmp_path, "float32", INPUTS, COUNT))
    assert found.wrong == 0 and found.apart < 1e-3


@pytest.mark.slow
def test_what_vllm_refuses_is_passed_on(tmp_path, asked):
    toys.make_modern(REFUSED, tmp_path, **SHAPE)
    with pytest.raises(XgptError, match="vLLM does not start: Sliding window"):
        asked.tokens(tmp_path, "float32", INPUTS, COUNT)
