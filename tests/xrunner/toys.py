"""Toy models of random weights as Hugging Face directories, and what transformers answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from xgpt.model import ModelSpec, from_hf_config
from xgpt.schedule import StageAssignment
from xrunner.checkpoint.reader import CheckpointReader
from xrunner.comm import Comm, local_comms
from xrunner.head import Head
from xrunner.models.shard import Shard
from xrunner.models.stage_model import StageModel
from xrunner.pipeline import await_start, serve_stage
from xrunner.query import FinishedQuery, PreparedQuery
from xrunner.rules.rra import RraRule
from xrunner.stage import StageExecutor

T = TypeVar("T")
VOCAB, EOS = 97, 5
FAMILIES = ("llama", "llama-tied", "llama3-rope", "qwen2", "opt", "gpt2", "gpt2-untied")


def make_model(family: str, directory: Path) -> Any:
    """Writes a 5-layer model of `family` to `directory`; returns transformers' own instance."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        OPTConfig,
        OPTForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 5,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0}
    if family == "opt":
        model: Any = OPTForCausalLM(OPTConfig(
            vocab_size=VOCAB, hidden_size=48, ffn_dim=80, num_hidden_layers=5,
            num_attention_heads=6, max_position_embeddings=128, word_embed_proj_dim=48,
            init_std=0.3, bos_token_id=1, eos_token_id=EOS, pad_token_id=0))
    elif family in ("gpt2", "gpt2-untied"):
        model = GPT2LMHeadModel(GPT2Config(
            vocab_size=VOCAB, n_embd=48, n_inner=80, n_layer=5, n_head=6, n_positions=128,
            initializer_range=0.3, bos_token_id=1, eos_token_id=EOS, pad_token_id=0,
            tie_word_embeddings=family == "gpt2"))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=False))
    elif family == "llama3-rope":
        scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                   "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
                   "rope_theta": 10000.0}
        model = LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=scaling))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=family == "llama-tied"))
    _stir_norms_and_biases(model)
    model.eval().save_pretrained(directory)
    return model


def make_t5(version: str, directory: Path) -> Any:
    """Writes a T5 of 3 encoder and 2 decoder layers to `directory`, of version "1.0" or "1.1", as
    published checkpoints of it are; returns transformers' own instance."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    is_new = version == "1.1"
    # few buckets and a short reach, so that all kinds of distance occur in short inputs
    config = T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=4, d_ff=36, num_layers=3, num_decoder_layers=2,
        num_heads=6, relative_attention_num_buckets=8, relative_attention_max_distance=10,
        feed_forward_proj="gated-gelu" if is_new else "relu", tie_word_embeddings=not is_new,
        decoder_start_token_id=0, eos_token_id=EOS, pad_token_id=0)
    model = T5ForConditionalGeneration(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.4)
    if is_new:
        model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, 32))
    _stir_norms_and_biases(model, centre=1.0)
    model.eval().save_pretrained(directory)
    written = json.loads((directory / "config.json").read_text())
    # transformers 5 tells the versions apart by this key, the hub's files by the tied head
    written["tie_word_embeddings"] = written.pop("scale_decoder_outputs")
    (directory / "config.json").write_text(json.dumps(written))
    return model


def _stir_norms_and_biases(model: Any, centre: float | None = None) -> None:
    """Away from 1 and 0, or they go unseen. `centre` None: the one they are near."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            near = 1.0 if float(parameter.detach().mean()) > 0.5 else 0.0
            torch.nn.init.normal_(parameter, near if centre is None else centre, 0.3)


def spec_of(directory: Path) -> ModelSpec:
    return from_hf_config(json.loads((directory / "config.json").read_text()), directory.name)


