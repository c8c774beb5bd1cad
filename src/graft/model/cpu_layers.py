"""Fused layers of Llama-like networks on a CPU: one call of the library in `cpu_layers.c` for all layers of a step.

For a few tokens, torch's modules spend more time between the matrix products than in them. The network's own weights
are read, and its own modules make embeddings and rotary positions. Other networks, and changed ones, are run by their
own code. Draft heads are in `proposers/eagle3/cpu_head.py`.

A token gets the same bits in every step: alone, in a tree, in a batch, or in a chunk of a prompt.
"""

from __future__ import annotations

import copy
import ctypes
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from graft.model.attention import Visibility
from graft.model.cpu_linear import FewTokensLinear, can_run, library, pack, threads
from graft.model.fusable import MAX_HEAD_DIM, why_not, window_of
from graft.model.kv_cache import PAGE, KVCache
from graft.model.plain_modules import settings_of

_PRODUCTS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
_BIASES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm", "hidden_norm")
_MOST = 128  # tokens of a call: the activations of more would not fit into a CPU cache
_L = TypeVar("_L", bound="CpuLayers")


class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "packed")),
        *((name, ctypes.c_long) for name in ("n", "k", "is_bfloat16")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("products", _Matrix * len(_PRODUCTS)),
        ("biases", ctypes.c_void_p * len(_BIASES)),
        ("norms", ctypes.c_void_p * len(_NORMS)),
    )


class _Network(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "norm", "feature_norms")),
        ("fc", _Matrix),
        *((name, ctypes.c_long) for name in ("num_feature_norms", "num_layers", "hidden", "heads", "kv_heads")),
        *((name, ctypes.c_long) for name in ("head_dim", "neurons", "adds_to_normed")),
        *((name, ctypes.c_double) for name in ("eps", "head_eps", "scale")),
        ("output", _Matrix),
    )


class _Row(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_long) for name in ("first", "count", "num_own", "length")),
        *((name, ctypes.c_void_p) for name in ("pages", "seen")),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("num_rows", ctypes.c_long),
        ("num_tokens", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("features", "embeddings", "stream", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("slots", "keys", "values")),
        ("layer_stride", ctypes.c_long),
        ("taps", ctypes.c_void_p),
        ("num_taps", ctypes.c_long),
        ("outputs", ctypes.c_void_p),
        ("num_outputs", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("tapped", "out", "logits", "scratch")),
    )


