"""Runs a model's first layers for drafting, and lets the target's step continue after them.

`FirstLayersRunner` leaves a `FirstLayersStep` in each row. The target's runner finds it there and lets it finish the
step, so that no layer runs a token twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from graft.model import PagePool, Row, TargetRunner, VerifyOutput
from graft.model.kv_cache import KVStore
from graft.model.runner import outputs_of
from graft.model.step import FlatStep
from graft.settings import require
from graft.spec_decode.proposers.early_exit.split import SplitModel


@dataclass(frozen=True)
class FirstLayersStep:
    """Uncommitted tokens that the first layers have run. Their keys and values are in the row's pages, in order."""

    split: SplitModel
    length: int  # of the row
    tokens: list[int]  # the root first
    parents: list[int]  # places
    hidden: Tensor  # [n, H] outputs of the first layers

    def places_of(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """The place of each node of a tree among these tokens, compared by path; -1: not there."""
        children = {node: place for place, node in enumerate(zip(self.parents, self.tokens, strict=True)) if place}
        found = [0 if tokens[0] == self.tokens[0] else -1]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            found.append(children.get((found[parent], token), -1))
        return found

    def finish(self, runner: TargetRunner, step: FlatStep, begun: Sequence[FirstLayersStep | None]) -> Tensor:
        """Logits [1, T, V] of the step: run the first layers on new tokens, then the other layers on all."""
        split = self.split
        require(split.model is runner.model, "an early-exit drafter works with its own model only: make one for this")
        is_run = np.ones(step.num_tokens, dtype=bool)
        known: list[Tensor] = []
        moves: list[tuple[Row, int, int]] = []
        by_row = step.by_row[:2, : len(step.rows)].tolist()
        for row, own, start, count in zip(step.rows, begun, *by_row, strict=True):
            if own is None:
                continue
            part = slice(start, start + count)
            places = own.places_of(step.tokens[part].tolist(), step.parents[part].tolist())
            is_run[part] = [place < 0 for place in places]
            known.append(own.hidden[[place for place in places if place >= 0]])
            moves += [(row, place, node) for node, place in enumerate(places) if place not in (-1, node)]
        runner.cache_of(step.rows).move(moves, split.num_layers)
        hidden = known[0].new_empty(step.num_tokens, known[0].shape[1])
        is_new = torch.from_numpy(is_run).to(runner.device)
        hidden[~is_new] = torch.cat(known)
        if is_run.any():
            with runner.forward_of(step, is_run) as arguments:
                hidden[is_new] = split.hidden_of(**arguments)[0]
        with runner.forward_of(step) as arguments:
            return split.run_rest(hidden[None], **arguments)


class FirstLayersRunner(TargetRunner):
    """Runs a model's first layers, final norm and output layer over the KV cache of the model's own runner."""

    def __init__(self, model: PreTrainedModel, num_layers: int, pool: PagePool, store: KVStore) -> None:
        """pool, store: those of the model's own runner."""
        super().__init__(model, pool=pool, store=store)
        self._split = SplitModel(model, num_layers)

    def _run(self, step: FlatStep, num_already_run: int) -> tuple[VerifyOutput | None, list[VerifyOutput]]:
        is_run = step.skip_already_run(num_already_run) if num_already_run else None
        with self.forward_of(step, is_run) as arguments:
            logits, hidden = self._split.run_first(**arguments)
        counts = step.by_row[1, : len(step.rows)].tolist()
        new = hidden[0].split([count - num_already_run for count in counts])
        for row, start, count, own in zip(step.rows, step.by_row[0].tolist(), counts, new, strict=False):
            part = slice(start, start + count)
            before = [row.begun.hidden[:num_already_run]] if row.begun is not None and num_already_run else []
            tokens, parents = step.tokens[part].tolist(), step.parents[part].tolist()
            row.begun = FirstLayersStep(self._split, row.length, tokens, parents, torch.cat([*before, own]))
        return outputs_of(step, logits[0].float(), hidden[0])
