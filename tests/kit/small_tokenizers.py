"""Tokenizers of a few hundred tokens, trained in a moment, in the forms that models are published
with."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXT = ["The quick brown fox jumps over the lazy dog.", "How many roads must a man walk down?",
        "user system assistant tool model weather Bonn rain today", "I don't know, he said .",
        "Größe, ça va? 你好 мир", "def f(x):\n    return x + 1\n", "1234567890 times"] * 20
SIZE = 420


@cache
def trained(kind: str, specials: tuple[str, ...]) -> str:
    """A tokenizer.json: `bytes` (GPT-2's), `pieces` (SentencePiece's BPE, as Llama 2 has it),
    `unigram` (T5's) or `words` (BERT's). The special tokens are the first."""
    if kind == "bytes":
        own = Tokenizer(models.BPE())
        own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        own.decoder = decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=SIZE, special_tokens=list(specials), show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    elif kind == "pieces":
        own = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        own.normalizer = normalizers.Sequence([
            normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        own.decoder = decoders.Sequence([
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0)])
        trainer = trainers.BpeTrainer(
            vocab_size=SIZE, show_progress=False,
            special_tokens=[*specials, *(f"<0x{byte:02X}>" for byte in range(256))])
    elif kind == "unigram":
        own = Tokenizer(models.Unigram())
        own.pre_tokenizer = pre_tokenizers.Metaspace()
        own.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=SIZE // 2, unk_token="<unk>",
                                          special_tokens=list(specials), show_progress=False)
    else:
        own = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        own.normalizer = normalizers.BertNormalizer()
        own.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        own.decoder = decoders.WordPiece(cleanup=False)
        trainer = trainers.WordPieceTrainer(vocab_size=SIZE, special_tokens=list(specials),
                                            show_progress=False)
    own.train_from_iterator(TEXT, trainer)
    if kind == "pieces":
        own.add_special_tokens([AddedToken(one, normalized=False) for one in specials])
    return own.to_str()


def begun_with(text: str, token: str) -> str:
    """The tokenizer.json with that token before each text."""
    own = Tokenizer.from_str(text)
    own.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, own.token_to_id(token))])
    return own.to_str()


def write_folder(folder: Path, files: dict[str, Any]) -> Path:
    """Texts as they are, other values as JSON; a name may have a folder in it."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return folder


def older_files(text: str) -> dict[str, Any]:
    """vocab.json and merges.txt of a byte-pair encoding's tokenizer.json."""
    model = json.loads(text)["model"]
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    return {"vocab.json": model["vocab"], "merges.txt": f"#version: 0.2\n{merges}\n"}


def plain_folder(folder: Path, **settings: Any) -> Path:
    """A folder with a tokenizer of bytes, and what its tokenizer_config.json says besides."""
    return write_folder(folder, {
        "tokenizer.json": trained("bytes", ("<s>", "</s>")), "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", **settings}})
