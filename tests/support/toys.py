"""Toy models of random weights as Hugging Face directories, and what transformers answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Hashable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from lockstep import Lockstep

from xgpt.core.model import ModelSpec
from xgpt.core.request_files.files import RequestFiles
from xgpt.core.schedule import Pool, Role, StageAssignment
from xgpt.core.spool import SpoolWriter
from xrunner.checkpoint.reader import open_weights
from xrunner.checkpoint.source import read_spec
from xrunner.engine.head import Head, PoolLink, Sink
from xrunner.engine.links import FromEncodePool, ToDecodePool
from xrunner.engine.pipeline import Neighbours, Route, await_start, routes, serve_stage
from xrunner.engine.roster import Vocabulary
from xrunner.engine.stage import StageExecutor
from xrunner.io.intake import ModelTokeniser, hand_on, take_in
from xrunner.io.tokenizer import TextTokenizer, start_token
from xrunner.models.encoder_decoder import load_stage
from xrunner.models.shard import WHOLE, Shard
from xrunner.plan import RunPlan
from xrunner.query import FinishedQuery, PreparedQuery
from xrunner.rules.batch_sizer import BatchSizer
from xrunner.rules.rra import RraRule
from xrunner.rules.steps import BatchingRule
from xrunner.rules.taken import DecodeAim
from xrunner.rules.waa import WaaDecodeRule, WaaEncodeRule
from xrunner.transport.comm import Comm, local_comms
from xrunner.transport.courier import EntryReceiver, EntrySender
from xrunner.transport.handover import Transfer, transfers

torch.set_num_threads(1)  # ranks are threads or processes already; more than cores is a disaster

T = TypeVar("T")
VOCAB, EOS = 97, 5
FAMILIES = ("llama", "llama-tied", "llama3-rope", "qwen2", "mistral", "opt", "gpt2", "gpt2-untied")
T5_FAMILIES = ("t5", "t5-1.1")
ENCODER_DECODER_FAMILIES = (*T5_FAMILIES, "mt5", "bart", "mbart")


def logits_of(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """hidden [n, H] -> this shard's logits [n, V_local], of a last stage's model or of its ends."""
    logits: torch.Tensor = model.scores(hidden).of(range(len(hidden)))
    return logits


def make_model(family: str, directory: Path, *, heads: int = 6, head_dim: int = 8) -> Any:
    """Writes a model of `family`, of 5 layers (encoder-decoders: 5 and 4), to `directory`; returns
    transformers' own instance. `heads`, `head_dim`: of OPT and GPT-2."""
    if family in ("bart", "mbart"):
        return make_bart(family, directory)
    if family in ENCODER_DECODER_FAMILIES:
        version = {"t5": "1.0", "t5-1.1": "1.1"}.get(family, family)
        return make_t5(version, directory, encoder_layers=5, decoder_layers=4)
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
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
            vocab_size=VOCAB, hidden_size=heads * head_dim, ffn_dim=80, num_hidden_layers=5,
            num_attention_heads=heads, max_position_embeddings=128,
            word_embed_proj_dim=heads * head_dim,
            init_std=0.3, bos_token_id=1, eos_token_id=EOS, pad_token_id=0))
    elif family in ("gpt2", "gpt2-untied"):
        model = GPT2LMHeadModel(GPT2Config(
            vocab_size=VOCAB, n_embd=heads * head_dim, n_inner=80, n_layer=5, n_head=heads,
            n_positions=128,
            initializer_range=0.3, bos_token_id=1, eos_token_id=EOS, pad_token_id=0,
            tie_word_embeddings=family == "gpt2"))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=False))
    elif family == "mistral":
        model = MistralForCausalLM(MistralConfig(**shape, sliding_window=None, head_dim=10))
    elif family == "llama3-rope":
        scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                   "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
                   "rope_theta": 10000.0}
        model = LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=scaling))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=family == "llama-tied"))
    stir_norms_and_biases(model)
    model.eval().save_pretrained(directory)
    return model


