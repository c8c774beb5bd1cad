"""TargetRunner: runs transformers' own model over trees and chunks of prompt, one forward at a time.

It owns no sequences: a `TreeCache` does, and is passed in. Choosing and accepting tokens happens elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from graft.target import attention
from graft.target.cache import TreeCache
from graft.target.support import check_supported
from graft.tree import DraftTree


@dataclass(frozen=True)
class Verified:
    """The target's judgement of W tokens in B rows."""

    tokens: Tensor  # [B, W] what was judged
    logits: Tensor  # [B, W, V] float32, the target's opinion of what follows each
    hidden: tuple[Tensor, ...]  # [B, W, H] inputs of the layers asked for, in that order


class TargetRunner:
    """A model, and the three verbs of a round: `prefill`, `verify`, `commit` (on the cache it opened)."""

    def __init__(self, model: PreTrainedModel, hidden_layers: Sequence[int] = (), chunk_size: int = 256) -> None:
        check_supported(model)
        self.model = model.eval()
        self.chunk_size = chunk_size
        self._hidden_layers = tuple(hidden_layers)
        config = model.config.get_text_config()
        self._num_layers = config.num_hidden_layers
        self.vocab_size: int = config.vocab_size
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def open(self, num_rows: int, num_slots: int) -> TreeCache:
        return TreeCache(self._num_layers, num_rows, num_slots)

    @contextmanager
    def _tree_attention(self) -> Iterator[None]:
        """Lets the model attend over trees inside. For one forward only: the model stays its owner's outside.

        Set on the config, where the model's code reads it: `set_attn_implementation` takes 1 ms to do the same.
        """
        config = self.model.config
        before = config._attn_implementation
        config._attn_implementation = attention.NAME
        try:
            yield
        finally:
            config._attn_implementation = before

    def prefill(self, cache: TreeCache, row: int, tokens: Sequence[int]) -> Iterator[Verified]:
        """Commits a prompt to one row, a chunk at a time: a chunk is a tree with one path, all of it accepted."""
        for start in range(0, len(tokens), self.chunk_size):
            chunk = DraftTree.chain(torch.tensor([tokens[start : start + self.chunk_size]], device=self.device))
            verified = self._forward(cache, slice(row, row + 1), chunk)
            cache.commit([range(1, chunk.width)])
            yield verified

    def verify(self, cache: TreeCache, tree: DraftTree) -> Verified:
        """Judges every node of every row's tree in one forward. Nothing is committed."""
        return self._forward(cache, slice(0, cache.num_rows), tree)

    @torch.no_grad()
    def _forward(self, cache: TreeCache, rows: slice, tree: DraftTree) -> Verified:
        lengths = cache.aim(rows, tree.width, self.device)
        positions = tree.positions(lengths)
        if self.max_positions is not None:
            # Nodes past the model's last position cannot become text; they only must not break its tables.
            positions = positions.clamp(max=self.max_positions - 1)
        with self._tree_attention():
            output = self.model(
                input_ids=tree.tokens,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                output_hidden_states=bool(self._hidden_layers),
                tree=attention.Visibility(lengths, positions, tree.ancestors(), self.model.dtype),
            )
        hidden = tuple(output.hidden_states[layer] for layer in self._hidden_layers)
        return Verified(tree.tokens, output.logits.float(), hidden)
