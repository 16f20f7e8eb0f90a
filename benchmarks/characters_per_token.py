"""Characters a token: what a tokenizer makes of the texts on this machine, beside the estimate that
planning takes where there is no tokenizer (xrunner.io.estimated).

    python benchmarks/characters_per_token.py TOKENIZER.json

English prose is the quickstart's prompts, Markdown this project's docs, Python its runner; other
languages are messages of installed programs (/usr/share/locale), joined to pieces of 400
characters."""

import argparse
import gettext
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from xrunner.io.estimated import ASCII_PER_TOKEN, OTHERS_PER_TOKEN, estimated_tokens

ROOT = Path(__file__).resolve().parents[1]
LOCALES = Path("/usr/share/locale")
LANGUAGES = ("de", "fr", "es", "it", "pt_BR", "nl", "sv", "pl", "tr", "vi", "ru", "uk", "el", "ar",
             "hi", "zh_CN", "ja", "ko")
_PIECE, _LEAST, _MOST_FILES, _MOST_PIECES = 400, 40, 25, 400


def paragraphs(paths: list[Path]) -> list[str]:
    return [part for path in paths for part in re.split(r"\n\s*\n", path.read_text("utf-8"))
            if len(part) > 2 * _LEAST]


def messages(language: str) -> Iterator[str]:
    """Pieces of the translated messages of a language."""
    piece = ""
    for path in sorted((LOCALES / language / "LC_MESSAGES").glob("*.mo"))[:_MOST_FILES]:
        with path.open("rb") as file:
            catalog = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
        for key, text in catalog.items():
            if key and isinstance(text, str) and len(text) > _LEAST:
                piece += text + " "
            if len(piece) > _PIECE:
                yield piece
                piece = ""


def corpora() -> dict[str, list[str]]:
    prompts = (ROOT / "jobs" / "prompts" / "quickstart.jsonl").read_text("utf-8").splitlines()
    return {"prompts, English": [json.loads(line)["prompt"] for line in prompts],
            "Markdown": paragraphs(sorted((ROOT / "docs").glob("*.md"))),
            "Python": paragraphs(sorted((ROOT / "xrunner").rglob("*.py"))),
            **{f"messages, {name}": list(messages(name))[:_MOST_PIECES] for name in LANGUAGES}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path)
    tokenizer = Tokenizer.from_file(str(parser.parse_args().tokenizer))
    print(f"{tokenizer.get_vocab_size()} tokens; a token for {ASCII_PER_TOKEN} characters of "
          f"ASCII or {OTHERS_PER_TOKEN:g} others\n")
    print("| texts | pieces | characters a token | estimated / counted |\n|---|---|---|---|")
    logarithms = []
    for name, texts in corpora().items():
        if not texts:
            continue
        counted = sum(len(one.ids) for one in tokenizer.encode_batch(
            texts, add_special_tokens=False))
        ratio = sum(map(estimated_tokens, texts)) / counted
        logarithms.append(math.log(ratio))
        print(f"| {name} | {len(texts)} | {sum(map(len, texts)) / counted:.2f} | {ratio:.2f} |")
    square = sum(value * value for value in logarithms) / len(logarithms)
    print(f"\nroot mean square of the logarithm: {math.sqrt(square):.3f}")


if __name__ == "__main__":
    main()
