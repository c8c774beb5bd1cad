"""A check when a model is loaded: do fused layers give what transformers' own layers give?

One layer of each kind, the embedding and the logits run both ways on random input. It takes about as long as these
layers do, and keeps nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from graft.model.attention import Scores, attend
from graft.model.captures import first_line, is_out_of_memory
from graft.model.kv_cache import Pair
from graft.model.network import Attention, Network, kind_of
from graft.model.overrides import current_step, evaluating, use_tree_attention

_NUM_TOKENS = 4
_LEAST_BEFORE = 70  # tokens before them: more than a page of the KV cache
_MOST_BEFORE = 8192
_INPUT_SIZE = 0.1  # standard deviation of a layer's input: small, so that it does not hide what the layer adds
_SCORE_SIZE = 4.0  # standard deviation of attention's scores with earlier tokens
# Allowed differences by dtype: in proportion to what a layer adds, and to its whole output, which is rounded.
_ALLOWED = {torch.float32: (1e-4, 1e-6), torch.float16: (0.01, 0.001), torch.bfloat16: (0.05, 0.006)}


class Executor(Protocol):
    """What runs a described model."""

    def embed(self, tokens: Tensor) -> Tensor:
        """The residual stream [T, H] before the first layer."""

    def run_layer(self, number: int, stream: Tensor, past: Pair, tokens: Tensor) -> Tensor:
        """A layer's output [T, H] for tokens that follow the `past` keys and values, [kv_heads, positions, head_dim].

        If the layer reads another's keys and values, the past includes those of the tokens.
        """

    def end(self, stream: Tensor) -> Tensor:
        """Logits [T, V] of the last layer's output."""


def why_unlike(model: PreTrainedModel, what: Network, executor: Executor) -> str | None:
    """The reason why an executor of a model's description may not run it; None: it gives what the model gives."""
    try:
        return _why_unlike(model, what, executor)
    except Exception as error:  # whatever another release of transformers, or a compiler, may raise
        if is_out_of_memory(error):
            raise
        return f"its layers could not be compared with transformers' own: {first_line(error)}"


@torch.no_grad()
def _why_unlike(model: PreTrainedModel, what: Network, executor: Executor) -> str | None:
    layers = list(_text_model(model).layers)
    types = getattr(model.config.get_text_config(), "layer_types", None) or [None] * len(layers)
    wanted: dict[Hashable, int] = {}
    for number, layer in enumerate(what.layers):  # a wrong description may take layers of two kinds for one
        kind = kind_of(replace(layer, output_scale=1.0))  # Gemma 4 has another one in each layer
        wanted.setdefault((kind, types[number], _settings_of(layers[number])), number)
    windows = [size for layer in what.layers for size in (layer.mixer.window, layer.mixer.chunk) if size]
    most = max([_LEAST_BEFORE, *(2 * size for size in windows if 2 * size <= _MOST_BEFORE)])
    limits = [rotary.limit for rotary in what.rotaries() if rotary.limit is not None]
    most = min([most, *(max(limit - _NUM_TOKENS, 0) for limit in limits)])
    # Of so many earlier tokens, the tokens' own keys hardly matter.
    reasons = (_compare(model, what, executor, set(wanted.values()), before) for before in (0, most))
    return next(filter(None, reasons), None)


def _compare(model: PreTrainedModel, what: Network, executor: Executor, wanted: set[int], before: int) -> str | None:
    """Compare these layers, on tokens with so many earlier ones, and all around the layers."""
    inner, layers = _text_model(model), list(_text_model(model).layers)
    sources = {layer.mixer.kv_of for layer in what.layers} - {None}
    generator = torch.Generator().manual_seed(0)
    device, dtype = what.head.weight.device, what.head.weight.dtype

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    probes = [
        _Probe(layer, _INPUT_SIZE * random(_NUM_TOKENS, what.hidden_size) if used else None)
        for number, layer in enumerate(layers)
        for used in [number in wanted or number in sources]
    ]
    tokens = torch.randint(what.embedding.num_embeddings, (_NUM_TOKENS,), generator=generator).to(device)
    positions = before + torch.arange(_NUM_TOKENS, device=device)
    observed = _Observed(before, positions, random)
    shadow = _with_layers(model, inner, probes)
    with evaluating(model), use_tree_attention(model, observed):
        logits = shadow(input_ids=tokens[None], position_ids=positions[None], use_cache=False).logits[0]
    stream = executor.embed(tokens)
    expected = probes[0].seen
    assert expected is not None
    allowed = _ALLOWED[dtype]
    if _is_unlike(stream, expected, torch.zeros_like(expected), allowed):
        return "its embedding differs from what is known of its family"
    if _is_unlike(executor.end(stream), logits, torch.zeros_like(logits), allowed):
        return "its last norm or its logits differ from what is known of its family"
    for number in sorted(wanted):
        probe, attention = probes[number], what.layers[number].mixer
        source = probe if attention.kv_of is None else probes[attention.kv_of]
        if probe.attended is None or source.attended is None or probe.given is None or probe.output is None:
            return f"layer {number} has no attention"
        if (scores := probe.attended.scores) != _scores_of(attention):
            return f"attention of layer {number} differs from what is known of its family: {scores}"
        keys, values = source.attended.past
        if attention.kv_of is None:
            keys, values = keys[:, :before], values[:, :before]
        found = executor.run_layer(number, probe.given, (keys, values), tokens)
        if _is_unlike(found, probe.output, probe.given, allowed):
            return f"layer {number} gives something else than transformers' own code"
    return None