class CpuLayers:
    """Decoder layers and the norm after them, as the library reads them. Subclasses know the network around them."""

    max_tokens = sys.maxsize  # of a step; longer ones are run by the network's own code

    def __init__(
        self,
        layers: Sequence[nn.Module],
        norm: nn.Module,
        heads: tuple[int, int, int],
        eps: float,
        scale: float,
        head_eps: float = 0.0,
        output: nn.Linear | None = None,
        fc: nn.Linear | None = None,
        feature_norms: Sequence[nn.Module] = (),
        adds_to_normed: bool = False,
    ) -> None:
        """heads: numbers of query and key heads, and head_dim. head_eps: of the norms of queries and keys.

        output: gives the logits; None: there are none. The others are of draft heads: `fc` and the norms before it,
        and whether attention adds to the normed stream.
        """
        self._held: list[tuple[dict[str, Any], str, nn.Parameter, int, int]] = []
        self._packed: list[Tensor] = []
        self._key_heads = heads[1:]
        self._layers = (_Layer * len(layers))(*map(self._layer_of, layers))
        self._feature_norms = (ctypes.c_void_p * len(feature_norms))(*map(self._pointer, feature_norms))
        first = self._layers[0].products
        down = first[_PRODUCTS.index("mlp.down_proj")]
        self._c = _Network(
            ctypes.addressof(self._layers),
            self._pointer(norm),
            ctypes.addressof(self._feature_norms),
            self._matrix(fc) if fc is not None else _Matrix(),
            len(feature_norms),
            len(layers),
            down.n,
            *heads,
            down.k,
            adds_to_normed,
            *(eps, head_eps, scale),
            self._matrix(output) if output is not None else _Matrix(),
        )

    def is_current(self) -> bool:
        """Whether all parameters are those that were read, as far as torch tells."""
        return all(
            owner[name] is parameter and parameter._version == version and parameter.data_ptr() == address
            for owner, name, parameter, version, address in self._held
        )

    def run_layers(
        self,
        cache: KVCache,
        seen: Visibility,
        stream: Tensor,  # [T, H] embeddings, or a head's hidden states; overwritten by the outputs
        rotations: Sequence[Tensor],  # cos and sin, each [1, T, head_dim]
        taps: Sequence[int] = (),
        embeddings: Tensor | None = None,  # [T, H], of a head
        features: Tensor | None = None,  # [T, inputs of fc]: a head's stream is made from them
        outputs: Tensor | None = None,  # [n] tokens whose outputs are wanted, ascending; None: all
        first: int = 0,  # of the T tokens, among those of `seen` and of the cache's slots
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """The normed outputs [n, H], the inputs of the layers `taps`, side by side, and logits, if there are any.

        `seen` is of the outputs. None: a weight has changed, and the layers must be made anew.
        """
        compiled, c, count = library(), self._c, len(stream)
        assert compiled is not None and (compiled.page, compiled.max_dim) == (PAGE, MAX_HEAD_DIM)
        if cache.store.keys is None:
            cache.store.shape(stream, self._key_heads)
        keys, values = cache.store.stored
        for each, width in ((stream, c.hidden), (embeddings, c.hidden), (features, c.fc.k)):
            assert each is None or (each.dtype is torch.float32 and each.shape[-1] == width)  # C does not check
        assert keys.dtype is torch.float32 and stream.is_contiguous()
        num_outputs = count if outputs is None else len(outputs)
        out, logits = (stream.new_empty(num_outputs, width) for width in (c.hidden, c.output.n))
        tapped = stream.new_empty(count, len(taps) * c.hidden)
        scratch = stream.new_empty(compiled.scratch_size(ctypes.addressof(c), count))
        wanted = torch.tensor([range(c.num_layers + 1)[tap] for tap in taps], dtype=torch.int64)
        inputs = [each.contiguous() if each is not None else None for each in (features, embeddings)]
        cos, sin = (each[0].contiguous() for each in rotations)
        rows, kept = _rows_of(seen, first, first + num_outputs)
        step = _Step(
            ctypes.addressof(rows),
            len(rows),
            count,
            *map(_address, (*inputs, stream, cos, sin, cache.written[first:], keys, values)),
            keys.stride(0),
            wanted.data_ptr(),
            len(taps),
            _address(outputs),
            num_outputs,
            *map(_address, (tapped, out, logits, scratch)),
        )
        has_changed = compiled.run_layers(ctypes.addressof(c), ctypes.addressof(step), threads())
        del kept
        return None if has_changed else (out, tapped, logits)

    def _layer_of(self, layer: Any) -> Any:
        products = [self._matrix(layer.get_submodule(name)) for name in _PRODUCTS]
        biases = [self._pointer(layer.get_submodule(name), "bias") for name in _BIASES]
        modules = dict(layer.named_modules())
        norms = [self._pointer(modules[name]) if name in modules else None for name in _NORMS]
        return _Layer((_Matrix * len(products))(*products), tuple(biases), tuple(norms))

    def _matrix(self, layer: nn.Linear) -> Any:
        packed = pack(layer.weight)
        self._packed.append(packed)
        is_bfloat16 = packed.dtype is torch.int16
        return _Matrix(self._pointer(layer), packed.data_ptr(), *layer.weight.shape, is_bfloat16)

    def _pointer(self, module: nn.Module, name: str = "weight") -> int | None:
        parameter: Any = module._parameters[name]
        if parameter is None:
            return None
        self._held.append((module._parameters, name, parameter, parameter._version, parameter.data_ptr()))
        return parameter.data_ptr()


class CpuModel(CpuLayers):
    """A model in fused layers."""

    def __init__(self, model: PreTrainedModel) -> None:
        """model: one for which `why_not_on_cpu` is None."""
        parts: Any = model
        config, first = model.config, parts.model.layers[0].self_attn
        heads = config.num_attention_heads, config.num_key_value_heads, first.head_dim
        head_norm, eps = getattr(first, "q_norm", None), parts.model.norm.variance_epsilon
        head_eps = head_norm.variance_epsilon if head_norm is not None else 0.0
        super().__init__(parts.model.layers, parts.model.norm, heads, eps, first.scaling, head_eps, parts.lm_head)
        self._model = parts

    def run(
        self, tokens: Tensor, cache: KVCache, positions: Tensor, seen: Visibility, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor] | None:
        """Logits [1, T, V], and the hidden states of layers `taps`, concatenated. tokens, positions: [1, T].

        None: a weight has changed, and the layers must be made anew.
        """
        model, parts = self._model.model, []
        for first in range(0, tokens.shape[1], _MOST):  # a token's keys are its own or those of tokens before it
            own = slice(first, first + _MOST)
            stream = model.embed_tokens(tokens[:, own])[0].contiguous()
            rotations = model.rotary_emb(stream[None], positions[:, own])
            found = self.run_layers(cache, seen, stream, rotations, taps, first=first)
            if found is None:
                return None
            parts.append(found)
        _, tapped, logits = (torch.cat(each) if len(each) > 1 else each[0] for each in zip(*parts, strict=True))
        return logits[None], tapped[None]


class Fused(Generic[_L]):
    """The fused layers of a network, made anew when it has changed."""

    def __init__(self, network: Any, why_not: Callable[[Any], str | None], layers: Callable[[Any], _L]) -> None:
        """why_not: the reason why a network cannot be fused."""
        self._network, self._why_not, self._new = network, why_not, layers
        self.reason: str | None = None  # why there are no layers
        self._modules: list[nn.Module] = []  # of the network when its layers were made
        self._settings: list[Any] = []
        self.layers: _L | None = None  # None if the network's own code must run

    def __deepcopy__(self, memo: dict[int, Any]) -> Fused[_L]:
        return Fused(copy.deepcopy(self._network, memo), self._why_not, self._new)

    def refresh(self) -> None:
        """Check whether the network has changed, for example by a hook, another module or weights that moved."""
        modules, settings = list(self._network.modules()), settings_of(self._network)
        self.reason = self._why_not(self._network)
        if self.reason is not None:
            self.layers, self._modules = None, []
        elif (
            self.layers is None
            or not self.layers.is_current()
            or list(map(id, modules)) != list(map(id, self._modules))
            or settings != self._settings
        ):
            self.layers, self._modules, self._settings = self._new(self._network), modules, settings

    def run(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the `run` of the layers returns; None if they cannot run these tokens now."""
        layers: Any = self.layers
        if layers is None or torch.is_autocast_enabled("cpu") or torch.is_grad_enabled():
            return None
        if not 0 < tokens.numel() <= layers.max_tokens:
            return None
        if not layers.is_current():
            self.refresh()
            return self.run(tokens, *args, **kwargs)
        found = layers.run(tokens, *args, **kwargs)
        if found is None:
            self.layers = None  # torch did not count the change; the next text may use them again
        return found


def why_not_on_cpu(model: PreTrainedModel) -> str | None:
    """The reason why the library cannot run a model whose linear layers `speed_up` has replaced; None if it can."""
    if library() is None:
        return "the C layers were not built"
    if model.dtype is not torch.float32:
        return f"the C layers compute in float32, and the model is in {str(model.dtype).removeprefix('torch.')}"
    if (reason := why_not(model, FewTokensLinear)) is not None:
        if not any(isinstance(module, FewTokensLinear) for module in model.modules()) and why_not(model) is None:
            return "a model given in memory keeps PyTorch's linear layers: load it by its name or folder"
        return reason
    parts: Any = model
    attentions = [layer.self_attn for layer in parts.model.layers]
    if any(window_of(attention) is not None for attention in attentions):
        return "the C layers have no window of attention"
    if len({attention.scaling for attention in attentions}) > 1:
        return "its layers scale attention differently"
    return None if all_readable(model.parameters()) else "its weights are not plain tensors in one piece"


def all_readable(weights: Iterable[Tensor]) -> bool:
    """Whether the library can read these weights."""
    example = torch.empty(1)
    with torch.no_grad():
        return all(can_run(example, weight) for weight in weights)


def _address(tensor: Tensor | None) -> int | None:
    return tensor.data_ptr() if tensor is not None else None


def _rows_of(seen: Visibility, first: int, end: int) -> tuple[Any, list[Tensor]]:
    """The rows of the step's tokens `first` to `end` as the library reads them, and the tensors in which they are."""
    rows, kept, before = [], [], 0
    for own in seen.rows:
        assert len(own.pages) * PAGE >= own.num_keys  # the library does not check
        part = slice(max(first - before, 0), max(min(end - before, own.count), 0))
        visible = own.seen[part].contiguous()
        if len(visible):
            pages = torch.tensor(own.pages, dtype=torch.int64)
            numbers = (before + part.start - first, *visible.shape, own.length)
            rows.append(_Row(*numbers, pages.data_ptr(), visible.data_ptr()))
            kept += [pages, visible]
        before += own.count
    return (_Row * len(rows))(*rows), kept
