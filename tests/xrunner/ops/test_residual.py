"""The residual stream: what is added is there once, whoever reads it next."""

import torch
from torch.nn import functional as F

from xrunner.ops.residual import Residual


def test_products_are_added_once_by_the_norm_that_follows_or_by_the_next():
    start, parts, weight = torch.randn(5, 24), torch.randn(4, 5, 24), torch.randn(24)
    stream = Residual(start.clone())
    stream.add(parts[0])
    normed = stream.rms_norm(weight, 1e-5)
    torch.testing.assert_close(normed, F.rms_norm(start + parts[0], (24,), weight, 1e-5))
    torch.testing.assert_close(stream.rms_norm(weight, 1e-5), normed)
    stream.add(parts[1])
    stream.add(parts[2], lambda part: 3 * part)  # of a tensor-parallel group of equals
    expected = start + parts[0] + parts[1] + 3 * parts[2]
    torch.testing.assert_close(stream.layer_norm(weight, weight, 1e-5),
                               F.layer_norm(expected, (24,), weight, weight, 1e-5))
    stream.add(parts[3])
    torch.testing.assert_close(stream.total(), expected + parts[3])
    torch.testing.assert_close(stream.total(), expected + parts[3])
