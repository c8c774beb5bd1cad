"""Fused layers of described models (`network`) on a CPU: the library in `cpu_layers.c` runs all layers in one call.

For a few tokens, torch's modules spend more time between the matrix products than in them. The model's own weights are
read, and its own module gives rotary tables. Other models, and changed ones, are run by their own code. Draft heads are
in `drafters/eagle3/cpu_head.py`.

A token gets the same bits in every step: alone, in a tree, in a batch, or in a chunk of a prompt.
"""

from __future__ import annotations

import copy
import ctypes
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from graft.model.attention import RowKeys, Visibility
from graft.model.cpu_linear import FewTokensLinear, can_run, library, pack, pack_anew, threads
from graft.model.families import MAX_HEAD_DIM, NotDescribedError, describe, why_not
from graft.model.kv_cache import PAGE, KVCache, KVStore, Pair, Row
from graft.model.likeness import why_unlike
from graft.model.network import Activation, Experts, Layer, Network, Norm, SideInputs
from graft.model.plain_modules import settings_of

_ACTIVATIONS = (None, *get_args(Activation))
_SCORINGS = ("softmax", "sigmoid", "softmax_of_chosen")
_MOST = 128  # tokens of a call: the activations of more would not fit into a CPU cache
_FIRST_POSITIONS = 1024  # of rotary tables, which grow
_L = TypeVar("_L", bound="CpuLayers")


class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "packed", "bias")),
        *((name, ctypes.c_long) for name in ("n", "k", "is_bfloat16")),
    )


class _Norm(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_long) for name in ("size", "repeats", "is_layer", "plus_one")),
    )


class _Experts(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("router", "shared_gate")),
        *((name, ctypes.c_void_p) for name in ("correction", "gates", "ups", "downs")),
        *((name, ctypes.c_double) for name in ("least_sum", "added_to_sum", "factor", "limit", "alpha")),
        *((name, ctypes.c_long) for name in ("num_experts", "top_k", "groups", "top_groups", "scoring", "normalise")),
        ("activation", ctypes.c_long),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        ("experts", ctypes.c_void_p),
        *((name, _Matrix) for name in ("side_up", "side_down")),
        *((name, _Norm) for name in ("pre", "post", "pre_mlp", "post_mlp", "side_post", "q_norm", "k_norm", "v_norm")),
        ("stream_norm", _Norm),
        ("sinks", ctypes.c_void_p),
        *((name, ctypes.c_double) for name in ("scale", "softcap", "growth", "residual_scale", "output_scale")),
        *((name, ctypes.c_long) for name in ("heads", "kv_heads", "head_dim", "window", "chunk", "growth_length")),
        *((name, ctypes.c_long) for name in ("kv_of", "rotary", "rotary_dims", "is_interleaved", "norms_turned")),
        *((name, ctypes.c_long) for name in ("activation", "side_activation", "is_parallel")),
    )


class _Network(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("norm", _Norm),
        ("feature_norms", ctypes.c_void_p),
        ("fc", _Matrix),
        *((name, ctypes.c_long) for name in ("num_feature_norms", "num_layers", "hidden", "adds_to_normed")),
        ("output", _Matrix),
        *((name, ctypes.c_double) for name in ("logit_scale", "logit_softcap")),
        *(("side_projection", _Matrix), ("side_norm", _Norm)),
        *((name, ctypes.c_double) for name in ("side_projection_scale", "side_factor")),
    )


class _Rotary(ctypes.Structure):
    _fields_ = (("cos", ctypes.c_void_p), ("sin", ctypes.c_void_p), ("num_positions", ctypes.c_long))


class _Row(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_long) for name in ("first", "count", "num_own", "length")),
        *((name, ctypes.c_void_p) for name in ("pages", "seen")),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("num_rows", "num_tokens", "first_layer", "end_layer")),
        *((name, ctypes.c_void_p) for name in ("features", "embeddings", "sides", "stream")),
        *((name, ctypes.c_void_p) for name in ("rotaries", "positions", "slots")),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "taps")),
        ("num_taps", ctypes.c_long),
        ("outputs", ctypes.c_void_p),
        ("num_outputs", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("tapped", "out", "logits", "scratch")),
    )