def random_queries(count: int, seed: int = 1, longest: int = 20) -> list[PreparedQuery]:
    """Queries whose inputs and outputs all differ in length."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, size: int = 1) -> list[int]:
        values: list[int] = torch.randint(low, high, (size,), generator=generator).tolist()
        return values

    return [PreparedQuery(index=i, id=f"q{i}", input_ids=tuple(draw(6, VOCAB, draw(1, longest)[0])),
                          max_new_tokens=draw(1, 30)[0]) for i in range(count)]


def generate(model: Any, query: PreparedQuery) -> list[int]:
    """What transformers' generate answers to one query alone, greedily."""
    inputs = torch.tensor([query.input_ids])
    with torch.no_grad():
        out = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False,
                             max_new_tokens=query.max_new_tokens,
                             eos_token_id=None if query.is_forced else EOS, pad_token_id=0)
    answer: list[int] = out[0, len(query.input_ids):].tolist()
    return answer


class Collector:
    """A Sink that keeps what it is told; stops after `stop_after` results, if given."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.results: list[FinishedQuery] = []
        self._stop_after = stop_after

    def finished(self, result: FinishedQuery) -> None:
        self.results.append(result)

    def progress(self, elapsed_s: float, output_tokens: int) -> None:
        """Nobody watches."""

    def should_stop(self) -> bool:
        return self._stop_after is not None and len(self.results) >= self._stop_after


def split_stages(num_layers: int, num_stages: int) -> list[StageAssignment]:
    cuts = [round(i * num_layers / num_stages) for i in range(num_stages + 1)]
    return [StageAssignment(index=s, ranks=(s,), first_layer=cuts[s],
                            num_layers=cuts[s + 1] - cuts[s]) for s in range(num_stages)]


def run_in_process(directory: Path, queries: Sequence[PreparedQuery], *, num_stages: int,
                   num_groups: int, encode_batch: int = 4, decode_iterations: int = 5,
                   max_active: int = 12, kv_tokens: int = 10_000, sink: Collector | None = None,
                   dtype: torch.dtype = torch.float32,
                   ) -> tuple[Collector, list[StageExecutor]]:
    """The whole runner on threads instead of MPI ranks: (what finished, stages)."""
    torch.set_num_threads(max(2 // num_stages, 1))  # as many as cores: more is a disaster
    spec, sink = spec_of(directory), sink or Collector()
    comms = local_comms(num_stages)
    executors = [StageExecutor(StageModel(spec, CheckpointReader(directory, dtype), stage, dtype),
                               check=True)
                 for stage in split_stages(spec.num_layers, num_stages)]
    rule = RraRule(encode_batch=encode_batch, decode_iterations=decode_iterations,
                   num_groups=num_groups, max_active=max_active, kv_tokens=kv_tokens)
    head = Head(rule=rule, executor=executors[0], comm=comms[0], sink=sink,
                eos_ids=frozenset([EOS]), decode_text=lambda ids: " ".join(map(str, ids)))
    for query in queries:
        assert head.submit(query)
    threads = [threading.Thread(target=_serve, args=(comms[s], executors[s]))
               for s in range(1, num_stages)]
    for thread in threads:
        thread.start()
    head.start()
    head.run()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    return sink, executors


def _serve(comm: Comm, executor: StageExecutor) -> None:
    await_start(comm, executor)
    serve_stage(comm, executor)


class Lockstep:
    """All ranks of a tensor-parallel group as threads that meet at every all-reduce."""

    def __init__(self, degree: int) -> None:
        self._partials: list[torch.Tensor] = [torch.empty(0)] * degree
        self._barrier = threading.Barrier(degree, timeout=30)
        self.shards = [Shard(i, degree, lambda partial, i=i: self._sum(i, partial))
                       for i in range(degree)]

    def run(self, work: Callable[[Shard], T]) -> list[T]:
        with ThreadPoolExecutor(len(self.shards)) as pool:
            return list(pool.map(work, self.shards))

    def _sum(self, index: int, partial: torch.Tensor) -> torch.Tensor:
        self._partials[index] = partial
        self._barrier.wait()
        total = torch.stack(self._partials).sum(0)
        self._barrier.wait()  # nobody overwrites its partial before all have summed
        return total
