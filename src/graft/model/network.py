"""A decoder described by data: what its layers compute, and the modules whose parameters they read.

`families` makes descriptions of transformers' models. Executors run them: `llama` on a GPU, `cpu_layers` on a CPU.
Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Activation = Literal["silu", "gelu", "gelu_tanh", "relu_squared"]


@dataclass(frozen=True)
class Norm:
    """A norm of a token's hidden state, or of its heads: x / rms(x), or (x - mean) / deviation, times the weight."""

    module: nn.Module  # holds the weight and the bias, if there are any
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    plus_one: bool = False  # the weight is stored minus 1
    rounds: bool = False  # to the dtype, before the weight; otherwise only once, after weight and bias
    over_all: bool = False  # of queries or keys: over all heads together, not over each

    @property
    def weight(self) -> Tensor | None:
        """[size], or [heads, head_dim] if each head has its own."""
        return getattr(self.module, "weight", None)

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.module, "bias", None)


@dataclass(frozen=True)
class Rotary:
    """Rotary positions. The first `dims` numbers of a head turn in pairs, the others stay."""

    module: nn.Module  # the model's own; gives cosines and sines
    layer_type: str | None  # what the module is asked for, if its layers differ
    dims: int
    interleaved: bool = False  # pairs are neighbours; otherwise halves apart
    wide: bool = False  # the sum of the two products is rounded once, not each product
    limit: int | None = None  # positions from here on would change the table of all

    @torch.no_grad()
    def table(self, like: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [positions, dims / 2] of the first positions, on the device of `like` [any, any]."""
        positions = torch.arange(min(num_positions, self.limit or num_positions), device=like.device)[None]
        kind = () if self.layer_type is None else (self.layer_type,)
        cos, sin = (table[0] for table in self.module(like[:1], positions, *kind))
        half = self.dims // 2
        if cos.shape[1] == half:
            return cos.contiguous(), sin.contiguous()
        # Both numbers of a pair have the same angle; some modules store them as neighbours, most as halves.
        is_repeated = not torch.equal(cos[:, :half], cos[:, half:])
        own = slice(None, None, 2) if is_repeated else slice(half)
        return cos[:, own].contiguous(), sin[:, own].contiguous()


@dataclass(frozen=True)
class Attention:
    """Attention over a KV cache."""

    qkv: tuple[nn.Linear, ...]  # their outputs, one after the other, are queries, then keys, then values
    o: nn.Linear
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    norms_turned: bool = False  # q_norm and k_norm come after the rotation
    rotary: Rotary | None = None
    window: int | None = None  # keys this many or more positions back are masked
    chunk: int | None = None  # keys in earlier chunks of this many positions are masked
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: Tensor | None = None  # [heads] scores of an extra key whose value is 0
    growth: tuple[float, int] | None = None  # (b, n): queries are multiplied by 1 + b * log(1 + position // n)
    values_are_keys: bool = False  # values are the keys before norm and rotation, and qkv has none
    kv_of: int | None = None  # the earlier layer whose keys and values are read; qkv has queries only


@dataclass(frozen=True)
class Mlp:
    """down(activation(gate) * up), or down(activation(up))."""

    up: tuple[nn.Linear, ...]  # their outputs, one after the other, are gates, if there are any, then ups
    down: nn.Linear
    activation: Activation
    gated: bool = True


@dataclass(frozen=True)
class Router:
    """Chooses a token's experts and their weights. Equal scores: the expert with the lower number."""

    weight: Tensor  # [E, H]
    bias: Tensor | None  # [E] of the logits
    correction: Tensor | None  # [E], or [1, E], added to scores for the choice only
    scoring: Literal["softmax", "sigmoid", "softmax_of_chosen"]
    top_k: int
    groups: int = 1  # of experts, of which only those of the best `top_groups` are chosen from
    top_groups: int = 1
    normalise: bool = False  # divide weights by their sum, which is at least `least_sum`, plus `added_to_sum`
    least_sum: float = 0.0
    added_to_sum: float = 0.0
    factor: float = 1.0  # of the weights
    wide: bool = False  # logits stay in float32; otherwise they are rounded to the dtype
    wide_weights: bool = False  # so do weights, and the experts' weighted results

    @property
    def num_experts(self) -> int:
        return len(self.weight)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: sum of weight * down(activation(gate) * up) over a token's experts."""

    router: Router
    gate_up: Tensor  # [E, 2 * neurons, H], gates first; transposed: [E, H, 2 * neurons]
    down: Tensor  # [E, H, neurons]; transposed: [E, neurons, H]
    activation: Activation
    gate_up_bias: Tensor | None = None  # [E, 2 * neurons]
    down_bias: Tensor | None = None  # [E, H]
    transposed: bool = False
    interleaved: bool = False  # gates and ups take turns
    limit: float | None = None  # clamp gates to at most this, and ups to at most this in size
    alpha: float | None = None  # the activation is gate * sigmoid(alpha * gate), and 1 is added to ups
    shared: Mlp | None = None  # an expert of all tokens
    shared_gate: nn.Linear | None = None  # sigmoid of its output scales the shared expert's


@dataclass(frozen=True)
class Side:
    """A layer's last part, with an input of its own: x += post(down(activation(up(x)) * input))."""

    up: nn.Linear
    down: nn.Linear
    activation: Activation
    post: Norm


@dataclass(frozen=True)
class SideInputs:
    """The inputs of all layers' sides: factor * (scale * embedding(token) + norm(projection_scale * projection(x)))."""

    embedding: nn.Embedding  # [vocab, layers * size]
    scale: float
    projection: nn.Linear  # of the residual stream before the first layer
    projection_scale: float
    norm: Norm  # over each layer's input
    factor: float


@dataclass(frozen=True)
class Layer:
    """A decoder layer: x += post(mixer(pre(x))), then x += post_mlp(mlp(pre_mlp(x)))."""

    pre: Norm | None
    mixer: Attention
    post: Norm | None
    pre_mlp: Norm | None
    mlp: Mlp | Experts
    post_mlp: Norm | None
    # The MLP reads the mixer's input, normed by `pre`, and both are added to x: first the mixer's output, or their sum.
    parallel: Literal["stream", "sum"] | None = None
    residual_scale: float = 1.0  # of what is added to x
    side: Side | None = None
    output_scale: float = 1.0  # of x, at the end


@dataclass(frozen=True)
class Network:
    """A model for text."""

    embedding: nn.Embedding
    layers: tuple[Layer, ...]
    norm: Norm
    head: nn.Linear
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    sides: SideInputs | None = None

    @property
    def hidden_size(self) -> int:
        return self.embedding.embedding_dim

    def rotaries(self) -> list[Rotary]:
        """The different rotary positions of the layers."""
        return list(dict.fromkeys(layer.mixer.rotary for layer in self.layers if layer.mixer.rotary is not None))


def kind_of(description: Any) -> Hashable:
    """All of a description but the values of its weights: layers of one kind have the same."""
    if isinstance(description, Rotary):
        return description
    if is_dataclass(description):
        return tuple((field.name, kind_of(getattr(description, field.name))) for field in fields(description))
    if isinstance(description, nn.Module):
        tensors = (*description.named_parameters(), *description.named_buffers())
        return (type(description), *((name, tensor.shape) for name, tensor in tensors))
    if isinstance(description, Tensor):
        return description.shape
    return tuple(map(kind_of, description)) if isinstance(description, tuple) else description
