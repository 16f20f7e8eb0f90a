"""Forms of answers (xgpt.requests.forms): which tokens may come next. That follows from the tokens
so far alone, so a request that is resumed is at the same place."""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from xgpt.core.errors import XgptError
from xgpt.requests.chat import form_of
from xgpt.requests.forms import grammar_of, library
from xrunner.files.tokenizer import TextTokenizer, eos_ids

_MOST_KEPT = 256  # chosen: compiled forms of a job whose lines have their own


class Matcher:
    """Follows one answer, token by token."""

    def __init__(self, matcher: Any) -> None:
        """`matcher`: llguidance's LLMatcher, used by this object alone."""
        self._matcher = matcher

    @property
    def allowed(self) -> bytes:
        """Bit mask of the tokens that may come next, token 0 the lowest bit of the first byte. All
        zeros after a token that the form does not allow."""
        mask: bytes = self._matcher.compute_bitmask()
        return bytes(len(mask)) if self._matcher.is_error() else mask

    def add(self, tokens: Sequence[int]) -> None:
        self._matcher.consume_tokens(list(tokens))


class Forms:
    """Makes matchers for the answers of one model, whose tokenizer it reads on first use."""

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self._directory, self._vocab_size = directory, vocab_size
        self._matcher = lru_cache(_MOST_KEPT)(self._compiled)

    @cached_property
    def refusal(self) -> str:
        """Why this model's answers cannot have forms; "" if they can. Raises MissingExtraError."""
        library()
        try:
            assert self._tokenizer is not None
        except (XgptError, ValueError) as cause:
            return f"no answer of this model can be held to a form: {cause}"
        return ""

    def matcher(self, passed: str, written: Sequence[int] = ()) -> Matcher:
        """Matcher of an answer with the form in `passed` (xgpt.requests.chat), after the tokens
        `written`. Raises MissingExtraError without llguidance."""
        own = Matcher(self._matcher(passed).deep_copy())
        own.add(written)
        return own

    def _compiled(self, passed: str) -> Any:
        return library().LLMatcher(self._tokenizer, grammar_of(form_of(passed)), log_level=0)

    @cached_property
    def _tokenizer(self) -> Any:
        own, ends = TextTokenizer(self._directory).backend, sorted(eos_ids(self._directory))
        if own is None or not ends:
            raise XgptError("its folder has no tokenizer" if own is None else
                            "its files name no end-of-sequence token")
        return library().LLTokenizer(own.to_str(), eos_token=ends, n_vocab=max(
            self._vocab_size, own.get_vocab_size()))