class _Stored(NamedTuple):
    """Addresses of each layer's keys and values."""

    keys: Any
    values: Any

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> _Stored:
        assert all(part.dtype is torch.float32 and part.is_contiguous() for pair in pairs for part in pair)
        keys, values = ((ctypes.c_void_p * len(pairs))(*(pair[part].data_ptr() for pair in pairs)) for part in (0, 1))
        return cls(keys, values)


@dataclass
class _Inputs:
    """What a call of the library reads. The stream and sides are overwritten."""

    stored: _Stored
    slots: Tensor  # [T]
    seen: Visibility  # of the outputs
    stream: Tensor  # [T, H]
    positions: Tensor  # [T]
    taps: Sequence[int] = ()
    embeddings: Tensor | None = None  # [T, H]
    features: Tensor | None = None  # [T, inputs of fc]
    sides: Tensor | None = None  # [T, layers * size] embeddings of layers' sides
    outputs: Tensor | None = None  # [n]
    first: int = 0  # of the T tokens, among those of `seen`
    layers: tuple[int, int] | None = None  # the first, and the end; None: all
    has_logits: bool = True


class CpuLayers:
    """Decoder layers and the norm after them, as the library reads them. Subclasses know the network around them."""

    max_tokens = sys.maxsize  # of a step; longer ones are run by the network's own code

    def __init__(
        self,
        network: nn.Module,
        layers: Sequence[Layer],
        norm: Norm,
        whole: Network | None = None,
        fc: nn.Linear | None = None,
        feature_norms: Sequence[Norm] = (),
        stream_norm: Norm | None = None,
        adds_to_normed: bool = False,
    ) -> None:
        """network: all modules whose weights are read. whole: of a model, for logits and the inputs of layers' sides.

        The others are of draft heads: `fc` and the norms before it, the norm of the stream (that of embeddings is the
        layer's first), and whether attention adds to the normed stream.
        """
        attentions = [layer.mixer for layer in layers]
        self._rotaries = list(dict.fromkeys(each.rotary for each in attentions if each.rotary is not None))
        turning = [rotary.module for rotary in self._rotaries]  # of longrope, calls change the frequencies
        modules = [module for module in network.modules() if module not in turning]
        own = [(each, name) for m in modules for each in (m._parameters, m._buffers) for name in each]
        self._owners = [(owner, name) for owner, name in own if owner[name] is not None]
        self._weights: list[Any] = [owner[name] for owner, name in self._owners]
        self._state = self._read_state()
        self._made: list[Any] = []  # what the library reads by its address
        self._samples: list[tuple[Tensor, Tensor]] = []  # of experts' weights: what they are, and what was read
        self._heads = [(each.kv_heads, each.head_dim, each.value_dim) for each in attentions]
        self._tables: list[tuple[Tensor, Tensor]] = []
        self._num_positions = 0
        self._c_rotaries: Any = None
        self._stored: tuple[list[Any], _Stored] | None = None
        hidden = layers[0].mixer.o.out_features
        self._layers = (_Layer * len(layers))(
            *(self._layer_of(number, layer, stream_norm) for number, layer in enumerate(layers))
        )
        self._feature_norms = (_Norm * len(feature_norms))(*map(_norm_of, feature_norms))
        self._c = _Network(
            ctypes.addressof(self._layers),
            _norm_of(norm, hidden),
            ctypes.addressof(self._feature_norms),
            *self._matrices((fc,)),
            *(len(feature_norms), len(layers), hidden, adds_to_normed),
            *self._matrices((whole.head if whole is not None else None,)),
            *((whole.logit_scale, whole.logit_softcap or 0.0) if whole is not None else (1.0, 0.0)),
            *self._sides_of(whole.sides if whole is not None else None, len(layers)),
        )

    def is_current(self) -> bool:
        """Whether all weights are those that were read, and where they were, as far as torch tells."""
        return self._read_state() == self._state

    def has_own_weights(self) -> bool:
        """Whether the network's modules still hold the weights that were read, as far as samples tell."""
        held = all(owner.get(name) is weight for (owner, name), weight in zip(self._owners, self._weights, strict=True))
        return held and all(torch.equal(own, read) for own, read in self._samples)

    def _read_state(self) -> tuple[list[int], list[int]]:
        return list(map(_VERSION, self._weights)), list(map(Tensor.data_ptr, self._weights))

    def run_layers(
        self,
        cache: KVCache,
        seen: Visibility,
        stream: Tensor,  # [T, H] embeddings, or a head's hidden states; overwritten by the outputs
        positions: Tensor,  # [T]
        taps: Sequence[int] = (),
        embeddings: Tensor | None = None,  # [T, H], of a head
        features: Tensor | None = None,  # [T, inputs of fc]: a head's stream is made from them
        sides: Tensor | None = None,  # [T, layers * size] embeddings of layers' sides; overwritten
        outputs: Tensor | None = None,  # [n] tokens whose outputs are wanted, ascending; None: all
        first: int = 0,  # of the T tokens, among those of `seen` and of the cache's slots
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """The normed outputs [n, H], the inputs of the layers `taps`, side by side, and logits, if there are any.

        `seen` is of the outputs. None: a weight has changed, and the layers must be made anew.
        """
        if cache.store.keys is None:
            cache.store.shape_layers(stream, self._heads)
        stored, slots = self._stored_in(cache.store), cache.written[first:]
        return self._run(
            _Inputs(stored, slots, seen, stream, positions, taps, embeddings, features, sides, outputs, first)
        )

    def _run(self, given: _Inputs) -> tuple[Tensor, Tensor, Tensor] | None:
        """As `run_layers`."""
        compiled, c, stream, sides = library(), self._c, given.stream, given.sides
        count, positions = len(stream), given.positions.contiguous()
        assert compiled is not None and (compiled.page, compiled.max_dim) == (PAGE, MAX_HEAD_DIM)
        widths = ((c.hidden, stream), (c.hidden, given.embeddings), (c.fc.k, given.features))
        for width, each in (*widths, (c.side_projection.n, sides)):
            assert each is None or (each.dtype is torch.float32 and each.shape[-1] == width)  # C does not check
        assert stream.is_contiguous() and positions.dtype is torch.int64
        self._extend_rotaries(stream, int(positions.max()) + 1)
        assert sides is None or (sides.is_contiguous() and given.outputs is None)
        num_outputs = count if given.outputs is None else len(given.outputs)
        has_logits = given.has_logits and c.output.n > 0
        out, logits = (stream.new_empty(num_outputs, width) for width in (c.hidden, c.output.n * has_logits))
        tapped = stream.new_empty(count, len(given.taps) * c.hidden)
        scratch = stream.new_empty(compiled.scratch_size(ctypes.addressof(c), count))
        taps = torch.tensor([range(c.num_layers + 1)[tap] for tap in given.taps], dtype=torch.int64)
        inputs = [each.contiguous() if each is not None else None for each in (given.features, given.embeddings)]
        rows, kept = _rows_of(given.seen, given.first, given.first + num_outputs)
        keys, values = given.stored
        step = _Step(
            *(ctypes.addressof(rows), len(rows), count, *(given.layers or (0, c.num_layers))),
            *map(_address, (*inputs, sides, stream)),
            *(ctypes.addressof(self._c_rotaries), _address(positions), _address(given.slots)),
            *(ctypes.addressof(keys), ctypes.addressof(values), _address(taps), len(taps)),
            *(_address(given.outputs), num_outputs),
            *map(_address, (tapped, out, logits if has_logits else None, scratch)),
        )
        has_changed = compiled.run_layers(ctypes.addressof(c), ctypes.addressof(step), threads())
        del kept
        return None if has_changed else (out, tapped, logits)

    def _stored_in(self, store: KVStore) -> _Stored:
        """The addresses, found anew when the store has grown or is another."""
        where = [(keys.data_ptr(), values.data_ptr(), keys.shape) for keys, values in store.pairs]
        if self._stored is None or self._stored[0] != where:
            self._stored = where, _Stored.of(store.by_layer)
        return self._stored[1]

    def _extend_rotaries(self, like: Tensor, num_positions: int) -> None:
        if num_positions > self._num_positions:
            self._num_positions = max(_FIRST_POSITIONS, 1 << (num_positions - 1).bit_length())
            self._tables = [rotary.table(like, self._num_positions) for rotary in self._rotaries]
            each = (_Rotary(cos.data_ptr(), sin.data_ptr(), len(cos)) for cos, sin in self._tables)
            self._c_rotaries = (_Rotary * len(self._tables))(*each)

    def _layer_of(self, number: int, layer: Layer, stream_norm: Norm | None) -> _Layer:
        attention, side = layer.mixer, layer.side
        experts, mlp = (layer.mlp, layer.mlp.shared) if isinstance(layer.mlp, Experts) else (None, layer.mlp)
        hidden, rotary, dim = attention.o.out_features, attention.rotary, attention.head_dim
        heads, kv_heads = attention.heads, attention.kv_heads
        num_kv = 0 if attention.kv_of is not None else 1 if attention.values_are_keys else 2
        qkv = self._matrices(attention.qkv, heads * dim, *[kv_heads * dim] * num_kv)
        up, down, activation = [_Matrix()], _Matrix(), 0
        if mlp is not None:
            up = list(self._matrices(mlp.up, *[mlp.down.in_features] * (2 if mlp.gated else 1)))
            (down,), activation = self._matrices((mlp.down,)), _ACTIVATIONS.index(mlp.activation)
        growth, growth_length = attention.growth or (0.0, 0)
        window, chunk = attention.window or 0, attention.chunk or 0
        return _Layer(
            *(*qkv, *[_Matrix()] * (2 - num_kv), *self._matrices((attention.o,))),
            *(*up, *[_Matrix()] * (2 - len(up)), down, self._experts_of(experts) if experts is not None else None),
            *self._matrices((side.up, side.down) if side is not None else (None, None)),
            *(_norm_of(norm, hidden) for norm in (layer.pre, layer.post, layer.pre_mlp, layer.post_mlp)),
            _norm_of(side.post if side is not None else None, hidden),
            _norm_of(attention.q_norm, dim, heads),
            *(_norm_of(norm, dim, kv_heads) for norm in (attention.k_norm, attention.v_norm)),
            _norm_of(stream_norm, hidden),
            _address(attention.sinks),
            *(attention.scale, attention.softcap or 0.0, growth, layer.residual_scale, layer.output_scale),
            *(heads, kv_heads, dim, window, chunk, growth_length),
            number if attention.kv_of is None else attention.kv_of,
            *((-1, 0, 0) if rotary is None else (self._rotaries.index(rotary), rotary.dims, rotary.interleaved)),
            *(attention.norms_turned, activation),
            *(_ACTIVATIONS.index(side.activation if side is not None else None), layer.parallel is not None),
        )

    def _experts_of(self, experts: Experts) -> int:
        """The address of a layer's experts."""
        router, neurons = experts.router, experts.down.shape[1 if experts.transposed else 2]
        first, second = slice(neurons), slice(neurons, None)
        if experts.interleaved:
            first, second = slice(0, None, 2), slice(1, None, 2)
        parts = [(experts.gate_up, experts.gate_up_bias, part) for part in (first, second)]
        products = []
        for weights, biases, part in (*parts, (experts.down, experts.down_bias, slice(None))):
            own = weights.detach().transpose(1, 2) if experts.transposed else weights.detach()
            self._samples += [(each, each.clone()) for each in map(_sample_of, (weights, biases)) if each is not None]
            bias = [None] * len(own) if biases is None else biases.detach()[:, part]
            matrices = [self._packed_anew(each[part], vector) for each, vector in zip(own, bias, strict=True)]
            products.append((_Matrix * len(own))(*matrices))
        numbers = (router.least_sum, router.added_to_sum, router.factor, experts.limit or 0.0, experts.alpha or 0.0)
        sizes = (len(router.weight), router.top_k, router.groups, router.top_groups, _SCORINGS.index(router.scoring))
        made = _Experts(
            self._packed_anew(router.weight.detach(), router.bias),
            *self._matrices((experts.shared_gate,)),
            _address(router.correction),
            *map(ctypes.addressof, products),
            *(*numbers, *sizes, router.normalise, _ACTIVATIONS.index(experts.activation)),
        )
        self._made += [made, *products]
        return ctypes.addressof(made)

    def _packed_anew(self, weight: Tensor, bias: Tensor | None) -> _Matrix:
        """The matrix of a weight that is no linear layer's, with a packed copy of its own."""
        packed, bias = pack_anew(weight.contiguous()), bias.detach().contiguous() if bias is not None else None
        self._made += [packed, bias]
        own = weight.data_ptr() if weight.is_contiguous() else None
        return _Matrix(own, packed.data_ptr(), _address(bias), *weight.shape, packed.dtype is torch.int16)

    def _sides_of(self, sides: SideInputs | None, num_layers: int) -> tuple[_Matrix, _Norm, float, float]:
        if sides is None:
            return _Matrix(), _Norm(), 0.0, 0.0
        (projection,) = self._matrices((sides.projection,))
        return projection, _norm_of(sides.norm, projection.n // num_layers), sides.projection_scale, sides.factor

    def _matrices(self, parts: Sequence[nn.Linear | None], *sizes: int) -> Iterator[_Matrix]:
        """The matrices of products, of which all together have so many outputs each; none: as the products have."""
        remaining = list(sizes)
        for part in parts:
            if part is None:
                yield _Matrix()
                continue
            first = 0
            while first < part.out_features:
                size = remaining.pop(0) if sizes else part.out_features
                yield self._matrix(part, first, size)
                first += size

    def _matrix(self, part: nn.Linear, first: int, size: int) -> _Matrix:
        """The matrix of some outputs. Those that begin inside a panel get a packed copy of their own."""
        compiled, weight, bias = library(), part.weight, part.bias
        assert compiled is not None and first + size <= len(weight)
        num_inputs, is_aligned = weight.shape[1], first % compiled.panel == 0
        packed = pack(weight) if is_aligned else pack_anew(weight[first : first + size])
        self._made.append(packed)
        before = first * num_inputs * packed.element_size() if is_aligned else 0
        return _Matrix(
            weight.data_ptr() + first * num_inputs * weight.element_size(),
            packed.data_ptr() + before,
            bias.data_ptr() + first * bias.element_size() if bias is not None else None,
            *(size, num_inputs, packed.dtype is torch.int16),
        )


_VERSION = operator.attrgetter("_version")


class CpuModel(CpuLayers):
    """A model in fused layers."""

    def __init__(self, model: PreTrainedModel) -> None:
        """model: one for which `why_not_on_cpu` is None. Raises NotDescribedError if its layers do something else."""
        self.what = what = describe(model, FewTokensLinear)
        super().__init__(model, what.layers, what.norm, what)
        if (reason := why_unlike(model, what, self)) is not None:
            raise NotDescribedError(reason)

    def run(
        self, tokens: Tensor, cache: KVCache, positions: Tensor, seen: Visibility, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor] | None:
        """Logits [1, T, V], and the hidden states of layers `taps`, concatenated. tokens, positions: [1, T].

        None: a weight has changed, and the layers must be made anew.
        """
        parts = []
        for first in range(0, tokens.shape[1], _MOST):  # a token's keys are its own or those of tokens before it
            part = slice(first, first + _MOST)
            ids, own = tokens[0, part], positions[0, part]
            found = self.run_layers(cache, seen, self.embed(ids), own, taps, sides=self._sides(ids), first=first)
            if found is None:
                return None
            parts.append(found)
        _, tapped, logits = (torch.cat(each) if len(each) > 1 else each[0] for each in zip(*parts, strict=True))
        return logits[None], tapped[None]

    # As `likeness.Executor`

    def embed(self, tokens: Tensor) -> Tensor:
        stream = embedding(tokens, self.what.embedding.weight)
        return stream if self.what.embedding_scale == 1 else stream * self.what.embedding_scale

    def run_layer(self, number: int, stream: Tensor, past: Pair, tokens: Tensor) -> Tensor:
        source, count, before = self.what.layers[number].mixer.kv_of, len(stream), past[0].shape[1]
        if source is not None:
            before -= count
        places, num_pages = torch.arange(before, before + count), -(-(before + count) // PAGE)
        stored = tuple(part.new_zeros(num_pages * PAGE, len(part), part.shape[2]) for part in past)
        for new, old in zip(stored, past, strict=True):
            new[: old.shape[1]] = old.transpose(0, 1)
        chain = torch.ones(count, count, dtype=torch.bool).tril()
        row = RowKeys(Row(0, list(range(num_pages))), before, torch.arange(count), chain, stream.device)
        given = _Inputs(
            _Stored.of([(stored[0], stored[1])] * len(self.what.layers)),
            slots=places,
            seen=Visibility([row], stream.dtype),
            stream=stream.clone(),
            positions=places,
            embeddings=self.embed(tokens),
            sides=self._sides(tokens),
            layers=(number, number + 1),
            has_logits=False,
        )
        self._run(given)
        return given.stream

    def end(self, stream: Tensor) -> Tensor:
        places, nothing, end = torch.arange(len(stream)), Visibility([], stream.dtype), len(self.what.layers)
        found = self._run(_Inputs(_Stored.of([]), places, nothing, stream.clone(), places, layers=(end, end)))
        assert found is not None
        return found[2]

    def _sides(self, tokens: Tensor) -> Tensor | None:
        sides = self.what.sides
        return embedding(tokens, sides.embedding.weight) * sides.scale if sides is not None else None


class Fused(Generic[_L]):
    """The fused layers of a network, made anew when it has changed."""

    def __init__(self, network: Any, why_not: Callable[[Any], str | None], layers: Callable[[Any], _L]) -> None:
        """why_not: the reason why a network cannot be fused."""
        self._network, self._why_not, self._new = network, why_not, layers
        self.reason: str | None = None  # why there are no layers
        self._modules: list[nn.Module] = []  # of the network when its layers were made
        self._settings: list[Any] = []
        self._refused: str | None = None  # the reason why their layers are not used
        self.layers: _L | None = None  # None if the network's own code must run

    def __deepcopy__(self, memo: dict[int, Any]) -> Fused[_L]:
        return Fused(copy.deepcopy(self._network, memo), self._why_not, self._new)

    def refresh(self) -> None:
        """Check whether the network has changed, for example by a hook, another module or weights that moved."""
        modules, settings = list(self._network.modules()), settings_of(self._network)
        is_same = list(map(id, modules)) == list(map(id, self._modules)) and settings == self._settings
        self.reason = self._why_not(self._network)
        if self.reason is not None:
            self.layers, self._modules = None, []
        elif is_same and self._refused is not None:
            self.reason = self._refused
        elif not is_same or self.layers is None or not (self.layers.is_current() and self.layers.has_own_weights()):
            self.layers, self._refused, self._modules, self._settings = None, None, modules, settings
            try:
                self.layers = self._new(self._network)
            except NotDescribedError as error:
                self.reason = self._refused = str(error)

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
    compiled = library()
    if compiled is None:
        return "the C layers were not built"
    if model.dtype is not torch.float32:
        return f"the C layers compute in float32, and the model is in {str(model.dtype).removeprefix('torch.')}"
    try:
        what = describe(model, FewTokensLinear)
    except NotDescribedError as error:
        if not any(isinstance(module, FewTokensLinear) for module in model.modules()) and why_not(model) is None:
            return "a model given in memory keeps PyTorch's linear layers: load it by its name or folder"
        return str(error)
    if any(layer.mixer.latent is not None for layer in what.layers):
        return "the C layers have no latent attention"
    numbers = [layer.mlp.router.num_experts for layer in what.layers if isinstance(layer.mlp, Experts)]
    if max(numbers, default=0) > compiled.max_experts:
        return f"it has {max(numbers)} experts, and the C layers at most {compiled.max_experts}"
    return None if all_readable(model.parameters()) else "its weights are not plain tensors in one piece"


def all_readable(weights: Iterable[Tensor]) -> bool:
    """Whether the library can read these weights."""
    example = torch.empty(1)
    with torch.no_grad():
        return all(can_run(example, weight) for weight in weights)


def _sample_of(weights: Tensor | None) -> Tensor | None:
    """Some numbers of each expert, as a view."""
    if weights is None:
        return None
    return weights.detach()[(slice(None), *(slice(None, None, max(size // 8, 1)) for size in weights.shape[1:]))]


def _norm_of(norm: Norm | None, size: int = 0, heads: int = 1) -> _Norm:
    """size: numbers of a token, or of a head; 0: as many as the weight has."""
    if norm is None:
        return _Norm()
    if size == 0 or norm.over_all:
        size = norm.weight.numel() if norm.weight is not None else size * heads
    repeats = norm.weight.numel() // size if norm.weight is not None else 1
    numbers = (norm.eps, size, repeats, norm.kind == "layer", norm.plus_one)
    return _Norm(_address(norm.weight), _address(norm.bias), *numbers)


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
