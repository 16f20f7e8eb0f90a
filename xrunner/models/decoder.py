"""The decoder layer of all decoder-only families, without its attention kernel, and a model's ends.

After attention a layer applies an MLP (plain or gated) or experts to each row. A family reads its
checkpoint's names and layouts into `LayerWeights`; xgpt.core.model.Decoder says what is
computed."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from xgpt.core.model import Experts, ModelSpec
from xrunner.models.rotary import rotaries, rotary_of
from xrunner.models.weights import WHOLE, Shard, WeightSource, embedding_weight, head_weight
from xrunner.ops.attention import Scoring
from xrunner.ops.linear import Product
from xrunner.ops.output_head import HeadScores, OutputHead, Scores
from xrunner.ops.rows import Residual, Rotation, layer_norm, rms_norm


class Norm(NamedTuple):
    """A norm with weight [H]: a layer norm if it has a `bias` [H], else an RMS norm."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        """Normed rows, [T, H]."""
        if self.bias is None:
            return rms_norm(rows, self.weight, self.eps)
        return layer_norm(rows, self.weight, self.bias, self.eps)

    def of(self, hidden: Residual) -> Tensor:
        """Normed rows [T, H] of the stream, pending additions included."""
        if self.bias is None:
            return hidden.rms_norm(self.weight, self.eps)
        return hidden.layer_norm(self.weight, self.bias, self.eps)


def rms_weight(weights: WeightSource, name: str, size: int, *, adds_one: bool) -> Tensor:
    """Weight of an RMS norm, [size]. `adds_one`: the checkpoint stores it less one."""
    weight = weights.get(f"{name}.weight", (size,))
    return weight + 1 if adds_one else weight


class HeadNorms:
    """RMS norms of queries and keys before rotation. Over each head, or over all heads of queries
    and all of keys, also those of other ranks."""

    def __init__(self, weight: Tensor, eps: float, *, over: tuple[int, int] | None = None,
                 sums: Callable[[Tensor], Tensor] | None = None) -> None:
        """`weight`: [h + k, d]. `over`: elements that a norm of queries, and of keys, is over;
        None: a head's. `sums`: sums over the ranks of a group (None: this rank has all heads)."""
        self.weight, self._eps, self._over, self._sums = weight, eps, over, sums

    def __call__(self, joint: Tensor, heads: int) -> Tensor:
        """Norms `joint` [T, (h + 2 k) d] in place and returns it; its first `heads` are queries."""
        count, dim = self.weight.shape
        part = joint.view(len(joint), -1, dim)[:, :count]
        wide = part.float()
        squares = wide.square()
        if self._over is None:
            mean = squares.mean(-1, keepdim=True)
        else:
            sums = torch.stack([side.sum((1, 2)) for side in (
                squares[:, :heads], squares[:, heads:])], dim=1)
            if self._sums is not None:
                sums = self._sums(sums)
            # numbers of the host: a tensor of them would wait for a GPU
            mean = torch.cat([(sums[:, side:side + 1] / over).expand(-1, width) for side, (
                over, width) in enumerate(zip(self._over, (heads, count - heads), strict=True))],
                dim=1)[:, :, None]
        part.copy_(wide * torch.rsqrt(mean + self._eps) * self.weight)
        return joint


def all_heads(weights: WeightSource, name: str, heads: int, dim: int, shard: Shard) -> Tensor:
    """This shard's part [h, d] of a weight over all `heads`."""
    part = shard.part(0, heads * dim)
    return weights.get(f"{name}.weight", (heads * dim,), part).view(-1, dim)


# activation of a gate, by ModelSpec.activation
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_new": partial(F.gelu, approximate="tanh"),
    "relu": F.relu}


class Mlp(Protocol):
    """Maps rows [T, H] to this shard's partial sums [T, H]."""

    @property
    def products(self) -> tuple[Product, ...]: ...

    def __call__(self, rows: Tensor) -> Tensor: ...


class PlainMlp:
    """down(activation(up)), with `up` [f, H] and `down` [H, f], f columns of this shard."""

    def __init__(self, up: Product, down: Product) -> None:
        self.up, self.down = up, down

    @property
    def products(self) -> tuple[Product, ...]:
        return self.up, self.down

    def __call__(self, rows: Tensor) -> Tensor:
        return self.down(self.up(rows))