def _is_unlike(found: Tensor, expected: Tensor, given: Tensor, allowed: tuple[float, float]) -> bool:
    """Whether outputs [T, n] differ by more than rounding. given: what they were added to.

    In 16 bits the median token decides: rounding may send a token to another expert.
    """
    is_wide = expected.dtype is torch.float32
    found, expected = found.float(), expected.float()
    of_added, of_all = allowed
    most = of_added * (expected - given.float()).norm(dim=1) + of_all * expected.norm(dim=1)
    excess = (found - expected).norm(dim=1) / most.clamp(min=1e-30)
    return not (excess.max() if is_wide else excess.median()) <= 1  # NaN is unlike


def _settings_of(layer: nn.Module) -> Hashable:
    """The classes of a layer's modules, and the simple values that they hold, but the layer's number."""
    return tuple(
        (name, type(module), *((key, value) for key, value in vars(module).items() if _is_setting(key, value)))
        for name, module in layer.named_modules()
    )


def _is_setting(name: str, value: Any) -> bool:
    return isinstance(value, (bool, int, float, str)) and name not in ("layer_idx", "training")


def _scores_of(attention: Attention) -> Scores:
    return Scores(attention.scale, attention.window, attention.chunk, attention.softcap, attention.sinks)


class _Attended:
    """What attention of a layer was asked for."""

    def __init__(self, scores: Scores, past: Pair) -> None:
        self.scores, self.past = scores, past  # keys and values [kv_heads, before + T, head_dim]


class _Observed:
    """In place of a step: attention of a chain of tokens over random earlier keys and values."""

    def __init__(self, before: int, positions: Tensor, random: Any) -> None:
        self._before, self._positions, self._random = before, positions, random
        self._pasts: dict[int, tuple[Tensor, Pair]] = {}  # by address of a layer's own keys, which are kept
        self.last: _Attended | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Attention [1, T, heads, D] of queries [1, heads, T, D] over the tokens' keys and values, and earlier ones."""
        if key.data_ptr() not in self._pasts:
            scale = (query.shape[-1] ** -0.5 if scores.scale is None else scores.scale) * query.shape[-1] ** 0.5
            size = _SCORE_SIZE / (query.float().square().mean().sqrt() * scale).clamp(min=1e-3)
            both = [(key, size), (value, value.float().square().mean().sqrt())]
            keys, values = (
                torch.cat(
                    [self._random(own.shape[1], self._before, own.shape[3]) * factor.to(own.dtype), own[0]], dim=1
                )
                for own, factor in both
            )
            self._pasts[key.data_ptr()] = key, (keys, values)
        keys, values = self._pasts[key.data_ptr()][1]
        self.last = _Attended(scores, (keys, values))
        positions, own = torch.arange(keys.shape[1], device=key.device), self._positions[:, None]
        is_seen = positions <= own
        if scores.window is not None:
            is_seen &= positions > own - scores.window
        if scores.chunk is not None:
            is_seen &= positions // scores.chunk == own // scores.chunk
        mask = torch.zeros(is_seen.shape, dtype=query.dtype, device=query.device).masked_fill_(~is_seen, -torch.inf)
        mask = mask.repeat(query.shape[1] // key.shape[1], 1)[None, None]
        return attend(query, keys[None], values[None], mask, scores).transpose(1, 2).contiguous()


class _Probe(nn.Module):
    """In place of a layer: runs it on a given input, if there is one, and returns its own input."""

    def __init__(self, layer: nn.Module, given: Tensor | None) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not a submodule
        self.given = given  # [T, H]
        self.seen: Tensor | None = None
        self.output: Tensor | None = None
        self.attended: _Attended | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.seen = hidden[0]
        if self.given is not None:
            step: _Observed = current_step()
            step.last = None
            output = self.layer(self.given.clone()[None], *args, **kwargs)
            self.output = (output[0] if isinstance(output, tuple) else output)[0]
            self.attended = step.last
        return hidden


def _text_model(model: PreTrainedModel) -> Any:
    inner: Any = model.model
    return getattr(inner, "language_model", inner)


def _with_layers(model: PreTrainedModel, text: nn.Module, layers: list[_Probe]) -> Any:
    """A shallow copy of a model, with other layers. The model itself is not changed: its owner may be using it."""

    def copied(module: nn.Module) -> nn.Module:
        made = copy.copy(module)
        own = {name: child for name, child in module._modules.items()}
        if module is text:
            own["layers"] = nn.ModuleList(layers)
        else:
            for name, child in own.items():
                if child is not None and any(part is text for part in child.modules()):
                    own[name] = copied(child)
        made._modules = own
        return made

    return copied(model)
