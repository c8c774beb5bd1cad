"""SuccessorTable: what the target found likeliest after a token, or after an n-gram, when it last judged it.

Order 1 is the adjacency matrix, a row a token. Higher orders are hashed: a row is named by its n-gram's hash and
carries a tag, so that another n-gram on the same row is told apart. Memory is fixed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from graft.hashing import mix64
from graft.retrieve.base import NUM_SUCCESSORS, Judged

COLD = -1  # stands for the successor of an n-gram that was never judged


class SuccessorTable:
    """M[rows, k] of token ids, likeliest first, with their shares."""

    def __init__(self, order: int, num_rows: int, device: torch.device) -> None:
        """num_rows: the vocabulary's size for order 1, else a power of two."""
        self.order = order
        self._successors = torch.full((num_rows, NUM_SUCCESSORS), COLD, dtype=torch.int32, device=device)
        self._shares = torch.zeros(num_rows, NUM_SUCCESSORS, device=device)
        self._tags = torch.zeros(num_rows if order > 1 else 0, dtype=torch.int64, device=device)

    def lookup(self, tokens: Tensor, before: Tensor, earlier: Tensor) -> tuple[Tensor, Tensor]:
        """Successors and shares [..., k] after n-grams whose last tokens are given; `COLD` and 0 where unknown."""
        rows, tags = self._place(tokens, before, earlier)
        successors, shares = self._successors[rows].long(), self._shares[rows]
        if tags is not None:
            other = (self._tags[rows] != tags)[..., None]
            successors, shares = successors.masked_fill(other, COLD), shares.masked_fill(other, 0.0)
        return successors, shares

    def learn(self, judged: Judged) -> None:
        """Of several judgements of one row the last stays."""
        rows, tags = self._place(judged.tokens, judged.before, judged.earlier)
        again = (rows[:, None] == rows).triu(1).any(dim=1)  # [R] judged once more, later
        # Every judgement of a row writes what the last one says, so the order of writing does not matter.
        index = torch.arange(len(rows), device=rows.device)
        if bool(again.any()):
            index = ((rows[:, None] == rows) * (index + 1)).amax(dim=1) - 1
        k = judged.successors.shape[1]
        self._successors[rows, :k] = judged.successors[index].int()
        self._shares[rows, :k] = judged.shares[index]
        if tags is not None:
            self._tags[rows] = tags[index]

    def state(self) -> dict[str, Tensor]:
        """The rows that were judged: a few thousand of many."""
        rows = (self._successors[:, 0] != COLD).nonzero().squeeze(1)
        held = {"rows": rows, "successors": self._successors[rows], "shares": self._shares[rows].half()}
        return held | ({"tags": self._tags[rows]} if self.order > 1 else {})

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._successors.fill_(COLD)
        self._shares.zero_()
        self._tags.zero_()
        if not state:
            return
        rows = state["rows"].to(self._shares.device)
        self._successors[rows] = state["successors"].to(self._successors)
        self._shares[rows] = state["shares"].to(self._shares)
        if self.order > 1:
            self._tags[rows] = state["tags"].to(self._tags)

    def _place(self, tokens: Tensor, before: Tensor, earlier: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.order == 1:
            return tokens, None
        key = mix64(before + 1)
        if self.order == 3:
            key = mix64(key + earlier)
        key = mix64(key + tokens)
        return key & (len(self._shares) - 1), key
