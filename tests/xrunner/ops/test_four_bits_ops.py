"""Tensors in 4 bits: the quantiser's bounds by its formula in float64, every implementation equal
to torch's to the bit, and a real model."""

import json
from pathlib import Path

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from implementations import IMPLEMENTATIONS, num_threads
from torch import Tensor

from xgpt.core import placement
from xgpt.core.errors import XgptError
from xrunner.checkpoint.source import find_model
from xrunner.files.tokenizer import TextTokenizer
from xrunner.ops.cpu import native
from xrunner.ops.four_bits import GROUP, pack, packed_bytes, unpack

# no CUDA source has these: torch's operations serve a GPU
HERE = [each for each in IMPLEMENTATIONS if each.name != "cuda-source"]
every_implementation = pytest.mark.parametrize("implementation", HERE, ids=str)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MILLION = 10**6
PROMPTS = Path(__file__).resolve().parents[3] / "jobs" / "prompts" / "quickstart.jsonl"


def restored(tensor: Tensor, dim: int = -1, bits: int = 4,
             dtype: torch.dtype = torch.float32) -> Tensor:
    return unpack(pack(tensor, dim, bits=bits), torch.empty_like(tensor, dtype=dtype), dim)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("factor", "offset"), [(1.0, 0.0), (1e-3, 0.0), (1e3, 0.0), (1.0, 12.0)])
def test_no_value_is_further_off_than_half_a_step(implementation, dtype, factor, offset):
    """(max - min) / 30 of its group, which the largest error all but reaches."""
    x = (normal(MILLION // GROUP + 1, GROUP) * factor + offset).to(dtype).to(implementation.device)
    with implementation.using():
        off = (restored(x).double() - x.double()).abs().amax(1)
    wide = x.double()
    bound = (wide.amax(1) - wide.amin(1)) / 30
    slack = wide.abs().amax() * 2**-24  # float32 rounds what is unpacked
    assert (off <= bound + slack).all()
    assert (off / bound).max() > 0.999


@pytest.mark.parametrize(("factor", "offset", "dtype"), [
    *((factor, 0.0, torch.bfloat16) for factor in (1e-36, 1e-9, 1e9, 1e36)),
    (3.0, -200.0, torch.bfloat16), (0.3, 500.0, torch.float16)])
def test_the_bound_holds_far_beyond_float16_and_for_values_that_are_near(factor, offset, dtype):
    x = (normal(1000, GROUP) * factor + offset).to(dtype)
    wide = x.double()
    bound = (wide.amax(1) - wide.amin(1)) / 30
    assert ((restored(x).double() - wide).abs().amax(1) <= bound * (1 + 1e-6)).all()


@every_implementation
def test_normal_values_lose_nine_percent(implementation):
    x = normal(MILLION // GROUP + 1, GROUP).to(implementation.device)
    with implementation.using():
        error = (restored(x) - x).square().mean().sqrt() / x.square().mean().sqrt()
    assert error.item() == pytest.approx(0.090, abs=0.003)


@pytest.mark.parametrize(("shape", "dim", "bits"), [
    ((64, 192), -1, 4.5), ((128, 5), 0, 4.5), ((3, 64, 7), 1, 4.5), ((2, 96), -1, 6.0),
    ((1, 1), 0, 36 * 8)])
def test_an_element_takes_so_many_bits(shape, dim, bits):
    x = normal(*shape)
    assert packed_bytes(shape, dim) * 8 == bits * x.numel()
    assert pack(x, dim).shape == (packed_bytes(shape, dim),)


def test_the_planner_counts_the_same_groups():
    assert placement.GROUP == GROUP


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_values_are_exact(implementation, dtype):
    """All that a 16-bit type has, in float32 too."""
    kept = torch.bfloat16 if dtype == torch.float32 else dtype
    values = torch.arange(-2**15, 2**15).to(torch.int16).view(kept).to(dtype)
    values = values[values.isfinite()].to(implementation.device)
    for x, dim in ((values[:, None].expand(-1, 70).contiguous(), -1),
                   (values.expand(70, -1).contiguous(), 0)):
        with implementation.using():
            assert torch.equal(restored(x, dim, dtype=dtype), x)


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("strange", [float("inf"), float("-inf"), float("nan")])
def test_a_group_that_is_not_finite_is_unpacked_as_nan(implementation, dtype, dim, strange):
    x = normal(140, 140, dtype=dtype).to(implementation.device)
    x[70, 33] = strange
    with implementation.using():
        got = restored(x, dim, dtype=dtype)
    expected = torch.zeros(140, 140, dtype=torch.bool)
    if dim == 0:
        expected[64:128, 33] = True
    else:
        expected[70, :64] = True
    assert torch.equal(got.isnan().cpu(), expected)


@pytest.mark.skipif(native.library() is None, reason=native.describe())
@every_implementation
@examples(100)
@given(shape=st.lists(st.sampled_from([0, 1, 2, 5, 16, 31, 33, 64, 65, 96, 130, 200]), min_size=1,
                      max_size=3),
       at=st.integers(0, 2), kind=st.sampled_from(["normal", "near", "equal", "wild", "zeros"]),
       dtype=st.sampled_from(DTYPES), target=st.sampled_from(DTYPES), bits=st.sampled_from([4, 2]),
       threads=st.integers(1, 4))
def test_every_implementation_equals_torch_to_the_bit(implementation, shape, at, kind, dtype,
                                                      target, bits, threads):
    x, dim = normal(*shape), at % len(shape)
    if kind == "wild":  # every exponent, infinities and NaN among them
        x = torch.randint(-2**31, 2**31, shape, dtype=torch.int64).to(torch.int32).view(
            torch.float32)
    x = {"near": x * 1e-3 + 300, "equal": x[..., :1].expand(shape), "zeros": x * 0.0}.get(kind, x)
    x = x.to(dtype)
    with native.torch_only():
        expected = pack(x, dim, bits=bits)
        values = unpack(expected, torch.empty(shape, dtype=target), dim)
    with implementation.using(), num_threads(threads):
        packed = pack(x.to(implementation.device), dim, bits=bits)
        got = unpack(packed, torch.empty(shape, dtype=target, device=implementation.device), dim)
    assert torch.equal(packed.cpu(), expected)
    as_bits = torch.int32 if target == torch.float32 else torch.int16
    kept = [torch.where(each.isnan(), torch.nan, each).view(as_bits)  # NaN have many forms
            for each in (got.cpu(), values)]
    assert torch.equal(*kept)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.int8, 4), (torch.float32, 5)])
