"""Parts of a block head that read the token before a slot: DSpark's Markov head, TreeFlash's MLP.

The backbone computes a slot's hidden state without knowing that token. These parts correct it for each candidate.
Parameters have the names of the projects' files. Shapes: B rows, K slots, m candidates of that token, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graft.drafters.block.config import BlockConfig

_CONDITIONAL_EPS = 1e-6  # TreeFlash's constant; the layers have another


class MarkovHead(nn.Module):
    """Low-rank table of token pairs, added to the logits: plain, gated by the hidden state, or recurrent."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        rank, hidden_size = config.markov_rank, config.hidden_size
        self.kind = config.markov
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def forward(self, normed: Tensor, parents: Tensor) -> Tensor:
        """States [B, K, m, r] whose product with `markov_w2` is added to the logits.

        normed: [B, K, H] hidden states. parents: [B, K, m].
        A recurrent head's state belongs to a path. It follows the first parent of each slot, which is exact for m = 1,
        and for the likeliest path if parents are sorted.
        """
        before = self.markov_w1(parents)  # [B, K, m, r]
        if self.kind == "rnn":
            return self._recurrent(normed, before)
        if self.kind == "gated":
            both = torch.cat([_for_each(normed, before), before], dim=-1)
            before = torch.sigmoid(self.gate_proj(both)) * before
        return before

    def _recurrent(self, normed: Tensor, before: Tensor) -> Tensor:
        state, outputs = torch.zeros_like(before[:, 0]), []  # [B, m, r]
        for slot in range(before.shape[1]):
            known = torch.cat([state, before[:, slot], _for_each(normed[:, slot], before[:, slot])], dim=-1)
            gate, candidate, output = self.joint_proj(known).chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            state = (gate * state + (1 - gate) * torch.tanh(candidate))[:, :1].expand_as(state)
            outputs.append(torch.tanh(output))
        return torch.stack(outputs, dim=1)


class ConditionalHead(nn.Module):
    """TreeFlash's correction of a hidden state by the embedding of the previous token."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.conditional_size or config.intermediate_size
        self.ug = nn.Linear(2 * size, 2 * inner)  # up and gate
        self.d = nn.Linear(inner, size, bias=False)  # down
        self.norm = nn.RMSNorm(size, eps=_CONDITIONAL_EPS)
        if not self.d.weight.is_meta:
            nn.init.zeros_(self.d.weight)  # a new head starts as the backbone's marginals

    def forward(self, normed: Tensor, embeddings: Tensor) -> Tensor:
        """The correction [..., m, H] of normed hidden states [..., H] for embeddings [..., m, H]."""
        of_embedding, of_hidden = self.ug.weight.chunk(2, dim=1)
        # Multiply a hidden state once for all its candidates.
        shared = nn.functional.linear(normed, of_hidden, self.ug.bias)[..., None, :]
        up, gate = (nn.functional.linear(self.norm(embeddings), of_embedding) + shared).chunk(2, dim=-1)
        return self.d(nn.functional.silu(gate) * up)


def _for_each(hidden: Tensor, candidates: Tensor) -> Tensor:
    """Hidden states [..., H] repeated for each of the candidates [..., m, any]: [..., m, H]."""
    return hidden[..., None, :].expand(*candidates.shape[:-1], -1)
