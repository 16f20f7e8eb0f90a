"""T5's layers, run one by one on ragged inputs, give transformers' hidden states and logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_runs import Lockstep
from toys import VOCAB, logits_of, make_t5, spec_of

from xgpt.core.errors import InputError
from xgpt.core.hf_config import from_hf_config
from xgpt.core.model import ModelSpec
from xrunner.checkpoint.reader import CheckpointReader
from xrunner.models.shard import WHOLE, Shard
from xrunner.models.stage_model import ENCODER_DECODER_CLASSES
from xrunner.models.t5 import SCORING
from xrunner.models.weights import WeightSource
from xrunner.ops.attention import decode_attention, packed_attention, store_packed
from xrunner.ops.contexts import decode_context, encode_context, whole_inputs
from xrunner.ops.residual import Residual
from xrunner.ops.rows import place

LENGTHS, STEPS = [17, 3, 1, 9], 9
F32 = torch.float32


class Runner:
    """Encoder and decoder of one shard, called as a stage would call them."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, shard: Shard = WHOLE) -> None:
        classes = ENCODER_DECODER_CLASSES["t5"]
        self.spec, self.heads = spec, spec.num_heads // shard.degree
        self.encoder = [classes.encoder_layer(spec, weights, i, shard)
                        for i in range(spec.num_encoder_layers)]
        self.decoder = [classes.decoder_layer(spec, weights, i, shard)
                        for i in range(spec.num_layers)]
        self.encoder_ends = classes.encoder_ends(spec, weights, first=True, last=True, shard=shard)
        self.decoder_ends = classes.decoder_ends(spec, weights, first=True, last=True, shard=shard)
        shape = (spec.num_layers, 2, len(LENGTHS), self.heads)
        self.self_cache = torch.zeros(*shape, STEPS, spec.head_dim)
        self.cross_cache = torch.zeros(*shape, max(LENGTHS), spec.head_dim)

    def encode(self, tokens: Tensor) -> Tensor:
        """Packed tokens [T] -> encoder output [T, H]; leaves the cross-attention's entries."""
        places = encode_context(whole_inputs(LENGTHS)).places
        hidden = Residual(self.encoder_ends.embed(tokens, places.positions))
        bias = self.encoder_ends.bias(max(LENGTHS))
        for layer in self.encoder:
            attended = packed_attention(layer.qkv(hidden), layer.heads, LENGTHS, SCORING.scale,
                                        bias)
            layer.finish(hidden, attended)
        encoded = self.encoder_ends.finish(hidden.total())
        for layer, (keys, values) in zip(self.decoder, self.cross_cache, strict=True):
            store_packed(*layer.cross_kv(encoded), (keys, values), places)
        return encoded

    def decode(self, tokens: Tensor, contexts: Tensor) -> Tensor:
        """One token [n] of the first n queries, of which each has `contexts` [n] cached."""
        step = decode_context((contexts + 1).tolist())
        bias, cross = self.decoder_ends.bias(step.longest), decode_context(LENGTHS[:len(tokens)])
        hidden = Residual(self.decoder_ends.embed(tokens, contexts))
        for layer, own, theirs in zip(self.decoder, self.self_cache, self.cross_cache, strict=True):
            query = place(layer.qkv(hidden), layer.heads, tuple(own), step.places)
            attended = decode_attention(query, tuple(own), step, SCORING, bias)
            query = layer.cross_query(hidden, attended)
            attended = decode_attention(query, tuple(theirs), cross, SCORING)
            layer.finish(hidden, attended)
        return logits_of(self.decoder_ends, hidden.total())


def inputs() -> Tensor:
    return torch.randint(6, VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(2))


