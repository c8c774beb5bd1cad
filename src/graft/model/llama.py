"""Fused forward of described models (`network`) on a GPU, over a transformers model's own weights.

The operations between matrix products are fused (`kernels/`). Weights of one product (q, k, v; gate, up) are
concatenated once, and the model's parameters become views of them. A model that has no description, or whose layers do
not give what transformers' own give (`likeness`), is run by transformers' own code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from graft.model import network
from graft.model.attention import KernelStep
from graft.model.kernels import attention as attention_kernels
from graft.model.kernels import layer as layer_kernels
from graft.model.kernels import overlap
from graft.model.kernels import rotary as rotary_kernels
from graft.model.kernels.matmul import Products, can_multiply
from graft.model.kernels.mixed import Mixed
from graft.model.kv_cache import PAGE, Pair
from graft.model.layout import Layout
from graft.model.mixture import Mixture

_MAX_HOLES = 2**31  # bytes of free memory between allocations
Stored = Sequence[Pair] | Mapping[Any, Pair]  # keys and values by layer, each [slots, kv_heads, head_dim]
_SMALL = 2**27  # bytes of a layer up to which launches overlap in steps of any size


@dataclass(frozen=True)
class Rotary:
    """Rotary tables: cosines and sines of the first positions, [positions, dims / 2]; None: no rotation."""

    cos: Tensor | None
    sin: Tensor | None
    growth: Tensor | None = None  # [positions] numbers that multiply rotated queries

    @classmethod
    def of(cls, module: nn.Module, like: Tensor, num_positions: int) -> Rotary:
        """Make tables by a head's own rotary module, on the device and in the dtype of `like` [any, any]."""
        dims = module(like[:1], torch.zeros(1, 1, dtype=torch.long, device=like.device))[0].shape[2]
        return cls(*network.Rotary(module, None, dims).table(like, num_positions))

    @classmethod
    def of_layer(cls, attention: network.Attention, like: Tensor, num_positions: int) -> Rotary:
        cos, sin = attention.rotary.table(like, num_positions) if attention.rotary is not None else (None, None)
        growth = None
        if attention.growth is not None:
            rate, length = attention.growth
            positions = torch.arange(num_positions, device=like.device)
            growth = (1 + rate * torch.log(1 + torch.floor(positions / length))).to(like.dtype)
        return cls(cos, sin, growth)


