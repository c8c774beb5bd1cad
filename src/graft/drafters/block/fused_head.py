"""The block head in Triton, over flat buffers, for CUDA graphs: new entries, and the block with its trees.

As in `model/llama.py`, weights that one product takes together are concatenated once, and the head's parameters become
views of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from graft.drafters import capturable
from graft.drafters.block import kernels as block_kernels
from graft.drafters.block.drafter import BlockTreeSettings, table_of
from graft.drafters.block.head import BlockHead
from graft.drafters.block.tree import Ranking
from graft.drafters.draft_buffers import DraftBuffers
from graft.drafters.drafter import Passes
from graft.model import PagePool
from graft.model.attention import KernelStep
from graft.model.kernels import attention as attention_kernels
from graft.model.kernels import layer as layer_kernels
from graft.model.kernels import rotary as rotary_kernels
from graft.model.kernels import topk as topk_kernels
from graft.model.kernels.matmul import Products
from graft.model.kv_cache import PAGE, KVStore
from graft.model.layout import Layout, bidirectional_columns
from graft.model.llama import Layer, LayerStack, Rotary, fuse_parameters, llama_layer
from graft.tree.device import best_first
from graft.tree.device.buffers import DraftDraws, Trees
from graft.tree.device.round import AddLevel


class BlockBuffers(DraftBuffers):
    """Static tensors, including those of blocks and trees."""

    def __init__(self, fast: FastBlock, pool: PagePool, store: KVStore, number: int) -> None:
        super().__init__(pool, store, Rotary.of(fast.head.rotary, fast.fc, pool.tables.shape[1] * PAGE), number)
        self.width = fast.config.block_size
        rows = torch.arange(self.max_rows, dtype=torch.int32, device=pool.device)
        self._rows_of = rows.repeat_interleave(self.width)  # by slot
        self._starts = rows * self.width
        self._counts = torch.full_like(rows, self.width)
        self._places = torch.arange(self.width, dtype=torch.int32, device=pool.device).repeat(self.max_rows)
        self._two_ways = bidirectional_columns(self.width, self.max_rows, fast.tile, pool.device)
        self._fits_tile = self.width <= fast.tile
        most = max(fast.settings.num_drafted(fast.head, is_chain) for is_chain in (False, True))
        self._trees = torch.zeros(5 * self.max_rows * most, dtype=torch.int32, device=pool.device)

    def layout(self, asked: Passes, lengths: Tensor) -> Layout:
        """Layout of causal slots after the entries of their rows."""
        rows, count = asked.num_rows, asked.num_rows * self.width
        return Layout(
            rows=self._rows_of[:count],
            places=self._places[:count],
            depths=self._places[:count],
            paths=self._two_ways[2][:count],  # not read
            starts=self._starts[:rows],
            counts=self._counts[:rows],
            lengths=lengths,
            table_rows=asked.table_rows,
            tables=self.tables,
            max_context=asked.context,
            only_chains=True,
        )

    def two_ways(self, layout: Layout) -> Layout:
        """The same slots for bidirectional layers: each slot sees all slots of its row."""
        places, depths, paths = (part[: len(layout.rows)] for part in self._two_ways)
        return replace(layout, places=places, depths=depths, paths=paths, only_chains=self._fits_tile)

    def trees(self, rows: int, num_nodes: int) -> Trees:
        """The trees of a round."""
        return Trees(self._trees[: 5 * rows * num_nodes].view(5, rows, num_nodes))


class FastBlock:
    """The head's decoder layers in few kernels, for entries and for blocks."""

    def __init__(self, head: BlockHead, settings: BlockTreeSettings) -> None:
        """head: one for which `why_not` is None."""
        self.settings = settings
        config, layers = head.config, list[Any](head.layers)
        self.head, self.config = head, config
        embedding = head.embed_tokens.weight if config.own_embedding else head.target_embedding
        assert embedding is not None
        self._embedding = embedding.detach()
        mask = head.mask_embedding if config.own_mask else self._embedding[config.mask_token_id]
        self._mask = mask.detach().to(self._embedding.dtype)
        self.fc, self._hidden_norm = head.fc.weight.detach(), head.hidden_norm.weight.detach()
        # Weights of q, k and v, [layers, outputs, inputs]: one product gives the keys and values of all layers.
        attentions = [layer.self_attn for layer in layers]
        projections = [p.weight for own in attentions for p in (own.q_proj, own.k_proj, own.v_proj)]
        self._qkv = fuse_parameters(projections).unflatten(0, (len(layers), -1))
        self._num_queries = config.num_attention_heads * config.head_dim
        self._multiply = Products(self._embedding.device)
        heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        what = [
            llama_layer(layer, *heads, config.rms_norm_eps, window)
            for layer, window in zip(layers, config.windows, strict=True)
        ]
        norms: list[Any] = [(own.mixer.q_norm, own.mixer.k_norm) for own in what if own.mixer.q_norm is not None]
        by_layer = [torch.stack([norm.weight.detach() for norm in each]) for each in zip(*norms, strict=True)]
        self._head_norms = (by_layer[0], by_layer[1], norms[0][0].eps) if norms else None  # [layers, head_dim]
        self._stack = LayerStack(list(map(Layer.of, what, self._qkv)), self._multiply)

    @property
    def tile(self) -> int:
        """Slots in a tile of the attention kernel."""
        tiles = attention_kernels.tiles_for(self.config.head_dim, self._embedding.dtype)
        return tiles.tokens(self.config.num_attention_heads // self.config.num_key_value_heads)

    def buffers(self, pool: PagePool, store: KVStore, number: int) -> BlockBuffers:
        return BlockBuffers(self, pool, store, number)

    def run_passes(
        self, buffers: BlockBuffers, asked: Passes, lengths: Tensor, draws: DraftDraws | None, add_level: AddLevel
    ) -> None:
        """See `Drafter.run_passes`. lengths, draws: of the rows."""
        rows, is_chain = asked.num_rows, asked.keep == 1
        layout, num_levels = buffers.layout(asked, lengths), self.config.num_drafts
        causal, two_ways = KernelStep(layout), KernelStep(buffers.two_ways(layout))
        seen = [causal if is_causal else two_ways for is_causal in self.config.causal]
        roots = asked.roots[:rows].contiguous()
        hidden = self.run(roots, causal, seen, buffers.keys, buffers.values, buffers.rotary)
        table = table_of(self.head, hidden, roots.long(), self.settings, is_chain, self._ranking(draws))
        trees = buffers.trees(rows, self.settings.num_drafted(self.head, is_chain))
        best_first.grow(*table, min(num_levels, asked.max_depth), trees)
        add_level(0, *(part.flatten() for part in (trees.tokens, trees.parents, trees.probabilities)))

    def _ranking(self, by_row: DraftDraws | None) -> Ranking:
        draws = factors = None
        if by_row is not None:
            rows, num_slots = len(by_row.seeds), self.config.num_drafts
            factors = torch.where(by_row.temperatures > 0, 1 / by_row.temperatures, 1.0)
            seeds, temperatures, positions = (part.repeat_interleave(num_slots) for part in by_row[:3])
            places = torch.arange(num_slots, device=positions.device).repeat(rows)
            draws = DraftDraws(seeds, temperatures, positions + places, by_row.to_target)

        def highest(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
            ids, best, total = topk_kernels.highest(logits.flatten(0, 1), k, draws)
            shape = logits.shape[:2]
            return ids.unflatten(0, shape), best.unflatten(0, shape), total.unflatten(0, shape)

        return Ranking(highest, block_kernels.children, factors)

    def enter(self, buffers: BlockBuffers, features: Tensor, tokens: Tensor, layout: Layout) -> None:
        """Write the keys and values of entries with the target's features [E, taps * H_t] to the store."""
        keys, values, rotary = buffers.keys, buffers.values, buffers.rotary
        fused = self._multiply(features, self.fc)
        _, hidden = layer_kernels.add_norm(fused, None, self._hidden_norm, self.config.rms_norm_eps)
        weights = self._qkv[:, self._num_queries :]
        projected = torch.bmm(hidden.expand(len(weights), -1, -1), weights.mT)  # [layers, E, 2 * kv_heads * head_dim]
        rotary_kernels.rotate_and_store(projected, keys, values, layout, rotary.cos, rotary.sin, self._head_norms)

    def run(
        self,
        roots: Tensor,  # [R] int32
        step: KernelStep,  # of R * block_size slots
        seen: Sequence[KernelStep],  # by layer
        keys: Tensor,  # [layers, slots, kv_heads, head_dim]
        values: Tensor,
        rotary: Rotary,
    ) -> Tensor:
        """Hidden states [R, K, H] of the predicting slots, before the final norm."""
        width = self.config.block_size
        slots = block_kernels.slots(roots, self._embedding, self._mask, width)
        stored = list(zip(keys, values, strict=True))
        _, stream, last = self._stack(slots, step, stored, [rotary] * len(stored), seen)
        assert isinstance(last.delta, Tensor)
        return self.head.predicting((stream + last.delta).unflatten(0, (-1, width)))


def why_not(head: BlockHead) -> str | None:
    """The reason why the head cannot be captured; None if it can."""
    config = head.config
    # The kernels apply a window to earlier positions only.
    if any(window and not causal for causal, window in zip(config.causal, config.windows, strict=True)):
        return "it has a window of attention without being causal"
    return capturable.why_not(head)
