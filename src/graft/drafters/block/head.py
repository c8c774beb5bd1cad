"""The block head: a few decoder layers that draft all slots of a block in one pass.

Only the network is here. `checkpoint` reads and writes its files. The caller of `forward` supplies attention over the
draft KV cache; in `block` the cache is a pair of plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, rotate_half

from graft.drafters.block.config import BlockConfig
from graft.drafters.block.token_heads import ConditionalHead, MarkovHead
from graft.drafters.draft_head import DraftHead
from graft.errors import GraftError
from graft.model.attention import attend
from graft.settings import require

KeyValue = tuple[Tensor, Tensor]  # each [layers, B, kv_heads, W, D]
# Attention of a layer, by its number, from queries [B, heads, W, D] and the slots' own keys and values
# [B, kv_heads, W, D] to outputs [B, heads, W, D].
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Product = Callable[[Tensor, Tensor], Tensor]  # like `torch.nn.functional.linear`

_GATHERED = 2**27  # the most output weights to gather at once


def within_reach(distance: Tensor, causal: bool, window: int | None) -> Tensor:
    """Whether a layer's queries see keys at a distance before them (after them if negative)."""
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance.abs() < window)


def logits_of(
    weight: Tensor, states: Tensor, shortlist: Tensor | None, product: Product = nn.functional.linear
) -> Tensor:
    """Logits [..., m, vocab] of states [..., m, H] by an output weight [vocab, H], or those of a shortlist [..., S]."""
    if shortlist is None:
        return product(states, weight)
    most = max(1, _GATHERED // (shortlist[0].numel() * weight.shape[1]))
    parts = [some @ weight[ids].mT for some, ids in zip(states.split(most), shortlist.split(most), strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class BlockHead(DraftHead):
    """The network. Parameters have the names of z-lab's, DeepSpec's and TreeFlash's files.

    Shapes: B rows, W slots or tokens, K predicting slots, m candidates of the previous token, H hidden, D head_dim.
    """

    config: BlockConfig
    target_lm_head: Tensor | None

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.target_layers) * config.target_hidden_size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.layers = nn.ModuleList(_DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(size, eps=eps)
        self.register_buffer("target_lm_head", None, persistent=False)  # [vocab, H], borrowed, never saved
        self.product: Product = nn.functional.linear  # with the lm_head; replaced by a faster one on a CPU
        if config.own_lm_head:
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        if config.own_mask:
            self.mask_embedding = nn.Parameter(torch.zeros(size))
        if config.markov is not None:
            self.markov_head = MarkovHead(config)
        if config.conditional:
            self.ar_approximation = ConditionalHead(config)

    def borrow_lm_head(self, weight: Tensor) -> None:
        """Use the target's output weight [vocab, H]."""
        self.target_lm_head = self._fitting("lm_head", weight)[: self.config.draft_vocab_size]

    def context(self, features: Tensor, positions: Tensor) -> KeyValue:
        """Keys and values of W committed tokens, for the draft KV cache.

        features: [B, W, taps * H_t], the target's concatenated hidden states. positions: [B, W].
        """
        hidden = self.hidden_norm(self.fc(features))
        rotary = self.rotary(hidden, positions)
        pairs = [layer.self_attn.key_value(hidden, rotary) for layer in self._decoder_layers]
        return torch.stack([key for key, _ in pairs]), torch.stack([value for _, value in pairs])

    def slots(self, roots: Tensor) -> Tensor:
        """The block's input [..., block_size, H] for roots [...]: their embeddings, then the mask's."""
        config = self.config
        root = self.embed(roots)[..., None, :]
        mask = self.mask_embedding if config.own_mask else self.embed(roots.new_tensor(config.mask_token_id))
        return torch.cat([root, mask.to(root.dtype).expand(*roots.shape, config.block_size - 1, -1)], dim=-2)

    def forward(self, slots: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states [B, W, H] of slots [B, W, H] at positions [B, W], before the final norm."""
        hidden, rotary = slots, self.rotary(slots, positions)
        for number, layer in enumerate(self._decoder_layers):
            normed = layer.input_layernorm(hidden)
            query = layer.self_attn.query(normed, rotary)
            attended = attention(number, query, *layer.self_attn.key_value(normed, rotary))
            hidden = hidden + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return hidden

    def block(self, roots: Tensor, lengths: Tensor, past: KeyValue) -> Tensor:
        """Hidden states [B, K, H] of the predicting slots, before the final norm. Slot k predicts the k-th new token.

        roots: [B]. lengths: [B] tokens before each root, whose keys and values come first in `past`, from `context`.
        """
        places = torch.arange(self.config.block_size, device=roots.device)
        attention = self.attention_over(lengths, past)
        return self.predicting(self(self.slots(roots), lengths[:, None] + places, attention))

    def attention_over(self, lengths: Tensor, past: KeyValue) -> Attention:
        """Attention of blocks to the first `lengths` [B] tokens of `past` and to themselves."""
        positions = lengths[:, None] + torch.arange(self.config.block_size, device=lengths.device)
        before = torch.arange(past[0].shape[3], device=lengths.device).expand(len(lengths), -1)
        known = torch.cat([before < lengths[:, None], torch.ones_like(positions, dtype=torch.bool)], dim=1)
        distance = positions[:, :, None] - torch.cat([before, positions], dim=1)[:, None]  # [B, W, S + W]

        def attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = torch.cat([past[0][layer], key], dim=2), torch.cat([past[1][layer], value], dim=2)
            seen = known[:, None] & self.reaches(layer, distance)
            groups = query.shape[1] // key.shape[1]
            return attend(query, keys, values, seen[:, None].repeat(1, 1, groups, 1))

        return attention

    def reaches(self, layer: int, distance: Tensor) -> Tensor:
        """`within_reach` of a layer."""
        return within_reach(distance, self.config.causal[layer], self.config.windows[layer])

    def predicting(self, hidden: Tensor) -> Tensor:
        """The predicting slots [..., K, H] of all slots [..., block_size, H]."""
        return hidden if self.config.shifted else hidden[..., 1:, :]

    def marginals(self, hidden: Tensor) -> Tensor:
        """Logits [..., draft_vocab] of slots [..., H], independent of the previous token."""
        return self._logits(self.norm(hidden))

    def conditionals(self, hidden: Tensor, parents: Tensor, shortlist: Tensor | None = None) -> Tensor:
        """Logits [B, K, m, draft_vocab] of slots [B, K, H], each after m candidates [B, K, m] of the previous token.

        The root precedes the first slot. A recurrent head needs all slots at once, others do not.
        shortlist: compute logits [B, K, m, S] of only these draft ids [B, K, S].
        """
        require(self.config.has_conditionals, "this head has marginals only: it does not read the token before a slot")
        normed = self.norm(hidden)
        if self.config.conditional:
            correction = self.ar_approximation(normed, self.embed(parents))
            return self._logits(self.norm(hidden[..., None, :] + correction), shortlist)
        logits = self._logits(normed[..., None, :], shortlist)
        return logits + logits_of(self.markov_head.markov_w2.weight, self.markov_head(normed, parents), shortlist)

    def _logits(self, normed: Tensor, shortlist: Tensor | None = None) -> Tensor:
        weight = self.lm_head.weight if self.config.own_lm_head else self.target_lm_head
        if weight is None:
            raise GraftError("this head has no lm_head of its own: `borrow_lm_head` gives it the target's")
        return logits_of(weight, normed, shortlist, self.product)

    @property
    def _decoder_layers(self) -> list[_DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, _DecoderLayer)]


class _DecoderLayer(nn.Module):
    """The layer's parameters, which `BlockHead.forward` uses."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = _Projections(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config.llama())


class _Projections(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        size, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.head_dim, eps = config.head_dim, config.rms_norm_eps
        self.q_proj = nn.Linear(size, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(size, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(size, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, size, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=eps) if config.head_norms else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, eps=eps) if config.head_norms else nn.Identity()

    def query(self, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """[B, heads, W, D] of [B, W, H], rotated."""
        return _rotated(self.q_norm(self._by_head(self.q_proj(hidden))), rotary)

    def key_value(self, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Each [B, kv_heads, W, D] of [B, W, H], keys rotated. Committed tokens and slots share these projections."""
        key = _rotated(self.k_norm(self._by_head(self.k_proj(hidden))), rotary)
        return key, self._by_head(self.v_proj(hidden))

    def _by_head(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def _rotated(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (table[:, None] for table in rotary)
    return x * cos + rotate_half(x) * sin