def make_t5(version: str, directory: Path, *, encoder_layers: int = 3,
            decoder_layers: int = 2) -> Any:
    """Writes a T5 to `directory`, of version "1.0" or "1.1", or an "mt5", as published checkpoints
    of it are; returns transformers' own instance."""
    from transformers import (
        MT5Config,
        MT5ForConditionalGeneration,
        T5Config,
        T5ForConditionalGeneration,
    )

    torch.manual_seed(0)
    is_new, is_mt5 = version != "1.0", version == "mt5"
    # few buckets and a short reach, so that all kinds of distance occur in short inputs
    config = (MT5Config if is_mt5 else T5Config)(
        vocab_size=VOCAB, d_model=32, d_kv=4, d_ff=36, num_layers=encoder_layers,
        num_decoder_layers=decoder_layers,
        num_heads=6, relative_attention_num_buckets=8, relative_attention_max_distance=10,
        feed_forward_proj="gated-gelu" if is_new else "relu", tie_word_embeddings=not is_new,
        decoder_start_token_id=0, eos_token_id=EOS, pad_token_id=0)
    model: Any = (MT5ForConditionalGeneration if is_mt5 else T5ForConditionalGeneration)(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.4)
    if is_new:
        model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, 32))
    stir_norms_and_biases(model, centre=1.0)
    model.eval().save_pretrained(directory)
    written = json.loads((directory / "config.json").read_text())
    # transformers 5 tells the versions apart by this key, the hub's files by the tied head
    written["tie_word_embeddings"] = written.pop("scale_decoder_outputs", False)
    (directory / "config.json").write_text(json.dumps(written))
    return model


def make_bart(family: str, directory: Path, **generation: Any) -> Any:
    """Writes a "bart" or "mbart" to `directory`; returns transformers' own instance. `generation`:
    what its generation_config.json says beside the tokens that begin and end."""
    import transformers

    torch.manual_seed(0)
    is_mbart = family == "mbart"
    prefix = "MBart" if is_mbart else "Bart"
    own: dict[str, Any] = {"forced_eos_token_id": None, **generation}
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(
        getattr(transformers, f"{prefix}Config")(
            vocab_size=VOCAB, d_model=48, encoder_layers=5, decoder_layers=4,
            encoder_attention_heads=6, decoder_attention_heads=6, encoder_ffn_dim=80,
            decoder_ffn_dim=80, max_position_embeddings=32, init_std=0.3,
            scale_embedding=is_mbart, activation_function="relu" if is_mbart else "gelu",
            pad_token_id=0, bos_token_id=1, eos_token_id=EOS, decoder_start_token_id=2))
    for key, value in own.items():
        setattr(model.generation_config, key, value)
    torch.nn.init.normal_(model.final_logits_bias, 0.0, 0.5)
    model.final_logits_bias[0, EOS] += 1.0
    stir_norms_and_biases(model)
    decoder = model.model.decoder
    # of either sign, or every token is likeliest behind itself: the head is the embedding
    last = decoder.layer_norm if is_mbart else decoder.layers[-1].final_layer_norm
    torch.nn.init.normal_(last.weight)
    # norms of sums forget what large blocks are added to: every token would be the same
    shares = {"self_attn.out_proj": 0.05, "encoder_attn.out_proj": 0.2, "fc2": 0.2,
              "norm.bias": 0.3}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter *= next((shares[part] for part in shares if part in name), 1.0)
    model.eval().save_pretrained(directory)
    return model


def stir_norms_and_biases(model: Any, centre: float | None = None) -> None:
    """Away from 1 and 0, or they go unseen. `centre` None: the one they are near."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            near = 1.0 if float(parameter.detach().mean()) > 0.5 else 0.0
            torch.nn.init.normal_(parameter, near if centre is None else centre, 0.3)


def spec_of(directory: Path) -> ModelSpec:
    return read_spec(directory, directory.name)


def write_spool(plan: RunPlan, requests: Path) -> None:
    """What the launcher hands on of a file of requests."""
    spec, spool = spec_of(plan.model_dir), SpoolWriter()
    tokeniser = ModelTokeniser(TextTokenizer(plan.model_dir), plan.is_chat, spec.vocab_size)
    files = RequestFiles(paths=(requests,))
    hand_on(take_in(files, tokeniser, spool), spool, plan, spec)


def random_queries(count: int, seed: int = 1, longest: int = 20) -> list[PreparedQuery]:
    """Queries whose inputs and outputs all differ in length."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, size: int = 1) -> list[int]:
        values: list[int] = torch.randint(low, high, (size,), generator=generator).tolist()
        return values

    return [PreparedQuery(index=i, id=f"q{i}", input_ids=tuple(draw(6, VOCAB, draw(1, longest)[0])),
                          max_new_tokens=draw(1, 30)[0]) for i in range(count)]