class GatedMlp:
    """down(activation(gate) * up), with `gate_up` [2 f, H], gate first, and `down` [H, f]."""

    def __init__(self, gate_up: Tensor, down: Product, activation: str) -> None:
        self.gate_up = Product(gate_up, activation="silu_mul" if activation == "silu" else "none")
        self.down, self._activation = down, activation

    @property
    def products(self) -> tuple[Product, ...]:
        return self.gate_up, self.down

    def __call__(self, rows: Tensor) -> Tensor:
        joint = self.gate_up(rows)
        if self._activation == "silu":  # applied by the product
            return self.down(joint)
        gate, up = joint.chunk(2, dim=-1)
        return self.down(GATES[self._activation](gate) * up)


class Mixture:
    """A router [E, H], whole on every rank, and E gated MLPs, this shard's columns of each."""

    def __init__(self, router: Tensor, mlps: list[GatedMlp], experts: Experts) -> None:
        self.router, self.mlps, self._experts = router, mlps, experts
        # brings an expert's weights, and begins to bring those of the one used after it (None: no
        # more); None: all are resident
        self.lend: Callable[[int, int | None], None] | None = None

    @property
    def products(self) -> tuple[Product, ...]:
        return tuple(product for mlp in self.mlps for product in mlp.products)

    def __call__(self, rows: Tensor) -> Tensor:
        """Weighted sum [T, H] of each row's experts; an expert takes all of its rows at once."""
        return self.over([rows])[0]

    def over(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """The sums of each of `batches`, one expert after the other: each is used, and lent where
        it is not resident, once for all of them."""
        routes = [self._route(rows) for rows in batches]
        outs = [torch.zeros_like(rows) for rows in batches]
        used = [expert for expert in range(self._experts.count)
                if any(route.of(expert) for route in routes)]
        for place, expert in enumerate(used, start=1):
            following = used[place] if place < len(used) else None
            if self.lend is not None:
                self.lend(expert, following)
            for rows, route, out in zip(batches, routes, outs, strict=True):
                if places := route.of(expert):
                    own, mlp = route.rows[places], self.mlps[expert]
                    out.index_add_(0, own, mlp(rows[own]) * route.shares[places][:, None])
        return outs

    def _route(self, rows: Tensor) -> "_Route":
        shares = F.linear(rows, self.router.to(rows.dtype)).softmax(-1, dtype=torch.float)
        weights, chosen = shares.topk(self._experts.per_token, dim=-1)
        if self._experts.is_normed:
            weights = weights / weights.sum(-1, keepdim=True)
        # rows sorted by expert, each expert's in their order
        experts, order = chosen.flatten().sort(stable=True)
        counts = experts.bincount(minlength=self._experts.count).tolist()
        return _Route(order // self._experts.per_token, weights.view(-1)[order].to(rows.dtype),
                      [0, *accumulate(counts)])


class _Route(NamedTuple):
    """Experts of a batch's rows. `rows`, `shares`: row and weight of each use, sorted by expert.
    `bounds`: where each expert's uses begin, and where the last one's end."""

    rows: Tensor
    shares: Tensor
    bounds: list[int]

    def of(self, expert: int) -> slice | None:
        """The uses of an expert; None if it has none."""
        first, end = self.bounds[expert:expert + 2]
        return slice(first, end) if end > first else None


class LayerWeights(NamedTuple):
    """Weights of one layer, or one rank's shard of them. Norms are of the inputs of attention and
    MLP, or of their outputs; None: no norm."""

    qkv: Product  # query, key and value, [(h + 2 k) d, H]
    out: Product
    mlp: Mlp
    input_norm: Norm | None = None
    mlp_norm: Norm | None = None
    attended_norm: Norm | None = None
    output_norm: Norm | None = None
    head_norms: HeadNorms | None = None


def read_norm(spec: ModelSpec, weights: WeightSource, name: str) -> Norm:
    """A layer norm with bias."""
    size = (spec.hidden_size,)
    return Norm(weights.get(f"{name}.weight", size), weights.get(f"{name}.bias", size),
                spec.norm_eps)


class DecoderLayer:
    """One decoder layer, or one rank's shard of it, with `heads` (h) and `kv_heads` (k) of size
    `dim` (d). `scoring`: how attention scores are computed. `rotary`: number of the rotation among
    the model's (None: no rotation)."""

    def __init__(self, spec: ModelSpec, shard: Shard, index: int, weights: LayerWeights) -> None:
        self.heads = shard.share(spec.num_heads)
        self.kv_heads = shard.of_kv(spec).share(spec.kv_heads)
        self.dim, self._all_reduce = spec.head_dim, shard.completes
        self.weights, self._scale = weights, spec.decoder.residual_scale
        self.rotary = rotary_of(spec, index)
        self.scoring = Scoring(spec.decoder.query_scale, spec.decoder.window(index),
                               spec.decoder.attention_cap)

    @property
    def products(self) -> tuple[Product, ...]:
        return self.weights.qkv, self.weights.out, *self.weights.mlp.products

    def qkv(self, hidden: Residual) -> Tensor:
        """Query, key and value of each token, [T, (h + 2 k) d], unrotated, from hidden [T, H]."""
        joint = self.weights.qkv(_normed(hidden, self.weights.input_norm))
        norms = self.weights.head_norms
        return joint if norms is None else norms(joint, self.heads)

    def finish(self, hidden: Residual, attended: Tensor) -> None:
        """Turns hidden [T, H] into the layer's output, in place, by attended [T, h * d]."""
        self.project(hidden, attended)
        self.mix([hidden])

    def project(self, hidden: Residual, attended: Tensor) -> None:
        """Adds attention's output projection to hidden [T, H]."""
        self._add(hidden, self.weights.out(attended), self.weights.attended_norm)

    def mix(self, batches: Sequence[Residual]) -> None:
        """Adds the MLP's output to each of the batches' hidden states [T, H]."""
        weights, mlp = self.weights, self.weights.mlp
        normed = (_normed(hidden, weights.mlp_norm) for hidden in batches)
        outs = mlp.over([*normed]) if isinstance(mlp, Mixture) else map(mlp, normed)
        for hidden, out in zip(batches, outs, strict=True):
            self._add(hidden, out, weights.output_norm)

    def _add(self, hidden: Residual, product: Tensor, norm: Norm | None) -> None:
        if self._scale != 1.0:
            product = product * self._scale
        if norm is None:
            hidden.add(product, self._all_reduce)
        else:  # of the whole group's sum
            hidden.add(norm(product if self._all_reduce is None else self._all_reduce(product)))


def _normed(hidden: Residual, norm: Norm | None) -> Tensor:
    return hidden.total() if norm is None else norm.of(hidden)


class DecoderEnds:
    """Embeddings (first stage), rotary tables (every stage), final norm and head (last stage)."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, *, first: bool, last: bool,
                 norm: str, shard: Shard = WHOLE, table: tuple[str, int] | None = None) -> None:
        """`norm`: name of the final norm in checkpoints. `table`: name of the learned positions and
        row of position 0; norms then have biases."""
        self._spec, self._rotaries, self._scale = spec, rotaries(spec), spec.decoder.embedding_scale
        self.embedding: Tensor | None = None
        # reads rows of a table that is not resident; None: it is
        self.rows: Callable[[Tensor], Tensor] | None = None
        self.head: OutputHead | None = None
        self.norm: Norm | None = None
        self.positions: Tensor | None = None
        name, self._offset = table or ("", 0)
        if first:
            self.embedding = embedding_weight(spec, weights)
            # rounded like the embedding, as in transformers; read now, since later it would wait
            # for a GPU
            self._scale = float(torch.tensor(self._scale, dtype=self.embedding.dtype))
        if first and table is not None:
            assert spec.max_positions is not None, "a model with learned positions"
            self.positions = weights.get(name, (spec.max_positions + self._offset,
                                                 spec.hidden_size))
        if last:
            self.norm = read_norm(spec, weights, norm) if table is not None else Norm(rms_weight(
                weights, norm, spec.hidden_size, adds_one=spec.decoder.norm_adds_one), None,
                spec.norm_eps)
            self.head = OutputHead(head_weight(spec, weights, self.embedding, shard))

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [T, H] of tokens [T] at positions [T]."""
        if self.rows is not None:
            hidden = self.rows(tokens)
        else:
            assert self.embedding is not None, "only the first stage embeds"
            hidden = F.embedding(tokens, self.embedding)
        if self._scale != 1.0:
            hidden = hidden * self._scale
        if self.positions is None:
            return hidden
        at = positions + self._offset if self._offset else positions
        return hidden + F.embedding(at, self.positions)

    def rotation(self, positions: Tensor) -> tuple[Rotation, ...]:
        """Rotations of queries and keys at positions [T], indexed by a layer's `rotary`."""
        return tuple(rotary(positions) for rotary in self._rotaries)

    def normed(self, hidden: Tensor) -> Tensor:
        """Last hidden states [n, H] after the final norm; the head multiplies them."""
        assert self.norm is not None, "only the last stage has the last norm"
        return self.norm(hidden)

    def scores(self, hidden: Tensor) -> Scores:
        """Logits [n, V_local] of this shard's share of the vocabulary, from hidden [n, H]."""
        decoder = self._spec.decoder
        assert self.head is not None, "only the last stage has a head"
        rows = self.normed(hidden)
        return HeadScores(self.head, rows if decoder.logit_scale == 1.0 else
                          rows * decoder.logit_scale, cap=decoder.logit_cap)
