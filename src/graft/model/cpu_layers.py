"""Fused forward of Llama-like models on a CPU: one call of the library in `cpu_layers.c` for all layers of a step.

For a few tokens, transformers' modules spend more time between the matrix products than in them. The model's own
weights are read, and its own modules make embeddings and rotary positions. Other models, and changed ones, are run by
transformers' code.

A token gets the same bits in every step: alone, in a tree, in a batch, or in a chunk of a prompt.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from graft.model.attention import Visibility
from graft.model.cpu_linear import FewTokensLinear, can_run, library, pack, threads
from graft.model.fusable import why_not, window_of
from graft.model.kv_cache import PAGE, KVCache

_PRODUCTS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
_BIASES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_MAX_TOKENS = 128  # of a call; activations of more would not fit into a CPU cache
_NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")


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


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "norm")),
        *((name, ctypes.c_long) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "neurons")),
        *((name, ctypes.c_double) for name in ("eps", "head_eps", "scale")),
        ("output", _Matrix),
    )


class _Row(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_long) for name in ("first", "count", "length", "num_own")),
        *((name, ctypes.c_void_p) for name in ("pages", "seen")),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("num_rows", ctypes.c_long),
        ("num_tokens", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("stream", "cos", "sin", "slots", "keys", "values")),
        ("layer_stride", ctypes.c_long),
        ("taps", ctypes.c_void_p),
        ("num_taps", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("tapped", "out", "logits", "scratch")),
    )


class CpuLayers:
    """The weights of a model, as the library reads them."""

    def __init__(self, model: PreTrainedModel) -> None:
        """model: one for which `can_fuse` is true."""
        parts: Any = model
        config, first = model.config, parts.model.layers[0].self_attn
        self._model = parts
        self._held: list[tuple[dict[str, Any], str, nn.Parameter, int, int]] = []
        self._packed: list[Tensor] = []
        self.kv_heads, self.head_dim = config.num_key_value_heads, first.head_dim
        self._layers = (_Layer * len(parts.model.layers))(*map(self._layer_of, parts.model.layers))
        head_norm = getattr(first, "q_norm", None)
        self._c = _Model(
            ctypes.addressof(self._layers),
            self._pointer(parts.model.norm),
            len(parts.model.layers),
            config.hidden_size,
            config.num_attention_heads,
            self.kv_heads,
            self.head_dim,
            parts.model.layers[0].mlp.gate_proj.out_features,
            parts.model.norm.variance_epsilon,
            head_norm.variance_epsilon if head_norm is not None else 0.0,
            first.scaling,
            self._matrix(parts.lm_head),
        )

    def is_current(self) -> bool:
        """Whether all parameters are those that were read, as far as torch tells."""
        return all(
            owner[name] is parameter and parameter._version == version and parameter.data_ptr() == address
            for owner, name, parameter, version, address in self._held
        )

    @torch.no_grad()
    def run(
        self, cache: KVCache, tokens: Tensor, positions: Tensor, seen: Visibility, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor] | None:
        """Logits [1, T, V], and the hidden states of layers `taps`, concatenated. tokens, positions: [1, T].

        None: a weight has changed, and the layers must be made anew.
        """
        compiled, parts, c = library(), self._model, self._c
        assert compiled is not None
        keys, values = self._stored(cache)
        stream = parts.model.embed_tokens(tokens)[0].contiguous()
        cos, sin = (table[0].contiguous() for table in parts.model.rotary_emb(stream[None], positions))
        count, slots, wanted = len(stream), cache.written, torch.tensor(taps, dtype=torch.int64)
        most = min(count, _MAX_TOKENS)
        logits, tapped = stream.new_empty(count, c.output.n), stream.new_empty(count, len(taps) * c.hidden)
        out = torch.empty_like(stream)
        scratch = stream.new_empty(compiled.scratch_size(ctypes.addressof(c), most))
        for first in range(
            0, count, most
        ):  # a token's keys come from earlier tokens of the step, never from later ones
            own = slice(first, first + most)
            rows, kept = _rows_of(seen, own)
            step = _Step(
                ctypes.addressof(rows),
                len(rows),
                len(stream[own]),
                *(each[own].data_ptr() for each in (stream, cos, sin, slots)),
                keys.data_ptr(),
                values.data_ptr(),
                keys.stride(0),
                wanted.data_ptr(),
                len(taps),
                *(each[own].data_ptr() for each in (tapped, out, logits)),
                scratch.data_ptr(),
            )
            has_changed = compiled.run_layers(ctypes.addressof(c), ctypes.addressof(step), threads())
            del kept
            if has_changed:
                return None
        return logits[None], tapped[None]

    def _stored(self, cache: KVCache) -> tuple[Tensor, Tensor]:
        store = cache.store
        if store.keys is None:
            store.shape(self._model.lm_head.weight, (self.kv_heads, self.head_dim))
        return store.stored

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
        return _Matrix(self._pointer(layer), packed.data_ptr(), layer.out_features, layer.in_features, is_bfloat16)

    def _pointer(self, module: nn.Module, name: str = "weight") -> int | None:
        parameter: Any = module._parameters[name]
        if parameter is None:
            return None
        self._held.append((module._parameters, name, parameter, parameter._version, parameter.data_ptr()))
        return parameter.data_ptr()


def can_run_now() -> bool:
    """Whether torch's modes allow the library to run."""
    return not torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled()


def can_fuse(model: PreTrainedModel) -> bool:
    """Whether the library can run the model: `speed_up` has changed its linear layers, and all else is as usual."""
    compiled = library()
    if compiled is None or model.device.type != "cpu" or why_not(model, FewTokensLinear) is not None:
        return False
    assert compiled.page == PAGE
    parts: Any = model
    layers = parts.model.layers
    alike = {(layer.mlp.gate_proj.out_features, layer.self_attn.scaling) for layer in layers}
    if len(alike) > 1 or any(window_of(layer.self_attn) is not None for layer in layers):
        return False
    example = torch.empty(1)
    with torch.no_grad():
        return all(can_run(example, weight) for weight in model.parameters())


def _rows_of(seen: Visibility, tokens: slice) -> tuple[Any, list[Tensor]]:
    """The rows of some tokens of a step as the library reads them, and the tensors in which they are."""
    rows, kept, first = [], [], 0  # of a row, in the step
    for own in seen.rows:
        begin, end = max(tokens.start - first, 0), min(tokens.stop - first, own.count)
        if begin < end:
            pages, visible = torch.tensor(own.pages, dtype=torch.int64), own.seen[begin:end].contiguous()
            numbers = (first + begin - tokens.start, end - begin, own.length, visible.shape[1])
            rows.append(_Row(*numbers, pages.data_ptr(), visible.data_ptr()))
            kept += [pages, visible]
        first += own.count
    return (_Row * len(rows))(*rows), kept
