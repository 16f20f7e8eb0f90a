"""What an encoder-decoder model's own files say of the tokens that are chosen, beside its weights:
BART's summarisers begin with a token that is given, and end with one where they must end.

It is what transformers' greedy `generate` does by the same files: generation_config.json, where it
is there, else config.json. Beams and the temperature of draws are the job's to say, not the
file's. What of the rest is not done here is refused, for a text without it would be another."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from xgpt.core.errors import InputError, Mistake, wrong
from xgpt.core.model_file import load_json
from xrunner.io.tokenizer import is_token

# key -> values that ask for nothing, beside null, false and what is empty
_NOT_DONE: dict[str, tuple[object, ...]] = {
    "encoder_no_repeat_ngram_size": (0,), "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,), "bad_words_ids": (), "sequence_bias": (),
    "suppress_tokens": (), "begin_suppress_tokens": (), "exponential_decay_length_penalty": (),
    "guidance_scale": (1,)}
# what transformers takes where config.json alone is there and does not say
_USUAL_LAST = {"bart": 2, "mbart": 2}


@dataclass(frozen=True, slots=True)
class GivenTokens:
    """`first`: the first token of every output; `last`: its last one where it reaches its most
    tokens; None: the model chooses. `least`: tokens, that which the decoder is fed first among
    them, before which no end of sequence is chosen; `unrepeated`: so many in a row are not chosen
    twice, 0: may be."""

    first: int | None = None
    last: int | None = None
    least: int = 0
    unrepeated: int = 0

    def fixed(self, max_new_tokens: int) -> tuple[tuple[int, int], ...]:
        """(tokens before it, token) of what is given of an output of at most so many tokens."""
        at = ((1, self.first), (max_new_tokens, self.last))
        return tuple((position, token) for position, token in at if token is not None)


@lru_cache(4)
def given_tokens(directory: Path) -> GivenTokens:
    """Of the model in `directory`. Raises InputError for what is not done, naming every key."""
    path = directory / "generation_config.json"
    if not path.is_file():
        path = directory / "config.json"
    values = load_json(path)
    if mistakes := tuple(_not_done(values, path)):
        raise InputError(mistakes)
    usual = _USUAL_LAST.get(str(values.get("model_type")))
    return GivenTokens(_token(values, "forced_bos_token_id", path),
                       _token(values, "forced_eos_token_id", path, usual),
                       _count(values, "min_length", path),
                       _count(values, "no_repeat_ngram_size", path))


def _not_done(values: Mapping[str, Any], path: Path) -> Iterator[Mistake]:
    for key, neutral in _NOT_DONE.items():
        value = values.get(key)
        if value and value not in neutral:
            yield Mistake(file=str(path), line=None, key=key, value=value, allowed=(
                "our own runner does not do this, and without it the model's answers are others: "
                "take the key out of the file to have those"))


def _count(values: Mapping[str, Any], key: str, path: Path) -> int:
    value = values.get(key) or 0
    if not is_token(value):
        raise wrong(path, key, value, "a whole number >= 0")
    return int(value)


def _token(values: Mapping[str, Any], key: str, path: Path,
           usual: int | None = None) -> int | None:
    value = values.get(key, usual)
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not all(map(is_token, tokens)):
        raise wrong(path, key, value, "a token id, or a list of them")
    return min(tokens, default=None)  # of several with the same logit greedily the lowest
