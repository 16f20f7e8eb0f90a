"""Input tokens estimated from characters, for planning where the model's tokenizer cannot be had. A
run never uses it.

Measured with SmolLM2's tokenizer on texts at hand: 4.3 characters a token of English prompts, 3.6
of Markdown and Python, 2.1 to 2.9 of other languages in Latin letters, 1.3 to 1.5 of Cyrillic and
Greek, 0.8 to 1.2 of Chinese, Japanese and Korean among names in ASCII. The estimate is 1.18 times
what was counted for the first, 1.00 for the second, 0.43 at the worst (Korean); its logarithm is
0.32 off over 21 kinds of texts (root mean square):
benchmarks/results/characters-per-token.md."""

from collections.abc import Sequence
from typing import Any

from xgpt.requests.request import Request

ASCII_PER_TOKEN = 3.6
OTHERS_PER_TOKEN = 1.0  # characters outside ASCII
SPREAD = 0.32  # standard deviation of the logarithm, common to all texts of a job


def estimated_tokens(text: str) -> int:
    """How many tokens a text has, roughly; at least one."""
    others = len(text) - len(text.encode("ascii", "ignore"))
    return max(round((len(text) - others) / ASCII_PER_TOKEN + others / OTHERS_PER_TOKEN), 1)


class CharacterTokens:
    """Stands for a tokenizer where only numbers of tokens are asked for. What a chat template adds
    is not counted."""

    vocab_size = None

    def tokenise(self, requests: Sequence[Request]) -> list[Any]:
        """As many ids as each request has tokens, which stand for nothing."""
        return [request.tokens if request.tokens is not None else range(estimated_tokens(
            (request.prompt or "\n".join(m.get("content", "") for m in request.messages or ()))
            + (request.continuation or ""))) for request in requests]