@dataclass(frozen=True)
class Dense:
    """An MLP's weights, as products take them: [outputs, inputs], and biases [outputs]."""

    what: network.Mlp
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    @classmethod
    def of(cls, what: network.Mlp) -> Dense:
        up = fuse_parameters([part.weight for part in what.up])
        return cls(what, up, _biases(what.up), what.down.weight.detach(), _biases((what.down,)))

    def __call__(self, x: Tensor, multiply: Products) -> Tensor:
        inner = multiply.activate(x, self.up, self.up_bias, self.what.activation, self.what.gated)
        return multiply(inner, self.down, self.down_bias)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Those that `Products` multiplies by."""
        return self.up, self.down


@dataclass(frozen=True)
class Layer:
    """One decoder layer's weights, as products take them: [outputs, inputs], and biases [outputs]."""

    what: network.Layer
    qkv: Tensor
    qkv_bias: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    mlp: Dense | Mixture

    @classmethod
    def of(cls, what: network.Layer, qkv: Tensor | None = None) -> Layer:
        """Concatenate a layer's weights. qkv: those of queries, keys and values, if the caller has done so."""
        attention, mlp = what.mixer, what.mlp
        own: Dense | Mixture
        if isinstance(mlp, network.Experts):
            gate, shared = mlp.shared_gate, Dense.of(mlp.shared) if mlp.shared is not None else None
            own = Mixture(mlp, shared, fuse_parameters([mlp.router.weight, gate.weight]) if gate is not None else None)
        else:
            own = Dense.of(mlp)
        return cls(
            what,
            fuse_parameters([part.weight for part in attention.qkv]) if qkv is None else qkv,
            _biases(attention.qkv),
            *(attention.o.weight.detach(), _biases((attention.o,)), own),
        )

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Those that `Products` multiplies by."""
        return self.qkv, self.o, *self.mlp.weights


@dataclass(frozen=True)
class Addition:
    """What a layer adds to the residual stream, and how; see `layer_kernels.add_norm`."""

    delta: Tensor | Mixed
    post: network.Norm | None = None
    more: Tensor | None = None
    sum_first: bool = False
    scale: float = 1.0
    output_scale: float = 1.0


class LayerStack:
    """The decoder layers of a model or of a draft head, over the tensors of a KV store."""

    def __init__(self, layers: Sequence[Layer], multiply: Products) -> None:
        self.layers, self._multiply = layers, multiply
        self._is_small = sum(weight.nbytes for weight in layers[0].weights) <= _SMALL

    def __call__(
        self,
        stream: Tensor,  # [T, H]
        step: KernelStep,
        stored: Stored,
        rotary: Sequence[Rotary],  # by layer
        seen: Sequence[KernelStep] | None = None,
        sides: Tensor | None = None,  # [T, layers, size], if layers have sides
    ) -> tuple[list[Tensor], Tensor, Addition]:
        """Returns the layers' inputs, each [T, H], the last residual stream, and what is to be added to it.

        seen: by layer, what its tokens see, if that differs from the step.
        """
        kinds = {
            (layer.what.mixer.heads, layer.what.mixer.kv_heads, layer.what.mixer.head_dim) for layer in self.layers
        }
        size = 0
        for heads, kv_heads, head_dim in kinds:
            tiles = attention_kernels.tiles_for(head_dim, stream.dtype)
            for each in seen or (step,):
                each.plan(heads // kv_heads, tiles)  # before any launch that may overlap
            layouts = (each.layout for each in (step, *(seen or ())))
            size = max(size, *(attention_kernels.scratch_size(layout, heads, head_dim, tiles) for layout in layouts))
        scratch = torch.empty(size, dtype=torch.float32, device=stream.device)  # shared by all layers
        inputs = []
        last: Addition | None = None  # still to be added to the stream
        with overlap.launches(self._is_small or len(stream) in overlap.FASTER):
            for number, layer in enumerate(self.layers):
                stream, normed = _add(stream, last, layer.what.pre)
                inputs.append(stream)
                own = seen[number] if seen is not None else None
                stream, last = self._run(layer, stream, normed, step, stored, number, rotary[number], own, scratch)
                if layer.what.side is not None:
                    assert sides is not None
                    stream, last = self._run_side(layer.what.side, stream, last, sides[:, number])
        assert last is not None
        return inputs, stream, last

    def _run(
        self,
        layer: Layer,
        stream: Tensor,
        normed: Tensor,
        step: KernelStep,
        stored: Stored,
        number: int,
        rotary: Rotary,
        seen: KernelStep | None,
        scratch: Tensor,
    ) -> tuple[Tensor, Addition]:
        """The stream after attention, and what the MLP adds; or, with parallel branches, what both add."""
        what, multiply = layer.what, self._multiply
        source = what.mixer.kv_of
        keys, values = stored[number if source is None else source]
        qkv = multiply(normed, layer.qkv, layer.qkv_bias)
        attended = attend_in_store(qkv, keys, values, step, rotary, what.mixer, seen=seen, scratch=scratch)
        delta = multiply(attended, layer.o, layer.o_bias)
        if what.parallel is not None:
            more = layer.mlp(normed, multiply)
            assert isinstance(more, Tensor)  # no family has experts in a branch beside attention
            return stream, Addition(delta, None, more, what.parallel == "sum", what.residual_scale)
        stream, normed = _add(stream, Addition(delta, what.post, scale=what.residual_scale), what.pre_mlp)
        given = layer.mlp(normed, multiply)
        return stream, Addition(given, what.post_mlp, None, False, what.residual_scale, what.output_scale)

    def _run_side(self, side: network.Side, stream: Tensor, last: Addition, given: Tensor) -> tuple[Tensor, Addition]:
        """The stream after the MLP, and what the layer's side adds."""
        stream, _ = _add(stream, replace(last, output_scale=1.0), None)
        inner = self._multiply.activate(stream, side.up.weight.detach(), None, side.activation, False)
        delta = self._multiply(inner * given, side.down.weight.detach())
        return stream, Addition(delta, side.post, output_scale=last.output_scale)


def _add(stream: Tensor, last: Addition | None, norm: network.Norm | None) -> tuple[Tensor, Tensor]:
    if last is None:
        return layer_kernels.add_norm(stream, None, norm)
    return layer_kernels.add_norm(
        stream,
        last.delta,
        norm,
        post=last.post,
        more=last.more,
        sum_first=last.sum_first,
        scale=last.scale,
        output_scale=last.output_scale,
    )


