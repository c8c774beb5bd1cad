"""The eager block drafter: one forward of the head gives all levels of the tree.

The head's KV cache holds the keys and values of committed tokens, made from the target's features. A round's slots are
written after them, and the next round overwrites the slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graft.model import KVCache, PagePool, Row
from graft.model.attention import RowKeys, attend
from graft.model.noise import ComingDraws
from graft.settings import Settings, check_size
from graft.spec_decode.proposers.block.head import Attention, BlockHead
from graft.spec_decode.proposers.block.tree import (
    PLAIN,
    Ranking,
    Table,
    chain_table,
    conditional_table,
    levels_of,
    marginal_table,
    ranking_of,
)
from graft.spec_decode.proposers.drafter import KEPT_OF_A_LEVEL, TreeSettings
from graft.spec_decode.proposers.eager import DraftRow, EagerDrafter, EagerState, PendingEntries
from graft.tree.device.buffers import Level


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


class BlockDrafter(EagerDrafter[DraftRow]):
    """Drafts with a block head, eagerly.

    If the head has conditionals, a node's children depend on its token. Else all nodes of a depth have the same
    children: the next slot's likeliest tokens.
    """

    max_passes = 1
    num_beams = 0  # there is only one pass

    def __init__(self, head: BlockHead, settings: BlockTreeSettings | None = None) -> None:
        config = head.config
        key_heads = (config.num_key_value_heads, config.head_dim)
        super().__init__(config.target_layers, head.fc.weight, config.num_layers, key_heads)
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
        return (self._num_drafted(keep == 1),)

    def beams_of(self, num_rows: int, keep: int = KEPT_OF_A_LEVEL) -> int:
        return self.num_beams

    @torch.no_grad()
    def passes(
        self,
        state: EagerState[DraftRow],
        roots: Tensor,
        keep: int | None = None,
        draws: ComingDraws | None = None,
    ) -> Iterator[Sequence[Level]]:
        self._refresh(state.pool, state.rows)
        roots = roots.to(self.device)
        hidden = self._block(state, roots)
        ranking = ranking_of(draws, self.head.target_ids) if draws is not None else PLAIN
        table = table_of(self.head, hidden, roots, self.settings, keep == 1, ranking)
        yield levels_of(table.to_host(), self.max_depth, self._num_drafted(keep == 1))

    def _num_drafted(self, is_chain: bool) -> int:
        """Nodes of a drafted tree."""
        return self.max_depth if is_chain else self.settings.nodes

    def _new_row(self, row: Row) -> DraftRow:
        return DraftRow(row, row.length)

    def _refresh(self, pool: PagePool, rows: Sequence[DraftRow]) -> None:
        pending = PendingEntries(rows)
        if not pending.rows:
            return
        keys, values = self.head.context(pending.features(), pending.positions(self.device))
        cache = self.cache_writing_at(pool, pending.places)
        for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
            cache.update(key, value, layer)
        pending.finish()

    def _block(self, state: EagerState[DraftRow], roots: Tensor) -> Tensor:
        """Hidden states [B, K, H] of the predicting slots after roots [B]."""
        places = torch.arange(self.head.config.block_size)
        positions = torch.tensor(state.lengths)[:, None] + places
        cache = self.cache_writing_at(
            state.pool, [(row, row.length + place) for row in state.rows for place in places.tolist()]
        )
        attention = self._attention(cache, state.rows)
        return self.head.predicting(self.head(self.head.slots(roots), positions.to(self.device), attention))

    def _attention(self, cache: KVCache, rows: Sequence[DraftRow]) -> Attention:
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
