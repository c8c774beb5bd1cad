"""Tree attention as one of transformers' attention functions, under the name "graft".

The model's own code calls it in every layer, so no model is patched. Which keys each token sees is thread-local
(`overrides.current_step`). While one of our forwards runs, forwards of the model's owner in other threads also arrive
here, and are passed on to the attention function that the owner chose.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graft.errors import GraftError
from graft.model import overrides
from graft.model.kv_cache import PAGE, Row
from graft.model.layout import Layout
from graft.model.step import FlatStep
from graft.tree.tree import ancestors

if TYPE_CHECKING:
    from graft.model.kernels.attention import Plan, Tiles


@dataclass(frozen=True)
class Scores:
    """How a layer turns products of queries and keys into scores."""

    scale: float | None = None  # None: 1 / sqrt(head_dim)
    window: int | None = None  # keys this many or more positions back are masked
    chunk: int | None = None  # keys in earlier chunks of this many positions are masked; not together with a window
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: Tensor | None = None  # [heads] score of one extra key per head, whose value is 0


class KernelStep:
    """A step for the Triton kernels: its layout, and the kernels' plans, which layers of one kind share.

    Every forward makes its own, because a captured graph must contain the computation of its plans.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._plans: dict[tuple[int, Tiles], Plan] = {}

    def plan(self, group: int, tiles: Tiles) -> Plan:
        """group: query heads that share a key head."""
        from graft.model.kernels import attention as attention_kernels  # needs Triton: only on GPUs

        key = (group, tiles)
        if key not in self._plans:
            self._plans[key] = attention_kernels.plan(self.layout, group, tiles)
        return self._plans[key]


class Visibility:
    """Attention masks of a flat step, one per row: which keys each token sees."""

    def __init__(self, rows: Sequence[RowKeys], dtype: torch.dtype) -> None:
        """rows: in the order of their tokens in the step."""
        self._rows, self._dtype = rows, dtype
        self._masks: dict[tuple[int, int | None, int | None, int], Tensor | None] = {}

    @classmethod
    def of_step(
        cls, step: FlatStep, device: torch.device, dtype: torch.dtype, is_run: np.ndarray | None = None
    ) -> Visibility:
        """A token sees its row's committed tokens, and itself and its ancestors in the step.

        is_run: [T] bool, which tokens the forward runs; None: all. The others were run before and serve only as keys.
        """
        rows, first = [], 0
        for row, count in zip(step.rows, step.by_row[1, : len(step.rows)].tolist(), strict=True):
            parents, depths = step.columns[1, first : first + count], step.columns[3, first : first + count]
            below = torch.from_numpy(depths.astype(np.int64))
            seen, own = _seen_among(parents, depths), torch.arange(count)
            if is_run is not None:
                own = torch.from_numpy(np.flatnonzero(is_run[first : first + count]))
            if len(own):
                rows.append(RowKeys(row, row.length, below, seen[own], device, own))
            first += count
        return cls(rows, dtype)

    @property
    def rows(self) -> Sequence[RowKeys]:
        return self._rows

    @property
    def end(self) -> int:
        """The first slot after all keys that are seen."""
        return max(row.end for row in self._rows)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Attention [1, T, heads, D] of queries [1, heads, T, D] over a layer's store, [1, kv_heads, slots, D]."""
        parts, groups = [], query.shape[1] // key.shape[1]
        each = query.split([row.count for row in self._rows], dim=2)
        for number, (row, own) in enumerate(zip(self._rows, each, strict=True)):
            mask = self._mask(number, scores.window, scores.chunk, groups)
            parts.append(attend(own, row.of(key), row.of(value), mask, scores))
        return torch.cat(parts, dim=2).transpose(1, 2).contiguous()

    def _mask(self, number: int, window: int | None, chunk: int | None, num_groups: int) -> Tensor | None:
        """Additive mask [1, 1, groups * n, keys] of a row; None if every key is seen. Layers of one kind share it.

        num_groups: query heads that share a key head.
        """
        key = (number, window, chunk, num_groups)
        if key not in self._masks:
            self._masks[key] = self._make_mask(self._rows[number], window, chunk, num_groups)
        return self._masks[key]

    def _make_mask(self, row: RowKeys, window: int | None, chunk: int | None, num_groups: int) -> Tensor | None:
        num_keys = row.num_keys
        if row.count == 1 and bool(row.seen.all()) and num_keys <= min(window or num_keys, chunk or num_keys):
            return None
        committed = torch.ones(row.count, num_keys - row.seen.shape[1], dtype=torch.bool)
        seen = torch.cat([committed, row.seen], dim=1)
        if window is not None:
            seen &= row.own_positions[:, None] - row.positions < window
        if chunk is not None:
            seen &= row.own_positions[:, None] // chunk == row.positions // chunk
        mask = torch.zeros(seen.shape, dtype=self._dtype).masked_fill_(~seen, -torch.inf)
        return mask.to(row.device)[None, None].repeat(1, 1, num_groups, 1)