def greedy(runner: Runner) -> tuple[list[list[int]], list[Tensor]]:
    """Tokens and logits [steps, V] of each query; two join after two steps, one after three, so
    that contexts differ within a step."""
    texts: list[list[int]] = [[0] for _ in LENGTHS]
    logits: list[list[Tensor]] = [[] for _ in LENGTHS]
    for step in range(STEPS):
        active = 1 if step < 2 else 3 if step == 2 else 4
        contexts = torch.tensor([len(text) - 1 for text in texts[:active]])
        out = runner.decode(torch.tensor([text[-1] for text in texts[:active]]), contexts)
        for query, row in enumerate(out):
            texts[query].append(int(row.argmax()))
            logits[query].append(row)
    return texts, [torch.stack(rows) for rows in logits]


@pytest.fixture(scope="module", params=["1.0", "1.1"])
def toy_t5(request: pytest.FixtureRequest,
           tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("t5")
    return directory, make_t5(request.param, directory)


@torch.inference_mode()
def test_encoder_output_and_decoder_logits_are_transformers(toy_t5: tuple[Path, Any]) -> None:
    directory, model = toy_t5
    runner = Runner(spec_of(directory), CheckpointReader(directory, F32))
    tokens = inputs()
    encoded, rows = runner.encode(tokens).split(LENGTHS), tokens.split(LENGTHS)
    padded = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    present = torch.arange(max(LENGTHS))[None, :] < torch.tensor(LENGTHS)[:, None]
    theirs = model.encoder(input_ids=padded, attention_mask=present.long()).last_hidden_state
    for ours, expected, length in zip(encoded, theirs, LENGTHS, strict=True):
        torch.testing.assert_close(ours, expected[:length], rtol=1e-4, atol=1e-4)
    texts, logits = greedy(runner)
    assert [len(text) - 1 for text in texts] == [9, 7, 7, 6]
    assert len({token for text in texts for token in text}) > 5
    for row, text, ours in zip(rows, texts, logits, strict=True):
        fed = torch.tensor([text[:-1]])
        expected = model(input_ids=row[None], decoder_input_ids=fed).logits[0]
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))
        assert expected.argmax(-1).tolist() == text[1:]


@torch.inference_mode()
@pytest.mark.parametrize("degree", [2, 3])
def test_shards_of_t5_equal_the_whole(toy_t5: tuple[Path, Any], degree: int) -> None:
    directory, _ = toy_t5
    torch.set_num_threads(1)
    spec, tokens = spec_of(directory), inputs()

    @torch.inference_mode()  # of the thread that runs it
    def run(shard: Shard) -> tuple[Tensor, Tensor, Tensor]:
        runner = Runner(spec, CheckpointReader(directory, F32), shard)
        encoded = runner.encode(tokens)
        logits = [runner.decode(torch.tensor([7, 8, 9, 10]) + i, torch.full((4,), i))
                  for i in range(STEPS)]
        return encoded, torch.stack(logits), runner.cross_cache

    whole, shards = run(WHOLE), Lockstep(degree).run(run)
    for encoded, _, _ in shards:
        torch.testing.assert_close(encoded, whole[0], rtol=1e-4, atol=1e-4)
    logits = torch.cat([s[1] for s in shards], dim=-1)
    torch.testing.assert_close(logits, whole[1], rtol=1e-4, atol=1e-4 * float(whole[1].std()))
    assert [s[1].shape[-1] for s in shards] == {2: [49, 48], 3: [33, 33, 31]}[degree]
    cross = torch.cat([s[2] for s in shards], dim=3)
    torch.testing.assert_close(cross, whole[2], rtol=1e-4, atol=1e-4)


def test_a_config_saved_by_transformers_5_scales_its_head_as_the_published_one(
        toy_t5: tuple[Path, Any], tmp_path: Path) -> None:
    directory, model = toy_t5
    model.config.save_pretrained(tmp_path)
    assert spec_of(tmp_path).tied_embeddings == spec_of(directory).tied_embeddings


def test_unknown_activations_are_refused(toy_t5: tuple[Path, Any]) -> None:
    config = json.loads((toy_t5[0] / "config.json").read_text())
    with pytest.raises(InputError, match="feed_forward_proj = 'gated-silu'"):
        from_hf_config({**config, "feed_forward_proj": "gated-silu"}, "x")
