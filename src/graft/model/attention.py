"""Tree attention as one of transformers' attention functions, under the name "graft".

The model's own code calls it in every layer. What each token may see is passed as the forward's keyword argument
`tree`, so no model is patched. While a model is lent (`loan`), forwards of its owner come here too, and are handed on
to the attention function that the owner chose.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graft.errors import GraftError
from graft.model import loan
from graft.model.kv_cache import WritePosition

if TYPE_CHECKING:
    from graft.model.kernels.attention import Plan, Tiles

# Attention arguments that change the result and that this function does not compute.
_UNSUPPORTED = {"softcap": "soft-capped attention", "s_aux": "attention sinks", "position_bias": "position biases"}


@dataclass(frozen=True)
class Layout:
    """A flat step on the device: T tokens of R rows, which keys each sees, and where its own go.

    A row's tokens stand together, each after its parent; depths are less than the greater of T and P. Padding belongs
    to a row of line 0, whose pages are all 0, with depth == place.
    """

    rows: Tensor  # [T] int32 the row of each token, an index into the [R] tensors
    places: Tensor  # [T] int32 its slot is that of position length + place in its row
    depths: Tensor  # [T] int32 its position in the text, less the row's length
    paths: Tensor  # [T, P] int32 places of its ancestors and itself, by depth; not read where depth == place
    starts: Tensor  # [R] int32 the row's first token in the step
    counts: Tensor  # [R] int32 the row's tokens in the step; 0 for rows not in use
    lengths: Tensor  # [R] int32 committed tokens of each row
    lines: Tensor  # [R] int32 the row's line in the block tables
    tables: Tensor  # [lines, max_pages] int32 block tables
    max_context: int  # upper bound of the lengths: sizes a launch, never changes a result


class KernelStep:
    """A step for the Triton kernels: its layout, and the plans of its prefix, which all layers of a kind share.

    Made anew for every forward, and so for every capture: a plan of an earlier one would not be in the graph.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._plans: dict[tuple[int, Tiles], Plan] = {}

    def plan(self, group: int, tiles: Tiles) -> Plan:
        """group: query heads that share a key head."""
        from graft.model.kernels import attention as attention_kernels  # needs Triton, which only a GPU's users have

        key = (group, tiles)
        if key not in self._plans:
            self._plans[key] = attention_kernels.plan(self.layout, group, tiles)
        return self._plans[key]


class Visibility:
    """Which keys each token sees, as an attention mask: its row's committed tokens and its ancestors in the tree."""

    def __init__(self, aim: WritePosition, positions: Tensor, ancestors: Tensor, dtype: torch.dtype) -> None:
        self._aim = aim
        self._positions = positions  # [B, U] of the U tokens behind the committed ones; the forward's W are the last
        self._ancestors = ancestors  # [B, W, U] bool
        self._dtype = dtype
        self._masks: dict[tuple[int | None, int, int], Tensor | None] = {}

    def mask(self, num_keys: int, window: int | None, num_groups: int) -> Tensor | None:
        """Additive mask [B, 1, groups * W, keys], None when every key is seen; made once for all layers of a kind.

        window: of sliding attention, in tokens. num_groups: query heads that share a key head.
        """
        key = (window, num_keys, num_groups)
        if key not in self._masks:
            self._masks[key] = self._make_mask(num_keys, window, num_groups)
        return self._masks[key]

    def _make_mask(self, num_keys: int, window: int | None, num_groups: int) -> Tensor | None:
        batch, width, num_uncommitted = self._ancestors.shape
        if self._aim.exact_end and batch == 1 and num_uncommitted == 1 and (window is None or num_keys <= window):
            return None
        slots = torch.arange(num_keys, device=self._aim.lengths.device)
        place = slots - self._aim.lengths[:, None]  # [B, S] slot behind the committed ones, negative for committed keys
        in_forward = (place >= 0) & (place < num_uncommitted)
        index = place.clamp(0, num_uncommitted - 1)[:, None, :].expand(-1, width, -1)
        seen = torch.where(in_forward[:, None], self._ancestors.gather(2, index), (place < 0)[:, None])  # [B, W, S]
        if window is not None:
            key_position = torch.where(in_forward, self._positions.gather(1, index[:, 0]), slots)
            seen &= self._positions[:, -width:, None] - key_position[:, None, :] < window
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
        return mask[:, None].repeat(1, 1, num_groups, 1)


def tree_attention(
    module: nn.Module,
    query: Tensor,  # [B, heads, W, head_dim]
    key: Tensor,  # [B, kv_heads, S, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    tree: Visibility | KernelStep | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if not loan.is_ours():
        given = {"scaling": scaling, "sliding_window": sliding_window, **kwargs}
        return _as_the_owner_chose(module, query, key, value, attention_mask, **given)
    if tree is None:
        raise GraftError(f"{type(module).__name__} does not hand attention arguments on, so it cannot verify trees")
    for name, meaning in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise GraftError(f"{type(module).__name__} uses {meaning}, which tree verification does not support")
    if isinstance(tree, KernelStep):
        return _by_kernels(query, key, value, tree, scaling, sliding_window), None
    mask = tree.mask(key.shape[2], sliding_window, query.shape[1] // key.shape[1])
    return attend(query, key, value, mask, scaling).transpose(1, 2).contiguous(), None


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Attention [B, heads, W, D] of queries [B, heads, W, D] over keys and values [B, kv_heads, S, D].

    mask: [B, 1, groups * W, S], repeated for each of the heads / kv_heads query heads that share a key head, since one
    mask serves many layers; None lets all be seen.
    """
    batch, heads, width, head_dim = query.shape
    # Query heads that share keys are folded into more queries, so that no keys are copied for them.
    folded = query.reshape(batch, key.shape[1], -1, head_dim)
    out = nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    return out.reshape(batch, heads, width, -1)


def _by_kernels(
    query: Tensor,  # [1, heads, T, head_dim]
    keys: Tensor,  # [num_slots, kv_heads, head_dim], one layer's whole store
    values: Tensor,
    step: KernelStep,
    scale: float | None,
    window: int | None,
) -> Tensor:
    from graft.model.kernels import attention as attention_kernels

    _, heads, _, head_dim = query.shape
    tiles = attention_kernels.tiles_for(head_dim, query.dtype)
    plan = step.plan(heads // keys.shape[1], tiles)
    out = attention_kernels.tree_attention(
        query[0].transpose(0, 1), keys, values, step.layout, plan, scale=scale, window=window, tiles=tiles
    )
    return out.view(1, -1, heads, head_dim)


def _as_the_owner_chose(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Attention by the function that the module's code would have called, were the model not lent."""
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function: Any = ALL_ATTENTION_FUNCTIONS.get_interface(loan.owners_attention(module.config), eager)
    attended: tuple[Tensor, Tensor | None] = function(module, *args, **kwargs)
    return attended


def _mask(*args: Any, config: PreTrainedConfig, **kwargs: Any) -> Any:
    """The mask function: None for our forwards, which have their own; for the owner's, what its attention needs."""
    name = loan.owners_attention(config)
    # transformers makes none for attention functions that it knows no masks for.
    if loan.is_ours() or name not in ALL_MASK_ATTENTION_FUNCTIONS:
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS[name](*args, config=config, **kwargs)


AttentionInterface.register(loan.NAME, tree_attention)
AttentionMaskInterface.register(loan.NAME, _mask)
