"""EarlyExitDrafter: drafts with the target's own first layers, final norm and output layer.

It uses the target's weights and KV cache, so there is nothing to load or to prefill. The verify step runs all nodes
through all layers, and overwrites the drafter's keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from graft.drafters.beam_drafter import Found
from graft.drafters.drafter import Passes, TreeSettings
from graft.drafters.early_exit.split import first_layers
from graft.drafters.small_model import ModelRow, ModelState, SmallModelDrafter
from graft.model import KVCache, Row, TargetRunner, VerifyOutput, target_for


class EarlyExitDrafter(SmallModelDrafter):
    """Drafts with the target's first `num_layers` layers."""

    def __init__(self, target: PreTrainedModel, num_layers: int, settings: TreeSettings | None = None) -> None:
        super().__init__(first_layers(target, num_layers), TargetRunner(target).vocab_size, settings)
        self.num_layers = num_layers
        self._target = target

    def with_settings(self, settings: TreeSettings) -> EarlyExitDrafter:
        return EarlyExitDrafter(self._target, self.num_layers, settings)

    def of_model(self, target: PreTrainedModel) -> EarlyExitDrafter:
        """The same exit layer of another model, such as one that `widen` made, whose added layers come last."""
        return EarlyExitDrafter(target, self.num_layers, self.settings)

    @property
    def bytes_per_token(self) -> int:
        return 0

    def open(self, cache: KVCache, texts: Sequence[Sequence[int]] = ()) -> Any:
        return ModelState(self, cache.pool, [ModelRow(row, row) for row in cache.rows], self._runner(cache))

    def copied(self, state: ModelState, known: Any, row: Row) -> ModelRow:
        return ModelRow(row, row)

    def _new_runner(self, cache: KVCache) -> TargetRunner:
        return target_for(self.model, pool=cache.pool, store=cache.store)

    def read(self, chunks: Sequence[Any]) -> None:
        """Nothing to do: the target has read them."""

    def learn(
        self,
        state: ModelState,
        verified: VerifyOutput,
        nodes: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
    ) -> None:
        for row in state.rows:  # accepted tokens are in the target's cache
            row.drop_drafts()

    def root(self, asked: Passes, topk: int) -> Found:
        tokens = asked.roots[: len(asked.state.rows), None].long().cpu()
        return self._run_nodes(asked, tokens, torch.zeros_like(tokens), 0, topk, depth=1)