class FastLayers:
    """A described model's fused forward over the tensors of a KV store."""

    def __init__(self, what: network.Network, exact: bool = False) -> None:
        """exact: a token's bits never depend on the batch."""
        self.what = what
        self._embedding, self._head = what.embedding.weight.detach(), what.head.weight.detach()
        self._head_bias = _biases((what.head,))
        layers: list[Layer] = []
        for layer in what.layers:
            layers.append(Layer.of(layer))
            _release_cached_memory(self._embedding.device)
        self._multiply = Products(self._embedding.device, always=exact)
        self.stack = LayerStack(layers, self._multiply)

    @property
    def can_be_exact(self) -> bool:
        """Whether our kernel can compute all products."""
        return all(can_multiply(weight.shape) for weight in self._weights)

    @property
    def is_mostly_exact(self) -> bool:
        """Whether our kernel computes all products except in the largest steps, even if `exact` is off."""
        return self.can_be_exact and all(map(Products.is_quick, self._weights))

    @property
    def _weights(self) -> Iterator[Tensor]:
        yield self._head
        sides = self.what.sides
        if sides is not None:
            yield sides.projection.weight
        for layer in self.stack.layers:
            yield from layer.weights
            if layer.what.side is not None:
                yield from (layer.what.side.up.weight, layer.what.side.down.weight)

    def rotary(self, num_positions: int) -> list[Rotary]:
        """Rotary tables by layer. Layers with the same rotary positions share them."""
        attentions = [layer.mixer for layer in self.what.layers]
        keys = [(attention.rotary, attention.growth) for attention in attentions]
        made = {
            key: Rotary.of_layer(attention, self._embedding, num_positions)
            for key, attention in dict(zip(keys, attentions, strict=True)).items()
        }
        return [made[key] for key in keys]

    @torch.no_grad()
    def __call__(
        self,
        tokens: Tensor,  # [T]
        step: KernelStep,
        stored: Stored,
        rotary: Sequence[Rotary],
        hidden_layers: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits [T, V] in the model's dtype, and the inputs [T, H] of `hidden_layers`.

        Keys and values are written after the committed ones.
        """
        embedded = self.embed(tokens)
        inputs, stream, last = self.stack(embedded, step, stored, rotary, sides=self._sides(tokens, embedded))
        _, normed = _add(stream, last, self.what.norm)
        inputs.append(normed)  # transformers' last hidden state is normed too
        return self._logits(normed), [inputs[layer] for layer in hidden_layers]

    # As `likeness.Executor`

    def embed(self, tokens: Tensor) -> Tensor:
        stream = embedding(tokens, self._embedding)  # [T, H]
        return stream if self.what.embedding_scale == 1 else stream * self.what.embedding_scale

    def _sides(self, tokens: Tensor, embedded: Tensor) -> Tensor | None:
        """The inputs [T, layers, size] of the layers' sides."""
        sides = self.what.sides
        if sides is None:
            return None
        shape = (len(tokens), len(self.what.layers), -1)
        projected = self._multiply(embedded, sides.projection.weight.detach()) * sides.projection_scale
        size = projected.shape[1] // shape[1]
        _, normed = layer_kernels.add_norm(projected.view(-1, size), None, sides.norm)
        own = embedding(tokens, sides.embedding.weight) * sides.scale
        return ((normed.view_as(own) + own) * sides.factor).view(shape)

    @torch.no_grad()
    def run_layer(self, number: int, stream: Tensor, past: Pair, tokens: Tensor) -> Tensor:
        device, attention = stream.device, self.what.layers[number].mixer
        before, own = past[0].shape[1], torch.arange(len(stream), dtype=torch.int32, device=device)
        if attention.kv_of is not None:
            before -= len(own)
        num_pages = -(-(before + len(own)) // PAGE)
        stored = tuple(part.new_zeros((num_pages + 1) * PAGE, len(part), part.shape[2]) for part in past)
        for new, old in zip(stored, past, strict=True):
            new[PAGE : PAGE + old.shape[1]] = old.transpose(0, 1)
        tables = torch.zeros(2, num_pages, dtype=torch.int32, device=device)
        tables[1] = 1 + torch.arange(num_pages, device=device)
        zero, count, length, one = own.new_tensor([[0], [len(own)], [before], [1]])
        layout = Layout(
            *(own * 0, own, own, own[:, None] * 0, zero, count, length, one, tables, before), only_chains=True
        )
        pairs = {layer: (stored[0], stored[1]) for layer in (0, attention.kv_of)}
        rotary = Rotary.of_layer(attention, self._embedding, before + len(own))
        stack = LayerStack([self.stack.layers[number]], self._multiply)
        sides = self._sides(tokens, self.embed(tokens))
        sides = sides[:, number, None] if sides is not None else None
        _, stream, last = stack(stream, KernelStep(layout), pairs, [rotary], sides=sides)
        return _add(stream, last, None)[0]

    @torch.no_grad()
    def end(self, stream: Tensor) -> Tensor:
        return self._logits(_add(stream, None, self.what.norm)[1])

    def _logits(self, normed: Tensor) -> Tensor:
        logits = self._multiply(normed, self._head, self._head_bias)
        layer_kernels.finish_logits(logits, self.what.logit_scale, self.what.logit_softcap)
        return logits


def attend_in_store(
    qkv: Tensor,  # [T, (heads + 2 * kv_heads) * head_dim]
    keys: Tensor,  # [slots, kv_heads, head_dim], one layer of a store
    values: Tensor,
    step: KernelStep,
    rotary: Rotary,
    attention: network.Attention,
    *,
    seen: KernelStep | None = None,
    scratch: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Rotate queries and keys, write keys and values to the store, and attend: [T, heads * head_dim].

    seen: what the tokens see, if that differs from the step. dtype: of the result; None: the queries'.
    See `rotary_kernels.rotate_and_store` and `attention_kernels.tree_attention`.
    """
    rotary_kernels.rotate_and_store(
        *(qkv, keys, values, step.layout, rotary.cos, rotary.sin), attention=attention, growth=rotary.growth
    )
    heads, kv_heads, head_dim = attention.heads, attention.kv_heads, attention.head_dim
    tiles = attention_kernels.tiles_for(head_dim, qkv.dtype)
    seen = seen or step
    return attention_kernels.tree_attention(
        qkv.view(len(qkv), -1, head_dim)[:, :heads],
        keys,
        values,
        seen.layout,
        seen.plan(heads // kv_heads, tiles),
        scale=attention.scale,
        window=attention.window,
        chunk=attention.chunk,
        softcap=attention.softcap,
        sinks=attention.sinks,
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


def llama_layer(
    layer: Any, heads: int, kv_heads: int, head_dim: int, eps: float, window: int | None = None
) -> network.Layer:
    """The description of a draft head's decoder layer with Llama's names, and with norms of heads if it has them."""
    attention, mlp = layer.self_attn, layer.mlp
    norms: list[Any] = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    q_norm, k_norm = (
        network.Norm(norm, norm.eps, rounds=True) if getattr(norm, "weight", None) is not None else None
        for norm in norms
    )
    return network.Layer(
        pre=network.Norm(layer.input_layernorm, eps, rounds=True),
        mixer=network.Attention(
            (attention.q_proj, attention.k_proj, attention.v_proj),
            *(attention.o_proj, heads, kv_heads, head_dim, head_dim**-0.5, q_norm, k_norm),
            window=window,
        ),
        post=None,
        pre_mlp=network.Norm(layer.post_attention_layernorm, eps, rounds=True),
        mlp=network.Mlp((mlp.gate_proj, mlp.up_proj), mlp.down_proj, "silu"),
        post_mlp=None,
    )


def _biases(parts: Sequence[nn.Linear]) -> Tensor | None:
    """The biases of a product, as one tensor; None: there are none."""
    return None if parts[0].bias is None else fuse_parameters([part.bias for part in parts])


def fuse_parameters(parameters: Sequence[Any]) -> Tensor:
    """Concatenate parameters to one tensor and make them views of it, if they are not yet."""
    first, sizes = parameters[0], [len(p) for p in parameters]
    if _are_adjacent(parameters):
        return first.data.as_strided((sum(sizes), *first.shape[1:]), first.stride())
    whole = torch.cat([p.data for p in parameters])
    for parameter, part in zip(parameters, whole.split(sizes), strict=True):
        parameter.data = part
    return whole


def _are_adjacent(parameters: Sequence[Any]) -> bool:
    end = parameters[0].data_ptr()
    for parameter in parameters:
        same = parameter.untyped_storage().data_ptr() == parameters[0].untyped_storage().data_ptr()
        if not same or not parameter.is_contiguous() or parameter.data_ptr() != end:
            return False
        end += parameter.nbytes
    return True
