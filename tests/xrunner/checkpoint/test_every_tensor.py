"""Every tensor of a file is used, told as not used, or refused; none that config.json makes
obligatory may be absent; what is tied is read as transformers reads it."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
import toys
from safetensors.torch import load_file, save_file
from toy_runs import run_in_process

from xgpt.core.errors import InputError
from xrunner.checkpoint.tensors import MAX_SHOWN, check_weights

Held = dict[str, torch.Tensor]
HEAD = "lm_head.weight"
MADE = {**dict.fromkeys(("llama", "llama-tied", "qwen2", "opt", "gpt2", "gpt2-untied",
                         *toys.ENCODER_DECODER_FAMILIES), toys.make_model),
        **dict.fromkeys(("llama-biased", "mistral-window", "qwen3", "gemma2", "gemma3", "phi3",
                         "smollm3", "olmo2", "granite", "mixtral", "qwen3-moe"),
                        toys.make_modern)}
# what a file may lack: T5's head is tied wherever there is none, BART's bias is of zeros then
OPTIONAL = {("t5-1.1", HEAD), ("mt5", HEAD), ("bart", "final_logits_bias"),
            ("mbart", "final_logits_bias")}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A family's folder, whose weights a test may write anew, and the tensors that it was made
    with."""

    @cache
    def make(family: str) -> tuple[Path, Held]:
        folder = tmp_path_factory.mktemp(family)
        MADE[family](family, folder)
        return folder, load_file(folder / "model.safetensors")

    return make


def refused(folder: Path, tensors: Held) -> set[str | None]:
    """The keys that are refused of these tensors."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    try:
        check_weights(folder, toys.spec_of(folder))
    except InputError as error:
        return {mistake.key for mistake in error.mistakes}
    return set()


@pytest.mark.parametrize("family", MADE)
def test_a_tensor_of_any_kind_that_is_gone_is_refused_by_its_name(toy, family):
    folder, held = toy(family)
    assert not refused(folder, held)
    kinds = list({re.sub(r"\d+", "N", name): name for name in held}.values())
    assert len(kinds) > 8
    for gone in (kinds[at:at + MAX_SHOWN] for at in range(0, len(kinds), MAX_SHOWN)):
        found = {str(key) for key in refused(folder, {n: t for n, t in held.items()
                                                      if n not in gone})}
        needed = {name for name in gone if (family, name) not in OPTIONAL}
        assert len(found) == len(needed)
        assert all(any(name.endswith(key) for key in found) for name in needed)


@pytest.mark.parametrize("family", MADE)
def test_a_tensor_too_many_is_refused_or_told(toy, family):
    folder, held = toy(family)
    first = next(name for name in sorted(held) if re.search(r"\.0\..*weight$", name))
    for stray in (re.sub(r"\.0\.", ".77.", first, count=1), first.replace("weight", "bias_2"),
                  "lm_head.bias", "score.weight", f"language_model.{first}", f"head.{HEAD}"):
        assert refused(folder, {**held, stray: torch.ones(3)}) == {stray}
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert not refused(folder, {**held, buffer: torch.ones(3)})
    assert check_weights(folder, toys.spec_of(folder)) == [buffer]


def tokens(folder: Path) -> list[list[int]]:
    sink, _ = run_in_process(folder, toys.random_queries(3), degrees=(1,))
    return [list(r.output_ids) for r in sorted(sink.results, key=lambda r: r.query.index)]


def transformers_tokens(folder: Path) -> list[list[int]]:
    model = toys.reference_of(folder)
    return [toys.generate(model, query) for query in toys.random_queries(3)]


TIED = {"llama-tied": "model.embed_tokens.weight", "opt": "model.decoder.embed_tokens.weight",
        "gpt2": "transformer.wte.weight", "gemma2": "model.embed_tokens.weight",
        "smollm3": "model.embed_tokens.weight", "t5": "shared.weight",
        "bart": "model.shared.weight", "mbart": "model.shared.weight"}


@pytest.mark.parametrize("family", TIED)
def test_tied_tables_are_read_by_whichever_name_the_file_has(toy, family):
    folder, held = toy(family)
    table = held[TIED[family]]
    others = {name: tensor for name, tensor in held.items() if name != TIED[family]}
    assert not refused(folder, {**others, HEAD: table})
    assert tokens(folder) == transformers_tokens(folder)
    assert not refused(folder, {**held, HEAD: table.clone()})
    assert refused(folder, {**held, HEAD: table + 1e-3}) == {HEAD}


@pytest.mark.parametrize(("family", "prefix"), [("t5", ""), ("t5-1.1", ""), ("bart", "model.")])
def test_second_tables_of_an_encoder_decoder_are_the_same_or_refused(toy, family, prefix):
    folder, held = toy(family)
    names = [f"{prefix}{side}.embed_tokens.weight" for side in ("encoder", "decoder")]
    table = held[f"{prefix}shared.weight"]
    assert not refused(folder, {**held, **{name: table.clone() for name in names}})
    for name in names:
        assert refused(folder, {**held, name: table * 2}) == {name}
    only = {name: tensor for name, tensor in held.items() if name != f"{prefix}shared.weight"}
    assert not refused(folder, {**only, names[0]: table})
    assert tokens(folder) == transformers_tokens(folder)


@pytest.mark.parametrize("family", ["t5-1.1", "mt5"])
def test_t5s_head_that_is_absent_is_its_embedding(toy, family):
    folder, held = toy(family)
    assert not refused(folder, {name: t for name, t in held.items() if name != HEAD})
    assert tokens(folder) == transformers_tokens(folder)


@pytest.mark.parametrize("is_view", [False, True])
def test_pickled_tables_that_share_a_storage_are_the_same(tmp_path, is_view):
    toys.make_model("llama-tied", tmp_path)
    held = {name: tensor.bfloat16() for name, tensor in
            load_file(tmp_path / "model.safetensors").items()}
    (tmp_path / "model.safetensors").unlink()
    table = held["model.embed_tokens.weight"]
    both = torch.cat([table, table + 1])
    pair = (both[:len(table)], both[len(table):]) if is_view else (table, table)
    torch.save({**held, "model.embed_tokens.weight": pair[0], HEAD: pair[1]},
               tmp_path / "pytorch_model.bin")
    if is_view:
        with pytest.raises(InputError, match=r"lm_head\.weight.*tie_word_embeddings"):
            check_weights(tmp_path, toys.spec_of(tmp_path), may_unpickle=True)
    else:
        assert not check_weights(tmp_path, toys.spec_of(tmp_path), may_unpickle=True)


def test_a_tie_that_config_json_does_not_name_is_the_familys_usual(toy):
    for family, is_tied in (("llama-tied", False), ("gpt2", True), ("opt", True), ("gemma2", True),
                            ("smollm3", True), ("qwen3", False), ("t5", True)):
        folder, held = toy(family)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(
            {key: value for key, value in config.items() if key != "tie_word_embeddings"}))
        assert (HEAD in refused(folder, held)) is not is_tied
        (folder / "config.json").write_text(json.dumps(config))
