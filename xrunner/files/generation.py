"""Generation settings in a model's own files, beside its weights.

Qwen2.5 has a repetition penalty, for example, and BART's summarisers a fixed first token. They are
read as transformers' greedy `generate` does: from generation_config.json, else config.json. Beams
and temperature are the job's to set. Settings that are not implemented are refused, since texts
would differ without them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from xgpt.core.engines import OWN_ENGINE, VLLM
from xgpt.core.errors import InputError, Mistake, wrong
from xgpt.core.hf.config import NO_INFLUENCE
from xgpt.core.hf.values import load_json
from xrunner.files.tokenizer import is_token

# key -> values without effect, beside null, false and empty ones
_NOT_DONE: dict[str, tuple[object, ...]] = {
    "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,),
    "bad_words_ids": (), "sequence_bias": (), "suppress_tokens": (), "begin_suppress_tokens": (),
    "exponential_decay_length_penalty": (), "guidance_scale": (1,), "stop_strings": (),
    "watermarking_config": (), "penalty_alpha": (0,), "dola_layers": (), "token_healing": (),
    "force_words_ids": (), "constraints": ()}
# transformers' defaults if config.json alone exists and does not say
_USUAL_LAST = {"bart": 2, "mbart": 2}


@dataclass(frozen=True, slots=True)
class GenerationRules:
    """Fixed tokens and penalties that a model's files ask for.

    `first`: token after the first one (an encoder-decoder model's start, or an input of one token).
    `last`: last token of an output that reaches its limit. None: the model chooses. `least`:
    tokens, input or start included, before which the output may not end; `least_new`: the same
    without these. `no_repeat_size`: length of token sequences that may not repeat (0: any).
    `repetition_penalty`: of tokens that occurred."""

    first: int | None = None
    last: int | None = None
    least: int = 0
    no_repeat_size: int = 0
    repetition_penalty: float = 1.0
    least_new: int = 0

    def fixed(self, before: int, max_new_tokens: int) -> tuple[tuple[int, int], ...]:
        """(position, token) of the fixed tokens of an output of at most `max_new_tokens` tokens.
        `before`: tokens before the output."""
        at = ((1, self.first), (before + max_new_tokens - 1, self.last))
        return tuple((position, token) for position, token in at
                     if token is not None and position >= before)

    def least_after(self, before: int) -> int:
        """Least tokens of an output behind `before` tokens."""
        return self.least_new or max(self.least - before, 0)


@lru_cache(4)
def generation_rules(directory: Path) -> GenerationRules:
    """Generation settings of the model in `directory`. Raises InputError with every mistake."""
    path = _file_of(directory)
    values = load_json(path)
    if mistakes := tuple(_not_done(values, path)):
        raise InputError(mistakes)
    usual = _USUAL_LAST.get(str(values.get("model_type")))
    return GenerationRules(_token(values, "forced_bos_token_id", path),
                       _token(values, "forced_eos_token_id", path, usual),
                       _count(values, "min_length", path),
                       _count(values, "no_repeat_ngram_size", path),
                       _penalty(values, path), _count(values, "min_new_tokens", path))


def ignored_settings(directory: Path) -> list[str]:
    """Keys of generation_config.json that the job sets instead (beams, draws, lengths), or unknown.
    Raises InputError if the file cannot be read."""
    path = directory / "generation_config.json"
    values = load_json(path) if path.is_file() else {}
    return [key for key, value in sorted(values.items())
            if value is not None and key not in NO_INFLUENCE and key not in _NOT_DONE]


def refuse_unsupported_rules(directory: Path, engine: str) -> None:
    """Raises InputError with every setting of the model that the engine does not implement."""
    given, path = generation_rules(directory), _file_of(directory)
    asked = {"forced_bos_token_id": given.first, "forced_eos_token_id": given.last,
             "no_repeat_ngram_size": given.no_repeat_size or None,
             "repetition_penalty": given.repetition_penalty if given.repetition_penalty != 1
             else None}
    able = {OWN_ENGINE: frozenset(asked), VLLM: frozenset({"repetition_penalty"})}
    if mistakes := [Mistake(
            file=str(path), line=None, key=key, value=value, allowed=(
                f"xgpt cannot apply this with engine {engine}, and without it answers would "
                "differ: remove the key from the file to accept that"))
            for key, value in asked.items()
            if value is not None and key not in able.get(engine, frozenset())]:
        raise InputError(mistakes)


def _file_of(directory: Path) -> Path:
    path = directory / "generation_config.json"
    return path if path.is_file() else directory / "config.json"


def _not_done(values: Mapping[str, Any], path: Path) -> Iterator[Mistake]:
    for key, neutral in _NOT_DONE.items():
        value = values.get(key)
        if value and value not in neutral:
            yield Mistake(file=str(path), line=None, key=key, value=value, allowed=(
                "xgpt's runner does not implement this, and without it the answers would differ: "
                "remove the key from the file to accept that"))


def _penalty(values: Mapping[str, Any], path: Path) -> float:
    value = values.get("repetition_penalty") or 1.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise wrong(path, "repetition_penalty", value, "a number > 0")
    return float(value)


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
    return min(tokens, default=None)  # of tokens with equal logits greedy decoding takes the lowest
