"""Tensor-parallel shards: run in lockstep, they compute what the whole layers compute. A mixture of
experts gives each row what its experts give it."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor
from toy_runs import Lockstep, split_stages
from toy_stages import shape
from toys import logits_of

from xgpt.core.errors import XgptError
from xgpt.core.model import (
    Decoder,
    Experts,  # noqa: E402
    ModelSpec,
    refuse_tp_degree,
)
from xprofiler.points import Needs
from xrunner.engine.kv import KvCache, kv_shape
from xrunner.models import stage_model
from xrunner.models import weights as weights_module
from xrunner.models.decoder import GatedMlp, Mixture  # noqa: E402
from xrunner.models.stage_model import StageModel
from xrunner.models.weights import WHOLE, RandomWeights, Shard, TensorPart
from xrunner.ops.contexts import DecodeContext, decode_context, encode_context, whole_inputs
from xrunner.ops.linear import Product  # noqa: E402
from xrunner.rules.slots import Span

# 97 tokens are divided evenly neither by 2 nor by 3; the products are as wide as the residual
OWN = {"num_layers": 2, "num_heads": 12}
SHAPE = shape(**OWN, num_kv_heads=6, tied_embeddings=False)
SPECS = {"llama": SHAPE, "llama-tied": shape(**OWN, num_kv_heads=6),
         "qwen2": shape(**OWN, num_kv_heads=6, tied_embeddings=False, has_qkv_bias=True),
         "opt": shape("opt", **OWN), "gpt2": shape("gpt2", **OWN)}
LENGTHS, CAPACITY, DECODES = [5, 1, 9], 16, 3


def run_stage(spec: ModelSpec, shard: Shard) -> dict[str, Tensor]:
    """One encode and a few decodes of fixed tokens: hidden states, logits, and the cache."""
    stage = split_stages(spec.num_layers, 1)[0]
    model = StageModel(spec, RandomWeights(torch.float32, scale=0.3), stage, torch.float32, shard)
    cache = KvCache(kv_shape(spec, torch.float32, slots=len(LENGTHS), capacity=CAPACITY,
                             kv_heads=model.kv_heads))
    cache.allocate(LENGTHS)
    tokens = torch.arange(sum(LENGTHS)) * 7 % spec.vocab_size
    with torch.inference_mode():
        hidden = [model.encode(tokens, cache.store, encode_context(whole_inputs(LENGTHS)))]
        for step in range(DECODES):
            context = decode_context([length + 1 for length in cache.lengths])
            hidden.append(model.decode(torch.tensor([3, 50, 96]) - step, cache.store, context))
            for slot in range(len(LENGTHS)):
                cache.grow(slot)
        return {"hidden": torch.cat(hidden), "logits": logits_of(model, hidden[-1]),
                "cache": cache.store}


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("family", SPECS)
def test_shards_in_lockstep_equal_the_whole_stage(family, degree):
    spec = SPECS[family]
    torch.set_num_threads(1)
    whole = run_stage(spec, WHOLE)
    shards = Lockstep(degree).run(lambda shard: run_stage(spec, shard))
    for shard in shards:  # every rank ends with the same hidden state
        torch.testing.assert_close(shard["hidden"], whole["hidden"], rtol=1e-4, atol=1e-4)
    logits = torch.cat([s["logits"] for s in shards], dim=1)
    torch.testing.assert_close(logits, whole["logits"], rtol=1e-4, atol=1e-3)
    assert [s["logits"].shape[1] for s in shards] == {2: [49, 48], 3: [33, 33, 31]}[degree]
    cache = torch.cat([s["cache"] for s in shards], dim=3)
    torch.testing.assert_close(cache, whole["cache"], rtol=1e-4, atol=1e-4)
    assert whole["hidden"].std() > 1  # else the residual would hide a wrong product


@pytest.mark.parametrize(("degree", "kv_heads", "family"), [
    (4, 2, {}), (6, 2, {"has_qkv_bias": True}), (3, 1, {"decoder": Decoder(qk_norm="head")}),
    (4, 2, {"decoder": Decoder(qk_norm="all")}), (4, 1, {"decoder": Decoder(is_fused=True)})])
def test_copied_heads_in_lockstep_equal_the_whole_stage(degree, kv_heads, family):
    spec = replace(SHAPE, num_kv_heads=kv_heads, **family)
    torch.set_num_threads(1)
    whole = run_stage(spec, WHOLE)
    copies = degree // kv_heads
    for rank, shard in enumerate(Lockstep(degree).run(lambda shard: run_stage(spec, shard))):
        torch.testing.assert_close(shard["hidden"], whole["hidden"], rtol=1e-4, atol=1e-4)
        head = rank // copies
        torch.testing.assert_close(shard["cache"], whole["cache"][:, :, :, head:head + 1],
                                   rtol=1e-4, atol=1e-4)


def test_ranks_with_a_copied_head_hold_the_same_projections():
    """12 heads of 4 elements, 2 of keys, over 6 ranks: two heads and one of keys and values."""
    spec = replace(SHAPE, num_kv_heads=2)
    weights = RandomWeights(torch.float32)
    ranks = [stage_model.gated_layer(spec, weights, 0, Shard(index, 6)) for index in range(6)]
    joint = [layer.weights.qkv.weight for layer in ranks]
    assert {(layer.heads, layer.kv_heads) for layer in ranks} == {(2, 1)}
    assert {tuple(weight.shape) for weight in joint} == {((2 + 2 * 1) * 4, 48)}
    shared = [weight[8:] for weight in joint]
    assert all(torch.equal(shared[3 * head], shared[3 * head + i])
               for head in (0, 1) for i in (1, 2))
    assert not torch.equal(shared[0], shared[3])


def test_a_degree_that_does_not_divide_is_refused_with_the_counts():
    assert refuse_tp_degree(SHAPE, 3) is None
    assert "the model's 12 attention heads" in str(refuse_tp_degree(SHAPE, 5))
    assert refuse_tp_degree(SHAPE, 4) == (
        "tp_degree 4 is neither a divisor nor a multiple of the model's 6 key-value heads")
    assert refuse_tp_degree(replace(SHAPE, num_kv_heads=2), 4) is None
    odd = replace(SHAPE, intermediate_size=35)
    assert "the model's 35 MLP columns" in str(refuse_tp_degree(odd, 2))
    stage = split_stages(2, 1)[0]
    with pytest.raises(XgptError, match="tp_degree 5 does not divide"):
        StageModel(SHAPE, RandomWeights(torch.float32), stage, torch.float32, Shard(0, 5))


@pytest.mark.parametrize("threads", [1, 2])
def test_random_weights_are_drawn_where_nothing_is_differentiated(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            drawn = RandomWeights(torch.float32).get("a.weight", (3000, 1000))
    finally:
        torch.set_num_threads(before)
    assert drawn.is_inference() and drawn.equal(
        RandomWeights(torch.float32).get("a.weight", (3000, 1000)))


@pytest.mark.parametrize("shape", [(33,), (12, 10), (37, 24)])
def test_random_weights_do_not_depend_on_how_they_are_divided(shape, monkeypatch):
    monkeypatch.setattr(weights_module, "_BLOCK_ELEMENTS", 100)  # parts begin within blocks
    source = RandomWeights(torch.float32)
    whole = source.get("layers.0.q_proj.weight", shape)
    assert whole.unique().numel() > 0.9 * whole.numel()
    for dim, size in enumerate(shape):
        cuts = (0, size // 3, size // 2, size)
        parts = [source.get("layers.0.q_proj.weight", shape, TensorPart(dim, low, high))
                 for low, high in zip(cuts, cuts[1:], strict=False)]
        assert torch.equal(torch.cat(parts, dim), whole)
    assert not torch.equal(source.get("layers.1.q_proj.weight", shape), whole)
    assert torch.equal(source.get("h.0.ln_1.weight", shape, TensorPart(0, 1, 3)),
                       torch.ones(2, *shape[1:]))


def test_a_step_in_pieces_is_the_same(monkeypatch):
    spec, stage, lengths = SHAPE, split_stages(2, 1)[0], [5, 1, 9, 3, 3, 2, 7]
    model = StageModel(spec, RandomWeights(torch.float32, scale=0.3), stage, torch.float32)
    tokens = torch.arange(32) * 7 % spec.vocab_size  # two are decoded, or none, the others encoded

    def worked(decodes: bool, most: int) -> tuple[Tensor, Tensor]:
        monkeypatch.setattr(stage_model, "PIECE_TOKENS", most)
        step = encode_context(whole_inputs(lengths, 2))
        sizes = [rows.stop - rows.start for rows, _ in step.pieces(most)]
        assert sum(sizes) == 30 and all(n <= most or n in lengths for n in sizes)
        cache = torch.ones(2, 2, 9, model.kv_heads, 9, spec.head_dim)
        with torch.inference_mode():
            out = model.mixed(tokens, cache, decode_context([4, 2]), step) if decodes else (
                model.encode(tokens[2:], cache, step))
        return out, cache

    for decodes, most in product((False, True), (1, 4, 8, 16, 29)):
        for ours, theirs in zip(worked(decodes, most), worked(decodes, 32), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_piece_is_as_large_as_what_the_profiler_measures():
    assert Needs().tokens == stage_model.PIECE_TOKENS


@pytest.mark.parametrize("most", [7, 18])
@pytest.mark.parametrize("family", SPECS)
def test_the_ends_of_inputs_alone_are_as_among_all_rows(monkeypatch, family, most):
    """The last layer leaves out what no token comes of; keys and values are there all the same. The
    third input ends with another step."""
    monkeypatch.setattr(stage_model, "PIECE_TOKENS", most)
    spec, decoded = SPECS[family], decode_context([4, 2])
    model = StageModel(spec, RandomWeights(torch.float32, scale=0.3),
                       split_stages(2, 1)[0], torch.float32)
    tokens, spans = torch.arange(20) * 7 % spec.vocab_size, whole_inputs([5, 1, 9, 3], 2)
    spans[2] = spans[2]._replace(is_last=False)
    encoded = encode_context(spans)
    finished: list[int] = []
    for layer in model.layers:
        monkeypatch.setattr(layer, "finish", lambda hidden, attended, finish=layer.finish: (
            finished.append(len(attended)), finish(hidden, attended)))

    def run(step: DecodeContext | None, *, ends_only: bool) -> tuple[Tensor, Tensor]:
        cache = torch.ones(2, 2, 6, model.kv_heads, 9, spec.head_dim)
        with torch.inference_mode():
            return model.mixed(tokens[2 * (step is None):], cache, step, encoded,
                               ends_only=ends_only), cache

    for step, rows in ((None, [4, 5, 17]), (decoded, [0, 1, 6, 7, 19])):
        every, whole = run(step, ends_only=False)
        finished.clear()
        ends, cache = run(step, ends_only=True)
        torch.testing.assert_close(ends, every[rows], rtol=1e-5, atol=1e-5)
        assert torch.equal(cache, whole)
        assert sum(finished) == 18 + 2 * (step is not None) + len(rows)


def test_a_step_that_ends_no_input_gives_nothing():
    model = StageModel(SHAPE, RandomWeights(torch.float32, scale=0.3), split_stages(2, 1)[0],
                       torch.float32)
    spans = encode_context([Span(0, 0, 5, False)])
    with torch.inference_mode():
        out = model.encode(torch.arange(5), torch.zeros(2, 2, 1, model.kv_heads, 9, SHAPE.head_dim),
                           spans, ends_only=True)
    assert out.shape == (0, SHAPE.hidden_size)


HIDDEN, INNER, ROWS = 16, 24, 7


def weights_of(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(router [E, H], gate_up [E, 2 f, H], down [E, H, f])"""
    chance = torch.Generator().manual_seed(3)
    return tuple(torch.randn(shape, generator=chance).div(4).to(dtype) for shape in (
        (count, HIDDEN), (count, 2 * INNER, HIDDEN), (count, HIDDEN, INNER)))