class RowKeys:
    """The keys of one row of a step: its cached tokens, then U further ones, some of which the step runs."""

    def __init__(
        self, row: Row, length: int, depths: Tensor, seen: Tensor, device: torch.device, own: Tensor | None = None
    ) -> None:
        """length: number of cached tokens. depths: [U] positions of the further tokens minus the length.

        seen: [n, U] bool, which of the U tokens each of the step's n tokens sees. own: [n] which of the U tokens are
        the step's; None: the last n. These tensors are on the host. device: where the keys are.
        """
        self.count, self.length, self.seen, self.device = len(seen), length, seen, device
        self._depths, self._own = depths, own
        self.num_keys = length + len(depths)
        self.pages = row.pages[: -(-self.num_keys // PAGE)]
        self.end = PAGE * (max(self.pages) + 1)

    # What fused layers do not read is made on demand.

    @cached_property
    def positions(self) -> Tensor:
        """[keys]"""
        return torch.cat([torch.arange(self.length), self.length + self._depths])

    @property
    def own_positions(self) -> Tensor:
        """[n] of the step's tokens"""
        return self.positions[-self.count :] if self._own is None else self.length + self._depths[self._own]

    @cached_property
    def _slots(self) -> Tensor | slice:
        """The keys' slots. Consecutive pages are read in place."""
        first, pages = self.pages[0], self.pages
        if pages == list(range(first, first + len(pages))):
            return slice(first * PAGE, first * PAGE + self.num_keys)
        slots = torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)
        return slots.flatten()[: self.num_keys].to(self.device)

    def of(self, stored: Tensor) -> Tensor:
        """The row's keys, or values, [1, heads, n, D] in a layer's store."""
        slots = self._slots
        return stored[:, :, slots] if isinstance(slots, slice) else stored.index_select(2, slots)


def _seen_among(parents: np.ndarray, depths: np.ndarray) -> Tensor:
    """`ancestors` of a row's tokens in a step."""
    count = len(parents)
    if (parents[1:] == np.arange(count - 1)).all():
        return torch.ones(count, count, dtype=torch.bool).tril()
    return ancestors(torch.from_numpy(parents.astype(np.int64)), int(depths.max() - depths[0]))


def tree_attention(
    module: Any,  # a model's attention layer
    query: Tensor,  # [1, heads, T, head_dim]
    key: Tensor,  # [1, kv_heads, slots, head_dim], the layer's whole store; or the step's own, if they are made late
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    step: Visibility | KernelStep | None = overrides.current_step()
    if step is None:
        rare = {"softcap": softcap, "s_aux": s_aux}
        given = {name: value for name, value in rare.items() if value is not None} | kwargs
        given |= {"scaling": scaling, "sliding_window": sliding_window}
        return _attend_as_owner(module, query, key, value, attention_mask, **given)
    if (write := overrides.take_write()) is not None:
        key, value = write(key, value)
    if kwargs.get("position_bias") is not None:
        raise GraftError(f"{type(module).__name__} uses position biases, which tree verification does not support")
    if softcap is not None and overrides.owners_attention(module.config) == "sdpa":
        softcap = None  # PyTorch's function ignores it, so the model's own texts are made without it
    window, chunk = _reach(module, sliding_window)
    scores = Scores(scaling, window, chunk, softcap, s_aux)
    if isinstance(step, KernelStep):
        return _by_kernels(query, key, value, step, scores), None
    return step.attend(query, key, value, scores), None


def _reach(module: Any, window: int | None) -> tuple[int | None, int | None]:
    """The window and the chunk of a layer, by its type. Some layers have them only in the mask, which we do not use."""
    kinds = getattr(module.config, "layer_types", None)
    kind = kinds[module.layer_idx] if kinds and hasattr(module, "layer_idx") else None
    if kind == "chunked_attention":
        return None, module.config.attention_chunk_size
    if kind == "sliding_attention" and window is None:
        window = module.config.sliding_window
    return window, None


_PLAIN = Scores()


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores = _PLAIN) -> Tensor:
    """Attention [B, heads, W, D] of queries [B, heads, W, D] over keys and values [B, kv_heads, S, D].

    mask: [B, 1, groups * W, S], already repeated for the heads / kv_heads query heads that share a key head, because
    one mask serves many layers. None: every key is seen.
    """
    batch, heads, width, head_dim = query.shape
    # Query heads that share a key head become further queries of it, so keys need not be repeated.
    folded = query.reshape(batch, key.shape[1], -1, head_dim)
    if scores.softcap is None and scores.sinks is None:
        out = nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scores.scale)
    else:
        out = _attend_unfused(folded, key, value, mask, scores)
    return out.reshape(batch, heads, width, -1)


