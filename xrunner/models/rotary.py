"""Rotary positions: how fast each pair of a head's elements turns, by kind (docs/models.md).

A pair is elements i and i + d / 2, as the kernels rotate them. In Phi-4-mini only a head's first r
elements turn, in pairs i and i + r / 2. Elements of queries and keys are then reordered when
weights are loaded, which leaves their products unchanged."""

import math

import torch
from torch import Tensor

from xgpt.core.model import ModelSpec, RopeValue
from xrunner.devices import on_device
from xrunner.ops.rows import Rotation


class Rotary:
    """Rotation of the layers of one kind."""

    def __init__(self, inverse_frequency: Tensor, scale: float, dim: int) -> None:
        """`inverse_frequency`: [r / 2], of heads of `dim` elements. `scale`: of cos and sin."""
        self._inverse, self._scale, self._still = (
            inverse_frequency, scale, dim // 2 - len(inverse_frequency))

    def __call__(self, positions: Tensor) -> Rotation:
        """Cosines and sines at positions [T], [T, d / 2] each."""
        if self._inverse.device != positions.device:  # once: it stays there
            self._inverse = on_device(self._inverse, positions.device)
        angles = positions[:, None].float() * self._inverse
        cos, sin = angles.cos(), angles.sin()
        if self._scale != 1.0:
            cos, sin = cos * self._scale, sin * self._scale
        if self._still:
            rest = (len(cos), self._still)
            cos = torch.cat([cos, cos.new_ones(rest)], dim=1)
            sin = torch.cat([sin, sin.new_zeros(rest)], dim=1)
        return Rotation(cos, sin)


def rotaries(spec: ModelSpec) -> tuple[Rotary, ...]:
    """A model's rotations: that of global layers, then that of windowed layers if it differs. Empty
    for learned positions."""
    if spec.has_learned_positions:
        return ()
    dim = spec.head_dim
    rotated = spec.decoder.rotary_dim or dim
    kinds = [Rotary(*_scaled(spec, rotated), dim)]
    if (theta := spec.decoder.local_rope_theta) is not None:
        kinds.append(Rotary(_inverse(theta, rotated), 1.0, dim))
    return tuple(kinds)


def rotary_of(spec: ModelSpec, layer: int) -> int | None:
    """Index in `rotaries` of a layer's rotation; None if it is not rotated."""
    if spec.has_learned_positions or layer in spec.decoder.unrotated:
        return None
    is_local = (spec.decoder.local_rope_theta is not None
                and spec.decoder.window(layer) is not None)
    return 1 if is_local else 0


def element_order(spec: ModelSpec) -> Tensor | None:
    """Index of the stored element for each of a head's elements, [d]; None: unchanged order."""
    rotated, dim = spec.decoder.rotary_dim, spec.head_dim
    if rotated is None:
        return None
    turning, still = torch.arange(rotated).view(2, -1), torch.arange(rotated, dim).view(2, -1)
    return torch.cat([turning[0], still[0], turning[1], still[1]])


def _inverse(theta: float, rotated: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)


def _scaled(spec: ModelSpec, rotated: int) -> tuple[Tensor, float]:
    """Inverse frequencies [r / 2] and scale of cos and sin, as in transformers'
    modeling_rope_utils."""
    inverse, scaling = _inverse(spec.rope_theta, rotated), dict(spec.rope_scaling or ())
    match scaling.get("rope_type", scaling.get("type")):
        case None:
            return inverse, 1.0
        case "linear":
            return inverse / _number(scaling, "factor"), 1.0
        case "llama3":
            return _llama3(inverse, scaling), 1.0
        case "yarn":
            return _yarn(inverse, scaling, spec.rope_theta), _yarn_scale(scaling)
        case "longrope":
            factors = scaling["short_factor"]
            assert isinstance(factors, tuple) and len(factors) == len(inverse), (
                f"{len(inverse)} pairs of a head are rotated, short_factor is {factors}")
            return inverse / torch.tensor(factors), _longrope_scale(scaling)
        case kind:
            raise AssertionError(f"{kind = }")


def _number(scaling: dict[str, RopeValue], key: str, default: float | None = None) -> float:
    value = scaling[key] if default is None else scaling.get(key, default)
    assert isinstance(value, (int, float)), f"{key} = {value}"
    return float(value)


def _llama3(inverse: Tensor, scaling: dict[str, RopeValue]) -> Tensor:
    factor, low, high, trained = (_number(scaling, key) for key in (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
    wavelength = 2 * math.pi / inverse
    blend = ((trained / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inverse / factor + blend * inverse


def _yarn(inverse: Tensor, scaling: dict[str, RopeValue], theta: float) -> Tensor:
    """YaRN (arXiv:2309.00071): fast pairs unchanged, slow ones stretched."""
    trained, dim = _number(scaling, "original_max_position_embeddings"), 2 * len(inverse)

    def pair(turns: float) -> float:  # the pair that makes so many turns over the trained positions
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(_number(scaling, "beta_fast", 32.0)), pair(_number(scaling, "beta_slow", 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    steps = torch.arange(len(inverse), dtype=torch.float32)
    stretched = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    return inverse / _number(scaling, "factor") * stretched + inverse * (1 - stretched)


def _yarn_scale(scaling: dict[str, RopeValue]) -> float:
    if "attention_factor" in scaling:
        return _number(scaling, "attention_factor")
    factor = _number(scaling, "factor")

    def share(of: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * of * math.log(factor) + 1.0

    if "mscale" in scaling and "mscale_all_dim" in scaling:
        return share(_number(scaling, "mscale")) / share(_number(scaling, "mscale_all_dim"))
    return share(1.0)


def _longrope_scale(scaling: dict[str, RopeValue]) -> float:
    """LongRoPE (arXiv:2402.13753), within the positions of its first training."""
    if "attention_factor" in scaling:
        return _number(scaling, "attention_factor")
    factor, trained = (_number(scaling, key) for key in (
        "factor", "original_max_position_embeddings"))
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
