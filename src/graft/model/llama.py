"""Fused forward of Llama-like models (Llama, Mistral, Qwen2, Qwen3) over a transformers model's own weights.

The operations between matrix products are fused (`kernels/layer.py`). Weights of one product (q, k, v; gate, up) are
concatenated once, and the model's parameters become views of them. If `fusable.why_not` gives a reason, transformers'
own code runs the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from graft.model.attention import KernelStep
from graft.model.fusable import window_of
from graft.model.kernels import attention as attention_kernels
from graft.model.kernels import layer as layer_kernels
from graft.model.kernels import overlap
from graft.model.kernels.matmul import Products, can_multiply

_MAX_HOLES = 2**31  # bytes of free memory between allocations
_SMALL = 2**27  # bytes of a layer up to which launches overlap in steps of any size


@dataclass(frozen=True)
class Rotary:
    """Rotary tables: cosines and sines of the first positions, [positions, head_dim / 2]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, module: nn.Module, like: Tensor, num_positions: int) -> Rotary:
        """Make tables by a model's own rotary module, on the device and in the dtype of `like` [any, any]."""
        positions = torch.arange(num_positions, device=like.device)[None]
        # Both halves of a head have the same angles.
        return cls(*(table[0, :, : table.shape[2] // 2].contiguous() for table in module(like[:1], positions)))


@dataclass(frozen=True)
class Layer:
    """One decoder layer's weights. Products are [outputs, inputs], norms [size]."""

    qkv: Tensor
    qkv_bias: Tensor | None
    o: Tensor
    gate_up: Tensor
    down: Tensor
    input_norm: Tensor
    attention_norm: Tensor
    head_norms: tuple[Tensor, Tensor, float] | None
    scale: float
    window: int | None


class LayerStack:
    """The decoder layers of a model or of a draft head, over the tensors of a KV store."""

    def __init__(self, layers: Sequence[Layer], heads: int, eps: float, multiply: Products) -> None:
        self.layers, self._heads, self._eps, self._multiply = layers, heads, eps, multiply
        first = layers[0]
        weights = (first.qkv, first.o, first.gate_up, first.down)
        self._is_small = sum(weight.nbytes for weight in weights) <= _SMALL

    def __call__(
        self,
        stream: Tensor,  # [T, H]
        step: KernelStep,
        keys: Tensor,  # [layers, slots, kv_heads, head_dim]
        values: Tensor,
        rotary: Rotary,
        seen: Sequence[KernelStep] | None = None,
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Returns the layers' inputs, each [T, H], the last residual stream, and the delta to be added to it.

        seen: by layer, what its tokens see, if that differs from the step.
        """
        head_dim = keys.shape[3]
        tiles = attention_kernels.tiles_for(head_dim, stream.dtype)
        size = max(
            attention_kernels.scratch_size(each.layout, self._heads, head_dim, tiles) for each in (step, *(seen or ()))
        )
        scratch = torch.empty(size, dtype=torch.float32, device=stream.device)  # shared by all layers
        for each in seen or (step,):
            each.plan(self._heads // keys.shape[2], tiles)  # before any launch that may overlap
        multiply, inputs = self._multiply, []
        delta: Tensor | None = None  # still to be added to the stream
        with overlap.launches(self._is_small or len(stream) in overlap.FASTER):
            for number, layer in enumerate(self.layers):
                stream, normed = layer_kernels.add_norm(stream, delta, layer.input_norm, self._eps)
                inputs.append(stream)
                qkv = multiply(normed, layer.qkv, layer.qkv_bias)
                attended = attend_in_store(
                    qkv,
                    keys[number],
                    values[number],
                    step,
                    rotary,
                    self._heads,
                    seen=seen[number] if seen is not None else None,
                    norms=layer.head_norms,
                    scale=layer.scale,
                    window=layer.window,
                    scratch=scratch,
                )
                delta = multiply(attended, layer.o)
                stream, normed = layer_kernels.add_norm(stream, delta, layer.attention_norm, self._eps)
                delta = multiply(multiply.activate(normed, layer.gate_up), layer.down)
        assert delta is not None
        return inputs, stream, delta


class FastLayers:
    """The model's fused forward over the tensors of a KV store."""

    def __init__(self, model: PreTrainedModel, exact: bool = False) -> None:
        """model: one for which `why_not` is None. exact: a token's bits never depend on the batch."""
        parts: Any = model
        config = model.config
        self.num_layers = config.num_hidden_layers
        self.kv_heads = config.num_key_value_heads
        self.heads = config.num_attention_heads
        self.head_dim = parts.model.layers[0].self_attn.head_dim
        self._eps = parts.model.norm.variance_epsilon
        self._embedding = parts.model.embed_tokens.weight.detach()
        self._norm = parts.model.norm.weight.detach()
        self._head = parts.lm_head.weight.detach()
        self._rotary = parts.model.rotary_emb
        layers: list[Layer] = []
        for layer in parts.model.layers:
            layers.append(_layer(layer))
            _release_cached_memory(self._embedding.device)
        self._multiply = Products(self._embedding.device, always=exact)
        self._stack = LayerStack(layers, self.heads, self._eps, self._multiply)

    @property
    def can_be_exact(self) -> bool:
        """Whether our kernel can compute all products."""
        return all(can_multiply(weight.shape) for weight in self._weights)

    @property
    def is_mostly_exact(self) -> bool:
        """Whether our kernel computes all products except in the largest steps, even if `exact` is off."""
        return self.can_be_exact and all(map(Products.is_quick, self._weights))

    @property
    def _weights(self) -> list[Tensor]:
        return [
            self._head,
            *(w for layer in self._stack.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)),
        ]

    def rotary(self, num_positions: int) -> Rotary:
        return Rotary.of(self._rotary, self._embedding, num_positions)

    @torch.no_grad()
    def __call__(
        self,
        tokens: Tensor,  # [T]
        step: KernelStep,
        keys: Tensor,  # [layers, slots, kv_heads, head_dim]
        values: Tensor,
        rotary: Rotary,
        hidden_layers: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits [T, V] in the model's dtype, and the inputs [T, H] of `hidden_layers`.

        Keys and values are written after the committed ones.
        """
        stream = embedding(tokens, self._embedding)  # [T, H]
        inputs, stream, delta = self._stack(stream, step, keys, values, rotary)
        _, normed = layer_kernels.add_norm(stream, delta, self._norm, self._eps)
        inputs.append(normed)  # transformers' last hidden state is normed too
        return self._multiply(normed, self._head), [inputs[layer] for layer in hidden_layers]


def attend_in_store(
    qkv: Tensor,  # [T, (heads + 2 * kv_heads) * head_dim]
    keys: Tensor,  # [slots, kv_heads, head_dim], one layer of a store
    values: Tensor,
    step: KernelStep,
    rotary: Rotary,
    heads: int,
    *,
    seen: KernelStep | None = None,
    norms: tuple[Tensor, Tensor, float] | None = None,
    scale: float | None = None,
    window: int | None = None,
    scratch: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Rotate queries and keys, write keys and values to the store, and attend: [T, heads * head_dim].

    seen: what the tokens see, if that differs from the step. dtype: of the result; None: the queries'.
    See `layer_kernels.rotate_and_store` and `attention_kernels.tree_attention`.
    """
    layer_kernels.rotate_and_store(qkv, keys, values, step.layout, rotary.cos, rotary.sin, norms)
    kv_heads, head_dim = keys.shape[1:]
    tiles = attention_kernels.tiles_for(head_dim, qkv.dtype)
    seen = seen or step
    return attention_kernels.tree_attention(
        qkv.view(len(qkv), -1, head_dim)[:, :heads],
        keys,
        values,
        seen.layout,
        seen.plan(heads // kv_heads, tiles),
        scale=scale,
        window=window,
        tiles=tiles,
        scratch=scratch,
        dtype=dtype,
    )


def _release_cached_memory(device: torch.device) -> None:
    """Return cached memory to the device. The freed separate weights leave holes too small for fused ones."""
    if device.type != "cuda":
        return
    if torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > _MAX_HOLES:
        torch.cuda.empty_cache()


def _layer(layer: Any) -> Layer:
    attention = layer.self_attn
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    head_norms = None
    if getattr(attention, "q_norm", None) is not None:
        query_norm, key_norm = attention.q_norm, attention.k_norm
        head_norms = (query_norm.weight.detach(), key_norm.weight.detach(), query_norm.variance_epsilon)
    bias = fuse_parameters([p.bias for p in projections]) if attention.q_proj.bias is not None else None
    return fused_layer(
        layer,
        fuse_parameters([p.weight for p in projections]),
        bias,
        head_norms,
        attention.scaling,
        window_of(attention),
    )


def fused_layer(
    layer: Any,
    qkv: Tensor,
    qkv_bias: Tensor | None,
    head_norms: tuple[Tensor, Tensor, float] | None,
    scale: float,
    window: int | None,
) -> Layer:
    """The weights of a decoder layer with Llama's names. The caller passes what differs between models."""
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        qkv=qkv,
        qkv_bias=qkv_bias,
        o=attention.o_proj.weight.detach(),
        gate_up=fuse_parameters([mlp.gate_proj.weight, mlp.up_proj.weight]),
        down=mlp.down_proj.weight.detach(),
        input_norm=layer.input_layernorm.weight.detach(),
        attention_norm=layer.post_attention_layernorm.weight.detach(),
        head_norms=head_norms,
        scale=scale,
        window=window,
    )


def fuse_parameters(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Concatenate parameters to one tensor and make them views of it, if they are not yet."""
    first, sizes = parameters[0], [len(p) for p in parameters]
    if _are_adjacent(parameters):
        return first.data.as_strided((sum(sizes), *first.shape[1:]), first.stride())
    whole = torch.cat([p.data for p in parameters])
    for parameter, part in zip(parameters, whole.split(sizes), strict=True):
        parameter.data = part
    return whole


def _are_adjacent(parameters: Sequence[nn.Parameter]) -> bool:
    end = parameters[0].data_ptr()
    for parameter in parameters:
        same = parameter.untyped_storage().data_ptr() == parameters[0].untyped_storage().data_ptr()
        if not same or not parameter.is_contiguous() or parameter.data_ptr() != end:
            return False
        end += parameter.nbytes
    return True
