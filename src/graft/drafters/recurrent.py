"""Base of the drafters with a recurrent head, which is fed with its own output: EAGLE-3 and MTP.

An entry of the head's KV store is made from the target's features of a token and the embedding of the next token.
Drafted entries come after those of the text, and use the head's own outputs as features.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from graft.drafters.beam_drafter import BeamDrafter, Found, likeliest
from graft.drafters.drafter import Passes, TreeSettings
from graft.drafters.head_drafter import HeadDrafter, NewEntries
from graft.model import KVCache
from graft.model.attention import RowKeys, Visibility
from graft.model.noise import ComingDraws
from graft.settings import require
from graft.tree.device.buffers import Beams
from graft.tree.device.round import AddLevel


class RecurrentDrafter(HeadDrafter, BeamDrafter):
    """Drafts with a recurrent head."""

    head: Any

    def __init__(self, vocab_size: int, settings: TreeSettings | None, *of_head: Any) -> None:
        """vocab_size: tokens that the head drafts from. of_head: arguments of `HeadDrafter`."""
        super().__init__(*of_head)
        self.settings = settings or TreeSettings()
        topk = self.settings.topk
        require(topk <= vocab_size, f"topk is {topk}, but the head drafts from {vocab_size} tokens")

    @property
    def target_ids(self) -> Tensor | None:
        """The target ids of all drafted ids; None: they are equal."""
        return None

    @abstractmethod
    def outputs(self, cache: KVCache, seen: Visibility, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """The head's outputs [1, T, H] at entries of tokens [1, T] and hidden states [1, T, H], which are written."""

    @abstractmethod
    def entered(self, new: NewEntries) -> Tensor:
        """Make entries of the text. Returns the outputs [rows, H] at each row's last one."""

    def enter(self, new: NewEntries) -> None:
        for row, hidden in zip(new.rows, self.entered(new), strict=True):
            row.hidden = hidden

    def draft(self, asked: Passes, add_level: AddLevel) -> None:
        BeamDrafter.run_passes(self, asked, add_level)

    def root(self, asked: Passes, topk: int) -> Found:
        rows, width = asked.state.rows, self._weight.shape[0]
        self.refresh(asked.pool, rows)
        hidden = [row.hidden if row.hidden is not None else self._weight.new_zeros(width) for row in rows]
        return self._found(asked, torch.stack(hidden)[:, None], topk, 1)

    def expand(self, asked: Passes, beams: Beams, number: int, features: Tensor) -> Found:
        rows, (batch, topk), device = asked.state.rows, beams.tokens.shape, self.device
        before, count = (number - 1) * topk, number * topk  # drafted entries of a row
        cache = self.cache_writing_at(
            asked.pool, [(row, row.length + place) for row in rows for place in range(before, count)]
        )
        seen = torch.zeros(batch, topk, count, dtype=torch.bool)
        seen.scatter_(2, beams.entries[:, :, :number].long(), True)
        depths = torch.arange(number).repeat_interleave(topk)
        keys = [RowKeys(row.row, row.length, depths, own, device) for row, own in zip(rows, seen, strict=True)]
        tokens = beams.tokens.view(1, -1).long().to(device)
        origins = beams.origins if number > 1 else beams.origins // topk  # the first pass had one beam a row
        hidden = features.flatten(0, 1)[origins.flatten().to(device)][None]
        positions = torch.tensor([[row.length + number - 1 for row in rows for _ in range(topk)]], device=device)
        outputs = self.outputs(cache, Visibility(keys, hidden.dtype), tokens, hidden, positions)
        return self._found(asked, outputs[0].unflatten(0, (batch, topk)), topk, number + 1)

    def _found(self, asked: Passes, hidden: Tensor, topk: int, depth: int) -> Found:
        """The likeliest tokens after the head's outputs [B, F, H]."""
        draws = asked.draws
        assert draws is None or isinstance(draws, ComingDraws)
        logits = self.head.logits(hidden).float()
        ids, q = likeliest(logits, topk, draws, depth, self.target_ids if draws is not None else None, self.sharpness)
        return ids, q, hidden