_ANSWERS: dict[Hashable, list[int]] = {}
_DIGESTS: WeakKeyDictionary[Any, tuple[Hashable, str]] = WeakKeyDictionary()


def _digest(model: Any) -> str:
    """Of weights and configuration; both may change, or be those of another instance."""
    state = (*((p.data_ptr(), p._version, p.dtype) for p in model.parameters()),
             repr(model.generation_config))
    if model not in _DIGESTS or _DIGESTS[model][0] != state:
        digest = sha256((repr(model.config) + repr(model.generation_config)).encode())
        for tensor in model.state_dict().values():
            digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
        _DIGESTS[model] = state, digest.hexdigest()
    return _DIGESTS[model][1]


def generate(model: Any, query: PreparedQuery) -> list[int]:
    """What transformers' generate answers to one query alone, greedily; asked once for the same
    weights."""
    key = (_digest(model), query.input_ids, query.max_new_tokens, query.is_forced)
    if key not in _ANSWERS:
        _ANSWERS[key] = _generated(model, query)
    return [*_ANSWERS[key]]


def _generated(model: Any, query: PreparedQuery) -> list[int]:
    inputs = torch.tensor([query.input_ids])
    with torch.no_grad():
        out = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False,
                             max_new_tokens=query.max_new_tokens,
                             eos_token_id=None if query.is_forced else EOS, pad_token_id=0)
    # an encoder-decoder model's answer begins with the token its decoder is fed first
    before = 1 if model.config.is_encoder_decoder else len(query.input_ids)
    answer: list[int] = out[0, before:].tolist()
    return answer