def test_what_cannot_be_packed_is_refused(dtype, bits):
    with pytest.raises(ValueError, match=f"{dtype} in {bits} bits: 1 to 4 bits can be packed of"):
        pack(torch.zeros(4, dtype=dtype), bits=bits)


BYTES = torch.zeros(73, dtype=torch.uint8)


@pytest.mark.parametrize(("packed", "out"), [
    (BYTES[:71], torch.zeros(65)), (torch.zeros(72), torch.zeros(65)), (
        BYTES[1:], torch.zeros(65)), (BYTES[:72], torch.zeros(65, 2)[:, 0]),
    (BYTES[:72], torch.zeros(65, dtype=torch.int32))])
def test_what_cannot_be_unpacked_is_refused(packed, out):
    with pytest.raises(ValueError, match=r"72 bytes at an even address .* a contiguous tensor of"):
        unpack(packed, out)


@pytest.mark.slow  # no toy has a perplexity; bounds of its weights' errors: above
def test_a_model_keeps_its_perplexity_in_four_bits_and_breaks_in_two():
    from transformers import AutoModelForCausalLM

    try:
        directory = find_model("smollm2-135m", say=lambda message: None).directory
    except XgptError as cause:
        pytest.skip(f"the model is not to be had here: {cause}")
    text = "\n\n".join(json.loads(line)["prompt"]
                       for line in PROMPTS.read_text("utf-8").splitlines())
    (ids,) = TextTokenizer(directory).encode_many([text], special=False)
    tokens, found = torch.tensor([ids[:512]]), {}
    for bits in (16, 4, 2):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
        for layer in model.model.layers.modules():
            if isinstance(layer, torch.nn.Linear) and bits < 16:
                weight = layer.weight.data
                unpack(pack(weight, bits=bits), weight)
        with torch.inference_mode():
            logits = model(tokens).logits[0, :-1].float()
        found[bits] = torch.nn.functional.cross_entropy(logits, tokens[0, 1:]).exp().item()
    assert found[16] < 40
    assert found[4] < 1.6 * found[16] and found[2] > 1000 * found[16], found
