"""Random rows of tokens, as the operators' tests draw them."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

SIZES = [1, 2, 3, 8, 15, 16, 17, 33, 64, 100, 576]
DTYPES = [torch.float32, torch.bfloat16]


class Rows(NamedTuple):
    tokens: int
    size: int
    dtype: torch.dtype
    threads: int
    seed: int

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + len(shape))
        return torch.randn(shape, generator=generator).to(dtype or self.dtype)


rows = st.builds(Rows, st.integers(0, 9) | st.just(70), st.sampled_from(SIZES),
                 st.sampled_from(DTYPES), st.integers(1, 4), st.integers(0, 2**31))
