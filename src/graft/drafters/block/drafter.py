"""The drafter of block heads: one forward of the head gives all levels of the tree.

The head's KV store holds the keys and values of committed tokens, made from the target's features. A round's slots are
written after them, and the next round overwrites the slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graft.drafters.block.head import Attention, BlockHead
from graft.drafters.block.tree import (
    PLAIN,
    Ranking,
    Table,
    chain_table,
    conditional_table,
    grown,
    marginal_table,
    ranking_of,
)
from graft.drafters.drafter import KEPT_OF_A_LEVEL, Passes, TreeSettings
from graft.drafters.head_drafter import HeadDrafter, HeadRow, NewEntries
from graft.model import KVCache
from graft.model.attention import RowKeys, attend
from graft.model.noise import ComingDraws
from graft.settings import Settings, check_size
from graft.tree.device.round import AddLevel


@dataclass(frozen=True)
class BlockTreeSettings(Settings):
    """The shape of the tree drafted from a block."""

    width: int = 16  # tokens of a slot that have children, in a conditional head's table
    children: int = 8  # children of each of them
    shortlist: int = 64  # tokens of a slot that may be children
    nodes: int = 60  # nodes of the tree

    def __post_init__(self) -> None:
        for name in ("width", "children", "shortlist", "nodes"):
            check_size(name, getattr(self, name))

    def num_drafted(self, head: BlockHead, is_chain: bool) -> int:
        """Nodes of a drafted tree."""
        return head.config.num_drafts if is_chain else self.nodes

    @classmethod
    def like(cls, tree: TreeSettings) -> BlockTreeSettings:
        """Settings about as wide as EAGLE-3's tree. The defaults correspond."""
        width = tree.topk * cls.width // TreeSettings.topk or 1
        return cls(width=width, shortlist=4 * width, nodes=tree.total_token)


def table_of(
    head: BlockHead,
    hidden: Tensor,
    roots: Tensor,
    settings: BlockTreeSettings,
    is_chain: bool = False,
    ranking: Ranking = PLAIN,
) -> Table:
    """The table of blocks with hidden states [B, K, H] after roots [B]."""
    if is_chain:
        return chain_table(head, hidden, roots, settings.shortlist, ranking)
    if head.config.has_conditionals:
        shape = (settings.width, settings.children, settings.shortlist)
        return conditional_table(head, hidden, roots, *shape, ranking)
    return marginal_table(head, hidden, settings.nodes, ranking)


class BlockDrafter(HeadDrafter):
    """Drafts with a block head.

    If the head has conditionals, a node's children depend on its token. Else all nodes of a depth have the same
    children: the next slot's likeliest tokens.
    """

    max_passes = 1

    def __init__(self, head: BlockHead, settings: BlockTreeSettings | None = None, fast: Any = None) -> None:
        """fast: the head's `FastBlock`, where it runs in Triton."""
        config = head.config
        heads = (config.num_key_value_heads, config.head_dim)
        super().__init__(config.target_layers, head.fc.weight, config.num_layers, heads, heads, fast)
        self.head = head
        self.settings = settings or BlockTreeSettings()

    @property
    def max_depth(self) -> int:
        return self.head.config.num_drafts

    @property
    def num_nodes(self) -> int:
        return self.settings.nodes

    @property
    def num_slots(self) -> int:
        return self.head.config.block_size

    def level_sizes(self, num_rows: int, keep: int = KEPT_OF_A_LEVEL) -> tuple[int, ...]:
        return (self.settings.num_drafted(self.head, keep == 1),)

    def beams_of(self, num_rows: int, keep: int = KEPT_OF_A_LEVEL) -> int:
        return 0

    def enter(self, new: NewEntries) -> None:
        for layer, pair in enumerate(zip(*self.head.context(new.features, new.positions), strict=True)):
            new.cache.update(*pair, layer)

    @torch.no_grad()
    def draft(self, asked: Passes, add_level: AddLevel) -> None:
        if not int(asked.made[0]):
            return
        rows, head, draws, is_chain = asked.state.rows, self.head, asked.draws, asked.keep == 1
        self.refresh(asked.pool, rows)
        roots = asked.roots[: len(rows)].long().to(self.device)
        assert draws is None or isinstance(draws, ComingDraws)
        ranking = ranking_of(draws, head.target_ids) if draws is not None else PLAIN
        table = table_of(head, self._block(asked, roots), roots, self.settings, is_chain, ranking)
        trees = grown(table, min(self.max_depth, asked.max_depth), self.settings.num_drafted(head, is_chain))
        add_level(0, *map(asked.flat, (trees.tokens, trees.parents, trees.probabilities)))

    def _block(self, asked: Passes, roots: Tensor) -> Tensor:
        """Hidden states [B, K, H] of the predicting slots after roots [B]."""
        rows, places = asked.state.rows, torch.arange(self.head.config.block_size)
        positions = torch.tensor(asked.state.lengths)[:, None] + places
        cache = self.cache_writing_at(
            asked.pool, [(row, row.length + place) for row in rows for place in places.tolist()]
        )
        attention = self._attention(cache, rows)
        return self.head.predicting(self.head(self.head.slots(roots), positions.to(self.device), attention))

    def _attention(self, cache: KVCache, rows: Sequence[HeadRow]) -> Attention:
        """Attention of each row's block to the row's entries and to itself."""
        config, device = self.head.config, self.device
        places = torch.arange(config.block_size)
        all_slots = torch.ones(len(places), len(places), dtype=torch.bool)
        row_keys = [RowKeys(row.row, row.length, places, all_slots, device) for row in rows]
        masks: dict[tuple[int, bool, int | None], Tensor | None] = {}

        def mask_of(number: int, layer: int, groups: int) -> Tensor | None:
            """A row's mask [1, 1, groups * W, keys], made once for all layers of a kind; None if all keys are seen."""
            key = (number, config.causal[layer], config.windows[layer])
            if key not in masks:
                positions = row_keys[number].positions
                seen = self.head.reaches(layer, positions[-len(places) :, None] - positions)
                masks[key] = None if bool(seen.all()) else seen.to(device)[None, None].repeat(1, 1, groups, 1)
            return masks[key]

        def attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = cache.update(_flat(key), _flat(value), layer)
            groups = query.shape[1] // key.shape[1]
            return torch.cat(
                [
                    attend(query[number : number + 1], row.of(keys), row.of(values), mask_of(number, layer, groups))
                    for number, row in enumerate(row_keys)
                ]
            )

        return attention


def _flat(states: Tensor) -> Tensor:
    """Keys or values [B, kv_heads, W, D] of all rows side by side, [1, kv_heads, B * W, D]."""
    return states.transpose(0, 1).flatten(1, 2)[None]
