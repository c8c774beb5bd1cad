"""The published block networks, one number at a time: loops over slots, heads and keys instead of batches and masks.

Written from the papers' and projects' descriptions, over plain tensors by their published names, for comparison with
`BlockHead`. Nothing of the package is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

State = dict[str, Tensor]


@dataclass(frozen=True)
class Network:
    """A head: its tensors, and what they do not say."""

    state: State
    embedding: Tensor  # [vocab, H], the head's own or the target's
    lm_head: Tensor  # [draft vocab, H], likewise
    num_heads: int
    head_dim: int
    block_size: int
    mask: Tensor  # [H]
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    eps: float
    theta: float

    def norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        return x / math.sqrt(float((x * x).mean()) + (eps or self.eps)) * self.state[f"{name}.weight"]

    def rotated(self, x: Tensor, position: int) -> Tensor:
        """One head's vector [D], its halves turned against each other."""
        half = self.head_dim // 2
        out = torch.empty_like(x)
        for i in range(half):
            angle = position * self.theta ** (-2 * i / self.head_dim)
            out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
        return out

    def projected(self, x: Tensor, layer: str, which: str, position: int) -> list[Tensor]:
        """Queries, keys or values of one token, by head."""
        heads = list((self.state[f"{layer}.{which}_proj.weight"] @ x).split(self.head_dim))
        if which == "v":
            return heads
        if f"{layer}.{which}_norm.weight" in self.state:
            heads = [self.norm(head, f"{layer}.{which}_norm") for head in heads]
        return [self.rotated(head, position) for head in heads]

    def hidden(self, root: int, features: Tensor) -> list[Tensor]:
        """Of every slot [H], before the final norm. features: [length, taps * H_t] of the tokens before the root."""
        length = len(features)
        context = [self.norm(self.state["fc.weight"] @ row, "hidden_norm") for row in features]
        slots = [self.embedding[root]] + [self.mask] * (self.block_size - 1)
        for number, (causal, window) in enumerate(zip(self.causal, self.windows, strict=True)):
            layer = f"layers.{number}"
            attention = f"{layer}.self_attn"
            normed = [self.norm(slot, f"{layer}.input_layernorm") for slot in slots]
            inputs = context + normed
            keys = [self.projected(x, attention, "k", position) for position, x in enumerate(inputs)]
            values = [self.projected(x, attention, "v", position) for position, x in enumerate(inputs)]
            new = []
            for slot, x in enumerate(normed):
                position = length + slot
                seen = [
                    other
                    for other in range(len(inputs))
                    if not (causal and other > position) and (window is None or abs(position - other) < window)
                ]
                outputs = []
                for head, query in enumerate(self.projected(x, attention, "q", position)):
                    shared = head // (self.num_heads // len(keys[0]))
                    scores = torch.stack([query @ keys[other][shared] for other in seen]) / math.sqrt(self.head_dim)
                    shares = scores.softmax(dim=0)
                    outputs.append(
                        sum(share * values[other][shared] for share, other in zip(shares, seen, strict=True))
                    )
                mixed = slots[slot] + self.state[f"{attention}.o_proj.weight"] @ torch.cat(outputs)
                y = self.norm(mixed, f"{layer}.post_attention_layernorm")
                gate, up = (self.state[f"{layer}.mlp.{part}_proj.weight"] @ y for part in ("gate", "up"))
                new.append(mixed + self.state[f"{layer}.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up))
            slots = new
        return slots

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head @ self.norm(hidden, "norm")

    def treeflash(self, hidden: Tensor, parent: int) -> Tensor:
        """Logits of a slot after `parent`."""
        embedding = self.norm(self.embedding[parent], "ar_approximation.norm", 1e-6)
        both = torch.cat([embedding, self.norm(hidden, "norm")])
        projected = self.state["ar_approximation.ug.weight"] @ both + self.state["ar_approximation.ug.bias"]
        up, gate = projected[: len(projected) // 2], projected[len(projected) // 2 :]
        return self.logits(hidden + self.state["ar_approximation.d.weight"] @ (gate * torch.sigmoid(gate) * up))

    def markov(self, kind: str, hidden: list[Tensor], parents: list[int]) -> list[Tensor]:
        """Logits of the slots along a chain: parents[k] is the token before that of slot k."""
        w1, w2 = (self.state[f"markov_head.markov_{name}.weight"] for name in ("w1", "w2"))
        state, out = torch.zeros(w1.shape[1]), []
        for slot, parent in zip(hidden, parents, strict=True):
            normed, before = self.norm(slot, "norm"), w1[parent]
            if kind == "gated":
                gate = self._affine("markov_head.gate_proj", torch.cat([normed, before]))
                before = torch.sigmoid(gate) * before
            if kind == "rnn":
                joint = self._affine("markov_head.joint_proj", torch.cat([state, before, normed]))
                gate, candidate, output = joint.split(len(state))
                state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
                before = torch.tanh(output)
            out.append(self.logits(slot) + w2 @ before)
        return out

    def _affine(self, name: str, x: Tensor) -> Tensor:
        return self.state[f"{name}.weight"] @ x + self.state[f"{name}.bias"]