class Collector:
    """A Sink that keeps what it is told; stops after `stop_after` results, if given."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.results: list[FinishedQuery] = []
        self.is_complete: bool | None = None  # what the head says at its end
        self._stop_after = stop_after

    def finished(self, result: FinishedQuery) -> None:
        self.results.append(result)

    def progress(self, elapsed_s: float, output_tokens: int) -> None:
        """Nobody watches."""

    def should_stop(self) -> bool:
        return self._stop_after is not None and len(self.results) >= self._stop_after


def pool_of(stages: Sequence[StageAssignment], role: Role = "both") -> Pool:
    """A pool of that role and name."""
    return Pool(name=role, role=role, stages=tuple(stages), num_groups=1, kv_tokens=0)


def transfers_of(pools: Sequence[Pool], spec: ModelSpec) -> list[Transfer]:
    """What the ranks of an encode pool send to those of a decode pool."""
    encode, decode = pools
    return transfers(encode.stages, decode.stages, spec)


def ranks_of(pool: Pool) -> list[int]:
    return [rank for stage in pool.stages for rank in stage.ranks]


def split_stages(num_layers: int, num_stages: int, *, encoder_layers: int = 0,
                 degrees: Sequence[int] | None = None) -> list[StageAssignment]:
    """Layers spread evenly over stages of these tensor-parallel degrees (None: single ranks)."""
    degrees = degrees or [1] * num_stages
    cuts = [round(i * num_layers / num_stages) for i in range(num_stages + 1)]
    encoder = [round(i * encoder_layers / num_stages) for i in range(num_stages + 1)]
    first = [sum(degrees[:s]) for s in range(num_stages)]
    return [StageAssignment(index=s, ranks=tuple(range(first[s], first[s] + degrees[s])),
                            first_layer=cuts[s], num_layers=cuts[s + 1] - cuts[s],
                            first_encoder_layer=encoder[s],
                            num_encoder_layers=encoder[s + 1] - encoder[s])
            for s in range(num_stages)]


def run_in_process(directory: Path, queries: Sequence[PreparedQuery], *, num_stages: int = 0,
                   num_groups: int = 1, encode_batch: int = 4, decode_iterations: int = 5,
                   max_active: int = 12, kv_tokens: int = 10_000, sink: Collector | None = None,
                   dtype: torch.dtype = torch.float32, degrees: Sequence[int] | None = None,
                   stages: Sequence[StageAssignment] | None = None,
                   rule: BatchingRule | None = None, device: torch.device | str = "cpu",
                   in_blocks: bool = False) -> tuple[Collector, list[StageExecutor]]:
    """The whole runner on threads instead of MPI ranks: (what finished, every rank's executor).
    Stages: given, or of these tensor-parallel `degrees`, or `num_stages` single ranks."""
    stages = stages or stages_of(directory, degrees or [1] * num_stages)
    executors: list[StageExecutor] = []
    for stage in stages:
        shards = Lockstep(stage.tp_degree).shards if stage.tp_degree > 1 else [WHOLE]
        executors += [executor_of(directory, stage, shard, dtype, device) for shard in shards]
    comms, route = local_comms(len(executors)), routes([pool_of(stages)])
    rule = rule or RraRule(encode_batch=encode_batch, decode_iterations=decode_iterations,
                           num_groups=num_groups, max_active=max_active, kv_tokens=kv_tokens)
    threads = [threading.Thread(target=serve, args=(comms[r], route[r], executors[r]), daemon=True)
               for r in range(1, len(executors))]
    for thread in threads:
        thread.start()
    sink = lead(directory, comms[0], route[0], executors[0], rule, queries, sink,
                in_blocks=in_blocks)
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    return sink, executors


def run_waa_in_process(
        directory: Path, queries: Sequence[PreparedQuery], pools: Sequence[Pool],
        rules: tuple[WaaEncodeRule, WaaDecodeRule], *, sink: Collector | None = None,
        in_blocks: bool = False) -> tuple[Collector, dict[int, StageExecutor]]:
    """Both of WAA's pools on threads: (what finished, every rank's executor)."""
    own, ranks = transfers_of(pools, spec_of(directory)), range(sum(p.num_devices for p in pools))
    comms, side = local_comms(len(ranks)), local_comms(len(ranks))
    route, decode_ranks = routes(pools), ranks_of(pools[1])
    executors: dict[int, StageExecutor] = {}
    for role, stage in ((pool.role, stage) for pool in pools for stage in pool.stages):
        shards = Lockstep(stage.tp_degree).shards if stage.tp_degree > 1 else [WHOLE]
        for rank, shard in zip(stage.ranks, shards, strict=True):
            executors[rank] = executor_of(directory, stage, shard, role=role, **couriers(
                role, side[rank], own, decode_ranks))

    def follow(rank: int) -> None:
        if rank == decode_ranks[0]:
            lead_decoding(directory, comms[rank], route[rank], executors[rank], rules[1])
        else:
            serve(comms[rank], route[rank], executors[rank])

    threads = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in ranks[1:]]
    for thread in threads:
        thread.start()
    sink = lead(directory, comms[0], route[0], executors[0], rules[0], queries, sink,
                link=ToDecodePool(comms[0], *rules, decode_ranks[0]), in_blocks=in_blocks)
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    return sink, executors


def couriers(role: Role, comm: Comm, own: Sequence[Transfer],
             decode_ranks: Sequence[int]) -> dict[str, Any]:
    """A rank's end of the handover, as StageExecutor takes it."""
    if role == "encode":
        return {"sender": EntrySender(comm, own)}
    return {"receiver": EntryReceiver(comm, own, decode_ranks)}


def waa_pools(directory: Path, encode: Sequence[int], decode: Sequence[int],
              encode_cuts: Sequence[int] | None = None,
              decode_cuts: Sequence[int] | None = None) -> list[Pool]:
    """Two pools with stages of these tensor-parallel degrees. Cuts: where the layers of one stage
    end and those of the next begin (None: even)."""
    spec = spec_of(directory)
    held = {"encode": spec.num_encoder_layers or spec.num_layers, "decode": spec.num_layers}
    found: list[Pool] = []
    first = 0
    roles: tuple[Role, Role] = ("encode", "decode")
    for role, degrees, cuts in zip(roles, (encode, decode), (encode_cuts, decode_cuts),
                                   strict=True):
        stages: list[StageAssignment] = []
        inner = cuts or [round(i * held[role] / len(degrees)) for i in range(1, len(degrees))]
        bounds = [0, *inner, held[role]]
        for place, degree in enumerate(degrees):
            layers = {"first_layer": bounds[place],
                      "num_layers": bounds[place + 1] - bounds[place]}
            if spec.is_encoder_decoder and role == "encode":
                layers = {"first_layer": 0, "num_layers": 0,
                          "first_encoder_layer": bounds[place],
                          "num_encoder_layers": bounds[place + 1] - bounds[place]}
            stages.append(StageAssignment(
                index=place + sum(len(pool.stages) for pool in found),
                ranks=tuple(range(first, first + degree)), **layers))
            first += degree
        found.append(pool_of(stages, role))
    return found