def mixture_of(weights: tuple[torch.Tensor, ...], experts: Experts, *, packed: bool) -> Mixture:
    router, gate_up, down = weights
    mlps = [GatedMlp(own.clone(), Product(out.clone()), "silu")
            for own, out in zip(gate_up, down, strict=True)]
    mixture = Mixture(router, mlps, experts)
    for each in mixture.products if packed else ():
        each.pack(router.dtype)
    return mixture


def by_row(rows: torch.Tensor, weights: tuple[torch.Tensor, ...],
           experts: Experts) -> torch.Tensor:
    """In float64, one row and expert at a time."""
    router, gate_up, down = (own.double() for own in weights)
    out = torch.zeros(rows.shape, dtype=torch.double)
    for place, row in enumerate(rows.double()):
        shares = (router @ row).softmax(-1)
        chosen = shares.topk(experts.per_token).indices
        whole = shares[chosen].sum() if experts.is_normed else 1.0
        for expert in chosen:
            gate, up = (gate_up[expert] @ row).chunk(2)
            silu = torch.nn.functional.silu(gate)
            out[place] += shares[expert] / whole * (down[expert] @ (silu * up))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_normed", [True, False])
@pytest.mark.parametrize(("count", "per_token"), [(1, 1), (4, 1), (4, 2), (4, 4), (9, 3)])
def test_every_row_gets_what_its_experts_give(count, per_token, is_normed, dtype):
    experts = Experts(count=count, per_token=per_token, inner=INNER, is_normed=is_normed)
    weights = weights_of(count, dtype)
    rows = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(5)).to(dtype)
    close = {"atol": 1e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.03, "rtol": 0.03}
    for own in (rows, rows[:1], rows[:0], rows[:1].expand(ROWS, -1)):  # the last: all to the same
        for packed in (False, True):
            found = mixture_of(weights, experts, packed=packed)(own)
            assert found.shape == own.shape and found.dtype == dtype
            torch.testing.assert_close(found.double(), by_row(own, weights, experts), **close)