def _attend_unfused(folded: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """Attention of folded queries [B, kv_heads, groups * W, D] with softcap and sinks, which PyTorch's lacks."""
    scale = folded.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    products = (folded @ key.transpose(2, 3)).float() * scale
    if scores.softcap is not None:
        products = scores.softcap * torch.tanh(products / scores.softcap)
    if mask is not None:
        products = products + mask
    if scores.sinks is not None:
        width = folded.shape[2] // (len(scores.sinks) // key.shape[1])
        sinks = scores.sinks.float().view(key.shape[1], -1, 1).expand(-1, -1, width).reshape(1, key.shape[1], -1, 1)
        products = torch.cat([products, sinks.expand(len(products), -1, -1, -1)], dim=-1)
    weights = products.softmax(dim=-1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


def _by_kernels(query: Tensor, key: Tensor, value: Tensor, step: KernelStep, scores: Scores) -> Tensor:
    from graft.model.kernels import attention as attention_kernels  # needs Triton: only on GPUs

    tiles = attention_kernels.tiles_for(max(query.shape[3], value.shape[3]), query.dtype)
    out = attention_kernels.tree_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        step.layout,
        step.plan(query.shape[1] // key.shape[1], tiles),
        scale=scores.scale,
        window=scores.window,
        chunk=scores.chunk,
        softcap=scores.softcap,
        sinks=scores.sinks,
        tiles=tiles,
    )
    return out.unflatten(1, (query.shape[1], -1))[None]


def _attend_as_owner(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Attention by the function that the model's owner chose."""
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function: Any = ALL_ATTENTION_FUNCTIONS.get_interface(overrides.owners_attention(module.config), eager)
    attended: tuple[Tensor, Tensor | None] = function(module, *args, **kwargs)
    return attended


def _mask(*args: Any, config: PreTrainedConfig, **kwargs: Any) -> Any:
    """The mask function: None in our forwards, which make their own masks; else that of the owner's attention."""
    name = overrides.owners_attention(config)
    # Like transformers: no mask for an attention function without a mask function.
    if overrides.current_step() is not None or name not in ALL_MASK_ATTENTION_FUNCTIONS:
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS[name](*args, config=config, **kwargs)


AttentionInterface.register(overrides.NAME, tree_attention)
AttentionMaskInterface.register(overrides.NAME, _mask)