def toy_waa_rules(num_encode_stages: int, *, encode_batch: int = 3, num_groups: int = 1,
                  max_in_system: int = 8, kv_tokens: int = 10_000,
                  encode_kv_tokens: int = 10_000, encode_chunk: int = 0,
                  ) -> tuple[WaaEncodeRule, WaaDecodeRule]:
    """`encode_chunk`: of the decode pool, which takes inputs as long as there is room."""
    aim = DecodeAim(planned_active=max_in_system, stock_tokens=2 * encode_chunk)
    return (WaaEncodeRule(aim=aim, encode_batch=encode_batch,
                          num_groups=num_encode_stages + 2, max_in_system=max_in_system,
                          kv_tokens=kv_tokens, encode_kv_tokens=encode_kv_tokens,
                          sizer=BatchSizer(mean_input=10.0)),
            WaaDecodeRule(num_groups=num_groups, kv_tokens=kv_tokens, encode_chunk=encode_chunk,
                          group_max_active=-(-max_in_system // num_groups)))


def stages_of(directory: Path, degrees: Sequence[int]) -> list[StageAssignment]:
    """The model's layers over stages of these tensor-parallel degrees."""
    spec = spec_of(directory)
    return split_stages(spec.num_layers, len(degrees), degrees=degrees,
                        encoder_layers=spec.num_encoder_layers)


def executor_of(directory: Path, stage: StageAssignment, shard: Shard = WHOLE,
                dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
                role: Role = "both", **couriers: Any) -> StageExecutor:
    """One rank's, which checks its caches after every step."""
    reader = open_weights(directory, dtype)
    model = load_stage(spec_of(directory), reader, stage, shard, device, role=role)
    return StageExecutor(model, check=True, **couriers)


def lead(directory: Path, comm: Comm, route: Route, executor: StageExecutor, rule: BatchingRule,
         queries: Sequence[PreparedQuery], sink: Collector | None = None, *,
         link: PoolLink | None = None, in_blocks: bool = False) -> Collector:
    """What the first rank does. `in_blocks`: entries that are reserved lie so, too."""
    sink = sink or Collector()
    head = head_of(directory, Neighbours(comm, route), executor, rule, sink, link)
    head.roster.in_blocks = in_blocks
    for query in queries:
        assert head.submit(query)
    head.start()
    sink.is_complete = head.run()
    executor.close()
    return sink


def lead_decoding(directory: Path, comm: Comm, route: Route, executor: StageExecutor,
                  rule: WaaDecodeRule) -> None:
    """What the first rank of WAA's decode pool does."""
    assert executor.receiver is not None
    link = FromEncodePool(comm, executor.receiver, encode_head=0)
    head = head_of(directory, Neighbours(comm, route), executor, rule, link, link)
    head.start()
    head.run()
    executor.close()


def head_of(directory: Path, neighbours: Neighbours, executor: StageExecutor, rule: BatchingRule,
            sink: Sink, link: PoolLink | None = None) -> Head:
    is_encoder_decoder = executor.model.spec.is_encoder_decoder
    return Head(rule=rule, executor=executor, neighbours=neighbours, sink=sink, link=link,
                vocabulary=Vocabulary(
                    eos_ids=frozenset([EOS]), decode_text=lambda ids: " ".join(map(str, ids)),
                    start_token=start_token(directory) if is_encoder_decoder else None))


def serve(comm: Comm, route: Route, executor: StageExecutor) -> None:
    """What every other rank does."""
    neighbours = Neighbours(comm, route)
    await_start(neighbours, executor)
    serve_stage(neighbours, executor)
    executor.close()
